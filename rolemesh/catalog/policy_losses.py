"""Policy losses: what the actor minimises for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Code, Declaration


@dataclass(frozen=True, kw_only=True)
class PolicyLossSpec(Declaration):
    """A policy loss. Its function takes log_probs, the columns of `reads` (by default old_log_probs and
    advantages) and response_mask, all [b, T], and returns rolemesh.algos.policy_loss.TokenLosses.

    Args:
        reads: columns of the batch, in addition to response_mask.
        keys: of the sections `actor` and `actor.policy_loss` (and clip_low, clip_high, the ranges that hold),
            keyword arguments of the same names. A key without a value is refused.
        aggregation: in place of actor.loss_agg_mode, if the loss has one of its own.
        choose: a function that picks tokens of the whole mini-batch: covariance.choose_clip_cov and
            choose_kl_cov. The loss gets them as the keyword argument `chosen` [b, T] bool.
        choose_keys: the keyword arguments of `choose`, as `keys`.
        corrects: the loss gets algorithm.rollout_correction as the keyword argument `correction`. A job with
            bypass_mode has such a loss.
        row_weights: the loss is of a row, so a token's importance weight is the row's geometric mean.
        has_ratio: false: later passes over a batch would not see how far the policy has moved.
        clips_below: the loss holds the ratio above 1 - clip_low.
        metric: its name under actor/.
    """

    kind: ClassVar[str] = "policy loss"

    reads: tuple[str, ...] = ("old_log_probs", "advantages")
    keys: tuple[str, ...] = ()
    aggregation: str | None = None
    choose: Code | None = None
    choose_keys: tuple[str, ...] = ()
    corrects: bool = False
    row_weights: bool = False
    has_ratio: bool = True
    clips_below: bool = False
    metric: str = "pg_loss"

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        given = ("chosen",) * (self.choose is not None) + ("correction",) * self.corrects
        return ("log_probs", *self.reads, "response_mask"), (*self.keys, *given)


LOSSES = "rolemesh.algos.policy_loss"
COVARIANCE = "rolemesh.algos.covariance"
RANGE = ("clip_low", "clip_high")
ROWS = "seq-mean-token-mean"
PREFERENCE = "rolemesh.algos.preference"
PAIR = ("ref_log_probs", "contexts")

POLICY_LOSSES = Catalog(
    PolicyLossSpec,
    PolicyLossSpec(
        name="vanilla",
        code=f"{LOSSES}:vanilla_policy_loss",
        keys=(*RANGE, "clip_ratio_c"),
        clips_below=True,
        meaning="PPO's clipped surrogate with the dual clip",
    ),
    PolicyLossSpec(
        name="gpg", code=f"{LOSSES}:gpg_policy_loss", has_ratio=False, meaning="REINFORCE, without a ratio"
    ),
    PolicyLossSpec(
        name="gspo",
        code=f"{LOSSES}:gspo_policy_loss",
        keys=RANGE,
        clips_below=True,
        meaning="PPO's clip on the ratio of the whole response",
    ),
    PolicyLossSpec(
        name="cispo",
        code=f"{LOSSES}:cispo_policy_loss",
        keys=RANGE,
        meaning="clips the weight of log π, so no token loses its gradient",
    ),
    PolicyLossSpec(
        name="sapo",
        code=f"{LOSSES}:sapo_policy_loss",
        keys=("tau_pos", "tau_neg"),
        aggregation=ROWS,
        meaning="a smooth gate in place of the clip",
    ),
    PolicyLossSpec(
        name="clip_cov",
        code=f"{LOSSES}:clip_cov_policy_loss",
        keys=RANGE,
        choose=f"{COVARIANCE}:choose_clip_cov",
        choose_keys=(*RANGE, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        clips_below=True,
        meaning="PPO's clip without a few tokens that cost the most entropy",
    ),
    PolicyLossSpec(
        name="kl_cov",
        code=f"{LOSSES}:kl_cov_policy_loss",
        keys=("ppo_kl_coef",),
        choose=f"{COVARIANCE}:choose_kl_cov",
        choose_keys=("kl_cov_ratio",),
        meaning="a KL penalty on the tokens that cost the most entropy",
    ),
    PolicyLossSpec(
        name="geo_mean",
        code=f"{LOSSES}:geo_mean_policy_loss",
        keys=RANGE,
        aggregation=ROWS,
        row_weights=True,
        meaning="the geometric mean of the response's ratios",
    ),
    PolicyLossSpec(
        name="dppo_tv",
        code=f"{LOSSES}:dppo_tv_policy_loss",
        keys=(*RANGE, "clip_ratio_c"),
        meaning="masks tokens by the total variation that they moved",
    ),
    PolicyLossSpec(
        name="dppo_kl",
        code=f"{LOSSES}:dppo_kl_policy_loss",
        keys=(*RANGE, "clip_ratio_c"),
        meaning="masks tokens by the KL that they moved",
    ),
    PolicyLossSpec(
        name="dro",
        code=f"{LOSSES}:dro_policy_loss",
        keys=("dro_beta",),
        meaning="a quadratic penalty in place of the clip",
    ),
    PolicyLossSpec(
        name="bypass",
        code=f"{LOSSES}:bypass_policy_loss",
        keys=(*RANGE, "clip_ratio_c"),
        corrects=True,
        clips_below=True,
        meaning="two policies: the engine's takes the place of the old one",
    ),
    PolicyLossSpec(
        name="sft",
        code=f"{LOSSES}:supervised_loss",
        reads=(),
        has_ratio=False,
        metric="loss",
        meaning="supervised: −log π, of tokens that the data set has",
    ),
    PolicyLossSpec(
        name="dpo",
        code=f"{PREFERENCE}:dpo_loss",
        reads=PAIR,
        keys=("dpo_beta",),
        aggregation=ROWS,
        has_ratio=False,
        metric="loss",
        meaning="of pairs: the chosen answer's log-ratio to the reference above the rejected one's",
    ),
    PolicyLossSpec(
        name="dpo_norm",
        code=f"{PREFERENCE}:dpo_norm_loss",
        reads=PAIR,
        keys=("dpo_beta",),
        aggregation=ROWS,
        has_ratio=False,
        metric="loss",
        meaning="dpo by the mean over an answer's tokens",
    ),
    PolicyLossSpec(
        name="ipo",
        code=f"{PREFERENCE}:ipo_loss",
        reads=PAIR,
        keys=("dpo_beta",),
        aggregation=ROWS,
        has_ratio=False,
        metric="loss",
        meaning="of pairs: the difference of log-ratios close to 1/2β",
    ),
)
