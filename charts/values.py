"""Values of the chart `rlhf-job`, typed. `make chart` writes values.schema.json from these types and from the
job file's own, so that `helm install` refuses the keys and values that `rolemesh` would refuse.

What is Kubernetes' own (volumes, affinity, metrics) passes through and is checked by the API server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rolemesh.config import Config, JobConfig
from rolemesh.config.placement import PlacementConfig

Kubernetes = dict[str, Any]  # an object of the Kubernetes API
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
        description="without tag and digest: a template refuses them, and says where they go",
    )
    tag: Tag | Annotated[int, Field(ge=0)] = Field(
        "", description="empty: the chart's appVersion; a number is text here"
    )
    digest: str = Field(
        "", pattern=f"^({_DIGEST})?$", description="of the image, as sha256:…; it wins over the tag"
    )
    kind: Literal["cpu", "gpu"] = Field(
        "gpu", description="the target of the Dockerfile that it was built from"
    )
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: list[Name] = Field([], description="names of Secrets")


class Resources(Config):
    requests: dict[str, Quantity] = Field({})
    limits: dict[str, Quantity] = Field({})


class RoleValues(Config):
    gpus: int = Field(0, ge=0, description="of one pod")
    resources: Resources = Field(Resources(), description="of one pod, GPUs left out")


def _needs(cpu: int, memory: str) -> Resources:
    return Resources(requests={"cpu": cpu, "memory": memory}, limits={"memory": memory})


class RolesValues(Config):
    actor: RoleValues = RoleValues(gpus=1, resources=_needs(4, "64Gi"))
    rollout: RoleValues = RoleValues(gpus=1, resources=_needs(4, "32Gi"))
    reference: RoleValues = RoleValues(gpus=1, resources=_needs(4, "32Gi"))
    critic: RoleValues = RoleValues(gpus=1, resources=_needs(4, "64Gi"))
    reward: RoleValues = RoleValues(gpus=0, resources=_needs(2, "4Gi"))


class GpuValues(Config):
    resource: str = Field("nvidia.com/gpu", min_length=1, description="what a GPU is called in resource limits")
    perNode: int = Field(8, gt=0, description="of the largest node; a pod that wants more is refused")
    runtimeClassName: Name = Field("", description="of pods with GPUs")
    nodeSelector: Labels = Field({}, description="of pods with GPUs")
    tolerations: list[Toleration] = Field([], description="of pods with GPUs")


class PodValues(Config):
    """What may be said of all pods, and again of one group's."""

    labels: Labels = Field({})
    annotations: Labels = Field({})
    nodeSelector: Labels = Field({})
    tolerations: list[Toleration] = Field([])
    affinity: Kubernetes = Field({})
    schedulerName: str = ""
    priorityClassName: Name = ""
    runtimeClassName: Name = ""
    env: list[Kubernetes] = Field([])
    envFrom: list[Kubernetes] = Field([])
    volumes: list[Kubernetes] = Field([])
    volumeMounts: list[Kubernetes] = Field([])
    sharedMemory: Quantity = Field("1Gi", description="size of /dev/shm; counts as the container's memory")
    scratch: Quantity = Field("10Gi", description="size of /tmp, where caches lie, too")
    topologyKey: str = Field(
        "kubernetes.io/hostname", description="what a group's pods are spread over; empty: nothing"
    )


class GroupValues(Config):
    """Laid over `pods` for the pods of one group: what is not given is as there."""

    labels: Labels | None = None
    annotations: Labels | None = None
    nodeSelector: Labels | None = None
    tolerations: list[Toleration] | None = None
    affinity: Kubernetes | None = None
    schedulerName: str | None = None
    priorityClassName: Name | None = None
    runtimeClassName: Name | None = None
    env: list[Kubernetes] | None = None
    envFrom: list[Kubernetes] | None = None
    volumes: list[Kubernetes] | None = None
    volumeMounts: list[Kubernetes] | None = None
    sharedMemory: Quantity | None = None
    scratch: Quantity | None = None
    topologyKey: str | None = None
    gpus: int | None = Field(None, ge=0, description="instead of the most that one of its roles has")
    resources: Resources | None = Field(None, description="instead of what its roles come to")


class ControllerValues(GroupValues):
    gpus: Literal[0] = 0
    resources: Resources = _needs(2, "8Gi")
    suspend: bool = Field(False, description="start the roles and no run; helm test wants it so")
    scaleDown: bool = Field(True, description="the workloads go to zero when the run has ended")
    rbac: bool = Field(
        True, description="false: no Role; replicas are then found by DNS, and nothing is scaled"
    )
    backoffLimit: int = Field(100, ge=0, description="restarts, each from the last checkpoint")
    graceSeconds: int = Field(300, gt=0, description="for the running step and a checkpoint, from SIGTERM on")


class ClaimValues(Config):
    existingClaim: Name = Field("", description="a PersistentVolumeClaim of yours")
    size: Quantity | Literal[""] = Field("", description="of a claim that the chart makes; empty: none")
    storageClass: Name = Field("", description="empty: the cluster's default")
    accessModes: list[AccessMode] = Field(["ReadWriteMany"])
    mountPath: str = Field(..., pattern="^/[^:]+$")
    readOnly: bool = False
    keep: bool = Field(True, description="helm uninstall leaves the claim")


class StorageValues(Config):
    workspace: ClaimValues = ClaimValues(size="20Gi", mountPath="/workspace")
    models: ClaimValues = ClaimValues(mountPath="/models", readOnly=True)
    data: ClaimValues = ClaimValues(mountPath="/data", readOnly=True)
    checkpoints: ClaimValues = ClaimValues(mountPath="/checkpoints")
    singleNode: bool = Field(
        False, description="all pods on one node, for claims that one node alone can mount"
    )


class Step(Config):
    creates: str = Field(min_length=1, description="made last; where it is there, the command is not run")
    command: list[str] = Field(min_length=1)


class HuggingFaceValues(Config):
    secret: Name = Field("", description="a Secret with a token, which every pod has as HF_TOKEN")
    key: str = "token"


class RewardFunctionValues(Config):
    code: str = Field("", description="a Python file's text: --set-file rewardFunction.code=my_reward.py")
    configMap: Name = Field("", description="a ConfigMap of yours with Python files")
    egress: list[Kubernetes] = Field(
        [], description="what the reward's pods may reach beside DNS, as rules of a NetworkPolicy"
    )
    writes: bool = Field(False, description="the reward's pods may write to the workspace")


class Scaler(Config):
    scaler: Literal["hpa", "keda"] = Field(
        description="hpa: by metrics; keda: by the controller's pending work"
    )
    minReplicas: int = Field(1, ge=1)
    maxReplicas: int = Field(gt=0)
    metrics: list[Kubernetes] = Field([], description="hpa: autoscaling/v2's; empty: 70 % of the requested CPU")
    behavior: Kubernetes = Field({}, description="autoscaling/v2's")
    pendingPerReplica: int = Field(64, gt=0, description="keda: rows that wait, for each replica")


class AutoscalingValues(Config):
    rollout: Scaler | None = None
    reference: Scaler | None = None
    reward: Scaler | None = None


class GangValues(Config):
    scheduler: Literal["none", "volcano", "kueue", "coscheduling"] = "none"
    queue: str = Field("", description="volcano's or Kueue's")


class IssuerRef(Config):
    name: Name = Field("", description="empty: the chart makes an authority of the job's own")
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    group: str = "cert-manager.io"


class TlsValues(Config):
    mode: Literal["none", "certManager", "secret"] = "none"
    secret: Name = Field("", description="mode secret: with tls.crt, tls.key and ca.crt, for all processes")
    secrets: dict[str, Name] = Field(
        {}, description="mode secret: each group and controller to a Secret of its own, in place of `secret`"
    )
    issuerRef: IssuerRef = Field(IssuerRef(), description="mode certManager")
    duration: str = Field("2160h", description="mode certManager: of the key; it is renewed in time")


class NetworkPolicyValues(Config):
    enabled: bool = True
    metricsFrom: list[Kubernetes] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        description="who may read metrics",
    )
    scalerFrom: list[Kubernetes] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}],
        description="who may ask the controller for pending work, where a scaler is keda",
    )
    dnsTo: list[Kubernetes] = Field(
        [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
            {"ipBlock": {"cidr": "169.254.20.10/32"}},
        ],
        description="where every pod finds DNS",
    )
    dnsPorts: list[Port] = Field([53], min_length=1, description="of the DNS servers' pods, UDP and TCP")
    prepareEgress: list[Kubernetes] = Field(
        [], description="what steps of prepare reach, as rules of a NetworkPolicy; not of the reward's pods"
    )
    controllerEgress: list[Kubernetes] = Field(
        [{}], description="what the controller reaches beside DNS and the roles: the API server, loggers"
    )


class DashboardsValues(Config):
    enabled: bool = True
    labels: Labels = Field({"grafana_dashboard": "1"}, description="what Grafana's sidecar looks for")
    annotations: Labels = Field({})


class MonitoringValues(Config):
    operator: Literal["auto", "always", "never"] = Field(
        "auto", description="PodMonitor and PrometheusRule; auto: where the cluster knows them"
    )
    labels: Labels = Field({}, description="what the operator's selectors look for")
    annotations: bool = Field(True, description="prometheus.io/scrape on pods")
    interval: str = Field("15s", description="between scrapes by PodMonitor")
    runbooks: str = Field(
        "docs/runbooks/",
        pattern=r"^([\w./]\S*)?$",
        description="the folder that alerts say their pages are in: an address; empty: a page's name alone",
    )
    dashboards: DashboardsValues = DashboardsValues()


class Values(Config):
    """What `helm install -f` takes."""

    image: ImageValues = ImageValues()
    job: JobConfig = Field(JobConfig(), description="the job file, less its section placement")
    placement: PlacementConfig = PlacementConfig()
    roles: RolesValues = RolesValues()
    gpu: GpuValues = GpuValues()
    pods: PodValues = PodValues()
    groups: dict[str, GroupValues] = Field({})
    controller: ControllerValues = ControllerValues()
    storage: StorageValues = StorageValues()
    prepare: list[Step] = Field([], description="before a pod's process starts; one pod at a time")
    huggingFace: HuggingFaceValues = HuggingFaceValues()
    rewardFunction: RewardFunctionValues = RewardFunctionValues()
    autoscaling: AutoscalingValues = AutoscalingValues()
    gang: GangValues = GangValues()
    disruptionBudgets: bool = True
    tls: TlsValues = TlsValues()
    networkPolicy: NetworkPolicyValues = NetworkPolicyValues()
    monitoring: MonitoringValues = MonitoringValues()
    umbrella: Kubernetes = Field(
        {}, alias="global", description="what a chart around this one shares; not read"
    )
    user: int | None = Field(
        1000, gt=0, description="uid and gid of every process; null: the namespace decides"
    )
