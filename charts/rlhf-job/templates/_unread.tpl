{{/* Values that would do nothing, or name something twice, end the rendering with one sentence that says what to change. Values
that describe the cluster (gpu, monitoring, networkPolicy) may be set though a job has no use for them. */}}

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

{{/* Refuse claims that have one mountPath, or that of a volume of the chart: the API server takes no such pod. */}}
{{- define "rlhf-job.refuse.mounts" -}}
{{- $by := dict }}
{{- range include "rlhf-job.mountPaths" . | fromJsonArray }}{{ $_ := set $by . "reserved for the chart: set another path" }}{{ end }}
{{- range $name, $claim := .claims }}
{{- $path := clean $claim.mountPath }}
{{- with get $by $path }}{{ fail (printf "storage.%s.mountPath is %s, which is %s" $name $claim.mountPath .) }}{{ end }}
{{- $_ := set $by $path (printf "that of storage.%s, too: set another path for one of them" $name) }}
{{- end }}
{{- end }}

{{/* Where every pod may have volumes of the chart's own besides claims, as a list in JSON. */}}
{{- define "rlhf-job.mountPaths" -}}
{{- list "/etc/rolemesh" "/etc/rolemesh-tls" "/etc/rolemesh-reward" "/etc/rolemesh-plugins" "/etc/rolemesh-hub" "/tmp" "/dev/shm" | toJson }}
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

{{/* Refuse settings of pods that name what the chart has itself, or one thing twice, of (list $ OF SETTINGS). The API server
takes the last of two variables of one name, and refuses two volumes. Three variables may be replaced (_pod.tpl). */}}
{{- define "rlhf-job.refuse.settings" -}}
{{- $ := index . 0 }}{{ $of := index . 1 }}{{ $settings := index . 2 }}
{{- $claims := keys $.claims }}{{ $paths := include "rlhf-job.mountPaths" $ | fromJsonArray }}
{{- range $.claims }}{{ $paths = append $paths (trimSuffix "/" .mountPath) }}{{ end }}
{{- $variables := list "HOME" "USER" "PYTHONUNBUFFERED" "ROLEMESH_JOB" "ROLEMESH_REVISION" }}
{{- if $.Values.huggingFace.secret }}{{ $variables = concat $variables (list "HF_TOKEN" "HF_TOKEN_PATH") }}{{ end }}
{{- if $.Values.huggingFace.fetch }}{{ $variables = append $variables "HF_HUB_CACHE" | concat (list "HF_HUB_OFFLINE") }}{{ end }}
{{- if has "caches" $claims }}{{ $variables = concat $variables (list "VLLM_CACHE_ROOT" "TORCHINDUCTOR_CACHE_DIR" "TRITON_CACHE_DIR") }}{{ end }}
{{- $instead := dict "HF_TOKEN" "huggingFace.secret names another" "HF_TOKEN_PATH" "huggingFace.secret names another" "HF_HUB_CACHE" "set huggingFace.cache" }}
{{- range $key, $rule := dict
      "env" (dict "field" "name" "own" $variables)
      "volumes" (dict "field" "name" "own" (concat $claims (list "job" "tls" "reward" "plugins" "hub-token" "tmp" "shm")))
      "volumeMounts" (dict "field" "mountPath" "own" $paths) }}
{{- $seen := list }}
{{- range get $settings $key }}
{{- $name := get . $rule.field | toString | trimSuffix "/" }}
{{- if has $name $rule.own }}
{{- fail (printf "%s of %s has %s, which is reserved for the chart: %s" $key $of $name (get $instead $name | default "leave it out, or use another name")) }}
{{- end }}
{{- if and $name (has $name $seen) }}
{{- fail (printf "%s of %s has %s twice: leave one out" $key $of $name) }}
{{- end }}
{{- $seen = append $seen $name }}
{{- end }}
{{- end }}
{{- end }}
