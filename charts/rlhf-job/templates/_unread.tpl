{{/* Values that would do nothing end the rendering, with one sentence that says what to change. Values that describe the
cluster (gpu, monitoring, networkPolicy) may be set though a job has no use for them. */}}

{{/* Refuse values that nothing would read, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.unread" -}}
{{- $ := first . }}{{ $values := $.Values }}
{{- include "rlhf-job.refuse.unreadRanks" . }}
{{- include "rlhf-job.refuse.unreadScalers" . }}
{{- include "rlhf-job.refuse.unreadClaims" $ }}
{{- if $values.storage.caches.readOnly }}
{{- fail "storage.caches.readOnly is true, but pods write what they compile there: set it to false" }}
{{- end }}
{{- $gang := $values.gang }}
{{- if and $gang.queue (not (has $gang.scheduler (list "volcano" "kueue"))) }}
{{- fail (printf "gang.queue is %s, but gang.scheduler is %s, which has no queues: set it to volcano or kueue, or leave the queue out" $gang.queue $gang.scheduler) }}
{{- end }}
{{- if and $values.huggingFace.cache (not $values.huggingFace.fetch) }}
{{- fail (printf "huggingFace.cache is %s, but huggingFace.fetch is false, and nothing is downloaded: set it to true, or leave the cache out" $values.huggingFace.cache) }}
{{- end }}
{{- if and $values.huggingFace.secret (not $values.huggingFace.fetch) (not $values.prepare) }}
{{- fail (printf "huggingFace.secret is %s, but no pod fetches or prepares anything: set huggingFace.fetch to true, or leave the secret out" $values.huggingFace.secret) }}
{{- end }}
{{- if and $values.plugins.configMap (not $values.job.plugins) }}
{{- fail (printf "plugins.configMap is %s, but job.plugins names none of its files: add them, as /etc/rolemesh-plugins/FILE.py" $values.plugins.configMap) }}
{{- end }}
{{- $issuer := $values.tls.issuerRef }}
{{- if and (not $issuer.name) (or (ne $issuer.kind "Issuer") (ne $issuer.group "cert-manager.io")) }}
{{- fail (printf "tls.issuerRef.kind is %s of %s, but tls.issuerRef.name is empty: set it, or leave the others out" $issuer.kind $issuer.group) }}
{{- end }}
{{- range $group := last . }}
{{- if and (eq $gang.scheduler "coscheduling") (not $group.pod.schedulerName) }}
{{- fail (printf "gang.scheduler is coscheduling, but pods of group %s have no schedulerName: set pods.schedulerName to the scheduler that has the plugin, e.g. scheduler-plugins-scheduler, or default-scheduler" $group.name) }}
{{- end }}
{{- include "rlhf-job.refuse.settings" (list $ (printf "group %s" $group.name) $group.pod) }}
{{- end }}
{{- include "rlhf-job.refuse.settings" (list $ "the controller" (include "rlhf-job.settings" (list $ $values.controller 0) | fromJson)) }}
{{- end }}

{{/* Refuse ranks of a name that no group and no role has, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.unreadRanks" -}}
{{- $ := first . }}{{ $strategy := $.Values.placement.strategy }}
{{- $table := get (include "rlhf-job.tables" $ | fromJson) $strategy | default $.Values.placement.groups }}
{{- $names := concat (keys $table) ($.Files.Get "files/defaults.json" | fromJson).roles | uniq | sortAlpha }}
{{- range $name, $count := $.Values.placement.ranks }}
{{- if not (has $name $names) }}
{{- fail (printf "placement.ranks.%s is %v, but placement.strategy %s has no such group, and there is no such role: use one of %s" $name $count $strategy (join ", " $names)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse values of a scaler that the other kind of scaler reads, a number of pods beside a scaler, and a scaler by CPU where
no CPU is requested, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.unreadScalers" -}}
{{- $all := . }}{{ $ := first . }}
{{- range $role, $scaler := $.Values.autoscaling }}
{{- if $scaler }}
{{- $count := get $.Values.placement.replicas $role | int }}
{{- if gt $count 1 }}
{{- fail (printf "placement.replicas.%s is %d, but autoscaling.%s decides the number of its pods: set autoscaling.%s.minReplicas instead" $role $count $role $role) }}
{{- end }}
{{- if and (eq $scaler.scaler "hpa") (hasKey $scaler "pendingPerReplica") }}
{{- fail (printf "autoscaling.%s.pendingPerReplica is set, but its scaler is hpa, which does not count rows: set the scaler to keda, or leave it out" $role) }}
{{- end }}
{{- $group := dict "resources" dict }}{{ range last $all }}{{ if has $role .roles }}{{ $group = . }}{{ end }}{{ end }}
{{- if and (eq $scaler.scaler "hpa") (not $scaler.metrics) (not (or (dig "requests" "cpu" "" $group.resources) (dig "limits" "cpu" "" $group.resources))) }}
{{- fail (printf "autoscaling.%s.scaler is hpa, which scales by the share of the requested CPU that is used, but a pod of group %s requests none: set requests.cpu in roles.%s.resources or groups.%s.resources, or autoscaling.%s.metrics" $role $group.name $role $group.name $role) }}
{{- end }}
{{- if and (eq $scaler.scaler "keda") $scaler.metrics }}
{{- fail (printf "autoscaling.%s.metrics is set, but its scaler is keda, which counts pending rows alone: set the scaler to hpa, or leave them out" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse settings of a claim that is neither made nor named. */}}
{{- define "rlhf-job.refuse.unreadClaims" -}}
{{- $defaults := (.Files.Get "files/defaults.json" | fromJson).storage }}
{{- range $name, $claim := omit .Values.storage "singleNode" }}
{{- if not (or $claim.existingClaim $claim.size) }}
{{- range $key, $default := get $defaults $name }}
{{- if and (hasKey $claim $key) (ne (toJson $default) (toJson (get $claim $key))) }}
{{- fail (printf "storage.%s.%s is set, but storage.%s has neither a size nor an existingClaim: set one, or leave it out" $name $key $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse claims that have one mountPath, or that of a volume of the chart: the API server takes no such pod. */}}
{{- define "rlhf-job.refuse.mounts" -}}
{{- $by := dict }}
{{- range include "rlhf-job.mountPaths" . | fromJsonArray }}{{ $_ := set $by . "reserved for the chart: set another path" }}{{ end }}
{{- range $name, $claim := omit .Values.storage "singleNode" }}
{{- if or $claim.existingClaim $claim.size }}
{{- $path := clean $claim.mountPath }}
{{- with get $by $path }}{{ fail (printf "storage.%s.mountPath is %s, which is %s" $name $claim.mountPath .) }}{{ end }}
{{- $_ := set $by $path (printf "that of storage.%s, too: set another path for one of them" $name) }}
{{- end }}
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
{{- $claims := list }}{{ $paths := include "rlhf-job.mountPaths" $ | fromJsonArray }}
{{- range $name, $claim := omit $.Values.storage "singleNode" }}
{{- if or $claim.existingClaim $claim.size }}
{{- $claims = append $claims $name }}{{ $paths = append $paths (trimSuffix "/" $claim.mountPath) }}
{{- end }}
{{- end }}
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
