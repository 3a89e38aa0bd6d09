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
{{- $claims := include "rlhf-job.claims" (list $ .roles $settings) | fromJsonArray }}
{{- $readOnly := include "rlhf-job.readsOnly" (list $ .roles) }}
{{- $labels := merge dict (include "rlhf-job.selector" (list $ .component) | fromYaml) (.labels | default dict) }}
{{- range .roles }}{{ $_ := set $labels (printf "rolemesh.dev/role-%s" .) "true" }}{{ end }}
{{- $rewards := and (has "reward" .roles) (or $values.rewardFunction.code $values.rewardFunction.configMap) }}
{{- $annotations := merge (dict "checksum/job" (include "rlhf-job.file" $ | sha256sum)) (.annotations | default dict) }}
{{- if $rewards }}{{ $_ := set $annotations "checksum/reward" ($values.rewardFunction.code | sha256sum) }}{{ end }}
{{- if and .probes $values.monitoring.annotations }}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "9090") }}
{{- end -}}
metadata:
  labels:
    {{- include "rlhf-job.beside" (list $labels $settings.labels "pods.labels") | nindent 4 }}
  annotations:
    {{- include "rlhf-job.beside" (list $annotations $settings.annotations "pods.annotations") | nindent 4 }}
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
    - name: {{ quote . }}
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
      topologyKey: {{ $settings.topologyKey | quote }}
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
    runAsUser: {{ int64 . }}
    runAsGroup: {{ int64 . }}
    fsGroup: {{ int64 . }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  {{- $shared := dict "root" $ "settings" $settings "resources" .resources "claims" $claims "rewards" $rewards }}
  {{- with $values.prepare }}
  initContainers:
    {{- range $index, $step := . }}
    - name: prepare-{{ $index }}
      {{- if $readOnly }}
      # Another pod makes it: this one may not write.
      command: [sh, -c, 'until test -e "$0"; do sleep 1; done']
      {{- else }}
      # One pod makes it, the others wait for the lock and then find it there.
      command: [flock, .prepare.lock, sh, -c, 'test -e "$0" || exec "$@"']
      {{- end }}
      args: {{ prepend $step.command $step.creates | toJson }}
      {{- include "rlhf-job.container" $shared | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      command: {{ toJson .command }}
      args:
        {{- toYaml .args | nindent 8 }}
      {{- include "rlhf-job.container" (merge (dict "keys" (ne $values.tls.mode "none")) $shared) | nindent 6 }}
      {{- with .probes }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9090}
        - {name: health, containerPort: 50052}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  volumes:
    - name: job
      configMap:
        name: {{ include "rlhf-job.name" (list $ "job") }}
    {{- if ne $values.tls.mode "none" }}
    - name: tls
      secret:
        secretName: {{ include "rlhf-job.tlsSecret" (list $ .component) | quote }}
        defaultMode: 0400 # with an fsGroup the kubelet makes it 0440, of root and that group
        items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
    {{- end }}
    {{- if $rewards }}
    - name: reward
      configMap:
        name: {{ $values.rewardFunction.configMap | default (include "rlhf-job.name" (list $ "reward-function")) | quote }}
    {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ toJson $settings.scratch }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ toJson $settings.sharedMemory }}
    {{- range $claims }}
    - name: {{ .name }}
      persistentVolumeClaim:
        claimName: {{ .existingClaim | default (include "rlhf-job.name" (list $ .name)) | quote }}
    {{- end }}
    {{- with $settings.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What all containers of a pod share. */}}
{{- define "rlhf-job.container" -}}
{{- $ := .root }}{{ $values := $.Values -}}
image: {{ include "rlhf-job.image" $ | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
workingDir: {{ $values.storage.workspace.mountPath | quote }}
terminationMessagePolicy: FallbackToLogsOnError # kubectl describe pod says why it ended
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
      secretKeyRef: {name: {{ quote $values.huggingFace.secret }}, key: {{ quote $values.huggingFace.key }}}
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
  {{- if .keys }}
  - {name: tls, mountPath: /etc/rolemesh-tls, readOnly: true}
  {{- end }}
  {{- if .rewards }}
  - {name: reward, mountPath: /etc/rolemesh-reward, readOnly: true}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- range .claims }}
  - {name: {{ .name }}, mountPath: {{ quote .mountPath }}, readOnly: {{ .readOnly }}}
  {{- end }}
  {{- with .settings.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The image by its digest, or else by its tag, which may be given as a number. */}}
{{- define "rlhf-job.image" -}}
{{- $image := .Values.image }}
{{- $tag := kindIs "string" $image.tag | ternary $image.tag (printf "%d" (int64 $image.tag)) }}
{{- with $image.digest }}{{ $image.repository }}@{{ . }}{{ else }}{{ $image.repository }}:{{ $tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Labels or annotations of the chart's own with the user's, of (list OWN GIVEN KEY): no key is in both. */}}
{{- define "rlhf-job.beside" -}}
{{- include "rlhf-job.refuse.own" . }}
{{- toYaml (merge dict (index . 0) (index . 1)) }}
{{- end }}

{{/* Not empty: a pod of these roles writes nothing to the workspace, of (list $ ROLES). Roles that share a device park
their weights there, and profiles are written there. */}}
{{- define "rlhf-job.readsOnly" -}}
{{- $ := first . }}
{{- $profiled := (include "rlhf-job.job" $ | fromJson).trainer.profile_steps }}
{{- if and (eq (join "," (last .)) "reward") (not $.Values.rewardFunction.writes) (not $profiled) }}true{{ end }}
{{- end }}

{{/* The claims that a pod mounts, of (list $ ROLES SETTINGS), as JSON: the workspace, and those in which something that
it reads has a path. A pod without roles (controller, check) mounts all. */}}
{{- define "rlhf-job.claims" -}}
{{- $ := index . 0 }}{{ $roles := index . 1 }}
{{- $job := include "rlhf-job.job" $ | fromJson }}
{{- $read := list $job.actor.model $.Values.prepare (index . 2) }}
{{- range $roles }}{{ $read = append $read (get $job .) }}{{ end }}
{{- if or $job.trainer.profile_steps (gt (len $roles) 1) (has "actor" $roles) (has "critic" $roles) }}
{{- $read = append $read $job.trainer.default_local_dir }} {{- /* checkpoints, traces, parked weights */}}
{{- end }}
{{- $text := toRawJson $read }}
{{- $claims := list }}
{{- range $name, $claim := omit $.Values.storage "singleNode" }}
{{- $path := printf `(^|[^\w./-])%s([^\w.-]|$)` (regexQuoteMeta (trimSuffix "/" $claim.mountPath)) }}
{{- if and (or $claim.existingClaim $claim.size) (or (not $roles) (eq $name "workspace") (regexMatch $path $text)) }}
{{- $readOnly := or $claim.readOnly (ne (include "rlhf-job.readsOnly" (list $ $roles)) "") }}
{{- $claims = append $claims (merge (dict "name" $name "readOnly" $readOnly) $claim) }}
{{- end }}
{{- end }}
{{- toJson $claims }}
{{- end }}
