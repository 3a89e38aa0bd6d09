"""Pages: one step of an algorithm, as the order of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class PageSpec(Declaration):
    """A page: `async def page(prompts, roles, step) -> Metrics`, where prompts are a batch of the data set.

    Args:
        roles: the roles that it calls with every estimator.
        learns_from: the data set's rows have "prompts", which the rollouts answer; or also "responses"; or
            "pairs" of responses, of which one was chosen.
        losses: the policy losses that it trains with: the one that actor.policy_loss.loss_mode names, or the
            first. No other page has them. Empty: any that no page has.
        answers_greedily: it has each prompt answered once more, greedily.
        resamples: it trains on rows that algorithm.use_pf_ppo draws.
        filters: it drops groups whose answers are equal: a job with algorithm.filter_groups takes it.
    """

    kind: ClassVar[str] = "page"

    roles: tuple[str, ...] = ("actor", "rollout", "reward")
    learns_from: Literal["prompts", "responses", "pairs"] = "prompts"
    losses: tuple[str, ...] = ()
    answers_greedily: bool = False
    resamples: bool = False
    filters: bool = False

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("prompts", "roles", "step"), ()


STEPS = "rolemesh.services.controller.pages"

PAGES = Catalog(
    PageSpec,
    PageSpec(
        name="ppo",
        code=f"{STEPS}.ppo:ppo_step",
        roles=("actor", "rollout", "reward", "critic"),
        resamples=True,
        meaning="generate, score, learn with a critic",
    ),
    PageSpec(name="grpo", code=f"{STEPS}.grpo:grpo_step", meaning="generate, score, learn without a critic"),
    PageSpec(
        name="remax",
        code=f"{STEPS}.remax:remax_step",
        answers_greedily=True,
        meaning="generate by sampling and greedily, score both, learn from the difference",
    ),
    PageSpec(
        name="dapo",
        code=f"{STEPS}.dapo:dapo_step",
        filters=True,
        meaning="answer until there are enough groups whose answers differ",
    ),
    PageSpec(
        name="sft",
        code=f"{STEPS}.sft:sft_step",
        roles=("actor",),
        learns_from="responses",
        losses=("sft",),
        meaning="learn the responses of the data set",
    ),
    PageSpec(
        name="dpo",
        code=f"{STEPS}.dpo:dpo_step",
        roles=("actor", "reference"),
        learns_from="pairs",
        losses=("dpo", "dpo_norm", "ipo"),
        meaning="learn which of two responses of the data set was preferred",
    ),
)
