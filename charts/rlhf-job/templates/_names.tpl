{{/* An object's name, of (list $ SUFFIX): 52 characters at most, so that what Kubernetes hangs behind it fits in 63. */}}
{{- define "rlhf-job.name" -}}
{{- $release := (first .).Release.Name }}{{ $room := int (sub 51 (len (last .))) }}
{{- if gt (len $release) $room }}
{{- $release = printf "%s-%s" (trunc (int (sub $room 7)) $release | trimSuffix "-") (sha256sum $release | trunc 6) }}
{{- end }}
{{- printf "%s-%s" $release (last .) }}
{{- end }}

{{/* What all pods of a release have and those of no other one. */}}
{{- define "rlhf-job.release" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* What the pods of one component have, of (list $ COMPONENT): a group, controller or check. */}}
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
