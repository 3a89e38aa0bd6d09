{{/* The job file as every process reads it. Replicas are left out: their number may change, and restarts nothing. */}}
{{- define "rlhf-job.file" -}}
{{- $placement := dict "strategy" .Values.placement.strategy }}
{{- with .Values.placement.groups }}{{ $_ := set $placement "groups" . }}{{ end }}
{{- merge (dict "placement" $placement) (include "rlhf-job.given" . | fromJson) | toYaml }}
{{- end }}

{{/* The pod of every process: of (dict "root" $ "component" "container" "roles" "labels" "settings" "resources"
"probes" "command" "args" "talksToKubernetes" "graceSeconds"). */}}
{{- define "rlhf-job.pod" -}}
{{- $ := .root }}{{ $values := $.Values }}{{ $settings := .settings }}
{{- $claims := list }}
{{- range $name, $claim := omit $values.storage "singleNode" }}
{{- if or $claim.existingClaim $claim.size }}{{ $claims = append $claims (set (deepCopy $claim) "name" $name) }}{{ end }}
{{- end }}
{{- $rewards := and (has "reward" .roles) (or $values.rewardFunction.code $values.rewardFunction.configMap) -}}
metadata:
  labels:
    {{- include "rlhf-job.selector" (list $ .component) | nindent 4 }}
    {{- range .roles }}
    rolemesh.dev/role-{{ . }}: "true"
    {{- end }}
    {{- with merge dict (.labels | default dict) $settings.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/job: {{ include "rlhf-job.file" $ | sha256sum }}
    {{- if $rewards }}
    checksum/reward: {{ $values.rewardFunction.code | sha256sum }}
    {{- end }}
    {{- if and .probes $values.monitoring.annotations }}
    prometheus.io/scrape: "true"
    prometheus.io/port: "9090"
    {{- end }}
    {{- with merge dict (.annotations | default dict) $settings.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: {{ .talksToKubernetes | default false }}
  {{- if .talksToKubernetes }}
  serviceAccountName: {{ include "rlhf-job.name" (list $ "controller") }}
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .graceSeconds }}
  {{- if not .always }}
  restartPolicy: Never
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- if eq .component "controller" }}
  shareProcessNamespace: true # as the first of all processes flock, while it waits, would not heed SIGTERM
  {{- end }}
  {{- if and .always (eq $values.gang.scheduler "volcano") (not $settings.schedulerName) }}
  {{- $_ := set $settings "schedulerName" "volcano" }}
  {{- end }}
  {{- range $key := list "schedulerName" "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" }}
  {{- with get $settings $key }}
  {{- dict $key . | toYaml | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- $affinity := $settings.affinity }}
  {{- if $values.storage.singleNode }}
  {{- $near := dict "labelSelector" (dict "matchLabels" (include "rlhf-job.release" $ | fromYaml)) "topologyKey" "kubernetes.io/hostname" }}
  {{- $affinity = merge (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $near))) $affinity }}
  {{- end }}
  {{- with $affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .always $settings.topologyKey }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $settings.topologyKey }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "rlhf-job.selector" (list $ .component) | nindent 10 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    seccompProfile:
      type: RuntimeDefault
    {{- with $values.user }}
    runAsUser: {{ . }}
    runAsGroup: {{ . }}
    fsGroup: {{ . }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  {{- $common := include "rlhf-job.container" (dict "root" $ "settings" $settings "resources" .resources "claims" $claims "rewards" $rewards) }}
  {{- with $values.prepare }}
  initContainers:
    {{- range $index, $step := . }}
    - name: prepare-{{ $index }}
      # One pod makes it, the others wait for the lock and then find it there.
      command: [flock, .prepare.lock, sh, -c, 'test -e "$0" || exec "$@"']
      args: {{ prepend $step.command $step.creates | toJson }}
      {{- $common | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      command: {{ toJson .command }}
      args:
        {{- toYaml .args | nindent 8 }}
      {{- $common | nindent 6 }}
      {{- with .probes }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9090}
        - {name: health, containerPort: 50052}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  volumes:
    - name: job
      projected:
        sources:
          - configMap:
              name: {{ include "rlhf-job.name" (list $ "job") }}
          {{- if ne $values.tls.mode "none" }}
          - secret:
              name: {{ include "rlhf-job.tlsSecret" $ }}
              items:
                - {key: tls.crt, path: tls/tls.crt}
                - {key: tls.key, path: tls/tls.key}
                - {key: ca.crt, path: tls/ca.crt}
          {{- end }}
    {{- if $rewards }}
    - name: reward
      configMap:
        name: {{ $values.rewardFunction.configMap | default (include "rlhf-job.name" (list $ "reward-function")) }}
    {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ $settings.scratch }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $settings.sharedMemory }}
    {{- range $claims }}
    - name: {{ .name }}
      persistentVolumeClaim:
        claimName: {{ .existingClaim | default (include "rlhf-job.name" (list $ .name)) }}
    {{- end }}
    {{- with $settings.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What all containers of a pod share. */}}
{{- define "rlhf-job.container" -}}
{{- $ := .root }}{{ $values := $.Values -}}
image: {{ $values.image.repository }}:{{ $values.image.tag | default $.Chart.AppVersion }}
imagePullPolicy: {{ $values.image.pullPolicy }}
workingDir: {{ $values.storage.workspace.mountPath }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources:
  {{- toYaml .resources | nindent 2 }}
env:
  - {name: HOME, value: /tmp}
  - {name: USER, value: rolemesh} # a uid without a name in the image: what asks for one finds this
  - {name: PYTHONUNBUFFERED, value: "1"}
  - {name: TOKENIZERS_PARALLELISM, value: "false"}
  - {name: OMP_WAIT_POLICY, value: PASSIVE} # threads that spin at barriers ruin their neighbours
  {{- if or (dig "requests" "cpu" "" .resources) (dig "limits" "cpu" "" .resources) }}
  - name: OMP_NUM_THREADS # what the pod is sure to have, rounded up; the node may have many times as many
    valueFrom:
      resourceFieldRef: {resource: requests.cpu}
  {{- end }}
  {{- if $values.huggingFace.secret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ $values.huggingFace.secret }}, key: {{ $values.huggingFace.key }}}
  {{- end }}
  {{- with .settings.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .settings.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: job, mountPath: /etc/rolemesh, readOnly: true}
  {{- if .rewards }}
  - {name: reward, mountPath: /etc/rolemesh-reward, readOnly: true}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- range .claims }}
  - {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: {{ .readOnly }}}
  {{- end }}
  {{- with .settings.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
