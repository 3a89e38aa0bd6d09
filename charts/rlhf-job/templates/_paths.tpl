{{/* Paths of the job in a pod, and those that are refused: where a pod cannot write, or loses what it writes. */}}

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
{{- if (get $.Values.storage .).readOnly }}
{{- fail (printf "the run directory (job.trainer.default_local_dir) is %s, but storage.%s is read-only: set storage.%s.readOnly to false, or write to another claim" $dir . .) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The folder that has an absolute path and ends with the pod, of (list $ PATH). Empty: none, or a volume is mounted there. */}}
{{- define "rlhf-job.lost" -}}
{{- $path := printf "%s/" (last .) }}{{ $values := (first .).Values }}
{{- $lost := regexFind "^/(tmp|dev/shm)/" $path | trimSuffix "/" }}
{{- if include "rlhf-job.claimOf" . }}{{ $lost = "" }}{{ end }}
{{- range $settings := concat (list $values.pods $values.controller) (values $values.groups) }}
{{- range ($settings | default dict).volumeMounts }}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $path }}{{ $lost = "" }}{{ end }}
{{- end }}
{{- end }}
{{- $lost }}
{{- end }}

{{/* Refuse paths in the home directory, which is /tmp in a pod, and what the run writes in /tmp: both end with the pod. */}}
{{- define "rlhf-job.refuse.homes" -}}
{{- $claim := "which is lost with the pod: write a path in a claim, relative to storage.workspace.mountPath or absolute" }}
{{- $why := printf "but ~ in a pod is /tmp, %s" $claim }}
{{- range $step := .Values.prepare }}
{{- if hasPrefix "~" $step.creates }}{{ fail (printf "prepare has a step that creates %s, %s" $step.creates $why) }}{{ end }}
{{- with include "rlhf-job.lost" (list $ (include "rlhf-job.inPod" (list $ $step.creates))) }}
{{- fail (printf "prepare has a step that creates %s, but each pod has its own %s, %s" $step.creates . $claim) }}
{{- end }}
{{- end }}
{{- $job := include "rlhf-job.job" . | fromJson }}
{{- with include "rlhf-job.lost" (list $ (include "rlhf-job.runDir" .)) }}
{{- fail (printf "job.trainer.default_local_dir is %s, but each pod has its own %s, %s" $job.trainer.default_local_dir . $claim) }}
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
