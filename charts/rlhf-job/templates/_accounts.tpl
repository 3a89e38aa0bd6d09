{{/* Service accounts: roles, reward, environment and controller have one each (values.serviceAccounts). */}}

{{/* Key of the account of a pod, of its ROLES. A pod that runs users' code alone has another than the roles that train. */}}
{{- define "rlhf-job.accountKey" -}}
{{- if not . }}controller
{{- else if without . "reward" "environment" }}roles
{{- else if has "reward" . }}reward
{{- else }}environment
{{- end }}
{{- end }}

{{/* Not empty: the chart makes the account, of (list $ KEY). The controller's has the rights of controller.rbac. */}}
{{- define "rlhf-job.accountIsMade" -}}
{{- $ := first . }}{{ $account := get $.Values.serviceAccounts (last .) }}
{{- if or $account.create (and (eq (last .) "controller") $.Values.controller.rbac (not $account.name)) }}true{{ end }}
{{- end }}

{{/* Name of the account, of (list $ KEY); empty: the namespace's default. */}}
{{- define "rlhf-job.account" -}}
{{- $name := (get (first .).Values.serviceAccounts (last .)).name }}
{{- if include "rlhf-job.accountIsMade" . }}{{ $name = $name | default (include "rlhf-job.name" .) }}{{ end }}
{{- $name }}
{{- end }}

{{/* Refuse annotations of an account that the chart does not make, and a name of yours that does not exist. */}}
{{- define "rlhf-job.refuse.accounts" -}}
{{- $ := . }}
{{- range $key, $account := .Values.serviceAccounts }}
{{- if not (include "rlhf-job.accountIsMade" (list $ $key)) }}
{{- if $account.annotations }}
{{- fail (printf "serviceAccounts.%s.annotations is set, but the chart makes no such account: set serviceAccounts.%s.create to true, or annotate the account that you name" $key $key) }}
{{- end }}
{{- include "rlhf-job.refuse.absent" (list $ "ServiceAccount" $account.name (printf "serviceAccounts.%s.name" $key)) }}
{{- end }}
{{- end }}
{{- end }}
