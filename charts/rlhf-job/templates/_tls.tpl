{{/* Name of the Secret with a process's key, of (list $ COMPONENT): a group, controller, or check, which uses the
controller's. */}}
{{- define "rlhf-job.tlsSecret" -}}
{{- $ := first . }}{{ $component := eq (last .) "check" | ternary "controller" (last .) }}
{{- if eq $.Values.tls.mode "secret" }}
{{- get $.Values.tls.secrets $component | default $.Values.tls.secret }}
{{- else }}
{{- include "rlhf-job.name" (list $ (printf "%s-tls" $component)) }}
{{- end }}
{{- end }}

{{/* For each component, the roles that its certificate names, of GROUPS, as JSON. `rolemesh status` and similar commands
run in the controller's pod and use its key. */}}
{{- define "rlhf-job.certificates" -}}
{{- $roles := dict "controller" (list "controller" "operator") }}
{{- range . }}{{ $_ := set $roles .name .roles }}{{ end }}
{{- toJson $roles }}
{{- end }}

{{/* The DNS names of a component's certificate, of (list $ COMPONENT ROLES), as JSON. The first names the job. */}}
{{- define "rlhf-job.dnsNames" -}}
{{- $ := first . }}
{{- $names := list $.Release.Name }}
{{- range last . }}{{ $names = append $names (printf "%s.%s" . $.Release.Name) }}{{ end }}
{{- if eq (index . 1) "controller" }}
{{- $names = append $names (printf "%s.%s" (include "rlhf-job.name" (list $ "controller")) $.Release.Namespace) }} {{- /* of its Service */}}
{{- end }}
{{- toJson $names }}
{{- end }}

{{/* Refuse invalid values of tls, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.tls" -}}
{{- $ := first . }}{{ $tls := $.Values.tls }}
{{- $components := include "rlhf-job.certificates" (last .) | fromJson | keys | sortAlpha }}
{{- range $name, $_ := $tls.secrets }}
{{- if not (has $name $components) }}
{{- fail (printf "tls.secrets.%s is set, but the components are %s: use one of these names" $name (join ", " $components)) }}
{{- end }}
{{- end }}
{{- if eq $tls.mode "secret" }}
{{- range $components }}
{{- $secret := include "rlhf-job.tlsSecret" (list $ .) }}
{{- if not $secret }}
{{- fail (printf "tls.mode is secret, but no Secret is named for %s: set tls.secrets.%s, or tls.secret for all, to one with tls.crt, tls.key and ca.crt" . .) }}
{{- end }}
{{- include "rlhf-job.refuse.absent" (list $ "Secret" $secret (empty (get $tls.secrets .) | ternary "tls.secret" (printf "tls.secrets.%s" .))) }}
{{- end }}
{{- end }}
{{- end }}
