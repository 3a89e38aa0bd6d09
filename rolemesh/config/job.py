"""The job file as a whole, and what its sections must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from rolemesh.config.actor import ActorConfig, ReferenceConfig
from rolemesh.config.algorithm import COMPARING, AlgorithmConfig
from rolemesh.config.base import Config, explain, merge, parse_overrides
from rolemesh.config.critic import FOLLOWS_ACTOR, CriticConfig
from rolemesh.config.data import DataConfig
from rolemesh.config.effects import IdleKey, idle_keys, without
from rolemesh.config.model import JudgingModelConfig, ModelConfig, TrainedModelConfig
from rolemesh.config.placement import ROLES, PlacementConfig, num_replicas, place
from rolemesh.config.reward import RewardConfig
from rolemesh.config.rollout import RolloutConfig
from rolemesh.config.trainer import TrainerConfig
from rolemesh.config.yaml_file import read_yaml, to_yaml
from rolemesh.errors import InvalidConfig

M = TypeVar("M", bound=ModelConfig)


class JobConfig(Config):
    """One job: what the YAML file, the command line's overrides and the chart's `job:` value say."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = Field(PlacementConfig(), description="how the roles share devices")

    @field_validator("critic")
    @classmethod
    def _critic_follows_the_actor(cls, critic: CriticConfig, info: ValidationInfo) -> CriticConfig:
        actor = info.data.get("actor")  # absent where it is in error itself
        unset = [key for key in FOLLOWS_ACTOR if actor and getattr(critic, key) is None]
        values = dict(critic) | {key: getattr(actor, key) for key in unset}
        return CriticConfig.model_construct(critic.model_fields_set, **values)  # the job file set no more

    @model_validator(mode="after")
    def _sections_agree(self) -> JobConfig:
        self._check_batches()
        self._check_schedules()
        self._check_estimator()
        self._check_greedy()
        for key in ("prompt_length", "response_length"):
            own, common = getattr(self.rollout, key), getattr(self.data, f"max_{key}")
            if own not in (None, common):
                raise ValueError(
                    f"rollout.{key} is {own} and data.max_{key} {common}; the latter holds everywhere"
                )
        overlong, longest = self.reward.overlong_buffer, self.data.max_response_length
        if overlong.enable and overlong.len > longest:
            raise ValueError(
                f"reward.overlong_buffer.len is {overlong.len} and data.max_response_length {longest}: the "
                "buffer is the last part of a response; make it smaller"
            )
        if self.trainer.resume_mode == "resume_path" and not self.trainer.resume_from_path:
            raise ValueError("trainer.resume_mode is resume_path and trainer.resume_from_path is not set")
        self._check_dynamic_sampling()
        self._check_adapter()
        self._check_bypass()
        self._check_groups()
        return self

    def _check_batches(self) -> None:
        trained = {"actor": (self.actor.ppo_mini_batch_size, self.actor.ppo_micro_batch_size_per_gpu)}
        if self.uses_critic:
            trained["critic"] = (self.critic_mini_batch_size, self.critic.ppo_micro_batch_size_per_gpu)
        for role, (prompts, micro) in trained.items():
            mini = prompts * self.rollout.n
            if self.data.train_batch_size % prompts:
                raise ValueError(
                    f"data.train_batch_size {self.data.train_batch_size} does not divide into mini-batches "
                    f"of {role}.ppo_mini_batch_size {prompts}"
                )
            if mini % micro and self.max_tokens(role) is None:
                raise ValueError(
                    f"{role}.ppo_mini_batch_size is {prompts}, so a mini-batch has {mini} rows (rollout.n is "
                    f"{self.rollout.n}), and these do not divide into micro-batches of "
                    f"{role}.ppo_micro_batch_size_per_gpu {micro} rows"
                )
        longest = self.data.max_prompt_length + self.data.max_response_length
        for role in ("actor", "critic", "reference"):
            budget = self.max_tokens(role)
            if role in self.roles and budget is not None and budget < longest:
                raise ValueError(
                    f"{self.max_tokens_key(role)} is {budget}, and a row may have {longest} tokens "
                    "(data.max_prompt_length and data.max_response_length); set it to that or more"
                )

    def _check_schedules(self) -> None:
        if self.trainer.total_training_steps is not None:
            return
        trained = {"actor": self.actor.optim} | ({"critic": self.critic.optim} if self.uses_critic else {})
        for role, optim in trained.items():
            if key := optim.depends_on_total:
                raise ValueError(
                    f"{role}.optim.{key} is {getattr(optim, key)}, which depends on the number of all steps, "
                    "and trainer.total_training_steps is not set; set it"
                )

    def _check_estimator(self) -> None:
        estimator = self.algorithm.adv_estimator
        if estimator in COMPARING and self.rollout.n == 1:
            raise ValueError(
                f"algorithm.adv_estimator {estimator} compares the responses to one prompt, and rollout.n is "
                "1; set rollout.n to 2 or more"
            )
        own = [key for key in self.algorithm.gdpo_reward_keys if key not in ("score", "acc")]
        if estimator == "gdpo" and own and self.reward.custom_reward_function.path is None:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {own[0]}, which only a function of yours could tell, and "
                "reward.custom_reward_function.path is not set; name your file"
            )
        if estimator == "gdpo" and self.reward.overlong_buffer.enable:
            raise ValueError(
                "reward.overlong_buffer.enable is true and takes from the score, and algorithm.adv_estimator "
                "gdpo learns from the components alone; set enable to false; one of these may be length"
            )
        if estimator in ("egpo", "optimal_token_baseline") and self.algorithm.rollout_correction.bypass_mode:
            raise ValueError(
                f"algorithm.adv_estimator {estimator} reads what the actor says of its distributions before "
                "the update, and algorithm.rollout_correction.bypass_mode leaves that call out; set it to false"
            )
        if self.trainer.critic_warmup and not self.uses_critic:
            raise ValueError(
                f"trainer.critic_warmup is {self.trainer.critic_warmup}, and a job with "
                f"algorithm.adv_estimator {estimator} has no critic; set it to 0"
            )

    def _check_greedy(self) -> None:
        estimator, rollout = self.algorithm.adv_estimator, self.rollout
        reasons = {
            "do_sample is false": not rollout.do_sample,
            "temperature is 0": rollout.temperature == 0,
            "top_k is 1": rollout.top_k == 1,
        }
        by_group = rollout.n > 1 and estimator == "reinforce_plus_plus_baseline"
        learners = {
            f"algorithm.adv_estimator {estimator}": estimator in (*COMPARING, "remax") or by_group,
            "algorithm.filter_groups.enable": self.algorithm.filter_groups.enable,
        }
        found = [[text for text, holds in each.items() if holds] for each in (reasons, learners)]
        if all(found):
            raise ValueError(
                f"rollout.{found[0][0]}, so all answers to a prompt are the same, and {found[1][0]} learns "
                "from how they differ; set do_sample to true, temperature above 0 and top_k to -1"
            )

    def _check_adapter(self) -> None:
        model, other = self.actor.model, self.reference.model.path
        if model.lora_adapter_path and not model.lora_rank:
            raise ValueError(
                f"actor.model.lora_adapter_path is {model.lora_adapter_path} and actor.model.lora_rank 0; set "
                "lora_rank to the adapter's rank"
            )
        if self.ref_in_actor and other not in ("", model.path):
            raise ValueError(
                f"reference.model.path is {other}, and with actor.model.lora_rank {model.lora_rank} the "
                "reference policy is the actor with its adapter off; leave the one or the other out"
            )
        own = self.reference.model
        if self.ref_in_actor and "dtype" in own.model_fields_set and own.dtype != model.dtype:
            raise ValueError(
                f"reference.model.dtype is {own.dtype}, and with actor.model.lora_rank {model.lora_rank} the "
                f"reference policy is the actor, whose dtype is {model.dtype}; leave the former out"
            )

    def _check_dynamic_sampling(self) -> None:
        algorithm, data = self.algorithm, self.data
        if algorithm.use_pf_ppo and algorithm.adv_estimator != "gae":
            raise ValueError(
                "algorithm.use_pf_ppo draws rows by their scores for PPO, and algorithm.adv_estimator is "
                f"{algorithm.adv_estimator}; set use_pf_ppo to false, or adv_estimator to gae"
            )
        if not algorithm.filter_groups.enable:
            if data.prompts_at_once != data.train_batch_size:
                raise ValueError(
                    f"data.gen_batch_size is {data.gen_batch_size} and data.train_batch_size "
                    f"{data.train_batch_size}: without algorithm.filter_groups.enable a step learns from all "
                    "that it answers; set that, or leave gen_batch_size out"
                )
            return
        if self.rollout.n == 1:
            raise ValueError(
                "algorithm.filter_groups.enable leaves out prompts whose answers do not differ, and rollout.n "
                "is 1; set rollout.n to 2 or more"
            )
        if algorithm.adv_estimator in ("gae", "remax"):
            raise ValueError(
                "algorithm.filter_groups.enable is for estimators that compare the answers to one prompt, and "
                f"algorithm.adv_estimator is {algorithm.adv_estimator}; set adv_estimator to grpo"
            )
        if algorithm.filter_groups.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
            raise ValueError(
                "algorithm.filter_groups.metric is seq_final_reward and algorithm.use_kl_in_reward true: with "
                "the KL taken off no two rewards are equal, and no group would be left out; set metric to "
                "seq_reward"
            )
        if algorithm.filter_groups.metric == "score" and self.reward.overlong_buffer.enable:
            raise ValueError(
                "algorithm.filter_groups.metric is score and reward.overlong_buffer.enable true: the score "
                "without the punishment is not kept; set metric to acc, or to seq_reward, which has it"
            )
        if self.rollout.mode == "async" and self.trainer.max_staleness > 0:
            raise ValueError(
                "algorithm.filter_groups.enable: how many prompts a step takes is not known before they are "
                "answered, and rollout.mode async would answer those of later steps; set rollout.mode to "
                "sync, or trainer.max_staleness to 0"
            )
        if self.trainer.total_training_steps is None:
            raise ValueError(
                "algorithm.filter_groups.enable: how many steps trainer.total_epochs holds is not known before "
                "the prompts are answered; set trainer.total_training_steps"
            )

    def _check_bypass(self) -> None:
        bypasses, loss_mode = self.algorithm.rollout_correction.bypass_mode, self.actor.policy_loss.loss_mode
        if loss_mode == "bypass" and not bypasses:
            raise ValueError(
                "actor.policy_loss.loss_mode is bypass and algorithm.rollout_correction.bypass_mode false; set "
                "bypass_mode to true, or loss_mode to vanilla"
            )
        if bypasses and loss_mode not in ("vanilla", "bypass"):
            raise ValueError(
                "algorithm.rollout_correction.bypass_mode is true, which has a loss of its own (loss_type), "
                f"and actor.policy_loss.loss_mode is {loss_mode}; set loss_mode to bypass, or bypass_mode to "
                "false"
            )

    def _check_groups(self) -> None:
        for group, members in self.groups.items():
            sharing = [role for role in members if self.on_device(role)]
            is_ahead = self.rollout.mode == "async" and self.trainer.max_staleness > 0
            if is_ahead and "rollout" in sharing and len(sharing) > 1:
                raise ValueError(
                    f"rollout.mode is async, and rollout shares the device of group {group} with "
                    f"{', '.join(role for role in sharing if role != 'rollout')}: a stream keeps its turn to "
                    "its end, so nothing would run beside it; give rollout a group of its own "
                    "(placement.strategy), or set rollout.mode to sync"
                )

    # ------------------------------------------------------- what roles the job has

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """A job that weighs no KL has no reference policy: nothing is loaded, computed or sent."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def ref_in_actor(self) -> bool:
        """The reference policy is the actor with its adapter off, and no role of its own."""
        return self.uses_reference and self.actor.model.lora_rank > 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this job, in the order in which they are started."""
        wanted = {"reference": self.uses_reference and not self.ref_in_actor, "critic": self.uses_critic}
        return tuple(role for role in ROLES if wanted.get(role, True))

    # ------------------------------------------------------------ where they run

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """What placement makes of this job's roles: those of a group share a process and take turns on its
        device."""
        return place(self.placement, self.roles)

    def num_replicas(self, group: str) -> int:
        """Processes of a group."""
        return num_replicas(self.placement, group, self.groups[group])

    def on_device(self, role: str) -> bool:
        """A reward by rules, and a rollout that is other servers, have nothing there and wait for no turn."""
        elsewhere = {"reward": not self.reward.reward_model.enable, "rollout": self.rollout.name == "openai"}
        return not elsewhere.get(role, False)

    # --------------------------------------------------------------- derived values

    @property
    def run_dir(self) -> Path:
        return Path(self.trainer.default_local_dir or f"outputs/{self.trainer.experiment_name}").absolute()

    def profile_dir(self, step: int) -> Path:
        """What trainer.profile_steps asks for of a step (docs/profiling.md)."""
        return self.run_dir / "profile" / f"step_{step}"

    @property
    def reference_model(self) -> JudgingModelConfig:
        return self._model(self.reference.model)

    @property
    def critic_model(self) -> TrainedModelConfig:
        return self._model(self.critic.model)

    @property
    def critic_mini_batch_size(self) -> int:
        """In prompts."""
        return self.critic.ppo_mini_batch_size or self.actor.ppo_mini_batch_size

    def max_tokens(self, role: str) -> int | None:
        """Tokens in a pass of actor, critic or reference; None where passes have a fixed number of rows."""
        actor, critic, reference = self.actor, self.critic, self.reference
        own, budget = {
            "actor": (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
            "critic": (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu),
            "reference": (reference.log_prob_use_dynamic_bsz, reference.log_prob_max_token_len_per_gpu),
        }[role]
        if not (actor.use_dynamic_bsz if own is None else own):
            return None
        return actor.ppo_max_token_len_per_gpu if budget is None else budget

    def max_tokens_key(self, role: str) -> str:
        """The key that says so."""
        stem = "log_prob" if role == "reference" else "ppo"
        return f"{role}.{stem}_max_token_len_per_gpu"

    def _model(self, model: M) -> M:
        return model if model.path else model.model_copy(update={"path": self.actor.model.path})

    def idle_keys(self) -> tuple[IdleKey, ...]:
        """The keys that have no effect in this job."""
        overruled = {}
        if self.ref_in_actor:
            overruled["reference"] = (
                "with actor.model.lora_rank the reference is the actor with its adapter off"
            )
        if self.rollout.name == "openai":
            overruled["rollout.free_cache_engine"] = "the servers of engine openai keep their memory"
        if self.trainer.resume_mode != "resume_path":
            overruled["trainer.resume_from_path"] = f"trainer.resume_mode is {self.trainer.resume_mode}"
        return tuple(idle_keys(self, overruled))

    def to_yaml(self) -> str:
        """The resolved job file: every key with its value. Of those that have no effect only what the job file
        sets: a run of the resolved file begins with the same warnings."""
        unset = (idle.key for idle in self.idle_keys() if not idle.is_set)
        return to_yaml(without(self.model_dump(mode="json"), unset))


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job file and lays overrides on it.

    Args:
        path: a YAML file.
        overrides: further YAML files, and `section.key=value`, the value in YAML (parse_overrides).

    Raises:
        InvalidConfig: with every wrong key, where it is, and the nearest right one; or the files are in the
            wrong order; or it is the values of the chart.
    """
    job, over = read_yaml(Path(path)), parse_overrides(overrides)
    if isinstance(job.get("job"), Mapping):
        raise InvalidConfig(
            f"{path} has the section job, as values of the chart rlhf-job do: a job file has what stands in "
            "that section at its top level, and placement beside it; make a file of these two"
        )
    files = [str(path), *(override for override in overrides if "=" not in override)]
    whole = next((file for file in files[1:] if "data" in read_yaml(Path(file))), None)
    if whole and not {"data", "trainer"} & job.keys():
        raise InvalidConfig(
            f"{path} is laid under {whole}, whose keys would win; the job file comes first: {whole} {path}"
        )
    return make_job(merge(job, over), where=", ".join(files))


def make_job(data: dict[str, Any], where: str = "job") -> JobConfig:
    """A job from sections; `where` begins the error's text."""
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        raise explain(error, JobConfig, where) from error
