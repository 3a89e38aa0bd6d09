{{/* Values that would do nothing, or name one thing twice, GPUs among resources, and a scaler by CPU without CPUs end the rendering
with one sentence that says what to change. Values that describe the cluster (gpu, monitoring, networkPolicy) may be set though a
job has no use for them. */}}

{{/* Refuse values that nothing would read, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.unread" -}}
{{- $ := first . }}{{ $groups := last . }}
{{- $names := include "rlhf-job.table" $ | fromJson | keys | sortAlpha }}
{{- range $name, $_ := $.Values.groups }}
{{- if not (has $name $names) }}
{{- fail (printf "groups.%s is set, but placement.strategy %s has the groups %s: use one of these names" $name $.Values.placement.strategy (join ", " $names)) }}
{{- end }}
{{- end }}
{{- range $group := $groups }}
{{- if and (eq $.Values.gang.scheduler "coscheduling") (not $group.pod.schedulerName) }}
{{- fail (printf "gang.scheduler is coscheduling, but pods of group %s have no schedulerName: set pods.schedulerName to the scheduler that has the plugin, e.g. scheduler-plugins-scheduler, or default-scheduler" $group.name) }}
{{- end }}
{{- $role := first $group.roles }}{{ $scaler := $group.scaler | default dict }}
{{- $requested := or (dig "requests" "cpu" "" $group.resources) (dig "limits" "cpu" "" $group.resources) }}
{{- if and (eq ($scaler.scaler | default "") "hpa") (not $scaler.metrics) (not $requested) }}
{{- fail (printf "autoscaling.%s.scaler is hpa, which scales by the share of the requested CPU that is used, but a pod of group %s requests none: set requests.cpu in roles.%s.resources or groups.%s.resources, or autoscaling.%s.metrics" $role $group.name $role $group.name $role) }}
{{- end }}
{{- include "rlhf-job.refuse.settings" (list $ (printf "group %s" $group.name) $group.pod) }}
{{- end }}
{{- include "rlhf-job.refuse.settings" (list $ "the controller" (include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson)) }}
{{- end }}

{{/* Refuse claims that have one mountPath: the API server takes no such pod. */}}
{{- define "rlhf-job.refuse.mounts" -}}
{{- $by := dict }}
{{- range $name, $claim := .claims }}
{{- $path := clean $claim.mountPath }}
{{- with get $by $path }}{{ fail (printf "storage.%s.mountPath is %s, which is that of storage.%s, too: set another path for one of them" $name $claim.mountPath .) }}{{ end }}
{{- $_ := set $by $path $name }}
{{- end }}
{{- end }}

{{/* Refuse GPUs among the resources of a role, a group or the controller, of (list $ KEY VALUES): only `gpus` gives a pod the
tolerations, the nodes and the device that belong to them. */}}
{{- define "rlhf-job.refuse.gpus" -}}
{{- $key := index . 1 }}{{ $gpu := (first .).Values.gpu.resource }}{{ $resources := dig "resources" dict (index . 2 | default dict) }}
{{- range $part := list "requests" "limits" }}
{{- if hasKey (get $resources $part | default dict) $gpu }}
{{- fail (printf "%s.resources has %s: %s" $key $gpu (eq $key "controller" | ternary "leave it out, as the controller uses no GPU" (printf "set %s.gpus instead" $key))) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse settings of pods that name one thing twice, or mount something in place of a claim, of (list $ OF SETTINGS). The API
server takes the last of two variables of one name, and refuses two volumes. */}}
{{- define "rlhf-job.refuse.settings" -}}
{{- $of := index . 1 }}{{ $settings := index . 2 }}{{ $paths := dict }}
{{- range $name, $claim := (first .).claims }}{{ $_ := set $paths (trimSuffix "/" $claim.mountPath) (printf ", which is storage.%s.mountPath: use another path" $name) }}{{ end }}
{{- range $key, $field := dict "env" "name" "volumes" "name" "volumeMounts" "mountPath" }}
{{- $known := eq $field "mountPath" | ternary $paths dict }}
{{- range get $settings $key }}
{{- $name := get . $field | toString | trimSuffix "/" }}
{{- with get $known $name }}{{ fail (printf "%s of %s has %s%s" $key $of $name .) }}{{ end }}
{{- $_ := set $known $name " twice: leave one out" }}
{{- end }}
{{- end }}
{{- end }}
