{{/* The job file that every process reads. It has no replicas: a change of their number must not restart a process. */}}
{{- define "rlhf-job.file" -}}
{{- $placement := dict "strategy" .Values.placement.strategy }}
{{- with .Values.placement.groups }}{{ $_ := set $placement "groups" . }}{{ end }}
{{- with .Values.placement.ranks }}{{ $_ := set $placement "ranks" . }}{{ end }}
{{- $job := include "rlhf-job.given" . | fromJson }}
{{- if .Values.plugins.code }}
{{- $_ := set $job "plugins" (append ($job.plugins | default list) "/etc/rolemesh-plugins/plugins.py") }}
{{- end }}
{{- merge (dict "placement" $placement) $job | toYaml }}
{{- end }}

{{/* The pod template of any process, of (dict "root" $ "component" "container" "roles" "labels" "settings" "resources"
"probes" "command" "args" "talksToKubernetes" "graceSeconds" "ranks" "follows" "ends"): ranks of the pod, and whether rank 0
is in another pod, to which the roles' Services lead; of the controller, the options that say how its run ends. */}}
{{- define "rlhf-job.pod" -}}
{{- $ := .root }}{{ $values := $.Values }}{{ $settings := .settings }}{{ $component := .component }}{{ $ends := .ends }}
{{- $readOnly := include "rlhf-job.readsOnly" (list $ .roles) }}
{{- /* Users' code runs in these pods, so nothing is prepared in them, also if they may write: it would need the Hub's token. */}}
{{- $onlyUserCode := include "rlhf-job.onlyUserCode" (list $ .roles) }}
{{- $gpus := dig "limits" $values.gpu.resource 0 .resources | int }}
{{- $claims := include "rlhf-job.claims" (list $ .roles $settings (and $gpus (not $onlyUserCode))) | fromJsonArray }}
{{- /* The request for disk, unless the resources have one. */}}
{{- $resources := .resources }}
{{- if and $settings.scratchRequest (not (or (dig "requests" "ephemeral-storage" "" $resources) (dig "limits" "ephemeral-storage" "" $resources))) }}
{{- $resources = merge (dict "requests" (dict "ephemeral-storage" $settings.scratchRequest)) $resources }}
{{- end }}
{{- /* Also the pod of `helm test`: it comes before the controller of a suspended run. */}}
{{- $fetches := has $component (list "controller" "check") }}
{{- $prepares := and (not $readOnly) (not $onlyUserCode) (or $values.prepare (and $values.huggingFace.fetch $fetches)) }}
{{- $labels := merge dict (include "rlhf-job.selector" (list $ .component) | fromYaml) (.labels | default dict) }}
{{- if not .follows }}{{ range .roles }}{{ $_ := set $labels (printf "rolemesh.dev/role-%s" .) "true" }}{{ end }}{{ end }}
{{- /* The controller reads the reward function, too: it compares its content with that of the reward's pods. */}}
{{- $rewards := and (or (has "reward" .roles) (has $component (list "controller" "check"))) (or $values.rewardFunction.code $values.rewardFunction.configMap) }}
{{- $plugins := or $values.plugins.code $values.plugins.configMap }}
{{- $annotations := merge (dict "checksum/job" (include "rlhf-job.file" $ | sha256sum)) (.annotations | default dict) }}
{{- if not $values.serviceMesh }} {{- /* of Istio with sidecars, of Istio without, and of Linkerd */}}
{{- range $key, $value := dict "sidecar.istio.io/inject" "false" "istio.io/dataplane-mode" "none" }}
{{- if not (hasKey $settings.labels $key) }}{{ $_ := set $labels $key $value }}{{ end }}
{{- end }}
{{- if not (hasKey $settings.annotations "linkerd.io/inject") }}{{ $_ := set $annotations "linkerd.io/inject" "disabled" }}{{ end }}
{{- end }}
{{- if $rewards }}{{ $_ := set $annotations "checksum/reward" ($values.rewardFunction.code | sha256sum) }}{{ end }}
{{- if $plugins }}{{ $_ := set $annotations "checksum/plugins" ($values.plugins.code | sha256sum) }}{{ end }}
{{- if and .probes $values.monitoring.annotations }}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "9090") }}
{{- end -}}
metadata:
  labels:
    {{- merge $labels $settings.labels | toYaml | nindent 4 }}
  annotations:
    {{- merge $annotations $settings.annotations | toYaml | nindent 4 }}
spec:
  automountServiceAccountToken: {{ .talksToKubernetes | default false }}
  {{- with include "rlhf-job.account" (list $ (include "rlhf-job.accountKey" .roles)) }}
  serviceAccountName: {{ quote . }}
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
  shareProcessNamespace: true # otherwise flock would be process 1, which ignores SIGTERM while it waits
  {{- end }}
  {{- if and .always (eq $values.gang.scheduler "volcano") (not $settings.schedulerName) }}
  {{- $_ := set $settings "schedulerName" "volcano" }}
  {{- end }}
  {{- $affinity := $settings.affinity }}
  {{- if $values.storage.singleNode }}
  {{- $node := include "rlhf-job.node" $ | fromJson }}
  {{- $settings = merge (pick $node "nodeSelector" "tolerations") $settings }}
  {{- $beside := include "rlhf-job.release" $ | fromYaml }}
  {{- if and $node.leads (ne $component $node.leads) }}{{ $beside = include "rlhf-job.selector" (list $ $node.leads) | fromYaml }}{{ end }}
  {{- $near := dict "labelSelector" (dict "matchLabels" $beside) "topologyKey" "kubernetes.io/hostname" }}
  {{- if and $node.leads (eq $component $node.leads) }} {{- /* a pod of `helm test` chooses no node */}}
  {{- $_ := set $near.labelSelector "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "NotIn" "values" (list "check"))) }}
  {{- end }}
  {{- $given := dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $affinity }}
  {{- $affinity = merge (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (prepend $given $near))) $affinity }}
  {{- end }}
  {{- range $key := list "schedulerName" "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" }}
  {{- with get $settings $key }}
  {{- dict $key . | toYaml | nindent 2 }}
  {{- end }}
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
    {{- with $values.supplementalGroups }}
    supplementalGroups: {{ toJson . }}
    {{- end }}
  {{- $counts := eq $component "controller" }}
  {{- $shared := dict "root" $ "counts" $counts "settings" $settings "resources" $resources "claims" $claims "rewards" $rewards "plugins" $plugins "ranks" (.ranks | default 1) }}
  {{- $fetch := include "rlhf-job.fetch" $ | fromJsonArray }}
  {{- with concat $fetch $values.prepare }}
  initContainers:
    {{- range $index, $step := . }}
    {{- $ofHub := lt $index (len $fetch) }}
    {{- $name := $ofHub | ternary "fetch" (printf "prepare-%d" (sub $index (len $fetch))) }}
    - name: {{ $name }}
      {{- $waits := or $readOnly $onlyUserCode (and $ofHub (not $fetches)) }}
      {{- if $waits }}
      # Another pod creates it. The shell is process 1, which would ignore SIGTERM without a trap.
      command: [sh, -c, 'trap "exit 143" TERM; until test -e "$0"; do sleep 1 & wait $!; done']
      args: {{ prepend $step.command $step.creates | toJson }}
      {{- else }}
      # The first pod creates it; the others wait for the lock, and then skip the command. What creates something else
      # has a lock of its own, since another release may download for hours.
      command: [rolemesh, prepare]
      {{- $path := include "rlhf-job.inPod" (list $ $step.creates) | trimPrefix (printf "%s/" $values.storage.workspace.mountPath) }}
      {{- $lock := printf ".prepare-%s.lock" (sha256sum $path | trunc 8) }}
      {{- $options := list (printf "--creates=%s" $step.creates) (printf "--lock=%s" $lock) }}
      {{- if $counts }} {{- /* the step's failures; after the last one it scales the roles down, as no controller will */}}
      {{- $file := printf "%s.%s.json" (include "rlhf-job.own" $) $name }}
      {{- $options = append $options (printf "--counts-in=%s" $file) }}
      {{- $options = append $options "--job=/etc/rolemesh/job.yaml" }} {{- /* refused before others have prepared */}}
      {{- $options = $ofHub | ternary (append $options "--final=2") $options }} {{- /* the Hub does not have a name */}}
      {{- $options = concat $options $ends }}
      {{- end }}
      args: {{ concat $options (list "--") $step.command | toJson }}
      {{- end }}
      {{- include "rlhf-job.container" (merge (dict "prepares" (not $waits)) $shared) | nindent 6 }}
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
        {{- range untilStep 1 (int $shared.ranks) 1 }}
        - {name: metrics-{{ . }}, containerPort: {{ add 9090 . }}}
        {{- end }}
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
        defaultMode: 0400 # with an fsGroup the kubelet sets 0440, with owner root and that group
        items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
    {{- end }}
    {{- if and $prepares $values.huggingFace.secret }}
    - name: hub-token
      secret:
        secretName: {{ quote $values.huggingFace.secret }}
        defaultMode: 0400 # with an fsGroup 0440, as for tls
        items: [{key: {{ quote $values.huggingFace.key }}, path: token}]
    {{- end }}
    {{- if $rewards }}
    - name: reward
      configMap:
        name: {{ $values.rewardFunction.configMap | default (include "rlhf-job.name" (list $ "reward-function")) | quote }}
    {{- end }}
    {{- if $plugins }}
    - name: plugins
      configMap:
        name: {{ $values.plugins.configMap | default (include "rlhf-job.name" (list $ "plugins")) | quote }}
    {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ toJson $settings.scratch }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $settings.sharedMemory | default (printf "%dGi" (max 1 (.ranks | default 1) $gpus)) | toJson }}
    {{- range $claims }}
    - name: {{ .name }}
      persistentVolumeClaim:
        claimName: {{ include "rlhf-job.claimName" (list $ .name) | quote }}
        {{- if (index $values.storage .name).readOnly }}
        readOnly: true # so the kubelet changes the group of no file; not where a pod writes, as it may do so once, for the first pod
        {{- end }}
    {{- end }}
    {{- with $settings.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The fields that all containers of a pod share. */}}
{{- define "rlhf-job.container" -}}
{{- $ := .root }}{{ $values := $.Values }}{{ $prepares := .prepares }}
{{- $given := list }}{{ range .settings.env }}{{ $given = append $given .name }}{{ end -}}
image: {{ include "rlhf-job.image" $ | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
workingDir: {{ $values.storage.workspace.mountPath | quote }}
terminationMessagePolicy: FallbackToLogsOnError # kubectl describe pod shows why it ended
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources:
  {{- toYaml .resources | nindent 2 }}
env:
  - {name: HOME, value: /tmp}
  - {name: USER, value: rolemesh} # the uid has no name in the image; some libraries need one
  - {name: PYTHONUNBUFFERED, value: "1"}
  {{- if and .counts $values.controller.maxAttempts }}
  - name: ROLEMESH_JOB # this and the next are another's, and attempts are counted anew, for another Job and after an upgrade
    valueFrom:
      fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}
  - name: ROLEMESH_REVISION
    valueFrom:
      configMapKeyRef: {name: {{ include "rlhf-job.name" (list $ "job") }}, key: revision}
  {{- end }}
  {{- if not (has "TOKENIZERS_PARALLELISM" $given) }}
  - {name: TOKENIZERS_PARALLELISM, value: "false"}
  {{- end }}
  {{- if not (has "OMP_WAIT_POLICY" $given) }}
  - {name: OMP_WAIT_POLICY, value: PASSIVE} # threads that spin at barriers slow down the other processes of the node
  {{- end }}
  {{- if and (not (has "OMP_NUM_THREADS" $given)) (or (dig "requests" "cpu" "" .resources) (dig "limits" "cpu" "" .resources)) }}
  {{- if gt (int .ranks) 1 }}
  {{- $cpu := dig "requests" "cpu" (dig "limits" "cpu" 0 .resources) .resources }}
  - name: OMP_NUM_THREADS # a rank's share of the CPUs that the pod requests, rounded up
    value: {{ divf (include "rlhf-job.number" $cpu | float64) (mulf 1000 .ranks) | ceil | quote }}
  {{- else }}
  - name: OMP_NUM_THREADS # the CPUs that the pod requests, rounded up; the node may have many more
    valueFrom:
      resourceFieldRef: {resource: requests.cpu}
  {{- end }}
  {{- end }}
  {{- if and .prepares $values.huggingFace.secret }}
  - {name: HF_TOKEN_PATH, value: /etc/rolemesh-hub/token}
  {{- end }}
  {{- range .claims }}
  {{- if eq .name "caches" }}
  {{- $folder := printf "%s/%s" (trimSuffix "/" .mountPath) (include "rlhf-job.image" $ | sha256sum | trunc 12) }}
  {{- range $name, $part := dict "VLLM_CACHE_ROOT" "vllm" "TORCHINDUCTOR_CACHE_DIR" "inductor" "TRITON_CACHE_DIR" "triton" }}
  - {name: {{ $name }}, value: {{ printf "%s/%s" $folder $part | quote }}}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if $values.huggingFace.fetch }}
  - {name: HF_HUB_CACHE, value: {{ include "rlhf-job.cache" $ | quote }}}
  {{- if not .prepares }}
  - {name: HF_HUB_OFFLINE, value: "1"}
  {{- end }}
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
  {{- if and .prepares $values.huggingFace.secret }}
  - {name: hub-token, mountPath: /etc/rolemesh-hub, readOnly: true}
  {{- end }}
  {{- if .rewards }}
  - {name: reward, mountPath: /etc/rolemesh-reward, readOnly: true}
  {{- end }}
  {{- if .plugins }}
  - {name: plugins, mountPath: /etc/rolemesh-plugins, readOnly: true}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- range .claims }}
  - {name: {{ .name }}, mountPath: {{ quote .mountPath }}, readOnly: {{ or .readOnly (and $values.huggingFace.fetch (not $prepares) (eq .name "models")) }}}
  {{- end }}
  {{- with .settings.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The folder of the Hugging Face Hub's cache. */}}
{{- define "rlhf-job.cache" -}}
{{- .Values.huggingFace.cache | default (printf "%s/huggingface" .Values.storage.workspace.mountPath) | clean }}
{{- end }}

{{/* The step that fetches the job's models and data, as a list in JSON, empty without one. The pods of the controller and
of `helm test` do it, one at a time, and the others wait for the file that it creates. Other models or data have another file. */}}
{{- define "rlhf-job.fetch" -}}
{{- $steps := list }}
{{- if .Values.huggingFace.fetch }}
{{- $job := .whole }}
{{- $named := list $job.actor.model $job.critic.model $job.reference.model $job.reward.reward_model.model $job.data.train_files $job.data.val_files }}
{{- $done := printf "%s/fetched/%s.json" (include "rlhf-job.cache" .) (toRawJson $named | sha256sum | trunc 16) }}
{{- $steps = list (dict "creates" $done "command" (list "rolemesh" "fetch" "/etc/rolemesh/job.yaml" "--done" $done)) }}
{{- end }}
{{- toJson $steps }}
{{- end }}

{{/* The image by its digest if one is set, otherwise by its tag, which may be a number. Its default is what `make image` gives. */}}
{{- define "rlhf-job.image" -}}
{{- $image := .Values.image }}
{{- $tag := kindIs "string" $image.tag | ternary $image.tag (printf "%d" (int64 $image.tag)) }}
{{- with $image.digest }}{{ $image.repository }}@{{ . }}{{ else }}{{ $image.repository }}:{{ $tag | default (printf "%s%s" $.Chart.AppVersion (eq $image.kind "gpu" | ternary "-gpu" "")) }}{{ end }}
{{- end }}

{{/* Not empty: a pod of these roles writes nothing to the workspace, of (list $ ROLES). Roles that share a device write
their weights there while they sleep, and profiles are written there. */}}
{{- define "rlhf-job.readsOnly" -}}
{{- $ := first . }}
{{- $writes := and (has "reward" (last .)) $.Values.rewardFunction.writes }}
{{- if not (or $writes $.whole.trainer.profile_steps) }}{{ include "rlhf-job.onlyUserCode" . }}{{ end }}
{{- end }}

{{/* The claims that a pod mounts, of (list $ ROLES SETTINGS COMPILES), as JSON: the workspace, each claim that contains a path
that the pod uses, and the caches if it compiles for GPUs. A pod without roles (controller, check) mounts all but these.
Paths may be anywhere in what a pod reads, as in a variable. Those of keys that are paths may also be relative. */}}
{{- define "rlhf-job.claims" -}}
{{- $ := index . 0 }}{{ $roles := index . 1 }}{{ $compiles := index . 3 }}
{{- $sections := list }}{{ $read := list $.Values.prepare (index . 2) (include "rlhf-job.fetch" $) }}
{{- range $roles }}{{ $sections = concat $sections (get $.known.reads .) | uniq }}{{ end }}
{{- range $sections }}
{{- $section := $.whole }}{{ range splitList "." . }}{{ $section = get $section . }}{{ end }}
{{- $read = append $read $section }}
{{- end }}
{{- $trained := false }}
{{- range $.known.trained }}{{ if has . $roles }}{{ $trained = true }}{{ end }}{{ end }}
{{- $trainer := $.whole.trainer }}
{{- if or $trainer.profile_steps (gt (len $roles) 1) $trained }}{{ $sections = append $sections $.known.runDir }}{{ end }} {{- /* checkpoints, traces, offloaded weights */}}
{{- if and $trained (eq $trainer.resume_mode "resume_path") }}{{ $sections = append $sections $.known.resumeDir }}{{ end }}
{{- $paths := list }}
{{- range $key, $each := $.paths }}
{{- range $sections }}{{ if hasPrefix (printf "%s." .) (printf "%s." $key) }}{{ $paths = concat $paths $each }}{{ end }}{{ end }}
{{- end }}
{{- range $.Values.prepare }}{{ $paths = append $paths (include "rlhf-job.inPod" (list $ .creates)) }}{{ end }}
{{- $text := toRawJson $read }}
{{- $claims := list }}
{{- range $name, $claim := $.claims }}
{{- $at := clean $claim.mountPath | trimSuffix "/" }}
{{- $used := or (not $roles) (eq $name "workspace") (regexMatch (printf `(^|[^\w./-])%s([^\w.-]|$)` (regexQuoteMeta $at)) $text) }}
{{- range $paths }}{{ if hasPrefix (printf "%s/" $at) (printf "%s/" .) }}{{ $used = true }}{{ end }}{{ end }}
{{- if eq $name "caches" }}{{ $used = $compiles }}{{ end }}
{{- if $used }}
{{- $readOnly := or $claim.readOnly (ne (include "rlhf-job.readsOnly" (list $ $roles)) "") }}
{{- $claims = append $claims (merge (dict "name" $name "readOnly" $readOnly) $claim) }}
{{- end }}
{{- end }}
{{- toJson $claims }}
{{- end }}
