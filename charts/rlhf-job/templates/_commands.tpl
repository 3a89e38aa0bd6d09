{{/* The options of a process: its addresses and its files. */}}
{{- define "rlhf-job.listen" -}}
- --config=/etc/rolemesh/job.yaml
- --listen=0.0.0.0:50051
- --metrics-listen=0.0.0.0:9090
- --health-listen=0.0.0.0:50052
{{ include "rlhf-job.common" . }}
{{- end }}

{{- define "rlhf-job.common" -}}
- --log-format=json
{{- if ne .Values.tls.mode "none" }}
- --tls-dir=/etc/rolemesh-tls
{{- end }}
{{- end }}

{{/* The address of each role: the pods behind its Service, watched through the API server, or resolved by DNS. */}}
{{- define "rlhf-job.addresses" -}}
{{- $ := . }}
{{- range .inJob }}
- --{{ . }}={{ $.Values.controller.rbac | ternary "kubernetes" "dns" }}:{{ include "rlhf-job.name" (list $ .) }}:50051
{{- end }}
{{- end }}

{{/* Not empty: create PodMonitor and PrometheusRule. */}}
{{- define "rlhf-job.operator" -}}
{{- $has := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor" }}
{{- if or (eq .Values.monitoring.operator "always") (and (eq .Values.monitoring.operator "auto") $has) }}true{{ end }}
{{- end }}

{{/* Number of pods of a group, of (list $ GROUP); empty if a scaler or the controller (scaleUp) sets it. An upgrade keeps the number set by a scaler
or by `kubectl scale`, unless the upgrade changes the number; also one that restarts the controller, whose Job then has another name. It keeps
the 0 of the end of a run unless it starts another. It cannot be left out: the API server would set it to 1, and a scaler does not scale up from 0. */}}
{{- define "rlhf-job.replicas" -}}
{{- $ := first . }}{{ $group := last . }}{{ $namespace := $.Release.Namespace }}
{{- $live := lookup "apps/v1" $group.kind $namespace $group.workload }}
{{- $run := lookup "batch/v1" "Job" $namespace (include "rlhf-job.run" $) }}
{{- $said := dig "metadata" "annotations" "rolemesh.dev/replicas" "" $live }}
{{- if $.Values.controller.scaleUp }}
{{- else if and $live $run (or $group.scaler (eq $said (toString $group.replicas)) (and (not $live.spec.replicas) (include "rlhf-job.ended" $))) }}
{{- $live.spec.replicas }}
{{- else if and $live (not $group.scaler) $live.spec.replicas (eq $said (toString $group.replicas)) }}
{{- $live.spec.replicas }}
{{- else if and $live $group.scaler }}
{{- max $live.spec.replicas $group.replicas }}
{{- else if not $group.scaler }}
{{- $group.replicas }}
{{- end }}
{{- end }}

{{/* Not empty: the run of this release has ended, as its Job says. */}}
{{- define "rlhf-job.ended" -}}
{{- $run := lookup "batch/v1" "Job" .Release.Namespace (include "rlhf-job.run" .) }}
{{- range dig "status" "conditions" list $run }}
{{- if and (has .type (list "Complete" "Failed")) (eq .status "True") }}true{{ end }}
{{- end }}
{{- end }}

{{/* The budgets that the controller deletes when the run has ended, as a list in JSON. They do not depend on
disruptionBudgets, so that this value restarts nothing. */}}
{{- define "rlhf-job.budgets" -}}
{{- $names := list (include "rlhf-job.name" (list . "controller")) }}
{{- range (include "rlhf-job.plan" . | fromJson).groups }}
{{- if eq .kind "RayCluster" }}{{ $names = append $names .workload }}{{ end }}
{{- end }}
{{- toJson $names }}
{{- end }}

{{/* Labels and annotations of a group's pods for a gang scheduler, of (list $ GROUPS GROUP). With Kueue every pod of a gang
says how many they are. So it has the groups whose number of pods is fixed, those with a trained role, or to scale another
role would restart them. Pods of the others are admitted one by one. */}}
{{- define "rlhf-job.gang" -}}
{{- $ := first . }}{{ $gang := $.Values.gang }}{{ $name := include "rlhf-job.name" (list $ "gang") }}
{{- if eq $gang.scheduler "volcano" -}}
annotations: {scheduling.k8s.io/group-name: {{ $name }}}
{{- else if eq $gang.scheduler "coscheduling" -}}
labels: {scheduling.x-k8s.io/pod-group: {{ $name }}}
{{- else if eq $gang.scheduler "kueue" -}}
labels:
  kueue.x-k8s.io/queue-name: {{ quote $gang.queue }}
{{- if (last .).trained }}
{{- $fixed := list }}
{{- range index . 1 }}{{ if .trained }}{{ $fixed = append $fixed . }}{{ end }}{{ end }}
  kueue.x-k8s.io/pod-group-name: {{ $name }}
annotations:
  kueue.x-k8s.io/pod-group-total-count: {{ include "rlhf-job.pods" $fixed | quote }}
  kueue.x-k8s.io/pod-group-serving: "true"
{{- end }}
{{- end }}
{{- end }}

{{/* Number of pods of all groups, of GROUPS; for a group with a scaler, its minimum. */}}
{{- define "rlhf-job.pods" -}}
{{- $pods := 0 }}
{{- range . }}{{ $pods = add $pods (mul .replicas .pods) }}{{ end }}
{{- $pods }}
{{- end }}
