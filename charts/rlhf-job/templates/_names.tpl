{{/* An object's name, of (list $ SUFFIX): at most 52 characters, so it fits in 63 with the suffixes of Kubernetes. */}}
{{- define "rlhf-job.name" -}}
{{- $release := (first .).Release.Name }}{{ $room := int (sub 51 (len (last .))) }}
{{- if gt (len $release) $room }}
{{- $release = printf "%s-%s" (trunc (int (sub $room 7)) $release | trimSuffix "-") (sha256sum $release | trunc 6) }}
{{- end }}
{{- printf "%s-%s" $release (last .) }}
{{- end }}

{{/* Labels that all pods of this release have, and no pods of other releases. */}}
{{- define "rlhf-job.release" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels that select the pods of a component, of (list $ COMPONENT): a group, controller or check. */}}
{{- define "rlhf-job.selector" -}}
{{ include "rlhf-job.release" (first .) }}
app.kubernetes.io/component: {{ last . | quote }}
{{- end }}

{{/* Labels of an object, of (list $ COMPONENT). */}}
{{- define "rlhf-job.labels" -}}
{{- $ := first . }}
{{- include "rlhf-job.selector" . }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The first lines of an object, of (list $ COMPONENT NAME). */}}
{{- define "rlhf-job.metadata" -}}
metadata:
  name: {{ last . }}
  namespace: {{ (first .).Release.Namespace | quote }}
  labels:
    {{- include "rlhf-job.labels" (initial .) | nindent 4 }}
{{- end }}

{{/* How the controller's own files in the workspace begin. Another namespace may share it, and have a release of this name. */}}
{{- define "rlhf-job.own" -}}
.{{ .Release.Namespace }}.{{ include "rlhf-job.name" (list . "controller") }}
{{- end }}
