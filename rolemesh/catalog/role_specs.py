"""Roles: the services of a job. Clients, processes, placement, planner and chart read this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rolemesh.catalog.catalog import Catalog, Code, Declaration
from rolemesh.catalog.engines import EngineSpec
from rolemesh.catalog.pages import PageSpec
from rolemesh.wire.limits import MAX_EPISODE_STREAMS, MAX_STREAMS


class JobOfRoles(Protocol):
    """The properties of a job that decide which roles it has, and which of them compute on a device."""

    @property
    def page(self) -> PageSpec: ...

    @property
    def engine(self) -> EngineSpec: ...

    @property
    def uses_critic(self) -> bool: ...

    @property
    def uses_reference(self) -> bool: ...

    @property
    def ref_in_actor(self) -> bool: ...

    @property
    def uses_environment(self) -> bool: ...

    @property
    def uses_reward_model(self) -> bool: ...


def _always(job: JobOfRoles) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class RoleSpec(Declaration):
    """A role. `code` is its worker, which implements the role's Protocol of rolemesh/roles.py.

    Args:
        trained: it has a state that training changes, so it has one replica and checkpoints. Other roles are
            stateless: a replica may join, leave or die while the job runs.
        methods: a function of the job that returns the role's rolemesh.methods.Method declarations.
        service: the descriptor of its gRPC service.
        servicer: its servicer, made of a worker (and of the process's WeightStore if serves_weights).
        client: its rolemesh.rpc.calling.clients.RoleClient.
        recorded: its stand-in while the step graph is recorded.
        serves_weights: its server has WeightsService too.
        runs_user_code: it may run the job author's code. Its pod writes nothing to the workspace, and prepares
            nothing there, unless another role shares it.
        wanted: whether a job has the role; it reads the properties of JobOfRoles. None: a job has the role if
            its page calls it.
        on_device: whether the role computes on its process's device. Others wait for no turn there.
        model_key: the key of the model that the role loads if it computes on a device; `JobSections.model_of`
            lists the keys.
        scores: its model has a head with one output, not the vocabulary's.
        pass_rows_key: the key of the rows of a micro-batch on each device. An engine has none.
        max_streams: calls at once on one connection to its server.
    """

    kind: ClassVar[str] = "role"

    trained: bool = False
    methods: Code
    service: Code
    servicer: Code
    client: Code
    recorded: Code
    serves_weights: bool = False
    runs_user_code: bool = False
    wanted: Callable[[JobOfRoles], bool] | None = _always
    on_device: Callable[[JobOfRoles], bool] = _always
    model_key: str = "actor.model"
    scores: bool = False
    pass_rows_key: str | None = None
    max_streams: int = MAX_STREAMS

    def is_in(self, job: JobOfRoles) -> bool:
        """Return whether a job has the role."""
        return self.name in job.page.roles if self.wanted is None else self.wanted(job)


SERVICES = "rolemesh.services"
CLIENTS = "rolemesh.rpc.calling.clients"
CONTRACT = "rolemesh.rpc.contract"
METHODS = "rolemesh.methods"
RECORDING = "rolemesh.graph.recording"

# In the order in which a group's roles are loaded.
ROLES = Catalog(
    RoleSpec,
    RoleSpec(
        name="actor",
        code=f"{SERVICES}.actor.worker:ActorWorker",
        trained=True,
        wanted=None,
        methods=f"{METHODS}:actor_methods",
        service=f"{CONTRACT}:ACTOR",
        servicer=f"{SERVICES}.actor.servicer:ActorServicer",
        client=f"{CLIENTS}:ActorClient",
        recorded=f"{RECORDING}:RecordedActor",
        serves_weights=True,
        pass_rows_key="actor.ppo_micro_batch_size_per_gpu",
        meaning="the policy under training",
    ),
    RoleSpec(
        name="rollout",
        code=f"{SERVICES}.rollout.worker:RolloutWorker",
        methods=f"{METHODS}:rollout_methods",
        service=f"{CONTRACT}:ROLLOUT",
        servicer=f"{SERVICES}.rollout.servicer:RolloutServicer",
        client=f"{CLIENTS}:RolloutClient",
        recorded=f"{RECORDING}:RecordedRollout",
        serves_weights=True,
        wanted=None,
        on_device=lambda job: job.engine.on_device,
        meaning="generation",
    ),
    RoleSpec(
        name="reference",
        code=f"{SERVICES}.actor.worker:ReferenceWorker",
        methods=f"{METHODS}:reference_methods",
        service=f"{CONTRACT}:REFERENCE",
        servicer=f"{SERVICES}.actor.servicer:ReferenceServicer",
        client=f"{CLIENTS}:ReferenceClient",
        recorded=f"{RECORDING}:RecordedReference",
        wanted=lambda job: job.uses_reference and not job.ref_in_actor,
        model_key="reference.model",
        pass_rows_key="reference.log_prob_micro_batch_size_per_gpu",
        meaning="the policy that the actor is held close to",
    ),
    RoleSpec(
        name="critic",
        code=f"{SERVICES}.critic.worker:CriticWorker",
        trained=True,
        methods=f"{METHODS}:critic_methods",
        service=f"{CONTRACT}:CRITIC",
        servicer=f"{SERVICES}.critic.servicer:CriticServicer",
        client=f"{CLIENTS}:CriticClient",
        recorded=f"{RECORDING}:RecordedCritic",
        wanted=lambda job: job.uses_critic,
        model_key="critic.model",
        scores=True,
        pass_rows_key="critic.ppo_micro_batch_size_per_gpu",
        meaning="the value model",
    ),
    RoleSpec(
        name="reward",
        code=f"{SERVICES}.reward.worker:RewardWorker",
        methods=f"{METHODS}:reward_methods",
        service=f"{CONTRACT}:REWARD",
        servicer=f"{SERVICES}.reward.servicer:RewardServicer",
        client=f"{CLIENTS}:RewardClient",
        recorded=f"{RECORDING}:RecordedReward",
        runs_user_code=True,
        wanted=None,
        on_device=lambda job: job.uses_reward_model,
        model_key="reward.reward_model.model",
        scores=True,
        pass_rows_key="reward.reward_model.micro_batch_size_per_gpu",
        meaning="the reward of a response, by rule, function or model",
    ),
    RoleSpec(
        name="environment",
        code=f"{SERVICES}.environment.worker:EnvironmentWorker",
        methods=f"{METHODS}:environment_methods",
        service=f"{CONTRACT}:ENVIRONMENT",
        servicer=f"{SERVICES}.environment.servicer:EnvironmentServicer",
        client="rolemesh.rpc.calling.episodes:EnvironmentClient",
        recorded=f"{RECORDING}:RecordedEnvironment",
        runs_user_code=True,
        wanted=lambda job: job.uses_environment,
        on_device=lambda job: False,
        max_streams=MAX_EPISODE_STREAMS,
        meaning="the other side of conversations: tools and interactions",
    ),
)


def stateless_roles() -> tuple[str, ...]:
    """The roles that may have several replicas."""
    return tuple(name for name, role in ROLES.items() if not role.trained)
