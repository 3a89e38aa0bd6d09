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

{{/* No text. Keeps beside .Values, read once, what most templates ask for: .known, of files/tables.json; .whole, the job
with every key; .inJob and .onDevice, the roles that the job has, and those that would compute on a device; .paths, from each
key of the job that has paths to a list of them, as pods see them; and .claims, those of storage that are made or named.
Nothing may change them. */}}
{{- define "rlhf-job.read" -}}
{{- if not (hasKey . "known") }}
{{- $known := .Files.Get "files/tables.json" | fromJson }}
{{- $_ := set . "known" $known }}
{{- $_ := set . "whole" (include "rlhf-job.over" (list (deepCopy $known.job) (include "rlhf-job.given" . | fromJson)) | fromJson) }}
{{- if not .whole.trainer.default_local_dir }}{{ $_ := set .whole.trainer "default_local_dir" (printf "outputs/%s" .whole.trainer.experiment_name) }}{{ end }}
{{- range $fact := list "inJob" "onDevice" }}
{{- $roles := list }}
{{- range $known.roles }}{{ if include "rlhf-job.holds" (list $ (get (get $known $fact) .)) }}{{ $roles = append $roles . }}{{ end }}{{ end }}
{{- $_ := set $ $fact $roles }}
{{- end }}
{{- $paths := dict }}
{{- range $key := $known.paths }}
{{- $path := $.whole }}{{ $each := list }}
{{- range splitList "." $key }}{{ $path = get $path . }}{{ end }}
{{- range kindIs "slice" $path | ternary $path (list $path) }}
{{- if . }}{{ $each = append $each (include "rlhf-job.inPod" (list $ .)) }}{{ end }}
{{- end }}
{{- $_ := set $paths $key $each }}
{{- end }}
{{- $_ := set . "paths" $paths }}
{{- $claims := dict }}
{{- range $name, $claim := omit .Values.storage "singleNode" }}
{{- if or $claim.existingClaim $claim.size }}{{ $_ := set $claims $name $claim }}{{ end }}
{{- end }}
{{- $_ := set . "claims" $claims }}
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

{{/* Not empty: one of a table's ALTERNATIVES holds for the job, of (list $ ALTERNATIVES). In each, every key has one of its
values. An empty one stands for all that the table does not name. */}}
{{- define "rlhf-job.holds" -}}
{{- $ := first . }}
{{- range last . }}
{{- $all := true }}
{{- range $key, $values := . }}
{{- $value := $.whole }}
{{- range splitList "." $key }}{{ $value = get $value . }}{{ end }}
{{- if not (has $value (get $.known.values $key)) }}{{ $value = "" }}{{ end }}
{{- if not (has $value $values) }}{{ $all = false }}{{ end }}
{{- end }}
{{- if $all }}true{{ end }}
{{- end }}
{{- end }}

{{/* The placement's groups with their roles, as JSON, from the file that the local launcher reads, or the user's. */}}
{{- define "rlhf-job.table" -}}
{{- $file := .Files.Get (printf "placements/%s.yaml" .Values.placement.strategy) | fromYaml }}
{{- $groups := $file.groups | default .Values.placement.groups }}
{{- if not $groups }}{{ fail (printf "placement.strategy is %v, which has no groups: set another strategy, or placement.groups" .Values.placement.strategy) }}{{ end }}
{{- toJson $groups }}
{{- end }}

{{/* Not empty: users' code runs in these pods, and no other role does, of (list $ ROLES). */}}
{{- define "rlhf-job.onlyUserCode" -}}
{{- $others := last . }}
{{- range (first .).known.runsUserCode }}{{ $others = without $others . }}{{ end }}
{{- if and (last .) (not $others) }}true{{ end }}
{{- end }}

{{/* The plan of the release, as JSON: roles, and for each group name, workload, kind, roles, trained (its first trained
role, in the order of roles; empty: none), scaler, replicas (with a scaler, the minimum), ranks, pods (of a replica),
gpusOfGroup (of a replica), gpus (of a pod), models (its roles that load a model; an engine on external servers loads
none), servesWeights, resources and pod (values.pods with the overrides of values.groups). Refuses invalid values. */}}
{{- define "rlhf-job.plan" -}}
{{- if not (hasKey . "plan") }}{{ $_ := set . "plan" (include "rlhf-job.planned" .) }}{{ end }}
{{- .plan }}
{{- end }}

{{- define "rlhf-job.planned" -}}
{{- include "rlhf-job.read" . }}
{{- include "rlhf-job.refuse.rest" . }}
{{- $groups := list }}
{{- range $name, $members := include "rlhf-job.table" . | fromJson }}
{{- $own := list }}{{ $models := list }}{{ $trained := list }}{{ $servesWeights := false }}
{{- $gpus := 0 }}{{ $resources := list }}{{ $ranks := get $.Values.placement.ranks $name | default 1 | int }}
{{- range $role := $members }}{{ if has $role $.inJob }}
{{- $values := get $.Values.roles $role | default dict }}{{ $computes := has $role $.onDevice }}
{{- $own = append $own $role }}
{{- $resources = append $resources ($values.resources | default dict) }}
{{- $ranks = max $ranks (get $.Values.placement.ranks $role | default 1 | int) }}
{{- if $computes }}{{ $models = append $models $role }}{{ end }}
{{- if has $role $.known.servesWeights }}{{ $servesWeights = true }}{{ end }}
{{- if or $computes (ne $role "rollout") }}{{ $gpus = max $gpus $values.gpus }}{{ end }} {{- /* a rule's GPU is the user's choice */}}
{{- end }}{{ end }}
{{- range $.known.trained }}{{ if has . $own }}{{ $trained = append $trained . }}{{ end }}{{ end }}
{{- if $own }}
{{- $override := get $.Values.groups $name | default dict }}
{{- if hasKey $override "gpus" }}{{ $gpus = int $override.gpus }}{{ end }}
{{- $merged := include "rlhf-job.resources" (list $resources) | fromJson }}
{{- if $override.resources }}{{ $merged = deepCopy $override.resources }}{{ end }}
{{- $pods := int ($override.pods | default 1) }}
{{- if and (not $override.pods) (gt $ranks 1) }}{{ $pods = div (add $gpus $.Values.gpu.perNode -1) $.Values.gpu.perNode | max 1 | int }}{{ end }}
{{- $ofGroup := $gpus }}{{ $gpus = div $gpus $pods | int }}
{{- if $gpus }}
{{- $_ := set $merged "limits" (set ($merged.limits | default dict) $.Values.gpu.resource $gpus) }}
{{- end }}
{{- $kind := gt $pods 1 | ternary "RayCluster" (empty $trained | ternary "Deployment" "StatefulSet") }}
{{- $scaler := get $.Values.autoscaling (first $own) }}
{{- $replicas := get $.Values.placement.replicas (first $own) | default 1 }}
{{- if $scaler }}{{ $replicas = $scaler.minReplicas | default 1 }}{{ end }}
{{- $group := dict "name" $name "workload" (include "rlhf-job.name" (list $ $name)) "kind" $kind "roles" $own
    "trained" (first $trained | default "") "scaler" $scaler "replicas" $replicas "ranks" $ranks "pods" $pods "gpusOfGroup" $ofGroup "gpus" $gpus
    "models" $models "servesWeights" $servesWeights "resources" $merged "pod" (include "rlhf-job.settings" (list $ $override $gpus) | fromJson) }}
{{- $groups = append $groups $group }}
{{- end }}
{{- end }}
{{- range $kind := list "groups" "tls" "unread" "accounts" "written" "prepared" "scaleUp" }}
{{- include (printf "rlhf-job.refuse.%s" $kind) (list $ $groups) }}
{{- end }}
{{- dict "groups" $groups "roles" .inJob | toJson }}
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
