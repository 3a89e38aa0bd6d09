"""The sections of the job file, and values derived from several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.catalog import Declaration
from rolemesh.catalog.engines import EngineSpec
from rolemesh.catalog.estimators import ESTIMATORS, EstimatorSpec
from rolemesh.catalog.pages import PAGES, PageSpec
from rolemesh.catalog.policy_losses import POLICY_LOSSES, PolicyLossSpec
from rolemesh.catalog.role_specs import ROLES
from rolemesh.catalog.tools import TOOLS
from rolemesh.config.actor import FOLLOWS_ACTOR, ActorConfig, CriticConfig, ReferenceConfig
from rolemesh.config.algorithm import AlgorithmConfig
from rolemesh.config.base import Config, absolute_path, value_at
from rolemesh.config.data import DataConfig, Files
from rolemesh.config.key_facts import DERIVED, Key, Section, key_facts
from rolemesh.config.model import CriticModelConfig, FrozenModelConfig, FsdpConfig, ModelConfig, chosen_dtype
from rolemesh.config.placement import PlacementConfig
from rolemesh.config.reward import RewardConfig
from rolemesh.config.rollout import RolloutConfig
from rolemesh.config.trainer import TrainerConfig

M = TypeVar("M", bound=ModelConfig)

DTYPE_KEYS = (
    "actor.model.dtype",
    "reference.model.dtype",
    "critic.model.dtype",
    "reward.reward_model.model.dtype",
    "rollout.dtype",
)


class Plugins(Config):
    """What is read of a job before everything else, since the rest may name its parts."""

    plugins: Files = Key(
        [], DERIVED, description="your Python files and modules, imported in every process (docs/plugins.md)"
    )


class JobSections(Plugins):
    """The sections of a job, not yet checked against each other, and values derived from several of them."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = Section(ActorConfig(), read_by=("actor",))
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = Section(ReferenceConfig(), read_by=("reference",))
    critic: CriticConfig = Section(CriticConfig(), read_by=("critic",))
    reward: RewardConfig = Section(RewardConfig(), read_by=("reward",))
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = Field(PlacementConfig(), description="how the roles share devices")

    @field_validator("critic")
    @classmethod
    def _critic_follows_the_actor(cls, critic: CriticConfig, info: ValidationInfo) -> CriticConfig:
        actor = info.data.get("actor")  # absent if the section actor is invalid
        unset = [key for key in FOLLOWS_ACTOR if actor and getattr(critic, key) is None]
        values = dict(critic) | {key: getattr(actor, key) for key in unset}
        return CriticConfig.model_construct(
            critic.model_fields_set, **values
        )  # keeps which keys the job file set

    # ---------------------------------------------------------------- the parts that it names

    @property
    def estimator(self) -> EstimatorSpec:
        """The declaration of algorithm.adv_estimator."""
        return ESTIMATORS[self.algorithm.adv_estimator]

    @property
    def page(self) -> PageSpec:
        """The declaration of algorithm.page; if unset, the page with filter_groups, or the estimator's page."""
        if self.algorithm.page:
            return PAGES[self.algorithm.page]
        if self.algorithm.filter_groups.enable:
            return next(page for page in PAGES.values() if page.filters)
        return PAGES[self.estimator.default_page]

    @property
    def page_options(self) -> dict[str, Any]:
        """algorithm.page_options; of a page that algorithm.page does not name, its defaults."""
        schema = self.page.options
        if self.algorithm.page or schema is None:
            return self.algorithm.page_options
        return schema().model_dump()

    @property
    def generates(self) -> bool:
        """True if rollouts answer the page's prompts."""
        return "rollout" in self.page.roles

    @property
    def validates(self) -> bool:
        """True if a run of the job validates at some time."""
        trainer = self.trainer
        return self.data.has_validation and (
            trainer.val_only or trainer.val_before_train or trainer.test_freq > 0
        )

    @property
    def steps_ahead(self) -> int:
        """How many steps ahead of training the rollouts may generate: 0 with rollout.mode sync."""
        return self.trainer.max_staleness if self.generates and self.rollout.mode == "async" else 0

    @property
    def temperature(self) -> float:
        """Temperature of the distribution that log-probabilities are of; 0 if answers are greedy."""
        if not self.generates:
            return 1.0
        return 0.0 if self.rollout.greedy else self.rollout.temperature

    @property
    def estimates(self) -> bool:
        """True if the page computes advantages, by algorithm.adv_estimator, from answers of the rollouts."""
        return self.page.learns_from == "prompts"

    @property
    def policy_loss(self) -> PolicyLossSpec:
        """The declaration of actor.policy_loss.loss_mode; on a page with losses of its own, one of these.

        With bypass_mode of algorithm.rollout_correction it is `bypass`, unless the named one corrects as well.
        """
        loss = self.actor.loss
        losses = self.page.losses
        if losses:
            return loss if loss.name in losses else POLICY_LOSSES[losses[0]]
        bypasses = self.algorithm.rollout_correction.bypass_mode
        return POLICY_LOSSES["bypass"] if bypasses and not loss.corrects else loss

    @property
    def engine(self) -> EngineSpec:
        """The declaration of rollout.name."""
        return self.rollout.engine

    @property
    def parts(self) -> tuple[Declaration, ...]:
        """The declarations of all parts that the job names."""
        return (
            self.estimator,
            self.page,
            self.policy_loss,
            self.engine,
            self.reward.manager,
            self.data.source,
            AGENTS[self.rollout.agent.default_agent_loop],
            *(TOOLS[name] for name in self.rollout.multi_turn.tools),
            CALL_FORMATS[self.rollout.multi_turn.format],
        )

    # ------------------------------------------------------- what roles the job has

    @property
    def uses_critic(self) -> bool:
        if self.critic.enable is not None:
            return self.critic.enable
        return "critic" in self.page.roles or (self.estimates and self.estimator.needs_critic)

    @property
    def uses_reference(self) -> bool:
        """True if the job uses KL, or its page the reference policy."""
        weighs_kl = self.algorithm.use_kl_in_reward or self.actor.use_kl_loss
        return weighs_kl or "reference" in self.page.roles

    @property
    def ref_in_actor(self) -> bool:
        """True if the reference policy is the actor with its adapter off, instead of a separate role."""
        return self.uses_reference and self.actor.model.lora_rank > 0

    @property
    def uses_environment(self) -> bool:
        return self.generates and self.rollout.multi_turn.enable

    @property
    def uses_reward_model(self) -> bool:
        return self.reward.reward_model.enable

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this job, in the order in which they are started."""
        return tuple(name for name, role in ROLES.items() if role.is_in(self))

    # ------------------------------------------------------------ where they run

    def with_rows_and_share(self, own_rows: int | None = None) -> Self:
        """Return this job with its engine's rows and share of the device decided, as RolloutConfig does."""
        return self.model_copy(update={"rollout": self.rollout.with_rows_and_share(own_rows)})

    def on_device(self, role: str) -> bool:
        """Return whether a role uses the device, and so takes turns; e.g. a reward by rules does not."""
        return ROLES[role].on_device(self)

    # --------------------------------------------------------------- derived values

    @property
    def given_run_dir(self) -> str:
        """The run directory as the job gives it, or its default."""
        return self.trainer.default_local_dir or f"outputs/{self.trainer.experiment_name}"

    @property
    def run_dir(self) -> Path:
        return absolute_path(self.given_run_dir)

    def profile_dir(self, step: int) -> Path:
        """Return the directory for the profile of a step in trainer.profile_steps (docs/profiling.md)."""
        return self.run_dir / "profile" / f"step_{step}"

    def model_of(self, role: str) -> ModelConfig:
        """Return the model that a role loads if it computes on a device."""
        models: dict[str, ModelConfig] = {
            "actor.model": self.actor.model,
            "reference.model": self.reference_model,
            "critic.model": self.critic_model,
            "reward.reward_model.model": self.reward.reward_model.model,
        }
        return models[ROLES[role].model_key]

    @property
    def reference_model(self) -> FrozenModelConfig:
        return self._model(self.reference.model)

    @property
    def critic_model(self) -> CriticModelConfig:
        return self._model(self.critic.model)

    def mini_batch_size(self, role: str) -> int:
        """Return the size of a trained role's mini-batches, in prompts."""
        own = self.critic.ppo_mini_batch_size if role == "critic" else None
        return own or self.actor.ppo_mini_batch_size

    def pass_rows(self, role: str) -> int:
        """Return the rows of a micro-batch of a role on each device."""
        key = ROLES[role].pass_rows_key
        assert key is not None, "a role with an engine has no micro-batches"
        rows = value_at(self, key)
        assert isinstance(rows, int)
        return rows

    def max_tokens(self, role: str) -> int | None:
        """Return the most tokens in a pass of a role; None if passes have fixed rows."""
        actor = self.actor
        critic = self.critic
        reference = self.reference
        own, budget = {
            "actor": (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
            "critic": (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu),
            "reference": (reference.log_prob_use_dynamic_bsz, reference.log_prob_max_token_len_per_gpu),
        }.get(role, (False, None))
        if not (actor.use_dynamic_bsz if own is None else own):
            return None
        return actor.ppo_max_token_len_per_gpu if budget is None else budget

    def ulysses_size(self, role: str) -> int:
        """Return how many ranks of a role compute the same rows."""
        return {
            "actor": self.actor.ulysses_sequence_parallel_size,
            "critic": self.critic.ulysses_sequence_parallel_size,
            "reference": self.reference.ulysses_sequence_parallel_size,
            "reward": self.reward.reward_model.ulysses_sequence_parallel_size,
        }.get(role, 1)

    def fsdp_config(self, role: str) -> FsdpConfig:
        """Return how a role of several ranks shards its model."""
        return {
            "actor": self.actor.fsdp_config,
            "critic": self.critic.model.fsdp_config,
            "reference": self.reference.fsdp_config,
            "reward": self.reward.reward_model.model.fsdp_config,
        }.get(role, FsdpConfig())

    def with_dtypes(self, device: str) -> Self:
        """Return this job with each dtype that is auto decided for cuda (Ampere or newer) or cpu."""

        def decided(section: Config, *names: str) -> Config:
            inner = getattr(section, names[0])
            found = decided(inner, *names[1:]) if names[1:] else chosen_dtype(inner, ".".join(names), device)
            return section if found == inner else section.model_copy(update={names[0]: found})

        job: Config = self
        for key in DTYPE_KEYS:
            job = decided(job, *key.split("."))
        assert isinstance(job, type(self))
        return job

    def max_tokens_key(self, role: str) -> str:
        """Return the key of `max_tokens`, for messages."""
        stem = "log_prob" if role == "reference" else "ppo"
        return f"{role}.{stem}_max_token_len_per_gpu"

    def _model(self, model: M) -> M:
        actor = self.actor.model
        same = {"path": actor.path, "revision": actor.revision}
        return model if model.path else model.model_copy(update=same)


KEY_FACTS = key_facts(JobSections)  # of every dotted key; a key without facts ends the import here
