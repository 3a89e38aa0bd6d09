{{/* The job as the user gave it. Helm reads YAML 1.1, in which rollout's key n is the boolean false. */}}
{{- define "rlhf-job.given" -}}
{{- $job := deepCopy .Values.job }}
{{- range $section := list $job.rollout (dig "rollout" "val_kwargs" dict $job) }}
{{- if hasKey ($section | default dict) "false" }}
{{- $_ := set $section "n" (get $section "false") }}
{{- $_ := unset $section "false" }}
{{- end }}
{{- end }}
{{- toJson $job }}
{{- end }}

{{/* The job with every key: the user's values over the defaults. Kept beside .Values, as is the plan: most templates need
both, and making them anew for each was two thirds of the time of a render. */}}
{{- define "rlhf-job.job" -}}
{{- if not (hasKey . "job") }}
{{- $_ := set . "job" (include "rlhf-job.over" (list (.Files.Get "files/defaults.json" | fromJson).job (include "rlhf-job.given" . | fromJson))) }}
{{- end }}
{{- .job }}
{{- end }}

{{/* No text. Keeps beside .Values, read once, what every pod asks for: .known, of files/defaults.json, and .whole, the job
with every key. Nothing may change them. */}}
{{- define "rlhf-job.read" -}}
{{- if not (hasKey . "known") }}
{{- $_ := set . "known" (.Files.Get "files/defaults.json" | fromJson) }}
{{- $_ := set . "whole" (include "rlhf-job.job" . | fromJson) }}
{{- end }}
{{- end }}

{{/* The dict GIVEN merged over DEFAULTS, of (list DEFAULTS GIVEN), as JSON. Not by mergeOverwrite, which replaces a given
false or 0 by the default. */}}
{{- define "rlhf-job.over" -}}
{{- $all := first . }}
{{- range $key, $value := last . }}
{{- $default := get $all $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $default) }}
{{- $value = include "rlhf-job.over" (list $default $value) | fromJson }}
{{- end }}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $all $key $value }}{{ end }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{/* Each strategy's table of groups, from the files that the local launcher reads. */}}
{{- define "rlhf-job.tables" -}}
{{- $tables := dict }}
{{- range $path, $_ := .Files.Glob "placements/*.yaml" }}
{{- $_ := set $tables (base $path | trimSuffix ".yaml") ($.Files.Get $path | fromYaml).groups }}
{{- end }}
{{- toJson $tables }}
{{- end }}

{{/* What files/defaults.json says of the job's page, as JSON. Empty: the page is a plug-in's, or that of a plug-in's
estimator, and the chart does not know its roles. */}}
{{- define "rlhf-job.page" -}}
{{- include "rlhf-job.read" . }}{{ $algorithm := .whole.algorithm }}{{ $known := .known }}
{{- $page := dig $algorithm.adv_estimator "page" "" $known.estimators }}
{{- if $algorithm.filter_groups.enable }}{{ $page = $known.filters }}{{ end }}
{{- get $known.pages ($algorithm.page | default $page) | default dict | toJson }}
{{- end }}

{{/* Not empty: the job has a critic. critic.enable decides if it is set, otherwise the estimator and the page. */}}
{{- define "rlhf-job.hasCritic" -}}
{{- include "rlhf-job.read" . }}{{ $job := .whole }}{{ $page := include "rlhf-job.page" . | fromJson }}
{{- $byEstimator := dig $job.algorithm.adv_estimator "needsCritic" false .known.estimators }}
{{- $needed := or (and $page.estimates $byEstimator) (has "critic" $page.roles) }}
{{- if kindIs "bool" $job.critic.enable }}{{ $needed = $job.critic.enable }}{{ end }}
{{- if $needed }}true{{ end }}
{{- end }}

{{/* Not empty: the job's engine generates on external servers and uses no device here. */}}
{{- define "rlhf-job.generatesElsewhere" -}}
{{- include "rlhf-job.read" . }}
{{- if has .whole.rollout.name .known.elsewhere }}true{{ end }}
{{- end }}

{{/* The job's roles, in the order used everywhere. A plug-in's page is taken to call those that grpo calls. */}}
{{- define "rlhf-job.roles" -}}
{{- include "rlhf-job.read" . }}{{ $job := .whole }}{{ $known := .known }}
{{- $called := (include "rlhf-job.page" . | fromJson).roles | default $known.pages.grpo.roles }}
{{- $absent := list }}
{{- range $known.called }}{{ if not (has . $called) }}{{ $absent = append $absent . }}{{ end }}{{ end }}
{{- if not (include "rlhf-job.hasCritic" .) }}{{ $absent = append $absent "critic" }}{{ end }}
{{- $usesReference := or $job.algorithm.use_kl_in_reward $job.actor.use_kl_loss (has "reference" $called) }}
{{- if or (not $usesReference) (gt (int $job.actor.model.lora_rank) 0) }}{{ $absent = append $absent "reference" }}{{ end }}
{{- if not (and $job.rollout.multi_turn.enable (has "rollout" $called)) }}{{ $absent = append $absent "environment" }}{{ end }}
{{- $roles := list }}
{{- range $known.roles }}
{{- if not (has . $absent) }}{{ $roles = append $roles . }}{{ end }}
{{- end }}
{{- toJson $roles }}
{{- end }}

{{/* The roles of a list that are of a kind of files/defaults.json, of (list $ ROLES KIND), as JSON. */}}
{{- define "rlhf-job.of" -}}
{{- include "rlhf-job.read" (first .) }}
{{- $kind := get (first .).known (index . 2) }}
{{- $roles := list }}
{{- range index . 1 }}{{ if has . $kind }}{{ $roles = append $roles . }}{{ end }}{{ end }}
{{- toJson $roles }}
{{- end }}

{{/* The plan of the release, as JSON: roles, and for each group name, workload, kind, roles, trained (its first trained
role, in the order of roles; empty: none), scaler, replicas (with a scaler, the minimum), ranks, pods (of a replica),
gpusOfGroup (of a replica), gpus (of a pod), models (its roles that load a model; an engine on external servers loads
none), resources and pod (values.pods with the overrides of values.groups). Refuses invalid values. */}}
{{- define "rlhf-job.plan" -}}
{{- if not (hasKey . "plan") }}{{ $_ := set . "plan" (include "rlhf-job.planned" .) }}{{ end }}
{{- .plan }}
{{- end }}

{{- define "rlhf-job.planned" -}}
{{- include "rlhf-job.refuse.rest" . }}
{{- include "rlhf-job.refuse.table" . }}
{{- $job := include "rlhf-job.job" . | fromJson }}
{{- $stateless := (.Files.Get "files/defaults.json" | fromJson).stateless }}
{{- $roles := include "rlhf-job.roles" . | fromJsonArray }}
{{- $table := get (include "rlhf-job.tables" . | fromJson) .Values.placement.strategy | default .Values.placement.groups }}
{{- $groups := list }}
{{- range $name, $members := $table }}
{{- $own := list }}
{{- range $members }}{{ if has . $roles }}{{ $own = append $own . }}{{ end }}{{ end }}
{{- if $own }}
{{- $override := get $.Values.groups $name | default dict }}
{{- $gpus := 0 }}{{ $ranks := get $.Values.placement.ranks $name | default 1 | int }}{{ $resources := list }}{{ $kind := "Deployment" }}{{ $models := list }}
{{- range $own }}
{{- $role := index $.Values.roles . }}
{{- $elsewhere := and (eq . "rollout") (include "rlhf-job.generatesElsewhere" $) }}
{{- if not $elsewhere }}{{ $gpus = max $gpus $role.gpus }}{{ end }}
{{- $ranks = max $ranks (get $.Values.placement.ranks . | default 1 | int) }}
{{- if not (or $elsewhere (eq . "environment") (and (eq . "reward") (not $job.reward.reward_model.enable))) }}{{ $models = append $models . }}{{ end }}
{{- $resources = append $resources ($role.resources | default dict) }}
{{- if not (has . $stateless) }}{{ $kind = "StatefulSet" }}{{ end }}
{{- end }}
{{- if hasKey $override "gpus" }}{{ $gpus = int $override.gpus }}{{ end }}
{{- $merged := include "rlhf-job.resources" (list $resources) | fromJson }}
{{- if $override.resources }}{{ $merged = deepCopy $override.resources }}{{ end }}
{{- $pods := int ($override.pods | default 1) }}
{{- if and (not $override.pods) (gt $ranks 1) }}{{ $pods = div (add $gpus $.Values.gpu.perNode -1) $.Values.gpu.perNode | max 1 | int }}{{ end }}
{{- $ofGroup := $gpus }}{{ $gpus = div $gpus $pods | int }}
{{- if gt $pods 1 }}{{ $kind = "RayCluster" }}{{ end }}
{{- if $gpus }}
{{- $_ := set $merged "limits" (set ($merged.limits | default dict) $.Values.gpu.resource $gpus) }}
{{- end }}
{{- $trained := "" }}
{{- range $roles }}{{ if and (not $trained) (has . $own) (not (has . $stateless)) }}{{ $trained = . }}{{ end }}{{ end }}
{{- $scaler := get $.Values.autoscaling (first $own) }}
{{- $replicas := get $.Values.placement.replicas (first $own) | default 1 }}
{{- if $scaler }}{{ $replicas = $scaler.minReplicas | default 1 }}{{ end }}
{{- $group := dict "name" $name "workload" (include "rlhf-job.name" (list $ $name)) "kind" $kind "roles" $own
    "trained" $trained "scaler" $scaler "replicas" $replicas "ranks" $ranks "pods" $pods "gpusOfGroup" $ofGroup "gpus" $gpus "models" $models "resources" $merged
    "pod" (include "rlhf-job.settings" (list $ $override $gpus) | fromJson) }}
{{- $groups = append $groups $group }}
{{- end }}
{{- end }}
{{- include "rlhf-job.refuse.groups" (list . $groups) }}
{{- include "rlhf-job.refuse.job" (list . $groups) }}
{{- include "rlhf-job.refuse.tls" (list . $groups) }}
{{- include "rlhf-job.refuse.unread" (list . $groups) }}
{{- include "rlhf-job.refuse.accounts" (list . $groups) }}
{{- include "rlhf-job.refuse.written" (list . $groups) }}
{{- include "rlhf-job.refuse.prepared" (list . $groups) }}
{{- include "rlhf-job.refuse.scaleUp" (list . $groups) }}
{{- dict "groups" $groups "roles" $roles | toJson }}
{{- end }}

{{/* values.pods with the keys of OVERRIDE replaced, of (list $ OVERRIDE GPUS). A pod with GPUs has those of values.gpu, too. */}}
{{- define "rlhf-job.settings" -}}
{{- $ := index . 0 }}{{ $override := index . 1 }}
{{- $pod := deepCopy $.Values.pods }}
{{- range $key, $value := $override }}
{{- if and (hasKey $pod $key) (not (kindIs "invalid" $value)) }}{{ $_ := set $pod $key $value }}{{ end }}
{{- end }}
{{- if index . 2 }}
{{- $_ := set $pod "nodeSelector" (merge dict $pod.nodeSelector $.Values.gpu.nodeSelector) }}
{{- $_ := set $pod "tolerations" (concat $pod.tolerations $.Values.gpu.tolerations) }}
{{- if kindIs "invalid" (index $override "runtimeClassName") }}
{{- $_ := set $pod "runtimeClassName" ($.Values.gpu.runtimeClassName | default $pod.runtimeClassName) }}
{{- end }}
{{- end }}
{{- toJson $pod }}
{{- end }}

{{/* Resources of a pod whose roles take turns, of (list [RESOURCES of each role]): the maximum of what roles use in turns
(CPU, devices), and the sum of what a sleeping role keeps (memory, disk). A limit applies only if every role has it. */}}
{{- define "rlhf-job.resources" -}}
{{- $all := first . }}
{{- $merged := dict }}
{{- range $part := list "requests" "limits" }}
{{- $amounts := dict }}
{{- range $resources := $all }}
{{- range $name, $amount := get $resources $part | default dict }}
{{- $_ := set $amounts $name (append (get $amounts $name | default list) $amount) }}
{{- end }}
{{- end }}
{{- range $name, $given := $amounts }}
{{- if or (eq $part "requests") (eq (len $given) (len $all)) (contains "/" $name) }}
{{- $total := 0.0 }}
{{- range $given }}
{{- $one := include "rlhf-job.number" . | float64 }}
{{- $total = ternary (addf $total $one) (maxf $total $one) (has $name (list "memory" "ephemeral-storage")) }}
{{- end }}
{{- $amount := ternary (first $given) (include "rlhf-job.quantity" $total) (eq (len $given) 1) }}
{{- $_ := set $merged $part (set (get $merged $part | default dict) $name $amount) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $merged }}
{{- end }}

{{/* A quantity as a number of thousandths: "2Gi", "500m" or 4. */}}
{{- define "rlhf-job.number" -}}
{{- $units := dict "m" 0.001 "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 }}
{{- $unit := regexFind "[a-zA-Z]*$" (toString .) }}
{{- printf "%.0f" (mulf 1000 (get $units $unit) (toString . | trimSuffix $unit | float64)) }}
{{- end }}

{{/* A number of thousandths as a quantity, in the largest unit that divides it. */}}
{{- define "rlhf-job.quantity" -}}
{{- $n := int64 . }}
{{- if mod $n 1000 }}{{ $n }}m
{{- else if mod $n 1048576000 }}{{ div $n 1000 }}
{{- else if mod $n 1073741824000 }}{{ div $n 1048576000 }}Mi
{{- else }}{{ div $n 1073741824000 }}Gi
{{- end }}
{{- end }}
