"""The section algorithm: advantages, the KL penalty, and the order of a step."""

from typing import Annotated, Any, Literal

from pydantic import model_validator

from rolemesh.catalog.estimators import BY_COMPONENTS, ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.config.actor import KLPenalty
from rolemesh.config.base import Config, name_in, options_of
from rolemesh.config.key_facts import DERIVED, FREE, REFUSED, WARNED, Key, Section
from rolemesh.config.rollout_correction import RolloutCorrectionConfig


class KLControlConfig(Config):
    type: Literal["fixed", "adaptive"] = Key(
        "fixed", WARNED, description="fixed: beta stays kl_coef; adaptive: beta is adapted to reach target_kl"
    )
    kl_coef: float = Key(
        0.001,
        WARNED,
        counts_if="algorithm.use_kl_in_reward",
        ge=0,
        description="beta, the weight of the KL; adaptive: its initial value",
    )
    horizon: int = Key(
        10000,
        WARNED,
        counts_if="algorithm.use_kl_in_reward",
        gt=0,
        description="adaptive: samples over which beta adapts; larger is slower",
    )
    target_kl: float = Key(
        0.1,
        WARNED,
        counts_if="algorithm.use_kl_in_reward",
        gt=0,
        description="adaptive: the target KL, in nats per token",
    )


class FilterGroupsConfig(Config):
    """Dynamic sampling (DAPO, arXiv:2503.14476): prompts whose answers are all equally good are replaced by
    others."""

    enable: bool = Key(
        False,
        DERIVED,
        read_by=("actor", "rollout", "reference"),
        description="answer more prompts until the batch is full of groups whose answers differ",
    )
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = Key(
        "acc",
        REFUSED,
        counts_if="algorithm.filter_groups.enable",
        description="what must differ: acc: correctness; the others: the reward",
    )
    max_num_gen_batches: int = Key(
        0,
        FREE,
        ge=0,
        description="maximum batches of data.gen_batch_size prompts per step, after which it fails; 0: no "
        "limit",
    )

    @model_validator(mode="after")
    def _limits_what_is_on(self) -> "FilterGroupsConfig":
        if self.max_num_gen_batches and not self.enable:
            raise ValueError(
                f"max_num_gen_batches is {self.max_num_gen_batches}, but enable is false, so a step takes one "
                "batch; set enable to true, or max_num_gen_batches to 0"
            )
        return self


class PFPPOConfig(Config):
    """PF-PPO (arXiv:2409.06957): rows to train on are drawn with weights from their scores."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Key(
        "pow",
        WARNED,
        counts_if="algorithm.use_pf_ppo",
        description="pow: weight |score|**weight_pow; max_min: 1 for the best and the worst score, else 0; "
        "max_random: 0.4 for the best, else 0.1",
    )
    weight_pow: float = Key(
        2.0, WARNED, counts_if="algorithm.use_pf_ppo", gt=0, description="pow: the exponent"
    )


class AlgorithmConfig(Config):
    adv_estimator: Annotated[str, name_in(ESTIMATORS)] = Key(
        "gae",
        REFUSED,
        read_by=("actor", "rollout", "reference", "reward"),
        description="how advantages are computed; gae is PPO",
    )
    options: Annotated[dict[str, Any], options_of(ESTIMATORS, "adv_estimator")] = Key(
        {}, REFUSED, description="options of a plug-in's estimator"
    )
    page: Annotated[str | None, name_in(PAGES)] = Key(
        None,
        REFUSED,
        read_by=("actor", "rollout", "reference"),
        description="the page, which is the order of a step's calls; null: dapo with filter_groups.enable, "
        "else the "
        "estimator's",
    )
    page_options: Annotated[dict[str, Any], options_of(PAGES, "page")] = Key(
        {}, REFUSED, description="options of a plug-in's page"
    )
    gamma: float = Key(1.0, WARNED, ge=0, le=1, description="discount factor of rewards; 1: no discount")
    lam: float = Key(1.0, WARNED, ge=0, le=1, description="gae: lambda")
    norm_adv_by_std_in_grpo: bool = Key(
        True, WARNED, description="divide by the standard deviation of the group's rewards; false is Dr. GRPO"
    )
    gdpo_reward_keys: tuple[str, ...] = Key(
        (),
        REFUSED,
        read_by=("reward",),
        description="gdpo: components of the reward, keys of the dict that compute_score returns",
    )
    gdpo_reward_weights: tuple[float, ...] | None = Key(
        None, REFUSED, description="gdpo: one weight for each component; null: all 1"
    )
    egpo_lambda: float = Key(0.4, WARNED, ge=0, description="egpo: weight of the entropy bonus")
    egpo_alpha: float = Key(
        2.0,
        WARNED,
        gt=0,
        description="egpo: the entropy is clipped to ± |A| / egpo_alpha before it is weighted",
    )
    use_kl_in_reward: bool = Key(
        False,
        WARNED,
        description="subtract kl_ctrl.kl_coef * KL(actor, reference) from the reward of each token",
    )
    kl_penalty: KLPenalty = Key(
        "kl",
        WARNED,
        counts_if="algorithm.use_kl_in_reward",
        description="the estimator of that KL; the same names as actor.kl_loss_type",
    )
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = Section(RolloutCorrectionConfig(), read_by=("actor",))
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    use_pf_ppo: bool = Key(False, WARNED, description="train on rows drawn by their scores (PF-PPO); with gae")
    pf_ppo: PFPPOConfig = PFPPOConfig()

    @model_validator(mode="after")
    def _adaptive_kl_is_weighed(self) -> "AlgorithmConfig":
        if self.kl_ctrl.type == "adaptive" and not self.use_kl_in_reward:
            raise ValueError(
                "kl_ctrl.type is adaptive, but use_kl_in_reward is false, so there is no KL to control "
                "(actor.kl_loss_coef is fixed); set kl_ctrl.type to fixed, or use_kl_in_reward to true"
            )
        if self.kl_ctrl.type == "adaptive" and not self.kl_ctrl.kl_coef:
            raise ValueError(
                "kl_ctrl.type is adaptive, but kl_ctrl.kl_coef is 0, and a multiple of 0 stays 0; set kl_coef "
                "above 0, or type to fixed"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_has_components(self) -> "AlgorithmConfig":
        keys = self.gdpo_reward_keys
        weights = self.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights has {len(weights)} numbers, but gdpo_reward_keys has {len(keys)} "
                "components; give each component one weight"
            )
        if len(set(keys)) < len(keys):
            raise ValueError(f"gdpo_reward_keys names a component twice: {', '.join(keys)}")
        if BY_COMPONENTS not in ESTIMATORS[self.adv_estimator].reads:
            return self
        if not keys:
            raise ValueError(
                f"adv_estimator is {self.adv_estimator}, but gdpo_reward_keys is empty; name the components of "
                "the reward, keys of the dict that compute_score returns"
            )
        if self.use_kl_in_reward:
            raise ValueError(
                f"use_kl_in_reward subtracts the KL from the reward, but adv_estimator {self.adv_estimator} "
                "uses only the reward's components; set actor.use_kl_loss instead"
            )
        return self
