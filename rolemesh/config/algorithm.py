"""algorithm: advantages and the KL penalty."""

from typing import Literal

from pydantic import Field

from rolemesh.config.actor import KLPenalty
from rolemesh.config.base import Config


class KLControlConfig(Config):
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0, description="beta, or its first value")
    horizon: int = Field(10000, gt=0, description="adaptive: samples over which beta follows")
    target_kl: float = Field(0.1, gt=0, description="adaptive: the KL that beta steers to")


class RolloutCorrectionConfig(Config):
    """Weights for what the engine drew from another distribution than the trainer's: w = old / rollout."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="weigh the policy loss by w, of each token or of the whole response; null: do not"
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="w is cut there (truncated importance sampling)")


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


class PFPPOConfig(Config):
    """PF-PPO (arXiv:2409.06957): rows are drawn anew, by weights of their scores."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        "pow", description="weights: |score|**weight_pow; 1 for best and worst, else 0; 0.4 for best, else 0.1"
    )
    weight_pow: float = Field(2.0, gt=0, description="of pow")


class AlgorithmConfig(Config):
    adv_estimator: Literal["gae", "grpo"] = Field("gae", description="chooses the page: gae is PPO")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda")
    norm_adv_by_std_in_grpo: bool = Field(True, description="false is Dr. GRPO")
    use_kl_in_reward: bool = Field(False, description="token rewards lose kl_coef * KL(actor, reference)")
    kl_penalty: KLPenalty = Field("kl", description="the estimator of that KL")
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    use_pf_ppo: bool = Field(False, description="train on rows drawn by their scores (PF-PPO); with gae")
    pf_ppo: PFPPOConfig = PFPPOConfig()
