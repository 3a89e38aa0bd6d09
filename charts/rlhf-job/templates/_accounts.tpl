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

{{/* Refuse an account that no pod has, annotations of one that the chart does not make, and a name of yours that does not
exist, of (list $ GROUPS). */}}
{{- define "rlhf-job.refuse.accounts" -}}
{{- $ := first . }}
{{- $keys := dict "roles" "roles" "controller" "controller" }} {{- /* role to the account of its pods */}}
{{- range $group := last . }}
{{- range $group.roles }}{{ $_ := set $keys . (include "rlhf-job.accountKey" $group.roles) }}{{ end }}
{{- end }}
{{- range $key, $account := $.Values.serviceAccounts }}
{{- $other := get $keys $key }}
{{- range $field, $value := $account }}
{{- if and $value (not $other) }}
{{- fail (printf "serviceAccounts.%s.%s is set, but this job has no %s: leave it out" $key $field $key) }}
{{- else if and $value (ne $other $key) }}
{{- fail (printf "serviceAccounts.%s.%s is set, but pods of %s have the account serviceAccounts.%s, because other roles share them: leave it out, or give %s a group of its own (placement.strategy)" $key $field $key $other $key) }}
{{- end }}
{{- end }}
{{- if not (include "rlhf-job.accountIsMade" (list $ $key)) }}
{{- if $account.annotations }}
{{- fail (printf "serviceAccounts.%s.annotations is set, but the chart makes no such account: set serviceAccounts.%s.create to true, or annotate the account that you name" $key $key) }}
{{- end }}
{{- include "rlhf-job.refuse.absent" (list $ "ServiceAccount" $account.name (printf "serviceAccounts.%s.name" $key)) }}
{{- end }}
{{- end }}
{{- end }}
