{{/* Invalid values end the rendering with one sentence that says what to change. */}}

{{/* Refuse a placement that does not have each of the job's roles exactly once. */}}
{{- define "rlhf-job.refuse.table" -}}
{{- $all := (.Files.Get "files/defaults.json" | fromJson).roles }}
{{- $tables := include "rlhf-job.tables" . | fromJson }}
{{- $strategy := .Values.placement.strategy }}{{ $own := .Values.placement.groups }}
{{- if .Values.job.placement }}
{{- fail "job.placement is set, but in the chart this section is a separate value: move it to placement" }}
{{- end }}
{{- if not (hasKey $tables $strategy) }}
{{- fail (printf "placement.strategy is %s: set it to one of %s" $strategy (keys $tables | sortAlpha | join ", ")) }}
{{- end }}
{{- $table := get $tables $strategy }}
{{- if and $table $own }}
{{- fail (printf "placement.groups is set, but placement.strategy %s defines its own groups: set the strategy to custom" $strategy) }}
{{- end }}
{{- $table = $table | default $own }}
{{- $homes := dict }}
{{- range $name, $members := $table }}
{{- if or (not (regexMatch "^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$" $name)) (has $name (list "controller" "check")) }}
{{- fail (printf "placement.groups has a group %q: name it with lower-case letters, digits and '-', at most 24 characters, and not controller or check" $name) }}
{{- end }}
{{- range $members }}
{{- if not (has . $all) }}
{{- fail (printf "placement.groups.%s names %s, which is not a role: use roles of %s" $name . (join ", " $all)) }}
{{- end }}
{{- $_ := set $homes . (append (get $homes . | default list) $name) }}
{{- end }}
{{- end }}
{{- $roles := include "rlhf-job.roles" . | fromJsonArray }}
{{- range $all }}
{{- $in := get $homes . | default list }}
{{- if gt (len $in) 1 }}
{{- fail (printf "placement.groups has %s %d times (%s): leave it in one group, once" . (len $in) (join ", " $in)) }}
{{- else if and (not $in) (has . $roles) }}
{{- fail (printf "placement.groups has no group with %s, which this job needs: add it to one" .) }}
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.groups }}
{{- if not (hasKey $table $name) }}
{{- fail (printf "groups.%s is set, but placement.strategy %s has the groups %s: use one of these names" $name $strategy (keys $table | sortAlpha | join ", ")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse invalid replicas, scalers and devices of groups, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.groups" -}}
{{- $ := first . }}
{{- $job := include "rlhf-job.job" $ | fromJson }}
{{- if ne $.Values.placement.launcher "processes" }}
{{- fail "placement.launcher is ray, but the chart decides this for each group: leave it out; a group of several pods starts by Ray" }}
{{- end }}
{{- $world := mul (int $job.trainer.n_gpus_per_node) (int ($job.trainer.nnodes | default 1)) }}
{{- if gt (int $world) 1 }}
{{- fail (printf "job.trainer.n_gpus_per_node times nnodes is %d, but the chart takes the ranks of a group from placement.ranks: set them there, and leave these keys out" (int $world)) }}
{{- end }}
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
{{- if and $group.scaler (gt (int ($group.scaler.minReplicas | default 1)) (int $group.scaler.maxReplicas)) }}
{{- fail (printf "autoscaling.%s.minReplicas is more than its maxReplicas: lower it" (first $group.roles)) }}
{{- end }}
{{- include "rlhf-job.refuse.ranks" (list $ $group) }}
{{- include "rlhf-job.refuse.host" (list $ $group) }}
{{- if gt (int $group.gpus) (int $.Values.gpu.perNode) }}
{{- fail (printf "a pod of group %s requests %d GPUs, but a node has %d (gpu.perNode): lower gpus of %s, or spread its models over several pods by placement.ranks" $group.name (int $group.gpus) (int $.Values.gpu.perNode) (join ", " $group.roles)) }}
{{- end }}
{{- if and (regexMatch "/mig-|[.]shared$" $.Values.gpu.resource) (or (gt (int $group.gpus) 1) (gt (int $group.ranks) 1)) }}
{{- fail (printf "a pod of group %s requests %d of %s, but parts of GPUs cannot work together: set gpus of %s to 1, without placement.ranks and job.rollout.tensor_model_parallel_size, or use whole GPUs" $group.name (int $group.gpus) $.Values.gpu.resource (join ", " $group.roles)) }}
{{- end }}
{{- $ranks := eq (include "rlhf-job.generatesElsewhere" $) "true" | ternary (min 1 (len (without $group.roles "rollout"))) 1 | int }}
{{- if and (has "rollout" $group.roles) (gt (int $job.rollout.tensor_model_parallel_size) 1) }}{{ $ranks = int $job.rollout.tensor_model_parallel_size }}{{ end }}
{{- if and (gt (int $group.gpus) $ranks) (eq (int $group.ranks) 1) }}
{{- fail (printf "a pod of group %s requests %d GPUs, but its roles use %d: set gpus of %s to %d, or placement.ranks to as many; a rollout with engine vllm uses as many as job.rollout.tensor_model_parallel_size" $group.name (int $group.gpus) $ranks (join ", " $group.roles) $ranks) }}
{{- end }}
{{- if and $group.gpus (eq $.Values.image.kind "cpu") }}
{{- fail (printf "a pod of group %s requests GPUs, but image.kind is cpu: set gpus of %s to 0, or use an image of the target gpu" $group.name (join ", " $group.roles)) }}
{{- end }}
{{- if and $group.gpus (eq $job.trainer.device "cpu") }}
{{- fail (printf "a pod of group %s requests GPUs, but job.trainer.device is cpu: set gpus of %s to 0, or the device to auto" $group.name (join ", " $group.roles)) }}
{{- end }}
{{- if and (not $group.gpus) $group.models (eq $job.trainer.device "cuda") }}
{{- fail (printf "job.trainer.device is cuda, but a pod of group %s has no GPU for the models of %s: set roles.%s.gpus to 1, or the device to auto" $group.name (join ", " $group.models) (first $group.models)) }}
{{- end }}
{{- if has "rollout" $group.roles }}
{{- if and (eq $job.rollout.name "vllm") (eq $.Values.image.kind "cpu") }}
{{- fail "job.rollout.name is vllm, but image.kind is cpu, and such an image has no vLLM: set job.rollout.name to hf, or use an image of the target gpu" }}
{{- end }}
{{- if and (gt $ranks 1) (gt $ranks (int $group.gpus)) }}
{{- fail (printf "job.rollout.tensor_model_parallel_size is %d, but a pod of group %s has %d GPUs: set roles.rollout.gpus to %d" $ranks $group.name (int $group.gpus) $ranks) }}
{{- end }}
{{- end }}
{{- end }}
{{- $roles := include "rlhf-job.roles" $ | fromJsonArray }}
{{- range $role, $scaler := $.Values.autoscaling }}
{{- if and $scaler (not (has $role $roles)) }}
{{- fail (printf "autoscaling.%s is set, but this job has no %s: remove it" $role $role) }}
{{- end }}
{{- if and $scaler (eq $.Values.gang.scheduler "kueue") }}
{{- fail (printf "autoscaling.%s is set, but gang.scheduler is kueue: a scaler counts pods that wait for quota as replicas that do too little, and adds more; remove autoscaling.%s, or set the scheduler to none" $role $role) }}
{{- end }}
{{- if and $scaler (eq ($scaler.scaler | default "") "keda") }}
{{- include "rlhf-job.refuse.crd" (list $ "keda.sh/v1alpha1/ScaledObject" (printf "autoscaling.%s.scaler is keda" $role) "KEDA" "set it to hpa") }}
{{- end }}
{{- end }}
{{- end }}

{{/* What is too small in the memory limit of a pod with a rollout on GPUs, of (list $ GROUP): "weights" if it is below
them, "processes" if it is below the guess of what its processes take besides; and a sentence. Empty if it suffices.
The pod checks this, too, and knows its model (rolemesh/checks/memory_limit.py). */}}
{{- define "rlhf-job.host" -}}
{{- $ := first . }}{{ $group := last . }}{{ $found := dict }}
{{- $limit := dig "limits" "memory" "" $group.resources }}
{{- if and $limit $group.gpus (has "rollout" $group.models) $.Values.roles.rollout.billionParameters }}
{{- $job := include "rlhf-job.job" $ | fromJson }}
{{- $known := $.Files.Get "files/defaults.json" | fromJson }}
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

{{/* Refuse a memory limit below the weights of a rollout on GPUs, of (list $ GROUP). */}}
{{- define "rlhf-job.refuse.host" -}}
{{- $host := include "rlhf-job.host" . | fromJson }}
{{- if eq ($host.small | default "") "weights" }}{{ fail $host.message }}{{ end }}
{{- end }}

{{/* Refuse ranks that no pods can hold, of (list $ GROUP). */}}
{{- define "rlhf-job.refuse.ranks" -}}
{{- $ := first . }}{{ $group := last . }}{{ $ranks := int $group.ranks }}{{ $pods := int $group.pods }}
{{- range $role := $group.models }}
{{- $own := get $.Values.placement.ranks $role | default (get $.Values.placement.ranks $group.name) | default 1 | int }}
{{- if ne $own $ranks }}
{{- fail (printf "placement.ranks is %d for %s, but its group %s has %d ranks, and each rank has all roles of its group: set placement.ranks.%s alone" $own $role $group.name $ranks $group.name) }}
{{- end }}
{{- end }}
{{- if and (gt $ranks 1) (has "rollout" $group.models) }}
{{- if eq (len $group.models) 1 }}
{{- fail (printf "placement.ranks is %d for group %s, which has the rollout alone: set placement.replicas.rollout for more engines, or job.rollout.tensor_model_parallel_size for an engine on several GPUs" $ranks $group.name) }}
{{- end }}
{{- $several := (include "rlhf-job.job" $ | fromJson).rollout.tensor_model_parallel_size | int }}
{{- if gt $several 1 }}
{{- fail (printf "job.rollout.tensor_model_parallel_size is %d, but each of the %d ranks of group %s has an engine on its own GPU: set it to 1, or give the rollout a group of its own (placement.strategy)" $several $ranks $group.name) }}
{{- end }}
{{- end }}
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

{{/* Refuse sections of the job that contradict each other, where the pods depend on them, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.job" -}}
{{- $job := include "rlhf-job.job" (first .) | fromJson }}
{{- $n := int $job.rollout.n }}{{ $batch := int $job.data.train_batch_size }}
{{- $longest := $job.data.max_length | default (add $job.data.max_prompt_length $job.data.max_response_length) | int }}
{{- $estimator := $job.algorithm.adv_estimator }}{{ $page := include "rlhf-job.page" (first .) | fromJson }}
{{- $known := (first .).Files.Get "files/defaults.json" | fromJson }}
{{- if and $page.estimates (dig $estimator "compares" false $known.estimators) (eq $n 1) }}
{{- fail (printf "job.algorithm.adv_estimator %s compares the responses to one prompt, but job.rollout.n is 1: set it to 2 or more" $estimator) }}
{{- end }}
{{- range $group := last . }}
{{- range $role := $group.roles }}{{ if not (has $role $known.stateless) }}
{{- $section := get $job $role }}
{{- $mini := int ($section.ppo_mini_batch_size | default $job.actor.ppo_mini_batch_size) }}
{{- $micro := int $section.ppo_micro_batch_size_per_gpu }}
{{- if mod $batch $mini }}
{{- fail (printf "job.data.train_batch_size %d does not divide into mini-batches of %d prompts: set job.%s.ppo_mini_batch_size to a divisor" $batch $mini $role) }}
{{- else if and (mod (mul $mini $n) $micro) (not (include "rlhf-job.tokens" (list $job $role))) }}
{{- fail (printf "a mini-batch of %d rows (%d prompts times job.rollout.n %d) does not divide into micro-batches of %d: set job.%s.ppo_micro_batch_size_per_gpu to a divisor" (mul $mini $n) $mini $n $micro $role) }}
{{- end }}
{{- end }}{{ end }}
{{- range $role := without $group.roles "rollout" "reward" "environment" }}
{{- with include "rlhf-job.tokens" (list $job $role) }}
{{- if lt (int .) $longest }}
{{- $stem := eq $role "reference" | ternary "log_prob" "ppo" }}
{{- fail (printf "job.%s.%s_max_token_len_per_gpu is %s, but a row may have %d tokens (job.data.%s): set it to that or more" $role $stem . $longest (empty $job.data.max_length | ternary "max_prompt_length and max_response_length" "max_length")) }}
{{- end }}
{{- end }}
{{- end }}
{{- $sharing := $group.models }} {{- /* roles that compute on the group's device */}}
{{- if and (eq $job.rollout.mode "async") (gt (int $job.trainer.max_staleness) 0) (has "rollout" $sharing) (gt (len $sharing) 1) }}
{{- fail (printf "job.rollout.mode is async, but rollout shares the device of group %s with %s and so cannot run ahead of training: give rollout a group of its own (placement.strategy), or set the mode to sync" $group.name (without $sharing "rollout" | join ", ")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Maximum number of tokens in a pass of actor, critic or reference, of (list JOB ROLE); empty if passes have a fixed
number of rows. */}}
{{- define "rlhf-job.tokens" -}}
{{- $job := first . }}{{ $role := last . }}{{ $section := get $job $role }}
{{- $stem := eq $role "reference" | ternary "log_prob" "ppo" }}
{{- $dynamic := eq $role "reference" | ternary $section.log_prob_use_dynamic_bsz $section.use_dynamic_bsz }}
{{- if kindIs "invalid" $dynamic }}{{ $dynamic = $job.actor.use_dynamic_bsz }}{{ end }}
{{- if $dynamic }}
{{- get $section (printf "%s_max_token_len_per_gpu" $stem) | default $job.actor.ppo_max_token_len_per_gpu | int }}
{{- end }}
{{- end }}

{{/* Refuse labels or annotations that are reserved for the chart, of (list OWN GIVEN KEY). All names under rolemesh.dev/
are, even if this object does not have them, because NetworkPolicies and Services select pods by them. */}}
{{- define "rlhf-job.refuse.own" -}}
{{- $own := index . 0 }}{{ $key := index . 2 }}
{{- range $name, $_ := index . 1 }}
{{- if or (hasKey $own $name) (hasPrefix "rolemesh.dev/" $name) }}
{{- fail (printf "%s has %s, which is reserved for the chart: remove it, or use another name" $key $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse other values: those that the cluster does not support, and those that contradict each other. */}}
{{- define "rlhf-job.refuse.rest" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}
{{- fail (printf "the release is called %s, which cannot begin the name of a Service: use lower-case letters, digits and '-', a letter first" .Release.Name) }}
{{- end }}
{{- $repository := .Values.image.repository }}
{{- if contains "@" $repository }}
{{- fail (printf "image.repository is %s, which has a digest: put the digest in image.digest, and leave it out here" $repository) }}
{{- else if contains ":" (base $repository) }}
{{- fail (printf "image.repository is %s, which has a tag: put the tag in image.tag, and leave it out here" $repository) }}
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
{{- else if and (eq .Values.gang.scheduler "kueue") (not .Values.gang.queue) }}
{{- fail "gang.scheduler is kueue, but gang.queue is empty: set it to a LocalQueue of the namespace" }}
{{- end }}
{{- if and .Values.controller.scaleUp (not (and .Values.controller.scaleDown .Values.controller.rbac)) }}
{{- fail "controller.scaleUp is true, but the controller scales up what it scales down: set controller.scaleDown and controller.rbac to true" }}
{{- end }}
{{- include "rlhf-job.refuse.gpus" (list . "controller" .Values.controller) }}
{{- $attempts := int .Values.controller.maxAttempts }}{{ $restarts := int .Values.controller.backoffLimit }}
{{- if and .Values.controller.scaleDown .Values.controller.rbac (lt $restarts $attempts) }} {{- /* else nothing is scaled down anyway */}}
{{- $fewer := gt $restarts 0 | ternary (printf ", or maxAttempts to %d or less" $restarts) "" }}
{{- fail (printf "controller.backoffLimit is %d, below controller.maxAttempts (%d), so a controller that is killed as often would leave the roles their GPUs: set backoffLimit to %d or more%s" $restarts $attempts $attempts $fewer) }}
{{- end }}
{{- if not (or .Values.storage.workspace.existingClaim .Values.storage.workspace.size) }}
{{- fail "storage.workspace has neither a size nor an existingClaim: set one, because the run directory is there" }}
{{- end }}
{{- include "rlhf-job.refuse.access" . }}
{{- include "rlhf-job.refuse.mounts" . }}
{{- if .Values.rewardFunction.code }}
{{- $path := (include "rlhf-job.job" . | fromJson).reward.custom_reward_function.path }}
{{- if or (ne (toString $path) "/etc/rolemesh-reward/reward.py") .Values.rewardFunction.configMap }}
{{- fail "rewardFunction.code is set: set job.reward.custom_reward_function.path to /etc/rolemesh-reward/reward.py, where the code is mounted, and leave rewardFunction.configMap empty" }}
{{- end }}
{{- end }}
{{- if and .Values.plugins.code .Values.plugins.configMap }}
{{- fail "plugins.code and plugins.configMap are both set: set only one, and put all files into it" }}
{{- end }}
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
{{- include "rlhf-job.refuse.names" . }}
{{- include "rlhf-job.refuse.homes" . }}
{{- if .Values.storage.workspace.readOnly }}
{{- fail "storage.workspace.readOnly is true, but the controller takes its lock there: set it to false" }}
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

{{/* Refuse claims of the chart that not all pods of the job can mount. */}}
{{- define "rlhf-job.refuse.access" -}}
{{- $ := . }}
{{- range $key, $claim := omit .Values.storage "singleNode" }}
{{- if and $claim.size (not $claim.existingClaim) }}
{{- $modes := $claim.accessModes }}
{{- if has "ReadWriteOncePod" $modes }}
{{- fail (printf "storage.%s.accessModes has ReadWriteOncePod, with which one pod alone can mount the claim, but a job has several: use ReadWriteMany, or ReadWriteOnce with storage.singleNode" $key) }}
{{- end }}
{{- if not (or $.Values.storage.singleNode (has "ReadWriteMany" $modes) (and $claim.readOnly (has "ReadOnlyMany" $modes))) }}
{{- fail (printf "storage.%s.accessModes is %s, with which pods on several nodes cannot use the claim: set storage.singleNode to true, or use ReadWriteMany" $key (join ", " $modes)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse names of estimators, losses and so on that are not built in, if there is no plug-in to define them. */}}
{{- define "rlhf-job.refuse.names" -}}
{{- $job := include "rlhf-job.job" . | fromJson }}
{{- $defaults := .Files.Get "files/defaults.json" | fromJson }}
{{- $plugins := or .Values.plugins.code .Values.plugins.configMap $job.plugins }}
{{- range $key, $known := $defaults.names }}
{{- $name := $job }}
{{- range splitList "." $key }}{{ $name = get $name . }}{{ end }}
{{- range $each := kindIs "slice" $name | ternary $name (list $name) }}
{{- if and $each (not (has $each $known)) (not $plugins) }}
{{- fail (printf "job.%s is %s: set it to one of %s, or define it in plugins.code" $key $each ($known | join ", ")) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (not (include "rlhf-job.page" . | fromJson)) (kindIs "invalid" $job.critic.enable) }}
{{- fail "job.algorithm has the page of a plug-in, or of a plug-in's estimator, and the chart cannot know whether it calls a critic: set job.critic.enable to true or false" }}
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
