{{/* Where a process listens and what it reads. */}}
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

{{/* Each role's address: the pods behind its Service, watched, or as DNS has them. */}}
{{- define "rlhf-job.addresses" -}}
{{- $ := . }}
{{- range include "rlhf-job.roles" . | fromJsonArray }}
- --{{ . }}={{ $.Values.controller.rbac | ternary "kubernetes" "dns" }}:{{ include "rlhf-job.name" (list $ .) }}:50051
{{- end }}
{{- end }}

{{/* Not empty: PodMonitor and PrometheusRule are made. */}}
{{- define "rlhf-job.operator" -}}
{{- $has := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor" }}
{{- if or (eq .Values.monitoring.operator "always") (and (eq .Values.monitoring.operator "auto") $has) }}true{{ end }}
{{- end }}

{{/* Pods of a group, of (list $ GROUP); nothing where a scaler will say. An upgrade leaves the number that a scaler,
`kubectl scale` or the end of the run gave, unless it gives another one or starts another run: left out, the API server
would make it 1, and a scaler does not wake what is at 0. */}}
{{- define "rlhf-job.replicas" -}}
{{- $ := first . }}{{ $group := last . }}{{ $namespace := $.Release.Namespace }}
{{- $live := lookup "apps/v1" $group.kind $namespace $group.workload }}
{{- $run := lookup "batch/v1" "Job" $namespace (include "rlhf-job.run" $) }}
{{- $said := dig "metadata" "annotations" "rolemesh.dev/replicas" "" $live }}
{{- if and $live $run (or $group.scaler (eq $said (toString $group.replicas))) }}
{{- $live.spec.replicas }}
{{- else if and $live $group.scaler }}
{{- max $live.spec.replicas $group.replicas }}
{{- else if not $group.scaler }}
{{- $group.replicas }}
{{- end }}
{{- end }}

{{/* What a gang scheduler looks for, of (list $ GROUPS). */}}
{{- define "rlhf-job.gang" -}}
{{- $ := first . }}{{ $gang := $.Values.gang }}{{ $name := include "rlhf-job.name" (list $ "gang") }}
{{- if eq $gang.scheduler "volcano" -}}
annotations: {scheduling.k8s.io/group-name: {{ $name }}}
{{- else if eq $gang.scheduler "coscheduling" -}}
labels: {scheduling.x-k8s.io/pod-group: {{ $name }}}
{{- else if eq $gang.scheduler "kueue" -}}
labels:
  kueue.x-k8s.io/queue-name: {{ quote $gang.queue }}
  kueue.x-k8s.io/pod-group-name: {{ $name }}
annotations:
  kueue.x-k8s.io/pod-group-total-count: {{ include "rlhf-job.pods" (last .) | quote }}
  kueue.x-k8s.io/pod-group-serving: "true"
{{- end }}
{{- end }}

{{/* Pods of all groups, of GROUPS; of a scaled one the fewest. */}}
{{- define "rlhf-job.pods" -}}
{{- $pods := 0 }}
{{- range . }}{{ $pods = add $pods .replicas }}{{ end }}
{{- $pods }}
{{- end }}
