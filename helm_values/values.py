"""Typed values of the chart `rlhf-job`.

`make chart` writes values.schema.json from these types and the job file's types, so `helm install` refuses the
keys and values that `rolemesh` would refuse. Objects of Kubernetes (volumes, affinity, metrics) have its own
types (kubernetes.py), and are passed through.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from helm_values import kubernetes
from rolemesh.config import Config, JobConfig
from rolemesh.config.placement import PlacementConfig

Labels = dict[str, str]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Quantity = (
    Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
    | Annotated[float, Field(ge=0)]
)
_TAG = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = "sha256:[0-9a-f]{64}"
Tag = Annotated[str, Field(pattern=f"^({_TAG})?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Gid = Annotated[int, Field(ge=1, le=2**31 - 1)]
_PATH = "[a-z0-9]+([._-]+[a-z0-9]+)*"  # one part of an image's path

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]


class Toleration(Config):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: int | None = None


class ImageValues(Config):
    repository: str = Field(
        "localhost/rolemesh",
        pattern=rf"^((\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(:[0-9]+)?/)?{_PATH}(/{_PATH})*"
        rf"(:{_TAG})?(@{_DIGEST})?$",
        description="the repository, without tag and digest, which have their own keys",
    )
    tag: Tag | Annotated[int, Field(ge=0)] = Field(
        "", description="empty: the chart's appVersion, with -gpu if kind is gpu; a number is used as text"
    )
    digest: str = Field(
        "", pattern=f"^({_DIGEST})?$", description="digest of the image, as sha256:…; overrides the tag"
    )
    kind: Literal["cpu", "gpu"] = Field(
        "gpu", description="the Dockerfile's target that the image was built from"
    )
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: list[Name] = Field([], description="names of Secrets")


class Resources(Config):
    requests: dict[str, Quantity] = Field({})
    limits: dict[str, Quantity] = Field({})


class RoleValues(Config):
    gpus: int = Field(0, ge=0, description="GPUs of each replica: of its pod, or of its pods together")
    resources: Resources = Field(Resources(), description="resources per pod, without GPUs")


class RolloutValues(RoleValues):
    billionParameters: float = Field(
        0,
        ge=0,
        description="parameters of job.actor.model in billions, e.g. 7.6; a memory limit below their "
        "versions is refused; 0: unknown",
    )


def _needs(cpu: int, memory: str) -> Resources:
    return Resources(requests={"cpu": cpu, "memory": memory}, limits={"memory": memory})


class RolesValues(Config):
    actor: RoleValues = RoleValues(gpus=1, resources=_needs(4, "64Gi"))
    rollout: RolloutValues = RolloutValues(gpus=1, resources=_needs(4, "32Gi"))
    reference: RoleValues = RoleValues(gpus=1, resources=_needs(4, "32Gi"))
    critic: RoleValues = RoleValues(gpus=1, resources=_needs(4, "64Gi"))
    reward: RoleValues = RoleValues(gpus=0, resources=_needs(2, "4Gi"))
    environment: RoleValues = RoleValues(gpus=0, resources=_needs(2, "4Gi"))


class GpuValues(Config):
    resource: str = Field("nvidia.com/gpu", min_length=1, description="name of a GPU in resource limits")
    perNode: int = Field(8, gt=0, description="GPUs of a node; ranks that need more take several pods")
    runtimeClassName: Name = Field("", description="for pods with GPUs")
    nodeSelector: Labels = Field({}, description="for pods with GPUs")
    tolerations: list[Toleration] = Field([], description="for pods with GPUs")


class PodValues(Config):
    """Settings of all pods, which a group may override."""

    labels: Labels = Field({})
    annotations: Labels = Field({})
    nodeSelector: Labels = Field({})
    tolerations: list[Toleration] = Field([])
    affinity: kubernetes.Affinity = Field({})
    schedulerName: str = ""
    priorityClassName: Name = ""
    runtimeClassName: Name = ""
    env: list[kubernetes.EnvVar] = Field([])
    envFrom: list[kubernetes.EnvFromSource] = Field([])
    volumes: list[kubernetes.Volume] = Field([])
    volumeMounts: list[kubernetes.VolumeMount] = Field([])
    graceSeconds: int = Field(
        30, ge=10, description="seconds from SIGTERM to SIGKILL; a role drains until 5 seconds before"
    )
    sharedMemory: Quantity | Literal[""] = Field(
        "", description="size of /dev/shm; counts as the container's memory; empty: 1Gi for each rank and GPU"
    )
    scratch: Quantity = Field("10Gi", description="maximum size of /tmp, which also has caches")
    scratchRequest: Quantity | Literal[""] = Field(
        "1Gi", description="of it, requested as ephemeral-storage; empty: none"
    )
    topologyKey: str = Field(
        "kubernetes.io/hostname",
        description="label over whose values a group's pods are spread; empty: no spread",
    )


class PodOverrides(Config):
    """Overrides of `pods` for some pods; null: as in `pods`."""

    labels: Labels | None = None
    annotations: Labels | None = None
    nodeSelector: Labels | None = None
    tolerations: list[Toleration] | None = None
    affinity: kubernetes.Affinity | None = None
    schedulerName: str | None = None
    priorityClassName: Name | None = None
    runtimeClassName: Name | None = None
    env: list[kubernetes.EnvVar] | None = None
    envFrom: list[kubernetes.EnvFromSource] | None = None
    volumes: list[kubernetes.Volume] | None = None
    volumeMounts: list[kubernetes.VolumeMount] | None = None
    graceSeconds: int | None = Field(None, ge=10)
    sharedMemory: Quantity | None = None
    scratch: Quantity | None = None
    scratchRequest: Quantity | Literal[""] | None = None


class GroupValues(PodOverrides):
    """Overrides for the pods of one group."""

    topologyKey: str | None = None
    gpus: int | None = Field(None, ge=0, description="GPUs of each replica; null: the maximum of its roles")
    resources: Resources | None = Field(None, description="resources per pod; null: computed from its roles")
    pods: int | None = Field(
        None, gt=0, description="pods among which its ranks are divided; null: by gpus and gpu.perNode"
    )


class ControllerValues(PodOverrides):
    """The controller's pod, which is one, has no GPU, and is not spread."""

    resources: Resources = _needs(2, "8Gi")
    suspend: bool = Field(False, description="start the roles without a run, for helm test")
    scaleDown: bool = Field(True, description="scale the workloads to zero when the run has ended")
    scaleUp: bool = Field(
        False,
        description="the workloads have no number of replicas, and the controller scales them up before a run",
    )
    rbac: bool = Field(
        True, description="false: create no Role; replicas are found by DNS, and nothing is scaled"
    )
    maxAttempts: int = Field(
        5,
        ge=0,
        description="starts without a new checkpoint, or failures of prepare, after which the run fails; "
        "0: only backoffLimit counts",
    )
    backoffLimit: int = Field(
        100, ge=0, description="maximum number of restarts for what the controller cannot count"
    )
    graceSeconds: int = Field(
        300,
        gt=0,
        description="time for the running step, its validation and a checkpoint after SIGTERM, in seconds",
    )


class ClaimValues(Config):
    existingClaim: Name = Field("", description="your PersistentVolumeClaim")
    size: Quantity | Literal[""] = Field("", description="size of a claim that the chart creates; empty: none")
    storageClass: Name = Field("", description="empty: the cluster's default")
    accessModes: list[AccessMode] = Field(["ReadWriteMany"], min_length=1)
    mountPath: str = Field(..., pattern="^/[^:]+$")
    readOnly: bool = False
    keep: bool = Field(True, description="helm uninstall keeps the claim")


class StorageValues(Config):
    workspace: ClaimValues = ClaimValues(size="20Gi", mountPath="/workspace")
    models: ClaimValues = ClaimValues(mountPath="/models", readOnly=True)
    data: ClaimValues = ClaimValues(mountPath="/data", readOnly=True)
    checkpoints: ClaimValues = ClaimValues(mountPath="/checkpoints")
    caches: ClaimValues = Field(
        ClaimValues(mountPath="/caches"), description="compiled kernels of pods with GPUs, by image"
    )
    singleNode: bool = Field(
        False, description="run all pods on one node, for claims that only one node can mount"
    )


class Step(Config):
    creates: str = Field(
        min_length=1, description="path that the command creates last; if it exists, the command is skipped"
    )
    command: list[str] = Field(min_length=1)


class HuggingFaceValues(Config):
    fetch: bool = Field(
        False,
        description="the pod of the controller, or of helm test, downloads the models and data that the job "
        "names at the Hub",
    )
    cache: str = Field(
        "",
        pattern="^(/[^:]+)?$",
        description="folder of the Hub's cache, in a claim; empty: huggingface in the workspace",
    )
    secret: Name = Field(
        "", description="a Secret with a token: the file HF_TOKEN_PATH where a pod fetches or prepares"
    )
    key: str = "token"


class RewardFunctionValues(Config):
    code: str = Field("", description="content of a Python file: --set-file rewardFunction.code=my_reward.py")
    configMap: Name = Field("", description="your ConfigMap with Python files")
    egress: list[kubernetes.EgressRule] = Field(
        [], description="what the reward's pods may reach in addition to DNS, as rules of a NetworkPolicy"
    )
    writes: bool = Field(False, description="the reward's pods may write to the workspace")


class PluginsValues(Config):
    code: str = Field("", description="content of a Python file: --set-file plugins.code=my_parts.py")
    configMap: Name = Field("", description="your ConfigMap with Python files, which job.plugins names")


class Scaler(Config):
    scaler: Literal["hpa", "keda"] = Field(
        description="hpa: by metrics; keda: by the controller's pending work"
    )
    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(gt=0)
    metrics: list[kubernetes.MetricSpec] = Field(
        [], description="hpa: metrics of autoscaling/v2; empty: 70 % of the requested CPU"
    )
    behavior: kubernetes.Behavior = Field({}, description="behavior of autoscaling/v2")
    pendingPerReplica: int = Field(64, gt=0, description="keda: target number of pending rows per replica")


class AccountValues(Config):
    create: bool = Field(False, description="the chart makes the account; false: yours, or the namespace's")
    name: Name = Field("", description="empty: chosen by the chart, or the namespace's default")
    annotations: Labels = Field({}, description="of the account that the chart makes, e.g. for IRSA")
    egress: list[kubernetes.EgressRule] = Field(
        [], description="what pods with the account may reach, as rules of a NetworkPolicy, e.g. its STS"
    )


class AccountsValues(Config):
    """Service accounts. `reward` is of pods without other roles than reward and environment."""

    roles: AccountValues = AccountValues()
    reward: AccountValues = AccountValues()
    environment: AccountValues = AccountValues()
    controller: AccountValues = Field(
        AccountValues(), description="made, too, if it needs rights and has no name"
    )


class AutoscalingValues(Config):
    rollout: Scaler | None = None
    reference: Scaler | None = None
    reward: Scaler | None = None
    environment: Scaler | None = None


class GangValues(Config):
    scheduler: Literal["none", "volcano", "kueue", "coscheduling"] = "none"
    queue: str = Field("", description="queue of Volcano or Kueue")


class IssuerRef(Config):
    name: Name = Field("", description="empty: the chart creates an authority for the job")
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    group: str = "cert-manager.io"


class TlsValues(Config):
    mode: Literal["none", "certManager", "secret"] = "none"
    secret: Name = Field(
        "", description="mode secret: a Secret with tls.crt, tls.key and ca.crt, for all processes"
    )
    secrets: dict[str, Name] = Field(
        {}, description="mode secret: a Secret for each group and controller, instead of `secret`"
    )
    issuerRef: IssuerRef = Field(IssuerRef(), description="mode certManager")
    duration: str = Field(
        "2160h", description="mode certManager: lifetime of the key, which is renewed before it expires"
    )


class NetworkPolicyValues(Config):
    enabled: bool = True
    metricsFrom: list[kubernetes.Peer] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        description="who may read metrics",
    )
    scalerFrom: list[kubernetes.Peer] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}],
        description="who may read pending work at the controller, if a scaler is keda",
    )
    dnsTo: list[kubernetes.Peer] = Field(
        [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
            {"ipBlock": {"cidr": "169.254.20.10/32"}},
        ],
        description="the DNS servers of all pods",
    )
    dnsPorts: list[Port] = Field([53], min_length=1, description="ports of the DNS servers' pods, UDP and TCP")
    prepareEgress: list[kubernetes.EgressRule] = Field(
        [],
        description="what `prepare` may reach, as rules of a NetworkPolicy; not of reward and environment",
    )
    environmentEgress: list[kubernetes.EgressRule] = Field(
        [], description="what the environment's pods may reach in addition to DNS, as rules of a NetworkPolicy"
    )
    controllerEgress: list[kubernetes.EgressRule] = Field(
        [{}],
        description="what the controller may reach in addition to DNS and the roles: the API server, loggers",
    )


class DashboardsValues(Config):
    enabled: bool = True
    labels: Labels = Field({"grafana_dashboard": "1"}, description="labels that Grafana's sidecar selects")
    annotations: Labels = Field({})


class MonitoringValues(Config):
    operator: Literal["auto", "always", "never"] = Field(
        "auto", description="create PodMonitor and PrometheusRule; auto: if the cluster has these kinds"
    )
    labels: Labels = Field({}, description="labels that the operator selects")
    annotations: bool = Field(True, description="prometheus.io/scrape on pods")
    interval: str = Field("15s", description="scrape interval of PodMonitor")
    runbooks: str = Field(
        "docs/runbooks/",
        pattern=r"^([\w./]\S*)?$",
        description="address of the folder with the alerts' pages; empty: only the page's name",
    )
    dashboards: DashboardsValues = DashboardsValues()


class Values(Config):
    """The values of `helm install -f`."""

    image: ImageValues = ImageValues()
    job: JobConfig = Field(JobConfig(), description="the job file, except its section placement")
    placement: PlacementConfig = PlacementConfig()
    roles: RolesValues = RolesValues()
    gpu: GpuValues = GpuValues()
    pods: PodValues = PodValues()
    groups: dict[str, GroupValues] = Field({})
    controller: ControllerValues = ControllerValues()
    storage: StorageValues = StorageValues()
    prepare: list[Step] = Field([], description="commands before a pod's process starts, one pod at a time")
    huggingFace: HuggingFaceValues = HuggingFaceValues()
    rewardFunction: RewardFunctionValues = RewardFunctionValues()
    plugins: PluginsValues = PluginsValues()
    autoscaling: AutoscalingValues = AutoscalingValues()
    gang: GangValues = GangValues()
    serviceAccounts: AccountsValues = AccountsValues()
    disruptionBudgets: bool = True
    tls: TlsValues = TlsValues()
    networkPolicy: NetworkPolicyValues = NetworkPolicyValues()
    serviceMesh: bool = Field(False, description="let a service mesh (Istio, Linkerd) take the pods in")
    monitoring: MonitoringValues = MonitoringValues()
    umbrella: dict[str, Any] = Field({}, alias="global", description="values of a parent chart; not used here")
    user: int | None = Field(
        1000, gt=0, description="uid and gid of every process; null: assigned by the namespace"
    )
    supplementalGroups: list[Gid] = Field([], description="more gids of every process, e.g. for model stores")
