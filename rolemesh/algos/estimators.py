"""The advantage estimators by the names that `algorithm.adv_estimator` gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rolemesh.algos.advantages import compute_reinforce_plus_plus, compute_remax, compute_whitened_gae
from rolemesh.algos.group_advantages import (
    compute_egpo,
    compute_gdpo,
    compute_gpg,
    compute_grpo,
    compute_grpo_passk,
    compute_opo,
    compute_optimal_token_baseline,
    compute_reinforce_plus_plus_baseline,
    compute_rloo,
)


@dataclass(frozen=True)
class Estimator:
    """How advantages and returns [B, T] are made of a batch.

    Args:
        compute: the formula.
        reads: columns, its positional arguments in their order.
        keys: of the section `algorithm`: keyword arguments of the same names.
        optional: columns that are keyword arguments where the job has them.
    """

    compute: Callable[..., tuple[Tensor, Tensor]]
    reads: tuple[str, ...]
    keys: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


RESPONSE = ("token_level_rewards", "response_mask")
GROUP = (*RESPONSE, "uid")
BY_STD = ("norm_adv_by_std_in_grpo",)

ESTIMATORS = {
    "gae": Estimator(
        compute_whitened_gae, ("token_level_rewards", "values", "response_mask"), ("gamma", "lam")
    ),
    "grpo": Estimator(compute_grpo, GROUP, BY_STD),
    "grpo_passk": Estimator(compute_grpo_passk, GROUP, BY_STD),
    "gdpo": Estimator(
        compute_gdpo,
        ("reward_components", "response_mask", "uid"),
        ("gdpo_reward_keys", "gdpo_reward_weights", *BY_STD),
    ),
    "reinforce_plus_plus": Estimator(compute_reinforce_plus_plus, RESPONSE, ("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(compute_reinforce_plus_plus_baseline, GROUP),
    "rloo": Estimator(compute_rloo, GROUP),
    "opo": Estimator(compute_opo, GROUP),
    "remax": Estimator(compute_remax, (*RESPONSE, "reward_baselines")),
    "gpg": Estimator(compute_gpg, GROUP),
    "optimal_token_baseline": Estimator(
        compute_optimal_token_baseline,
        (*GROUP, "old_log_probs", "sum_pi_squared"),
        optional=("rollout_is_weights",),
    ),
    "egpo": Estimator(compute_egpo, (*GROUP, "entropys", "think_mask"), (*BY_STD, "egpo_lambda", "egpo_alpha")),
}
