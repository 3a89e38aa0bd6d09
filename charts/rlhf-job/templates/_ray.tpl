{{/* A group of several pods, of (list $ GROUP POD): KubeRay starts a Ray node in each. The head pod has rank 0, and the
launcher, which starts the ranks by Ray. Its probe fails if rank 0 hangs, and passes while nobody listens: then the launcher
waits for pods, or starts the ranks anew, and to restart the head would end the other nodes' Ray, too. The hook leaves out the
server of Ray's clients, which `ray start` has no option for. Each node offers Ray as many CPUs as it has ranks. spec.suspend is the
controller's: true at the end of a run. */}}
{{- define "rlhf-job.rayCluster" -}}
{{- $ := index . 0 }}{{ $group := index . 1 }}{{ $pod := index . 2 }}
{{- $params := dict "num-cpus" (toString $pod.ranks) "object-store-memory" "83886080" "node-manager-port" "6380" }} {{- /* nothing is put into the object store */}}
{{- $ofHead := dict "include-dashboard" "false" "dashboard-host" "127.0.0.1" "disable-usage-stats" "true" }}
{{- if $group.gpus }}{{ $_ := set $params "num-gpus" (toString $group.gpus) }}{{ end }}
{{- $isLive := dict "livenessProbe" (dict "exec" (dict "command" (list "python" "-c" ($.Files.Get "files/rank_0_is_live.py")))
      "periodSeconds" 30 "timeoutSeconds" 20 "failureThreshold" 2) }}
{{- $raylet := dict
      "startupProbe" (dict "tcpSocket" (dict "port" 6380) "periodSeconds" 2 "failureThreshold" 150)
      "readinessProbe" (dict "tcpSocket" (dict "port" 6380) "periodSeconds" 5)
      "livenessProbe" (dict "tcpSocket" (dict "port" 6380) "periodSeconds" 10 "failureThreshold" 6) }}
{{- $start := `export RAY_START_HOOK=rolemesh.services.processes.ray_rank.without_client_server; eval "$(printf %s "$KUBERAY_GEN_RAY_START_CMD" | sed "s/ --block//")"; exec rolemesh "$@"` }}
{{- $head := merge (dict "command" (list "sh" "-euc" $start "rolemesh") "args" (append $pod.args "placement.launcher=ray")
      "probes" (merge $isLive (omit $pod.probes "livenessProbe"))) (omit $pod "probes" "command" "args") }}
{{- $follower := merge (dict "command" (list "sh" "-euc") "args" (list "exec $KUBERAY_GEN_RAY_START_CMD") "follows" true
      "probes" $raylet) (omit $pod "probes" "command" "args") }}
apiVersion: ray.io/v1
kind: RayCluster
{{ include "rlhf-job.metadata" (list $ $group.name $group.workload) }}
  annotations:
    ray.io/overwrite-container-cmd: "true"
spec:
  rayVersion: {{ quote $.known.ray }}
  authOptions: {mode: token}
  upgradeStrategy: {type: Recreate} # the ranks of a group live and die together
  headGroupSpec:
    rayStartParams: {{ merge $ofHead $params | toJson }}
    template:
      {{- include "rlhf-job.pod" $head | nindent 6 }}
  workerGroupSpecs:
    - groupName: followers
      replicas: 1
      minReplicas: 1
      maxReplicas: 1
      numOfHosts: {{ sub $group.pods 1 }}
      rayStartParams: {{ toJson $params }}
      template:
        {{- include "rlhf-job.pod" $follower | nindent 8 }}
{{- end }}
