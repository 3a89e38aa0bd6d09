{{/* Paths of the job in a pod, and those that are refused: where a pod cannot write, or loses what it writes, or waits in vain. */}}

{{/* A path as pods see it, absolute and without . and .., of (list $ PATH). */}}
{{- define "rlhf-job.inPod" -}}
{{- $path := last . }}
{{- if not (isAbs $path) }}{{ $path = printf "%s/%s" (first .).Values.storage.workspace.mountPath $path }}{{ end }}
{{- clean $path }}
{{- end }}

{{/* The run directory as pods see it, of $. */}}
{{- define "rlhf-job.runDir" -}}
{{- $trainer := (include "rlhf-job.job" . | fromJson).trainer }}
{{- include "rlhf-job.inPod" (list . ($trainer.default_local_dir | default (printf "outputs/%s" $trainer.experiment_name))) }}
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

{{/* Refuse claims that are read-only where the run writes. */}}
{{- define "rlhf-job.refuse.readOnly" -}}
{{- if .Values.storage.workspace.readOnly }}
{{- fail "storage.workspace.readOnly is true, but the controller takes its lock there: set it to false" }}
{{- end }}
{{- $dir := include "rlhf-job.runDir" . }}
{{- with include "rlhf-job.claimOf" (list . $dir) }}
{{- if eq . "caches" }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but only pods that compile for GPUs mount storage.caches: write to another claim" $dir) }}
{{- end }}
{{- if and $.Values.huggingFace.fetch (eq . "models") }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but with huggingFace.fetch a run mounts storage.models read-only: write to another claim" $dir) }}
{{- end }}
{{- if (get $.Values.storage .).readOnly }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but storage.%s is read-only: set storage.%s.readOnly to false, or write to another claim" $dir . .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The folder that has an absolute path in a pod, as JSON, of (list $ PATH SETTINGS): the longest that contains it of claims,
volumes of yours and the pod's own /tmp and /dev/shm. `at` is empty if there is none. `own`: others do not see it, and it
is lost with the pod. */}}
{{- define "rlhf-job.folderOf" -}}
{{- $ := index . 0 }}{{ $path := printf "%s/" (index . 1) }}{{ $settings := index . 2 }}
{{- $private := list "tmp" "shm" }}
{{- range $settings.volumes }}
{{- if or (hasKey . "emptyDir") (hasKey . "ephemeral") }}{{ $private = append $private .name }}{{ end }}
{{- end }}
{{- $mounts := concat (list (dict "name" "tmp" "mountPath" "/tmp") (dict "name" "shm" "mountPath" "/dev/shm")) ($settings.volumeMounts | default list) }}
{{- with include "rlhf-job.claimOf" (list $ (index . 1)) }}
{{- $mounts = append $mounts (dict "name" . "mountPath" (get $.Values.storage .).mountPath) }}
{{- end }}
{{- $found := dict "at" "" "own" false }}{{ $longest := 0 }}
{{- range $mounts }}
{{- $at := clean .mountPath }}{{ $within := printf "%s/" (trimSuffix "/" $at) }}
{{- if and (hasPrefix $within $path) (ge (len $within) $longest) }}
{{- $found = dict "at" $at "own" (has .name $private) }}{{ $longest = len $within }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The folder of a pod's own that has an absolute path, of (list $ PATH SETTINGS); empty: none. */}}
{{- define "rlhf-job.ownFolder" -}}
{{- $folder := include "rlhf-job.folderOf" . | fromJson }}
{{- if $folder.own }}{{ $folder.at }}{{ end }}
{{- end }}

{{/* Refuse a run directory that is lost with a pod that writes it, and steps that create something where a pod that prepares
nothing would wait for it, as others do not see it, of (list $ GROUPS). Without such pods each makes its own, as a copy of
a model on the node's disk. */}}
{{- define "rlhf-job.refuse.ownFolders" -}}
{{- $ := first . }}{{ $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $trainer := (include "rlhf-job.job" $ | fromJson).trainer }}{{ $dir := include "rlhf-job.runDir" $ }}
{{- $controller := include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson }}
{{- $writers := list (dict "of" "the controller" "pod" $controller) }}
{{- range last . }}
{{- if .trained }}{{ $writers = append $writers (dict "of" (printf "group %s" .name) "pod" .pod) }}{{ end }}
{{- end }}
{{- range $writer := $writers }}
{{- with include "rlhf-job.ownFolder" (list $ $dir $writer.pod) }}
{{- fail (printf "job.trainer.default_local_dir is %s, but pods of %s have their own %s, which is lost with the pod: %s" ($trainer.default_local_dir | default $dir) $writer.of . $claim) }}
{{- end }}
{{- end }}
{{- range $step := $.Values.prepare }}
{{- if eq (include "rlhf-job.claimOf" (list $ (include "rlhf-job.inPod" (list $ $step.creates)))) "caches" }}
{{- fail (printf "prepare has a step that creates %s, but only pods that compile for GPUs mount storage.caches: write to another claim" $step.creates) }}
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
