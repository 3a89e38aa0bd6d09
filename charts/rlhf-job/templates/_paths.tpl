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
{{- if and $.Values.huggingFace.fetch (eq . "models") }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but with huggingFace.fetch a run mounts storage.models read-only: write to another claim" $dir) }}
{{- end }}
{{- if (get $.Values.storage .).readOnly }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but storage.%s is read-only: set storage.%s.readOnly to false, or write to another claim" $dir . .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Not empty: a claim, or a volume of yours in some pods, has an absolute path, of (list $ PATH). */}}
{{- define "rlhf-job.isMounted" -}}
{{- $path := printf "%s/" (last .) }}{{ $values := (first .).Values }}
{{- include "rlhf-job.claimOf" . }}
{{- range $settings := concat (list $values.pods $values.controller) (values $values.groups) }}
{{- range ($settings | default dict).volumeMounts }}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $path }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The folder of each pod's own that has an absolute path, of (list $ PATH); empty: none. */}}
{{- define "rlhf-job.ownFolder" -}}
{{- if not (include "rlhf-job.isMounted" .) }}
{{- regexFind "^/(tmp|dev/shm)/" (printf "%s/" (last .)) | trimSuffix "/" }}
{{- end }}
{{- end }}

{{/* Refuse steps that create something in a folder of each pod's own if a pod that prepares nothing would wait for it, of
(list $ GROUPS). Without such pods each makes its own, as a copy of a model on the node's disk. */}}
{{- define "rlhf-job.refuse.awaited" -}}
{{- $ := first . }}
{{- range $group := last . }}
{{- $userCode := include "rlhf-job.of" (list $ $group.roles "runsUserCode") | fromJsonArray }}
{{- range $step := $.Values.prepare }}
{{- with include "rlhf-job.ownFolder" (list $ (include "rlhf-job.inPod" (list $ $step.creates))) }}
{{- if eq (len $userCode) (len $group.roles) }}
{{- fail (printf "prepare has a step that creates %s, but each pod has its own %s, and pods of group %s, which prepare nothing, would wait for it for ever: write a path in a claim, relative to storage.workspace.mountPath or absolute" $step.creates . $group.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse paths in the home directory, which is /tmp in a pod, and a run directory in /tmp: both end with the pod. */}}
{{- define "rlhf-job.refuse.homes" -}}
{{- $claim := "write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $why := printf "but ~ in a pod is /tmp, which is lost with the pod: %s" $claim }}
{{- range $step := .Values.prepare }}
{{- if hasPrefix "~" $step.creates }}{{ fail (printf "prepare has a step that creates %s, %s" $step.creates $why) }}{{ end }}
{{- end }}
{{- $job := include "rlhf-job.job" . | fromJson }}
{{- with include "rlhf-job.ownFolder" (list $ (include "rlhf-job.runDir" .)) }}
{{- fail (printf "job.trainer.default_local_dir is %s, but each pod has its own %s, which is lost with the pod: %s" $job.trainer.default_local_dir . $claim) }}
{{- end }}
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
