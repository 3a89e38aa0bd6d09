"""The sections actor, reference and critic: what is trained, and the policy of the KL penalty."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rolemesh.catalog.policy_losses import POLICY_LOSSES, PolicyLossSpec
from rolemesh.config.base import Config, name_in, options_of
from rolemesh.config.key_facts import FREE, REFUSED, WARNED, Key
from rolemesh.config.model import (
    CriticModelConfig,
    CriticOptimConfig,
    FrozenModelConfig,
    FsdpConfig,
    OptimConfig,
    PolicyModelConfig,
    TrainedFsdpConfig,
    Ulysses,
)

KLPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class PolicyLossConfig(Config):
    loss_mode: Annotated[str, name_in(POLICY_LOSSES)] = Key(
        "vanilla",
        WARNED,
        description="the policy loss per token; vanilla: PPO's clipped loss with the dual clip",
    )
    options: Annotated[dict[str, Any], options_of(POLICY_LOSSES, "loss_mode")] = Key(
        {}, WARNED, description="options of a plug-in's policy loss"
    )
    clip_cov_ratio: float = Key(
        0.0002, WARNED, gt=0, le=1, description="clip_cov: share of a mini-batch's tokens whose loss is dropped"
    )
    clip_cov_lb: float = Key(
        1.0, WARNED, description="clip_cov: only tokens with a covariance above this are dropped"
    )
    clip_cov_ub: float = Key(
        5.0, WARNED, description="clip_cov: only tokens with a covariance below this are dropped"
    )
    kl_cov_ratio: float = Key(
        0.0002, WARNED, gt=0, le=1, description="kl_cov: share of a mini-batch's tokens with a KL penalty"
    )
    ppo_kl_coef: float = Key(0.1, WARNED, ge=0, description="kl_cov: weight of that KL penalty")
    dpo_beta: float = Key(
        0.1, WARNED, gt=0, description="dpo, dpo_norm, ipo: how close to the reference; IPO's tau"
    )
    dro_beta: float | None = Key(
        None, WARNED, gt=0, description="dro: weight of the squared log-ratio, required for dro; 0.05 is usual"
    )

    @model_validator(mode="after")
    def _dro_has_a_weight(self) -> "PolicyLossConfig":
        if "dro_beta" in POLICY_LOSSES[self.loss_mode].keys and self.dro_beta is None:
            raise ValueError(f"loss_mode is {self.loss_mode}, but dro_beta is not set; 0.05 is usual")
        return self

    @model_validator(mode="after")
    def _covariances_lie_between(self) -> "PolicyLossConfig":
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb {self.clip_cov_lb:g} is not below clip_cov_ub {self.clip_cov_ub:g}")
        return self


class ActorConfig(Config):
    model: PolicyModelConfig = PolicyModelConfig()
    head_dtype: Literal["model", "float32"] = Key(
        "model",
        WARNED,
        read_by=("rollout", "reference"),
        description="type of the policy's logits in actor, reference and rollout; float32 leaves them "
        "unrounded, so that actor and engine agree more closely; model: the dtype of each",
    )
    optim: OptimConfig = OptimConfig()
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()
    ulysses_sequence_parallel_size: Ulysses = Key(1, FREE)
    ppo_mini_batch_size: int = Key(
        256,
        WARNED,
        read_by=("critic",),
        gt=0,
        description="prompts per optimizer step, with rollout.n rows each; must divide data.train_batch_size",
    )
    ppo_micro_batch_size_per_gpu: int = Key(
        8, FREE, gt=0, description="rows per forward and backward pass; affects memory, never the result"
    )
    use_dynamic_bsz: bool = Key(
        False,
        FREE,
        read_by=("reference", "critic"),
        description="fill each pass up to ppo_max_token_len_per_gpu tokens; false: a fixed number of rows",
    )
    ppo_max_token_len_per_gpu: int = Key(
        16384,
        FREE,
        read_by=("reference", "critic"),
        gt=0,
        description="use_dynamic_bsz: maximum tokens per pass; padding counts if model.use_remove_padding is "
        "false",
    )
    ppo_epochs: int = Key(1, WARNED, gt=0, description="passes over each batch")
    shuffle: bool = Key(False, WARNED, description="shuffle the rows in every pass")
    clip_ratio: float = Key(
        0.2, WARNED, gt=0, description="PPO's clip range epsilon; dppo losses: the allowed divergence"
    )
    clip_ratio_low: float | None = Key(None, WARNED, gt=0, description="lower clip range; null: clip_ratio")
    clip_ratio_high: float | None = Key(None, WARNED, gt=0, description="upper clip range; null: clip_ratio")
    clip_ratio_c: float = Key(
        3.0,
        WARNED,
        gt=1,
        description="dual clip: the loss is at most -clip_ratio_c * A where A < 0; dppo: upper bound of the "
        "ratio",
    )
    tau_pos: float = Key(
        1.0, WARNED, gt=0, description="sapo: temperature of the gate where A > 0; larger is sharper"
    )
    tau_neg: float = Key(1.05, WARNED, gt=0, description="sapo: temperature of the gate elsewhere")
    loss_agg_mode: LossAggMode = Key(
        "token-mean",
        WARNED,
        description="how the losses of tokens are aggregated; sapo and geo_mean always use seq-mean-token-mean",
    )
    loss_scale_factor: int | None = Key(
        None, WARNED, gt=0, description="divisor of seq-mean-token-sum-norm; null: data.max_response_length"
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = Key(0.0, WARNED, description="weight of the entropy bonus; 0: no bonus")
    use_kl_loss: bool = Key(False, WARNED, description="add kl_loss_coef * KL(actor, reference) to the loss")
    kl_loss_coef: float = Key(
        0.001, WARNED, counts_if="actor.use_kl_loss", ge=0, description="weight of that KL"
    )
    kl_loss_type: KLPenalty = Key(
        "low_var_kl",
        WARNED,
        counts_if="actor.use_kl_loss",
        description="the estimator of that KL: kl = k1, abs, mse = k2, low_var_kl = k3; with + the gradient is "
        "k2's",
    )
    grad_clip: float = Key(
        1.0, WARNED, gt=0, description="maximum norm of the gradient; larger ones are scaled down"
    )
    seed: int = Key(
        42, WARNED, description="seed of the shuffle, of the tokens that clip_cov selects, and of a new adapter"
    )

    @model_validator(mode="after")
    def _ratio_is_held_above_zero(self) -> "ActorConfig":
        if self.loss.clips_below and self.clip_low >= 1:
            raise ValueError(
                f"the lower clip range is {self.clip_low:g} (clip_ratio_low, or clip_ratio if that is null), "
                "but "
                f"loss_mode {self.policy_loss.loss_mode} clips the ratio at 1 minus it; set it below 1"
            )
        return self

    @property
    def loss(self) -> PolicyLossSpec:
        """The declaration of policy_loss.loss_mode."""
        return POLICY_LOSSES[self.policy_loss.loss_mode]

    def values_of(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of keys of this section or of policy_loss, by name."""
        return {key: getattr(self if hasattr(self, key) else self.policy_loss, key) for key in keys}

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ReferenceConfig(Config):
    model: FrozenModelConfig = FrozenModelConfig()
    fsdp_config: FsdpConfig = FsdpConfig()
    ulysses_sequence_parallel_size: Ulysses = Key(1, FREE)
    log_prob_micro_batch_size_per_gpu: int = Key(8, FREE, gt=0, description="rows per forward pass")
    log_prob_use_dynamic_bsz: bool | None = Key(
        None,
        FREE,
        description="fill each pass up to log_prob_max_token_len_per_gpu tokens; null: actor.use_dynamic_bsz",
    )
    log_prob_max_token_len_per_gpu: int | None = Key(
        None, FREE, gt=0, description="maximum tokens per pass; null: actor.ppo_max_token_len_per_gpu"
    )


# If one of these is null, JobConfig fills in the actor's value, so that config.yaml and every reader see it.
FOLLOWS_ACTOR = ("ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")


class CriticConfig(Config):
    enable: bool | None = Key(
        None,
        REFUSED,
        description="whether the job has a critic; null: if the estimator or the page needs one; the chart "
        "requires it if a plug-in's estimator or page decides this",
    )
    model: CriticModelConfig = Field(
        CriticModelConfig(), description="a causal LM or a reward model; an empty path: the actor's"
    )
    ulysses_sequence_parallel_size: Ulysses = Key(1, FREE)
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: int | None = Key(
        None,
        WARNED,
        gt=0,
        description="prompts per optimizer step, with rollout.n rows each; null: the actor's",
    )
    ppo_micro_batch_size_per_gpu: int = Key(8, FREE, gt=0, description="rows per forward and backward pass")
    use_dynamic_bsz: bool | None = Key(
        None,
        FREE,
        description="fill each pass up to ppo_max_token_len_per_gpu tokens; null: actor.use_dynamic_bsz",
    )
    ppo_max_token_len_per_gpu: int = Key(32768, FREE, gt=0, description="maximum tokens per pass")
    ppo_epochs: int | None = Key(None, WARNED, gt=0, description="passes over each batch; null: the actor's")
    shuffle: bool | None = Key(None, WARNED, description="shuffle the rows in every pass; null: the actor's")
    cliprange_value: float = Key(
        0.5, WARNED, gt=0, description="clip range of the value loss: distance of a value from the old one"
    )
    loss_agg_mode: LossAggMode | None = Key(
        None, WARNED, description="how the losses of tokens are aggregated; null: the actor's"
    )
    loss_scale_factor: int | None = Key(
        None, WARNED, gt=0, description="divisor of seq-mean-token-sum-norm; null: the actor's"
    )
    grad_clip: float = Key(
        1.0, WARNED, gt=0, description="maximum norm of the gradient; larger ones are scaled down"
    )
    seed: int = Key(42, WARNED, description="seed of a new value head and of the shuffle")

    @model_validator(mode="before")
    @classmethod
    def _is_trained_whole(cls, data: Any) -> Any:
        model = data.get("model") if isinstance(data, Mapping) else None
        if isinstance(model, Mapping) and model.get("lora_rank"):
            raise ValueError(
                f"critic.model.lora_rank is {model['lora_rank']}, but only the actor can train an adapter "
                "(actor.model.lora_rank); leave it out"
            )
        return data
