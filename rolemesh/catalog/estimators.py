"""Advantage estimators: how a batch's advantages and returns [B, T] are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration

BY_CRITIC = "values"
BY_GREEDY = "reward_baselines"
BY_COMPONENTS = "reward_components"
BY_GROUP = "uid"
BY_TURN = "turns"
# What only actor.compute_log_probs can tell, which bypass_mode leaves out.
OF_THE_DISTRIBUTION = ("entropys", "sum_pi_squared")


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec(Declaration):
    """An advantage estimator. Its function returns (advantages, returns), both [B, T] float32.

    Args:
        reads: columns, the positional arguments of the function in their order.
        optional: columns that are keyword arguments if the job has them.
        keys: of the section `algorithm`, keyword arguments of the same names.
        compares: an answer's advantage is relative to the other answers to its prompt, so rollout.n must be 2
            or more. (An estimator that also has a baseline of the batch works with 1.)
        page: the page of a job that names none; empty: ppo for an estimator that needs a critic, else grpo.
    """

    kind: ClassVar[str] = "advantage estimator"

    reads: tuple[str, ...]
    optional: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    compares: bool = False
    page: str = ""

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.reads, (*self.keys, *self.optional)

    @property
    def needs_critic(self) -> bool:
        return BY_CRITIC in self.reads

    @property
    def default_page(self) -> str:
        return self.page or ("ppo" if self.needs_critic else "grpo")

    @property
    def needs_distribution(self) -> bool:
        """True if it reads columns of the actor's distributions before the update."""
        return not set(OF_THE_DISTRIBUTION).isdisjoint(self.reads)

    def learns_from_differences(self, num_responses: int) -> bool:
        """True if equal answers to a prompt would teach nothing."""
        return self.compares or BY_GREEDY in self.reads or (BY_GROUP in self.reads and num_responses > 1)


RESPONSE = ("token_level_rewards", "response_mask")
GROUP = (*RESPONSE, BY_GROUP)
BY_STD = ("norm_adv_by_std_in_grpo",)
ALONE = "rolemesh.algos.advantages"
GROUPS = "rolemesh.algos.group_advantages"

ESTIMATORS = Catalog(
    EstimatorSpec,
    EstimatorSpec(
        name="gae",
        code=f"{ALONE}:compute_whitened_gae",
        reads=("token_level_rewards", BY_CRITIC, "response_mask"),
        keys=("gamma", "lam"),
        meaning="PPO's, with a critic",
    ),
    EstimatorSpec(
        name="grpo",
        code=f"{GROUPS}:compute_grpo",
        reads=GROUP,
        keys=BY_STD,
        compares=True,
        meaning="the score relative to the group's mean and deviation",
    ),
    EstimatorSpec(
        name="grpo_by_turn",
        code=f"{GROUPS}:compute_grpo_by_turn",
        reads=(*GROUP, BY_TURN),
        keys=BY_STD,
        compares=True,
        meaning="each turn of a conversation relative to the same turn of the group",
    ),
    EstimatorSpec(
        name="grpo_passk",
        code=f"{GROUPS}:compute_grpo_passk",
        reads=GROUP,
        keys=BY_STD,
        compares=True,
        meaning="the group's best answer relative to its second best",
    ),
    EstimatorSpec(
        name="gdpo",
        code=f"{GROUPS}:compute_gdpo",
        reads=(BY_COMPONENTS, "response_mask", BY_GROUP),
        keys=("gdpo_reward_keys", "gdpo_reward_weights", *BY_STD),
        compares=True,
        meaning="each component of the reward normalised by itself",
    ),
    EstimatorSpec(
        name="reinforce_plus_plus",
        code=f"{ALONE}:compute_reinforce_plus_plus",
        reads=RESPONSE,
        keys=("gamma",),
        meaning="discounted returns, whitened over the batch",
    ),
    EstimatorSpec(
        name="reinforce_plus_plus_baseline",
        code=f"{GROUPS}:compute_reinforce_plus_plus_baseline",
        reads=GROUP,
        meaning="the score less its group's mean, whitened over the batch",
    ),
    EstimatorSpec(
        name="rloo",
        code=f"{GROUPS}:compute_rloo",
        reads=GROUP,
        compares=True,
        meaning="the score less the mean of the group's other answers",
    ),
    EstimatorSpec(
        name="opo",
        code=f"{GROUPS}:compute_opo",
        reads=GROUP,
        compares=True,
        meaning="the score less the group's mean weighted by length",
    ),
    EstimatorSpec(
        name="remax",
        code=f"{ALONE}:compute_remax",
        reads=(*RESPONSE, BY_GREEDY),
        page="remax",
        meaning="the score less the greedy answer's",
    ),
    EstimatorSpec(
        name="gpg",
        code=f"{GROUPS}:compute_gpg",
        reads=GROUP,
        compares=True,
        meaning="the score less the group's mean, scaled by the share of groups that teach",
    ),
    EstimatorSpec(
        name="optimal_token_baseline",
        code=f"{GROUPS}:compute_optimal_token_baseline",
        reads=(*GROUP, "old_log_probs", "sum_pi_squared"),
        optional=("rollout_is_weights",),
        compares=True,
        meaning="a baseline for each token that minimises the gradient's variance",
    ),
    EstimatorSpec(
        name="egpo",
        code=f"{GROUPS}:compute_egpo",
        reads=(*GROUP, "entropys", "think_mask"),
        keys=(*BY_STD, "egpo_lambda", "egpo_alpha"),
        compares=True,
        meaning="grpo with a bonus for entropy while the model thinks",
    ),
)
