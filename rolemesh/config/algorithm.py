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


class AlgorithmConfig(Config):
    adv_estimator: Literal["gae", "grpo"] = Field("gae", description="chooses the page: gae is PPO")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda")
    norm_adv_by_std_in_grpo: bool = Field(True, description="false is Dr. GRPO")
    use_kl_in_reward: bool = Field(False, description="token rewards lose kl_coef * KL(actor, reference)")
    kl_penalty: KLPenalty = Field("kl", description="the estimator of that KL")
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
