"""algorithm.rollout_correction: what is done about tokens that the engine drew from another distribution than
the trainer's."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from rolemesh.config.base import Config

# of rollout_rs: over what, and which estimate of the divergence. seq_max of k1 would be of its sign alone
CRITERIA = (
    *(f"{over}_{k}" for over in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)


class Criterion(NamedTuple):
    """A reason to reject: the statistic is kept in [low, high].

    Args:
        over: token, seq_sum, seq_mean or seq_max.
        estimator: k1, k2 or k3.
        low, high: in nats.
    """

    over: str
    estimator: str
    low: float
    high: float

    @property
    def name(self) -> str:
        """As in rollout_rs."""
        return f"{self.over}_{self.estimator}"


class RolloutCorrectionConfig(Config):
    """Weights and masks for what the engine drew from another distribution than the trainer's:
    w = old / rollout."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="weigh the policy loss by w, of each token or of the whole response; null: do not"
    )
    rollout_is_threshold: float | str = Field(
        2.0,
        description="w is cut there (truncated importance sampling); two in quotes, '0.5_2.0': w is 0 outside "
        "(IcePop)",
    )
    rollout_is_batch_normalize: bool = Field(
        False, description="divide the weights, once bounded, by their mean over the batch"
    )
    rollout_rs: str | None = Field(
        None,
        description=f"reject what is too far off: one of {', '.join(CRITERIA)}, or several with commas; null: "
        "nothing",
    )
    rollout_rs_threshold: float | str | None = Field(
        None,
        description="of each criterion, with commas, or one for all; k1: of the ratio, '0.5_2.0' or 2.0 for "
        "that; k2 and k3: the largest, in nats",
    )
    bypass_mode: bool = Field(
        False, description="old_log_probs are the engine's; the actor computes none before the update"
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip", description="of bypass_mode: PPO's clip on new / rollout, or -w * A * log pi"
    )

    @model_validator(mode="after")
    def _thresholds_are_bounds(self) -> RolloutCorrectionConfig:
        _ = self.bounds, self.criteria
        if self.rollout_rs is None and self.rollout_rs_threshold is not None:
            raise ValueError("rollout_rs_threshold is set and rollout_rs is not, so nothing is rejected")
        return self

    @model_validator(mode="after")
    def _normalises_what_is_known(self) -> RolloutCorrectionConfig:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError(
                "rollout_is_batch_normalize is true and rollout_is not set, so there are no weights; set "
                "rollout_is, or rollout_is_batch_normalize to false"
            )
        if self.rollout_is_batch_normalize and self.bypass_mode:
            raise ValueError(
                "rollout_is_batch_normalize is true and bypass_mode too: there the weights are of the policy "
                "under training, whose mean over the batch is not known while it learns; set one to false"
            )
        return self

    @model_validator(mode="after")
    def _loss_type_is_of_bypass(self) -> RolloutCorrectionConfig:
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type is reinforce and bypass_mode false, where loss_mode chooses the loss")
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is:
            raise ValueError(
                f"bypass_mode with loss_type ppo_clip and rollout_is {self.rollout_is}: PPO's ratio is of the "
                "engine's probability already; set rollout_is to null, or loss_type to reinforce"
            )
        return self

    @property
    def bounds(self) -> tuple[float | None, float]:
        """Of w: (None, where it is cut), or IcePop's (low, high)."""
        return _bounds("rollout_is_threshold", str(self.rollout_is_threshold), single_from=1)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """What rollout_rs and its thresholds say."""
        if self.rollout_rs is None:
            return ()
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if strange := [name for name in names if name not in CRITERIA]:
            raise ValueError(f"rollout_rs {strange[0]!r} is none of {', '.join(CRITERIA)}")
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs is {self.rollout_rs} and rollout_rs_threshold is not set")
        texts = str(self.rollout_rs_threshold).split(",")
        if len(texts) not in (1, len(names)):
            raise ValueError(f"rollout_rs_threshold has {len(texts)} values for {len(names)} of rollout_rs")
        texts = texts * len(names) if len(texts) == 1 else texts
        return tuple(_criterion(name, text) for name, text in zip(names, texts, strict=True))

    @property
    def columns(self) -> tuple[str, ...]:
        """What the correction adds to the batch. With bypass_mode nothing: there w is of the policy under
        training, so the loss itself makes weights and mask, anew in each micro-batch."""
        if self.bypass_mode:
            return ()
        return ("rollout_is_weights",) * bool(self.rollout_is) + ("loss_mask",) * bool(self.rollout_rs)


def _criterion(name: str, text: str) -> Criterion:
    over, _, estimator = name.rpartition("_")
    low, high = _bounds(f"rollout_rs_threshold of {name}", text, single_from=1 if estimator == "k1" else 0)
    if estimator == "k1":
        return Criterion(over, estimator, math.log(low or 1 / high), math.log(high))
    if low is not None:
        raise ValueError(f"rollout_rs_threshold of {name} is {text.strip()!r}; it is one number, the largest")
    return Criterion(over, estimator, -math.inf, high)


def _bounds(key: str, text: str, *, single_from: float) -> tuple[float | None, float]:
    """`2.0` is (None, 2.0), `0.5_2.0` is (0.5, 2.0). One number alone is at least `single_from`."""
    first, underscore, second = text.strip().partition("_")
    try:
        low, high = (float(first), float(second)) if underscore else (None, float(first))
    except ValueError:
        low, high = None, math.nan
    if not (0 < high < math.inf and (low is None or 0 < low <= high)):
        raise ValueError(f'{key} is {text!r}; it is a number above 0, or two as in "0.5_2.0"')
    if low is None and high < single_from:
        raise ValueError(
            f"{key} is {text}, and a single bound of a ratio is not below 1; two are written in quotes, "
            "as YAML reads 0.5_5 as 0.55"
        )
    return low, high
