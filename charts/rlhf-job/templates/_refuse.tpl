{{/* What cannot become a job ends the rendering with one sentence that says what to change. */}}

{{/* placement: a table, with each of the job's roles once. */}}
{{- define "rlhf-job.refuse.table" -}}
{{- $all := (.Files.Get "files/defaults.json" | fromJson).roles }}
{{- $tables := include "rlhf-job.tables" . | fromJson }}
{{- $strategy := .Values.placement.strategy }}{{ $own := .Values.placement.groups }}
{{- if .Values.job.placement }}
{{- fail "job.placement is set, and in the chart that section is a value of its own: move it to placement" }}
{{- end }}
{{- if not (hasKey $tables $strategy) }}
{{- fail (printf "placement.strategy is %s: set it to one of %s" $strategy (keys $tables | sortAlpha | join ", ")) }}
{{- end }}
{{- $table := get $tables $strategy }}
{{- if and $table $own }}
{{- fail (printf "placement.groups is set, and placement.strategy %s has groups of its own: set the strategy to custom" $strategy) }}
{{- end }}
{{- $table = $table | default $own }}
{{- $homes := dict }}
{{- range $name, $members := $table }}
{{- if or (not (regexMatch "^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$" $name)) (has $name (list "controller" "check")) }}
{{- fail (printf "placement.groups has a group %q: name it with small letters, digits and '-', 24 at most, and not controller or check" $name) }}
{{- end }}
{{- range $members }}
{{- if not (has . $all) }}
{{- fail (printf "placement.groups.%s names %s: set it to roles out of %s" $name . (join ", " $all)) }}
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
{{- fail (printf "groups.%s is set, and there are %s: name one of these groups of placement.strategy %s" $name (keys $table | sortAlpha | join ", ") $strategy) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Groups of a plan, of (list $ GROUPS): replicas, scalers, devices. */}}
{{- define "rlhf-job.refuse.groups" -}}
{{- $ := first . }}
{{- $job := include "rlhf-job.job" $ | fromJson }}
{{- range $group := last . }}
{{- range $role := $group.roles }}
{{- $count := int (get $.Values.placement.replicas $role | default 1) }}
{{- range $other := $group.roles }}
{{- $fewer := int (get $.Values.placement.replicas $other | default 1) }}
{{- if lt $fewer $count }}
{{- fail (printf "placement.replicas.%s is %d, and a pod has all roles of its group %s, of which there is %d for %s (a role that is trained has one): give %s a group of its own (placement.strategy), or all of them as many" $role $count $group.name $fewer $other $role) }}
{{- end }}
{{- end }}
{{- if and (get $.Values.autoscaling $role) (gt (len $group.roles) 1) }}
{{- fail (printf "autoscaling.%s is set, and %s shares the pods of group %s with %s, which would be scaled with it: give %s a group of its own (placement.strategy), or remove autoscaling.%s" $role $role $group.name (without $group.roles $role | join ", ") $role $role) }}
{{- end }}
{{- if hasKey (dig "resources" "limits" dict (index $.Values.roles $role)) $.Values.gpu.resource }}
{{- fail (printf "roles.%s.resources has %s: set roles.%s.gpus instead" $role $.Values.gpu.resource $role) }}
{{- end }}
{{- end }}
{{- if and $group.scaler (gt (int ($group.scaler.minReplicas | default 1)) (int $group.scaler.maxReplicas)) }}
{{- fail (printf "autoscaling.%s.minReplicas is more than its maxReplicas: lower it" (first $group.roles)) }}
{{- end }}
{{- if gt (int $group.gpus) (int $.Values.gpu.perNode) }}
{{- fail (printf "a pod of group %s wants %d GPUs, and a node has %d (gpu.perNode): lower gpus of %s, since a group of several nodes does not exist yet" $group.name (int $group.gpus) (int $.Values.gpu.perNode) (join ", " $group.roles)) }}
{{- end }}
{{- $ranks := eq $job.rollout.name "openai" | ternary (min 1 (len (without $group.roles "rollout"))) 1 | int }}
{{- if and (has "rollout" $group.roles) (eq $job.rollout.name "vllm") }}{{ $ranks = int $job.rollout.tensor_model_parallel_size }}{{ end }}
{{- if gt (int $group.gpus) $ranks }}
{{- fail (printf "a pod of group %s wants %d GPUs, and its roles use %d: set gpus of %s to %d; only a rollout by vLLM takes several, as job.rollout.tensor_model_parallel_size says" $group.name (int $group.gpus) $ranks (join ", " $group.roles) $ranks) }}
{{- end }}
{{- if and $group.gpus (eq $.Values.image.kind "cpu") }}
{{- fail (printf "a pod of group %s wants GPUs, and image.kind is cpu: set gpus of %s to 0, or take the image's target gpu" $group.name (join ", " $group.roles)) }}
{{- end }}
{{- if and $group.gpus (eq $job.trainer.device "cpu") }}
{{- fail (printf "a pod of group %s wants GPUs, and job.trainer.device is cpu: set gpus of %s to 0, or the device to auto" $group.name (join ", " $group.roles)) }}
{{- end }}
{{- if and (not $group.gpus) $group.models (eq $job.trainer.device "cuda") }}
{{- fail (printf "job.trainer.device is cuda, and a pod of group %s has no GPU for the models of %s: set roles.%s.gpus to 1, or the device to auto" $group.name (join ", " $group.models) (first $group.models)) }}
{{- end }}
{{- if has "rollout" $group.roles }}
{{- if and (eq $job.rollout.name "vllm") (eq $.Values.image.kind "cpu") }}
{{- fail "job.rollout.name is vllm, and image.kind is cpu, whose image has no vLLM: set job.rollout.name to hf, or take the image's target gpu" }}
{{- end }}
{{- if and (gt $ranks 1) (gt $ranks (int $group.gpus)) }}
{{- fail (printf "job.rollout.tensor_model_parallel_size is %d, and a pod of group %s has %d GPUs: set roles.rollout.gpus to %d" $ranks $group.name (int $group.gpus) $ranks) }}
{{- end }}
{{- end }}
{{- end }}
{{- $roles := include "rlhf-job.roles" $ | fromJsonArray }}
{{- range $role, $scaler := $.Values.autoscaling }}
{{- if and $scaler (not (has $role $roles)) }}
{{- fail (printf "autoscaling.%s is set, and this job has no %s: remove it" $role $role) }}
{{- end }}
{{- if and $scaler (eq ($scaler.scaler | default "") "keda") }}
{{- include "rlhf-job.refuse.crd" (list $ "keda.sh/v1alpha1/ScaledObject" (printf "autoscaling.%s.scaler is keda" $role) "KEDA" "set it to hpa") }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of (list $ GROUPS): what sections of the job must agree on, as far as it decides what the pods do. */}}
{{- define "rlhf-job.refuse.job" -}}
{{- $job := include "rlhf-job.job" (first .) | fromJson }}
{{- $n := int $job.rollout.n }}{{ $batch := int $job.data.train_batch_size }}
{{- $longest := add $job.data.max_prompt_length $job.data.max_response_length | int }}
{{- $estimator := $job.algorithm.adv_estimator }}
{{- if and (has $estimator ((first .).Files.Get "files/defaults.json" | fromJson).comparing) (eq $n 1) }}
{{- fail (printf "job.algorithm.adv_estimator %s compares the responses to one prompt, and job.rollout.n is 1: set it to 2 or more" $estimator) }}
{{- end }}
{{- range $group := last . }}
{{- range $role := without $group.roles "rollout" "reference" "reward" }}
{{- $section := get $job $role }}
{{- $mini := int ($section.ppo_mini_batch_size | default $job.actor.ppo_mini_batch_size) }}
{{- $micro := int $section.ppo_micro_batch_size_per_gpu }}
{{- if mod $batch $mini }}
{{- fail (printf "job.data.train_batch_size %d does not divide into mini-batches of %d prompts: set job.%s.ppo_mini_batch_size to a divisor" $batch $mini $role) }}
{{- else if and (mod (mul $mini $n) $micro) (not (include "rlhf-job.tokens" (list $job $role))) }}
{{- fail (printf "a mini-batch of %d rows (%d prompts times job.rollout.n %d) does not divide into micro-batches of %d: set job.%s.ppo_micro_batch_size_per_gpu to a divisor" (mul $mini $n) $mini $n $micro $role) }}
{{- end }}
{{- end }}
{{- range $role := without $group.roles "rollout" "reward" }}
{{- with include "rlhf-job.tokens" (list $job $role) }}
{{- if lt (int .) $longest }}
{{- $stem := eq $role "reference" | ternary "log_prob" "ppo" }}
{{- fail (printf "job.%s.%s_max_token_len_per_gpu is %s, and a row may have %d tokens (job.data.max_prompt_length and max_response_length): set it to that or more" $role $stem . $longest) }}
{{- end }}
{{- end }}
{{- end }}
{{- $elsewhere := list (ternary "" "reward" $job.reward.reward_model.enable) (eq $job.rollout.name "openai" | ternary "rollout" "") }}
{{- $sharing := without $group.roles (first $elsewhere) (last $elsewhere) }}
{{- if and (eq $job.rollout.mode "async") (gt (int $job.trainer.max_staleness) 0) (has "rollout" $sharing) (gt (len $sharing) 1) }}
{{- fail (printf "job.rollout.mode is async, and rollout shares the device of group %s with %s, so that nothing would run ahead: give rollout a group of its own (placement.strategy), or set the mode to sync" $group.name (without $sharing "rollout" | join ", ")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Tokens in a pass of actor, critic or reference, of (list JOB ROLE); nothing where passes have a number of rows. */}}
{{- define "rlhf-job.tokens" -}}
{{- $job := first . }}{{ $role := last . }}{{ $section := get $job $role }}
{{- $stem := eq $role "reference" | ternary "log_prob" "ppo" }}
{{- $dynamic := eq $role "reference" | ternary $section.log_prob_use_dynamic_bsz $section.use_dynamic_bsz }}
{{- if kindIs "invalid" $dynamic }}{{ $dynamic = $job.actor.use_dynamic_bsz }}{{ end }}
{{- if $dynamic }}
{{- get $section (printf "%s_max_token_len_per_gpu" $stem) | default $job.actor.ppo_max_token_len_per_gpu | int }}
{{- end }}
{{- end }}

{{/* Of (list OWN GIVEN KEY): labels or annotations that are the chart's own. Those under rolemesh.dev/ are, though this
object may not have them: policies and Services know pods by them. */}}
{{- define "rlhf-job.refuse.own" -}}
{{- $own := index . 0 }}{{ $key := index . 2 }}
{{- range $name, $_ := index . 1 }}
{{- if or (hasKey $own $name) (hasPrefix "rolemesh.dev/" $name) }}
{{- fail (printf "%s has %s, which is the chart's own: leave it out, or give yours another name" $key $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What else the cluster must have, and values that belong together. */}}
{{- define "rlhf-job.refuse.rest" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}
{{- fail (printf "the release is called %s, and Services will be too: name it with small letters, digits and '-', a letter first" .Release.Name) }}
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
{{- fail "gang.scheduler is kueue and gang.queue is empty: set it to a LocalQueue of the namespace" }}
{{- end }}
{{- if not (or .Values.storage.workspace.existingClaim .Values.storage.workspace.size) }}
{{- fail "storage.workspace has neither a size nor an existingClaim: set one, since the run directory lies there" }}
{{- end }}
{{- if .Values.rewardFunction.code }}
{{- $path := (include "rlhf-job.job" . | fromJson).reward.custom_reward_function.path }}
{{- if or (ne (toString $path) "/etc/rolemesh-reward/reward.py") .Values.rewardFunction.configMap }}
{{- fail "rewardFunction.code is set: set job.reward.custom_reward_function.path to /etc/rolemesh-reward/reward.py, where it will be, and rewardFunction.configMap to nothing" }}
{{- end }}
{{- end }}
{{- range $key, $claim := omit .Values.storage "singleNode" }}
{{- include "rlhf-job.refuse.absent" (list $ "PersistentVolumeClaim" $claim.existingClaim (printf "storage.%s.existingClaim" $key)) }}
{{- end }}
{{- include "rlhf-job.refuse.absent" (list . "Secret" .Values.huggingFace.secret "huggingFace.secret") }}
{{- include "rlhf-job.refuse.absent" (list . "ConfigMap" .Values.rewardFunction.configMap "rewardFunction.configMap") }}
{{- end }}

{{/* Of (list $ API "what is set" "what brings the API" "what else to do"). */}}
{{- define "rlhf-job.refuse.crd" -}}
{{- if not ((first .).Capabilities.APIVersions.Has (index . 1)) }}
{{- fail (printf "%s, and the cluster does not know %s: install %s, or %s" (index . 2) (index . 1) (index . 3) (index . 4)) }}
{{- end }}
{{- end }}

{{/* Of (list $ KIND NAME KEY). Every namespace of a real cluster has the ConfigMap kube-root-ca.crt; without a cluster
(helm template) nothing is known to be absent. */}}
{{- define "rlhf-job.refuse.absent" -}}
{{- $namespace := (first .).Release.Namespace }}
{{- if and (index . 2) (lookup "v1" "ConfigMap" $namespace "kube-root-ca.crt") (not (lookup "v1" (index . 1) $namespace (index . 2))) }}
{{- fail (printf "%s is %s, and namespace %s has no such %s: create it, or name one that is there" (index . 3) (index . 2) $namespace (index . 1)) }}
{{- end }}
{{- end }}
