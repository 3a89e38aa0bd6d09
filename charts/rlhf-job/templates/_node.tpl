{{/* The node of all pods with storage.singleNode, as JSON: nodeSelector and tolerations, together those of every group and
of the controller; and leads, the group whose pods choose the node: that with the most GPUs, empty if there is none with
any. The other pods follow it, as none of them knows which nodes have a GPU. Its own pods go where pods of the release are,
so that one that is started anew comes back. */}}
{{- define "rlhf-job.node" -}}
{{- $plan := include "rlhf-job.plan" . | fromJson }}
{{- $pods := dict "controller" (include "rlhf-job.settings" (list . .Values.controller 0) | fromJson) }}
{{- $leads := "" }}{{ $most := 0 }}
{{- range $plan.groups }}
{{- $_ := set $pods .name .pod }}
{{- if gt (int .gpus) $most }}{{ $most = int .gpus }}{{ $leads = .name }}{{ end }}
{{- end }}
{{- $labels := dict }}{{ $from := dict }}{{ $tolerations := list }}
{{- range $name, $pod := $pods }}
{{- $tolerations = concat $tolerations ($pod.tolerations | default list) | uniq }}
{{- range $label, $value := $pod.nodeSelector }}
{{- if and (hasKey $labels $label) (ne $value (get $labels $label)) }}
{{- fail (printf "storage.singleNode is true, but the pods of %s need a node with %s %s and those of %s one with %s: set the same nodeSelector" (get $from $label) $label (get $labels $label) $name $value) }}
{{- end }}
{{- $_ := set $labels $label $value }}{{ $_ := set $from $label $name }}
{{- end }}
{{- end }}
{{- if and $leads .Values.controller.scaleUp }}
{{- fail (printf "controller.scaleUp and storage.singleNode are both true, but the controller follows the pods of %s to their node, and would wait for pods that it has to start: set one of them to false" $leads) }}
{{- end }}
{{- dict "leads" $leads "nodeSelector" $labels "tolerations" ($tolerations | default list) | toJson }}
{{- end }}
