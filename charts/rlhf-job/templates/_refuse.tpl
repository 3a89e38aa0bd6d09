{{/* Values that do not fit the job, each other or the cluster end the rendering with one sentence that says what to change. What
JSON Schema can express is refused by values.schema.json, and what the job alone decides by the first pod (`rolemesh check`). */}}

{{/* Refuse invalid replicas, scalers and devices of groups, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.groups" -}}
{{- $ := first . }}{{ $job := $.whole }}
{{- range $group := last . }}
{{- range $role := $group.roles }}
{{- $count := int (get $.Values.placement.replicas $role | default 1) }}
{{- range $other := $group.roles }}
{{- $fewer := int (get $.Values.placement.replicas $other | default 1) }}
{{- if lt $fewer $count }}
{{- fail (printf "placement.replicas.%s is %d, but a pod has all roles of its group %s, and %s has %d (a trained role has 1): give %s a group of its own (placement.strategy), or set all roles of the group to the same number" $role $count $group.name $other $fewer $role) }}
{{- end }}
{{- end }}
{{- if and (get $.Values.autoscaling $role) (gt (len $group.roles) 1) }}
{{- fail (printf "autoscaling.%s is set, but %s shares the pods of group %s with %s, which would be scaled with it: give %s a group of its own (placement.strategy), or remove autoscaling.%s" $role $role $group.name (without $group.roles $role | join ", ") $role $role) }}
{{- end }}
{{- include "rlhf-job.refuse.gpus" (list $ (printf "roles.%s" $role) (index $.Values.roles $role)) }}
{{- end }}
{{- include "rlhf-job.refuse.gpus" (list $ (printf "groups.%s" $group.name) (get $.Values.groups $group.name)) }}
{{- include "rlhf-job.refuse.ranks" (list $ $group) }}
{{- $host := include "rlhf-job.host" (list $ $group) | fromJson }}
{{- if eq ($host.small | default "") "weights" }}{{ fail $host.message }}{{ end }}
{{- $roles := join ", " $group.roles }}{{ $gpus := int $group.gpus }}
{{- if gt $gpus (int $.Values.gpu.perNode) }}
{{- fail (printf "a pod of group %s requests %d GPUs, but a node has %d (gpu.perNode): lower gpus of %s, or spread its models over several pods by placement.ranks" $group.name $gpus (int $.Values.gpu.perNode) $roles) }}
{{- end }}
{{- if and (regexMatch "/mig-|[.]shared$" $.Values.gpu.resource) (or (gt $gpus 1) (gt (int $group.ranks) 1)) }}
{{- fail (printf "a pod of group %s requests %d of %s, but parts of GPUs cannot work together: set gpus of %s to 1, without placement.ranks and job.rollout.tensor_model_parallel_size, or use whole GPUs" $group.name $gpus $.Values.gpu.resource $roles) }}
{{- end }}
{{- $engine := has "rollout" $group.roles | ternary (int $job.rollout.tensor_model_parallel_size) 1 }}
{{- if and (has "rollout" $group.roles) (not $group.models) (eq (len $group.roles) 1) }}{{ $engine = 0 }}{{ end }}
{{- if and (gt $gpus $engine) (eq (int $group.ranks) 1) }}
{{- fail (printf "a pod of group %s requests %d GPUs, but its roles use %d: set gpus of %s to %d, or placement.ranks to as many; a rollout with engine vllm uses as many as job.rollout.tensor_model_parallel_size" $group.name $gpus $engine $roles $engine) }}
{{- end }}
{{- if and (gt $engine 1) (gt $engine $gpus) }}
{{- fail (printf "job.rollout.tensor_model_parallel_size is %d, but a pod of group %s has %d GPUs: set roles.rollout.gpus to %d" $engine $group.name $gpus $engine) }}
{{- end }}
{{- if and $gpus (eq $.Values.image.kind "cpu") }}
{{- fail (printf "a pod of group %s requests GPUs, but image.kind is cpu: set gpus of %s to 0, or use an image of the target gpu" $group.name $roles) }}
{{- end }}
{{- if and $gpus (eq $job.trainer.device "cpu") }}
{{- fail (printf "a pod of group %s requests GPUs, but job.trainer.device is cpu: set gpus of %s to 0, or the device to auto" $group.name $roles) }}
{{- end }}
{{- if and (not $gpus) $group.models (eq $job.trainer.device "cuda") }}
{{- fail (printf "job.trainer.device is cuda, but a pod of group %s has no GPU for the models of %s: set roles.%s.gpus to 1, or the device to auto" $group.name (join ", " $group.models) (first $group.models)) }}
{{- end }}
{{- if and (has "rollout" $group.roles) (eq $job.rollout.name "vllm") (eq $.Values.image.kind "cpu") }}
{{- fail "job.rollout.name is vllm, but image.kind is cpu, and such an image has no vLLM: set job.rollout.name to hf, or use an image of the target gpu" }}
{{- end }}
{{- end }}
{{- range $role, $scaler := $.Values.autoscaling }}{{ if $scaler }}
{{- if not (has $role $.inJob) }}
{{- fail (printf "autoscaling.%s is set, but this job has no %s: remove it" $role $role) }}
{{- end }}
{{- if gt (int ($scaler.minReplicas | default 1)) (int $scaler.maxReplicas) }}
{{- fail (printf "autoscaling.%s.minReplicas is more than its maxReplicas: lower it" $role) }}
{{- end }}
{{- if eq $scaler.scaler "keda" }}
{{- include "rlhf-job.refuse.crd" (list $ "keda.sh/v1alpha1/ScaledObject" (printf "autoscaling.%s.scaler is keda" $role) "KEDA" "set it to hpa") }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{/* What is too small in the memory limit of a pod with a rollout on GPUs, of (list $ GROUP): "weights" if it is below
them, "processes" if it is below the guess of what its processes take besides; and a sentence. Empty if it suffices.
The pod checks this, too, and knows its model (rolemesh/checks/memory_limit.py). */}}
{{- define "rlhf-job.host" -}}
{{- $ := first . }}{{ $group := last . }}{{ $found := dict }}
{{- $limit := dig "limits" "memory" "" $group.resources }}
{{- if and $limit $group.gpus (has "rollout" $group.models) (dig "rollout" "billionParameters" 0 $.Values.roles) }}
{{- $job := $.whole }}{{ $known := $.known }}
{{- $billions := $.Values.roles.rollout.billionParameters | float64 }}
{{- $engines := div (int $group.ranks) (int $group.pods) | float64 }}
{{- $inDtype := has $job.rollout.name $known.inDtype }}
{{- $width := and $inDtype (ne $job.rollout.dtype "float32") | ternary 2.0 4.0 }}
{{- $processes := $known.hostGiB.hf }}
{{- if $inDtype }}{{ $processes = addf $known.hostGiB.vllm (mulf $known.hostGiB.perGpu (subf $job.rollout.tensor_model_parallel_size 1)) }}{{ end }}
{{- $version := divf (mulf $billions $width 1e9) 1073741824 }}
{{- $weights := $version }}
{{- if and $job.rollout.free_cache_engine (gt (len $group.models) 1) }}{{ $weights = addf $version (mulf $engines $version) }}{{ end }}
{{- $needed := addf (mulf $engines $processes) $weights }}
{{- $limitGiB := divf (include "rlhf-job.number" $limit | float64) 1073741824000 }}
{{- if gt $needed $limitGiB }}
{{- $small := gt $weights $limitGiB | ternary "weights" "processes" }}
{{- $found = dict "small" $small "message" (printf "a pod of group %s has a memory limit of %v, but its rollout takes about %.1f GiB of host memory: %.1f GiB for its processes, and %.1f GiB for weights of roles.rollout.billionParameters %v: raise the memory of roles.rollout.resources, or of groups.%s.resources" $group.name $limit $needed (mulf $engines $processes) $weights $billions $group.name) }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Refuse ranks that the pods' GPUs, or the cluster, cannot hold, of (list $ GROUP). */}}
{{- define "rlhf-job.refuse.ranks" -}}
{{- $ := first . }}{{ $group := last . }}{{ $ranks := int $group.ranks }}{{ $pods := int $group.pods }}
{{- if and (gt $pods 1) (eq $ranks 1) }}
{{- fail (printf "groups.%s.pods is %d, but the group has one rank: set placement.ranks.%s to a multiple of it" $group.name $pods $group.name) }}
{{- end }}
{{- if mod $ranks $pods }}
{{- fail (printf "group %s has %d ranks, which do not divide among %d pods: set placement.ranks.%s to a multiple of it (gpu.perNode and groups.%s.pods decide the number of pods)" $group.name $ranks $pods $group.name $group.name) }}
{{- end }}
{{- if and (gt $ranks 1) $group.gpusOfGroup (ne $ranks (int $group.gpusOfGroup)) }}
{{- fail (printf "group %s has %d ranks, but gpus of %s is %d: set both to the same number, because each rank has a GPU" $group.name $ranks (join ", " $group.roles) (int $group.gpusOfGroup)) }}
{{- end }}
{{- if gt $pods 1 }}
{{- include "rlhf-job.refuse.crd" (list $ "ray.io/v1/RayCluster" (printf "group %s has %d ranks in %d pods" $group.name $ranks $pods) "KubeRay" (printf "lower placement.ranks.%s to what one pod holds" $group.name)) }}
{{- if or $group.scaler (gt (int $group.replicas) 1) }}
{{- fail (printf "group %s has %d pods for each replica, and the chart starts one such replica: set placement.replicas of %s to 1, and remove its autoscaling" $group.name $pods (join ", " $group.roles)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse other values: those that the cluster does not support, and those that contradict each other. */}}
{{- define "rlhf-job.refuse.rest" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}
{{- fail (printf "the release is called %s, which cannot begin the name of a Service: use lower-case letters, digits and '-', a letter first" .Release.Name) }}
{{- end }}
{{- if eq .Values.monitoring.operator "always" }}
{{- include "rlhf-job.refuse.crd" (list . "monitoring.coreos.com/v1/PodMonitor" "monitoring.operator is always" "the Prometheus operator" "set it to auto") }}
{{- end }}
{{- if eq .Values.tls.mode "certManager" }}
{{- include "rlhf-job.refuse.crd" (list . "cert-manager.io/v1/Certificate" "tls.mode is certManager" "cert-manager" "set it to secret or none") }}
{{- end }}
{{- if eq .Values.gang.scheduler "volcano" }}
{{- include "rlhf-job.refuse.crd" (list . "scheduling.volcano.sh/v1beta1/PodGroup" "gang.scheduler is volcano" "Volcano" "set it to none") }}
{{- else if eq .Values.gang.scheduler "coscheduling" }}
{{- include "rlhf-job.refuse.crd" (list . "scheduling.x-k8s.io/v1alpha1/PodGroup" "gang.scheduler is coscheduling" "the scheduler plugins" "set it to none") }}
{{- end }}
{{- include "rlhf-job.refuse.gpus" (list . "controller" .Values.controller) }}
{{- $attempts := int .Values.controller.maxAttempts }}{{ $restarts := int .Values.controller.backoffLimit }}
{{- if and .Values.controller.scaleDown .Values.controller.rbac (lt $restarts $attempts) }} {{- /* else nothing is scaled down anyway */}}
{{- $fewer := gt $restarts 0 | ternary (printf ", or maxAttempts to %d or less" $restarts) "" }}
{{- fail (printf "controller.backoffLimit is %d, below controller.maxAttempts (%d), so a controller that is killed as often would leave the roles their GPUs: set backoffLimit to %d or more%s" $restarts $attempts $attempts $fewer) }}
{{- end }}
{{- include "rlhf-job.refuse.mounts" . }}
{{- if .Values.huggingFace.fetch }}
{{- $cache := include "rlhf-job.cache" . }}
{{- $key := include "rlhf-job.claimOf" (list . $cache) }}
{{- if or (not $key) (eq $key "caches") }}
{{- fail (printf "huggingFace.cache is %s, which is in no claim that all pods mount: set it to a folder of storage.workspace or storage.models" $cache) }}
{{- end }}
{{- if (get .Values.storage $key).readOnly }}
{{- fail (printf "huggingFace.cache is %s, but storage.%s is read-only: set storage.%s.readOnly to false; the roles mount models read-only all the same" $cache $key $key) }}
{{- end }}
{{- end }}
{{- range $key, $claim := omit .Values.storage "singleNode" }}
{{- include "rlhf-job.refuse.absent" (list $ "PersistentVolumeClaim" $claim.existingClaim (printf "storage.%s.existingClaim" $key)) }}
{{- end }}
{{- include "rlhf-job.refuse.absent" (list . "Secret" .Values.huggingFace.secret "huggingFace.secret") }}
{{- include "rlhf-job.refuse.absent" (list . "ConfigMap" .Values.rewardFunction.configMap "rewardFunction.configMap") }}
{{- include "rlhf-job.refuse.absent" (list . "ConfigMap" .Values.plugins.configMap "plugins.configMap") }}
{{- end }}

{{/* Refuse to begin with scaleUp while workloads have several pods, of (list $ GROUPS): if the number is taken out of a manifest,
Kubernetes sets it to 1. Workloads that the controller scales already say so. Checked only on a cluster. */}}
{{- define "rlhf-job.refuse.scaleUp" -}}
{{- $ := first . }}
{{- if $.Values.controller.scaleUp }}
{{- range last . }}
{{- if ne .kind "RayCluster" }}
{{- $live := lookup "apps/v1" .kind $.Release.Namespace .workload }}
{{- $said := dig "metadata" "annotations" "rolemesh.dev/scaled-by" "" $live }}
{{- $pods := dig "spec" "replicas" 0 $live | int }}
{{- if and (gt $pods 1) (ne $said "controller") }}
{{- fail (printf "controller.scaleUp is true, which leaves the number of pods out, but %s %s has %d, and Kubernetes would set it to 1: stop the run first (rolemesh stop), or scale it to 1; or, if it is the controller that scales it already, run kubectl -n %s annotate %s %s rolemesh.dev/scaled-by=controller" (lower .kind) .workload $pods $.Release.Namespace (lower .kind) .workload) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse a value if the cluster lacks the API that it needs, of (list $ API "what is set" "what installs the API"
"what else to do"). */}}
{{- define "rlhf-job.refuse.crd" -}}
{{- if not ((first .).Capabilities.APIVersions.Has (index . 1)) }}
{{- fail (printf "%s, but the cluster does not know %s: install %s, or %s" (index . 2) (index . 1) (index . 3) (index . 4)) }}
{{- end }}
{{- end }}

{{/* Refuse the name of an object that does not exist, of (list $ KIND NAME KEY). Checked only on a cluster, on which every
namespace has the ConfigMap kube-root-ca.crt: `helm template` cannot look objects up. */}}
{{- define "rlhf-job.refuse.absent" -}}
{{- $namespace := (first .).Release.Namespace }}
{{- if and (index . 2) (lookup "v1" "ConfigMap" $namespace "kube-root-ca.crt") (not (lookup "v1" (index . 1) $namespace (index . 2))) }}
{{- fail (printf "%s is %s, but namespace %s has no such %s: create it, or name an existing one" (index . 3) (index . 2) $namespace (index . 1)) }}
{{- end }}
{{- end }}
