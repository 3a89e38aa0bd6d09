{{/* Paths of the job in a pod, and those that are refused: where a pod cannot write, or loses what it writes, or waits in vain. */}}

{{/* A path as pods see it, absolute and without . and .., of (list $ PATH). */}}
{{- define "rlhf-job.inPod" -}}
{{- $path := last . }}
{{- if not (isAbs $path) }}{{ $path = printf "%s/%s" (first .).Values.storage.workspace.mountPath $path }}{{ end }}
{{- clean $path }}
{{- end }}

{{/* The run directory as pods see it, of $. */}}
{{- define "rlhf-job.runDir" -}}
{{- get .paths .known.runDir | first }}
{{- end }}

{{/* The claim that has an absolute path, of (list $ PATH): that with the longest mountPath, if several have it; empty: none. */}}
{{- define "rlhf-job.claimOf" -}}
{{- $found := "" }}{{ $longest := 0 }}{{ $path := printf "%s/" (last .) }}
{{- range $name, $claim := (first .).claims }}
{{- $within := printf "%s/" (clean $claim.mountPath | trimSuffix "/") }}
{{- if and (hasPrefix $within $path) (ge (len $within) $longest) }}
{{- $found = $name }}{{ $longest = len $within }}
{{- end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* A claim's PersistentVolumeClaim, of (list $ NAME). */}}
{{- define "rlhf-job.claimName" -}}
{{- (get (first .).Values.storage (last .)).existingClaim | default (include "rlhf-job.name" .) }}
{{- end }}

{{/* The folder that has an absolute path in a pod, as JSON, of (list $ PATH SETTINGS): the longest that contains it of claims,
volumes of yours and the pod's own /tmp and /dev/shm. `at` is empty if there is none. `claim`: its name, if it is a claim.
`storage`: the same, and also if a volume of yours has that claim.
`volume`: in words, the same for pods that may share it. `own`: others do not see it, and it is lost with the pod.
`readOnly`: a volume of yours that no process of the pod can write to. */}}
{{- define "rlhf-job.folderOf" -}}
{{- $ := index . 0 }}{{ $path := printf "%s/" (index . 1) }}{{ $settings := index . 2 }}
{{- $claims := dict }}
{{- range $name, $_ := $.claims }}{{ $_ := set $claims $name (include "rlhf-job.claimName" (list $ $name)) }}{{ end }}
{{- $volumes := dict "tmp" (dict "own" true) "shm" (dict "own" true) }}
{{- range $settings.volumes }}
{{- $kind := "emptyDir" }}{{ $source := dict }} {{- /* as for the API server, if it names no source */}}
{{- range $key, $value := . }}{{ if kindIs "map" $value }}{{ $kind = $key }}{{ $source = $value }}{{ end }}{{ end }}
{{- $readOnly := or $source.readOnly (has $kind (list "configMap" "secret" "projected" "downwardAPI" "image")) }}
{{- $_ := set $volumes .name (dict "own" (has $kind (list "emptyDir" "ephemeral")) "readOnly" $readOnly "claim" ($source.claimName | default "")) }}
{{- end }}
{{- $mounts := concat (list (dict "name" "tmp" "mountPath" "/tmp") (dict "name" "shm" "mountPath" "/dev/shm")) ($settings.volumeMounts | default list) }}
{{- with include "rlhf-job.claimOf" (list $ (index . 1)) }}
{{- $mounts = append $mounts (dict "name" . "mountPath" (get $.Values.storage .).mountPath) }}
{{- end }}
{{- $mount := dict "name" "" }}{{ $longest := 0 }}
{{- range $mounts }}
{{- $within := printf "%s/" (clean .mountPath | trimSuffix "/") }}
{{- if and (hasPrefix $within $path) (ge (len $within) $longest) }}{{ $mount = . }}{{ $longest = len $within }}{{ end }}
{{- end }}
{{- $found := dict "at" "" "claim" "" "storage" "" "volume" "no volume" "own" false "readOnly" false }}
{{- if $longest }}
{{- $at := clean $mount.mountPath }}{{ $volume := get $volumes $mount.name | default dict }}
{{- $claim := hasKey $claims $mount.name | ternary $mount.name "" }}
{{- $of := get $claims $mount.name | default $volume.claim }}{{ $words := "a volume of yours" }}
{{- if $volume.own }}{{ $words = printf "their own %s" $at }}{{ else if has $of (values $claims) }}{{ $words = printf "claim %s at %s" $of (clean (printf "/%s/%s" ($mount.subPath | default "") (trimPrefix $at (trimSuffix "/" $path)))) }}{{ end }}
{{- $storage := $claim }}{{ range $name, $one := $claims }}{{ if eq $one $of }}{{ $storage = $name }}{{ end }}{{ end }}
{{- $found = dict "at" $at "claim" $claim "storage" $storage "volume" $words "own" $volume.own "readOnly" (or $mount.readOnly $volume.readOnly) }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* What a run writes besides what it prepares, as a list in JSON, of (list $ GROUPS): each path as pods see it, its key, and
`by`, the pods that write it (`of` and `pod`). The run directory is written by the controller and by roles that are trained, that
offload their weights because they share a CPU, or that are profiled. The controller alone writes dumps. `shares`: others read it
there. `keeps`: it stays when the pod is gone, unlike offloaded weights. */}}
{{- define "rlhf-job.written" -}}
{{- $ := first . }}
{{- $controller := list (dict "of" "the controller" "pod" (include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson) "shares" true "keeps" true) }}
{{- $writers := $controller }}{{ $rollout := list }}
{{- range last . }}
{{- $offloads := and (gt (len .models) 1) (not .gpus) }}{{ $keeps := or .trained $.whole.trainer.profile_steps }}
{{- $group := dict "of" (printf "group %s" .name) "pod" .pod "shares" .trained "keeps" $keeps }}
{{- if or $keeps $offloads }}{{ $writers = append $writers $group }}{{ end }}
{{- if and (has "rollout" .roles) (not (has "rollout" .models)) }}{{ $rollout = list (merge (dict "shares" true "keeps" true) $group) }}{{ end }}
{{- end }}
{{- $written := list }}
{{- $byKey := dict $.known.runDir $writers $.known.weightsDir $rollout }}
{{- range $.known.dumps }}{{ $_ := set $byKey . $controller }}{{ end }}
{{- range $key, $by := $byKey }}
{{- range get $.paths $key }}{{ if $by }}{{ $written = append $written (dict "path" . "key" (printf "job.%s" $key) "by" $by) }}{{ end }}{{ end }}
{{- end }}
{{- toJson $written }}
{{- end }}

{{/* Refuse a path where a pod that writes it cannot, or loses it, or where others that write it do not see it, of
(list $ GROUPS). */}}
{{- define "rlhf-job.refuse.written" -}}
{{- $ := first . }}{{ $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- range $written := include "rlhf-job.written" . | fromJsonArray }}
{{- $is := printf "%s is %s, but" (.key | replace "job.trainer.default_local_dir" "the run directory (job.trainer.default_local_dir)") .path }}
{{- $volumes := dict }}
{{- range .by }}
{{- $folder := include "rlhf-job.folderOf" (list $ $written.path .pod) | fromJson }}
{{- if and $folder.own .keeps }}
{{- fail (printf "%s pods of %s have their own %s, which no other pod sees, and which is lost with the pod: %s" $is .of $folder.at $claim) }}
{{- end }}
{{- if $folder.readOnly }}
{{- fail (printf "%s the volume that pods of %s have at %s is read-only: mount one there that they can write to, or %s" $is .of $folder.at $claim) }}
{{- end }}
{{- with $folder.claim }}
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
{{- if or .shares (not $folder.at) }}
{{- $_ := set $volumes $folder.volume (append (get $volumes $folder.volume | default list) .of) }}
{{- end }}
{{- end }}
{{- if gt (len $volumes) 1 }}
{{- $each := list }}
{{- range $volume, $of := $volumes }}{{ $each = append $each (printf "%s: %s" $volume (join ", " $of)) }}{{ end }}
{{- fail (printf "%s the pods that write it do not share a volume there (%s): mount one in all of them (volumes and volumeMounts), or %s" $is (join "; " $each) $claim) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse steps that create something where no pod can, or where a pod that prepares nothing would wait for it, as others do
not see it, of (list $ GROUPS). Without such pods each makes its own, as a copy of a model on the node's disk. */}}
{{- define "rlhf-job.refuse.prepared" -}}
{{- $ := first . }}
{{- $preparing := list (include "rlhf-job.settings" (list $ $.Values.controller 0) | fromJson) }}{{ $waiting := list }}
{{- range last . }}
{{- if include "rlhf-job.onlyUserCode" (list $ .roles) }}{{ $waiting = append $waiting . }}{{ else }}{{ $preparing = append $preparing .pod }}{{ end }}
{{- end }}
{{- range $step := $.Values.prepare }}
{{- $path := include "rlhf-job.inPod" (list $ .creates) }}{{ $is := printf "prepare has a step that creates %s, but" .creates }}
{{- $volumes := list }} {{- /* where it is made: one of yours may have another mountPath there, as with subPath */}}
{{- range $preparing }}
{{- $folder := include "rlhf-job.folderOf" (list $ $path .) | fromJson }}
{{- $volumes = append $volumes $folder.volume }}
{{- with $folder.claim }}
{{- $claim := get $.Values.storage . }}
{{- if eq . "caches" }}
{{- fail (printf "%s only pods that compile for GPUs mount storage.caches: write to another claim" $is) }}
{{- end }}
{{- if and $claim.readOnly (not $claim.existingClaim) }}
{{- fail (printf "%s storage.%s, which the chart makes empty, is read-only: set storage.%s.readOnly to false, write to another claim, or leave the step out if the claim has been filled" $is . .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $waiting }}
{{- $folder := include "rlhf-job.folderOf" (list $ $path .pod) | fromJson }}
{{- if or $folder.own (not (has $folder.volume $volumes)) }}
{{- fail (printf "%s pods of group %s, which prepare nothing, would wait for it for ever: they look for it in %s, and the pods that prepare make it in %s: write a path in a claim, relative to storage.workspace.mountPath or absolute" $is .name $folder.volume (uniq $volumes | join ", or in ")) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
