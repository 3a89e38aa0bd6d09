"""algorithm: advantages and the KL penalty."""

from typing import Literal

from pydantic import Field, model_validator

from rolemesh.config.actor import KLPenalty
from rolemesh.config.base import Config
from rolemesh.config.rollout_correction import RolloutCorrectionConfig

AdvEstimator = Literal[
    "gae", "grpo", "grpo_passk", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "rloo", "opo", "remax", "gpg", "optimal_token_baseline", "egpo",
]  # fmt: skip
# What these know of a response comes from the others to its prompt: one alone would keep its bare reward.
# (reinforce_plus_plus_baseline is not among them: it compares with the batch, too.)
COMPARING = ("grpo", "grpo_passk", "gdpo", "rloo", "opo", "gpg", "optimal_token_baseline", "egpo")


class KLControlConfig(Config):
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0, description="beta, or its first value")
    horizon: int = Field(10000, gt=0, description="adaptive: samples over which beta follows")
    target_kl: float = Field(0.1, gt=0, description="adaptive: the KL that beta steers to")


class FilterGroupsConfig(Config):
    """Dynamic sampling (DAPO, arXiv:2503.14476): the answers to one prompt that are all as good make way for
    those to another one."""

    enable: bool = Field(
        False, description="answer more prompts until the batch is full of groups whose answers differ"
    )
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = Field(
        "acc", description="in what they must differ: whether they are right, or the reward"
    )
    max_num_gen_batches: int = Field(
        0, ge=0, description="batches of data.gen_batch_size that a step may take, then it fails; 0: no limit"
    )

    @model_validator(mode="after")
    def _limits_what_is_on(self) -> "FilterGroupsConfig":
        if self.max_num_gen_batches and not self.enable:
            raise ValueError(
                f"max_num_gen_batches is {self.max_num_gen_batches} and enable false: a step then takes one; "
                "set enable to true, or max_num_gen_batches to 0"
            )
        return self


class PFPPOConfig(Config):
    """PF-PPO (arXiv:2409.06957): rows are drawn anew, by weights of their scores."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        "pow", description="weights: |score|**weight_pow; 1 for best and worst, else 0; 0.4 for best, else 0.1"
    )
    weight_pow: float = Field(2.0, gt=0, description="of pow")


class AlgorithmConfig(Config):
    adv_estimator: AdvEstimator = Field("gae", description="chooses the page: gae is PPO")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda")
    norm_adv_by_std_in_grpo: bool = Field(True, description="false is Dr. GRPO")
    gdpo_reward_keys: tuple[str, ...] = Field(
        (), description="gdpo: components of the reward, keys of the dict that compute_score returns"
    )
    gdpo_reward_weights: tuple[float, ...] | None = Field(None, description="gdpo: theirs; null: all 1")
    egpo_lambda: float = Field(0.4, ge=0, description="egpo: weight of the entropy bonus")
    egpo_alpha: float = Field(2.0, gt=0, description="egpo: the bonus is at most |A| / egpo_alpha")
    use_kl_in_reward: bool = Field(False, description="token rewards lose kl_coef * KL(actor, reference)")
    kl_penalty: KLPenalty = Field("kl", description="the estimator of that KL")
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    use_pf_ppo: bool = Field(False, description="train on rows drawn by their scores (PF-PPO); with gae")
    pf_ppo: PFPPOConfig = PFPPOConfig()

    @model_validator(mode="after")
    def _adaptive_kl_is_weighed(self) -> "AlgorithmConfig":
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            raise ValueError(
                "kl_ctrl.type is adaptive and use_kl_in_reward false, so there is no KL to steer "
                "(actor.kl_loss_coef is fixed); set kl_ctrl.type to fixed, or use_kl_in_reward to true"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_has_components(self) -> "AlgorithmConfig":
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights has {len(weights)} numbers and gdpo_reward_keys {len(keys)} components; "
                "give each component its weight"
            )
        if len(set(keys)) < len(keys):
            raise ValueError(f"gdpo_reward_keys names a component twice: {', '.join(keys)}")
        if self.adv_estimator != "gdpo":
            return self
        if not keys:
            raise ValueError(
                "adv_estimator is gdpo and gdpo_reward_keys is empty: name the components of the reward, "
                "keys of the dict that compute_score returns"
            )
        if self.use_kl_in_reward:
            raise ValueError(
                "use_kl_in_reward takes the KL from the reward, and adv_estimator gdpo learns from its "
                "components alone; set actor.use_kl_loss instead"
            )
        return self
