{{/* Paths of the job in a pod, and those that are refused: where a pod cannot write, or loses what it writes, or waits in vain. */}}

{{/* A path as pods see it, absolute and without . and .., of (list $ PATH). */}}
{{- define "rlhf-job.inPod" -}}
{{- $path := last . }}
{{- if not (isAbs $path) }}{{ $path = printf "%s/%s" (first .).Values.storage.workspace.mountPath $path }}{{ end }}
{{- clean $path }}
{{- end }}

{{/* No text. Keeps .absolute beside .Values: from each key of the job that has paths to a list of them, as pods see them. */}}
{{- define "rlhf-job.readPaths" -}}
{{- include "rlhf-job.read" . }}
{{- if not (hasKey . "absolute") }}
{{- $absolute := dict }}
{{- range $key := .known.paths }}
{{- $path := $.whole }}{{ $each := list }}
{{- range splitList "." $key }}{{ $path = get $path . }}{{ end }}
{{- range kindIs "slice" $path | ternary $path (list $path) }}
{{- if . }}{{ $each = append $each (include "rlhf-job.inPod" (list $ .)) }}{{ end }}
{{- end }}
{{- $_ := set $absolute $key $each }}
{{- end }}
{{- $dir := include "rlhf-job.givenDir" . }}
{{- $_ := set $absolute "trainer.default_local_dir" (list (include "rlhf-job.inPod" (list . $dir))) }}
{{- $_ := set . "absolute" $absolute }}
{{- end }}
{{- end }}

{{/* The run directory as the job gives it, or its default, of $. */}}
{{- define "rlhf-job.givenDir" -}}
{{- include "rlhf-job.read" . }}
{{- .whole.trainer.default_local_dir | default (printf "outputs/%s" .whole.trainer.experiment_name) }}
{{- end }}

{{/* The run directory as pods see it, of $. */}}
{{- define "rlhf-job.runDir" -}}
{{- include "rlhf-job.readPaths" . }}
{{- get .absolute "trainer.default_local_dir" | first }}
{{- end }}

{{/* The claim that has an absolute path, of (list $ PATH): that with the longest mountPath, if several have it; empty: none. */}}
{{- define "rlhf-job.claimOf" -}}
{{- $found := "" }}{{ $longest := 0 }}{{ $path := printf "%s/" (last .) }}
{{- range $name, $claim := omit (first .).Values.storage "singleNode" }}
{{- $within := printf "%s/" (clean $claim.mountPath | trimSuffix "/") }}
{{- if and (or $claim.existingClaim $claim.size) (hasPrefix $within $path) (ge (len $within) $longest) }}
{{- $found = $name }}{{ $longest = len $within }}
{{- end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* The folder that has an absolute path in a pod, as JSON, of (list $ PATH SETTINGS): the longest that contains it of claims,
volumes of yours and the pod's own /tmp and /dev/shm. `at` is empty if there is none. `claim`: its name, if it is a claim.
`own`: others do not see it, and it is lost with the pod. */}}
{{- define "rlhf-job.folderOf" -}}
{{- $ := index . 0 }}{{ $path := printf "%s/" (index . 1) }}{{ $settings := index . 2 }}
{{- $private := list "tmp" "shm" }}
{{- range $settings.volumes }}
{{- if or (hasKey . "emptyDir") (hasKey . "ephemeral") }}{{ $private = append $private .name }}{{ end }}
{{- end }}
{{- $mounts := concat (list (dict "name" "tmp" "mountPath" "/tmp") (dict "name" "shm" "mountPath" "/dev/shm")) ($settings.volumeMounts | default list) }}
{{- with include "rlhf-job.claimOf" (list $ (index . 1)) }}
{{- $mounts = append $mounts (dict "name" . "claim" . "mountPath" (get $.Values.storage .).mountPath) }}
{{- end }}
{{- $found := dict "at" "" "claim" "" "own" false }}{{ $longest := 0 }}
{{- range $mounts }}
{{- $at := clean .mountPath }}{{ $within := printf "%s/" (trimSuffix "/" $at) }}
{{- if and (hasPrefix $within $path) (ge (len $within) $longest) }}
{{- $found = dict "at" $at "claim" (.claim | default "") "own" (has .name $private) }}{{ $longest = len $within }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The folder of a pod's own that has an absolute path, of (list $ PATH SETTINGS); empty: none. */}}
{{- define "rlhf-job.ownFolder" -}}
{{- $folder := include "rlhf-job.folderOf" . | fromJson }}
{{- if $folder.own }}{{ $folder.at }}{{ end }}
{{- end }}

{{/* Refuse a claim that the run cannot write to, of (list $ KEY PATH CLAIM); empty: none. */}}
{{- define "rlhf-job.refuse.unwritable" -}}
{{- $ := index . 0 }}{{ $is := printf "%s is %s, but" (index . 1) (index . 2) }}
{{- with index . 3 }}
{{- if eq . "caches" }}
{{- fail (printf "%s only pods that compile for GPUs mount storage.caches: write to another claim" $is) }}
{{- end }}
{{- if and $.Values.huggingFace.fetch (eq . "models") }}
{{- fail (printf "%s with huggingFace.fetch a run mounts storage.models read-only: write to another claim" $is) }}
{{- end }}
{{- if (get $.Values.storage .).readOnly }}
{{- fail (printf "%s storage.%s is read-only: set storage.%s.readOnly to false, or write to another claim" $is . .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse a run directory where a pod that writes it cannot, or loses it, of (list $ GROUPS). Such are the pods of the controller
and of trained roles, and of every role if steps are profiled. The controller alone writes dumps. */}}
{{- define "rlhf-job.refuse.runDir" -}}
{{- $ := first . }}{{ $dir := include "rlhf-job.runDir" $ }}{{ $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $key := "the run directory (job.trainer.default_local_dir)" }}
{{- $controller := include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson }}
{{- range $dumps := list "trainer.rollout_data_dir" "trainer.validation_data_dir" }}
{{- range get $.absolute $dumps }}
{{- include "rlhf-job.refuse.unwritable" (list $ (printf "job.%s" $dumps) . (include "rlhf-job.folderOf" (list $ . $controller) | fromJson).claim) }}
{{- end }}
{{- end }}
{{- $writers := list (dict "of" "the controller" "pod" $controller) }}
{{- range last . }}
{{- if or .trained $.whole.trainer.profile_steps }}{{ $writers = append $writers (dict "of" (printf "group %s" .name) "pod" .pod) }}{{ end }}
{{- end }}
{{- $with := list }}{{ $without := list }}
{{- range $writer := $writers }}
{{- $folder := include "rlhf-job.folderOf" (list $ $dir $writer.pod) | fromJson }}
{{- if $folder.own }}
{{- fail (printf "job.trainer.default_local_dir is %s, but pods of %s have their own %s, which is lost with the pod: %s" ($.whole.trainer.default_local_dir | default $dir) $writer.of $folder.at $claim) }}
{{- end }}
{{- include "rlhf-job.refuse.unwritable" (list $ $key $dir $folder.claim) }}
{{- if $folder.at }}{{ $with = append $with $writer.of }}{{ else }}{{ $without = append $without $writer.of }}{{ end }}
{{- end }}
{{- if and $with $without }}
{{- fail (printf "%s is %s, and pods of %s have a volume there, but those of %s, which write it too, have none: mount it in them (volumes and volumeMounts), or %s" $key $dir (join ", " $with) (join ", " $without) $claim) }}
{{- end }}
{{- end }}

{{/* Refuse steps that create something where a pod that prepares nothing would wait for it, as others do not see it, of
(list $ GROUPS). Without such pods each makes its own, as a copy of a model on the node's disk. */}}
{{- define "rlhf-job.refuse.ownFolders" -}}
{{- $ := first . }}{{ $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $controller := include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson }}
{{- $pods := list $controller }}{{ range last . }}{{ $pods = append $pods .pod }}{{ end }}
{{- range $step := $.Values.prepare }}
{{- range $pods }}
{{- if eq (include "rlhf-job.folderOf" (list $ (include "rlhf-job.inPod" (list $ $step.creates)) .) | fromJson).claim "caches" }}
{{- fail (printf "prepare has a step that creates %s, but only pods that compile for GPUs mount storage.caches: write to another claim" $step.creates) }}
{{- end }}
{{- end }}
{{- end }}
{{- $preparing := list $controller }}
{{- range $group := last . }}
{{- if ne (len (include "rlhf-job.of" (list $ $group.roles "runsUserCode") | fromJsonArray)) (len $group.roles) }}{{ $preparing = append $preparing $group.pod }}{{ end }}
{{- end }}
{{- range $group := last . }}
{{- $userCode := include "rlhf-job.of" (list $ $group.roles "runsUserCode") | fromJsonArray }}
{{- if eq (len $userCode) (len $group.roles) }}
{{- range $step := $.Values.prepare }}
{{- $path := include "rlhf-job.inPod" (list $ $step.creates) }}
{{- with include "rlhf-job.ownFolder" (list $ $path $group.pod) }}
{{- fail (printf "prepare has a step that creates %s, but each pod has its own %s, and pods of group %s, which prepare nothing, would wait for it for ever: %s" $step.creates . $group.name $claim) }}
{{- end }}
{{- /* A volume of yours may have another mountPath there, as with subPath: it need only be one. */}}
{{- $mounts := ne (include "rlhf-job.folderOf" (list $ $path $group.pod) | fromJson).at "" }}{{ $found := false }}
{{- range $pod := $preparing }}
{{- $folder := include "rlhf-job.folderOf" (list $ $path $pod) | fromJson }}
{{- if and (not $folder.own) (eq $mounts (ne $folder.at "")) }}{{ $found = true }}{{ end }}
{{- end }}
{{- if not $found }}
{{- fail (printf "prepare has a step that creates %s, but pods of group %s, which prepare nothing, would wait for it for ever: %s a volume there, and the pods that prepare do not share it: %s" $step.creates $group.name (ternary "they have" "they do not have" $mounts) $claim) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse paths in the home directory, which is /tmp in a pod. */}}
{{- define "rlhf-job.refuse.homes" -}}
{{- $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $why := printf "but ~ in a pod is /tmp, which is lost with the pod: %s" $claim }}
{{- range $step := .Values.prepare }}
{{- if hasPrefix "~" $step.creates }}{{ fail (printf "prepare has a step that creates %s, %s" $step.creates $why) }}{{ end }}
{{- end }}
{{- $job := include "rlhf-job.job" . | fromJson }}
{{- range $key := (.Files.Get "files/defaults.json" | fromJson).paths }}
{{- $path := $job }}
{{- range splitList "." $key }}{{ $path = get $path . }}{{ end }}
{{- range $each := kindIs "slice" $path | ternary $path (list $path) }}
{{- if hasPrefix "~" (toString $each) }}
{{- fail (printf "job.%s is %s, %s" $key $each $why) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
