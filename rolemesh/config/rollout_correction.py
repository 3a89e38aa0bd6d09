"""The section algorithm.rollout_correction, for the mismatch between the engine's and the trainer's policy."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import model_validator

from rolemesh.config.base import Config
from rolemesh.config.key_facts import WARNED, Key

# of rollout_rs: the statistic, and the estimator of the divergence. There is no seq_max_k1: k1 is signed
CRITERIA = (
    *(f"{over}_{k}" for over in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)


class Criterion(NamedTuple):
    """A criterion of rejection: the statistic must be in [low, high].

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
        """The name as in rollout_rs."""
        return f"{self.over}_{self.estimator}"


class RolloutCorrectionConfig(Config):
    """Importance weights and rejection for tokens that the engine sampled from another distribution than the
    trainer's: w = old / rollout."""

    rollout_is: Literal["token", "sequence"] | None = Key(
        None,
        WARNED,
        read_by=("critic",),
        description="multiply the policy loss by w of each token or of the whole response; null: no weights",
    )
    rollout_is_threshold: float | str = Key(
        2.0,
        WARNED,
        counts_if="algorithm.rollout_correction.rollout_is",
        description="upper bound of w (truncated importance sampling); two bounds in quotes, e.g. '0.5_2.0': w "
        "is 0 "
        "outside of them (IcePop)",
    )
    rollout_is_batch_normalize: bool = Key(
        False, WARNED, description="divide the bounded weights by their mean over the batch"
    )
    rollout_rs: str | None = Key(
        None,
        WARNED,
        read_by=("critic",),
        description=f"criteria to reject tokens or responses, separated by commas: {', '.join(CRITERIA)}; "
        "null: "
        "none",
    )
    rollout_rs_threshold: float | str | None = Key(
        None,
        WARNED,
        description="thresholds of the criteria, separated by commas, or one for all; k1: bounds of the ratio, "
        "'0.5_2.0', or 2.0 for the same; k2, k3: the maximum, in nats",
    )
    bypass_mode: bool = Key(
        False,
        WARNED,
        read_by=("critic",),
        description="use the engine's log-probabilities as old_log_probs; the actor computes none",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Key(
        "ppo_clip",
        WARNED,
        description="bypass_mode: the loss: ppo_clip: PPO's clip on new / rollout; reinforce: -w * A * log pi",
    )

    @model_validator(mode="after")
    def _thresholds_are_bounds(self) -> RolloutCorrectionConfig:
        _ = self.bounds, self.criteria
        if self.rollout_rs is None and self.rollout_rs_threshold is not None:
            raise ValueError("rollout_rs_threshold is set, but rollout_rs is not, so nothing is rejected")
        return self

    @model_validator(mode="after")
    def _normalises_what_is_known(self) -> RolloutCorrectionConfig:
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise ValueError(
                "rollout_is_batch_normalize is true, but rollout_is is not set, so there are no weights; set "
                "rollout_is, or rollout_is_batch_normalize to false"
            )
        if self.rollout_is_batch_normalize and self.bypass_mode:
            raise ValueError(
                "rollout_is_batch_normalize and bypass_mode are true, but in bypass_mode the weights depend on "
                "the policy under training, so their mean over the batch is unknown; set one to false"
            )
        return self

    @model_validator(mode="after")
    def _loss_type_is_of_bypass(self) -> RolloutCorrectionConfig:
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type is reinforce, but bypass_mode is false, so loss_mode selects the loss")
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is:
            raise ValueError(
                f"rollout_is is {self.rollout_is} with bypass_mode and loss_type ppo_clip, whose ratio already "
                "corrects for the engine; set rollout_is to null, or loss_type to reinforce"
            )
        return self

    @property
    def bounds(self) -> tuple[float | None, float]:
        """Bounds of w: (None, upper bound), or IcePop's (low, high)."""
        return _bounds("rollout_is_threshold", str(self.rollout_is_threshold), single_from=1)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The criteria of rollout_rs with their thresholds."""
        if self.rollout_rs is None:
            return ()
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if strange := [name for name in names if name not in CRITERIA]:
            raise ValueError(f"rollout_rs {strange[0]!r} is none of {', '.join(CRITERIA)}")
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs is {self.rollout_rs}, but rollout_rs_threshold is not set")
        texts = str(self.rollout_rs_threshold).split(",")
        if len(texts) not in (1, len(names)):
            raise ValueError(
                f"rollout_rs_threshold has {len(texts)} values for {len(names)} criteria of rollout_rs"
            )
        texts = texts * len(names) if len(texts) == 1 else texts
        return tuple(_criterion(name, text) for name, text in zip(names, texts, strict=True))

    @property
    def is_plain_reinforce(self) -> bool:
        """True if bypass_mode's loss is -A * log pi: no clip, and no weight for the policy's change."""
        return self.loss_type == "reinforce" and self.rollout_is is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the correction adds to the batch.

        With bypass_mode there are none: w depends on the policy under training, so the loss itself computes
        weights and mask in each micro-batch.
        """
        if self.bypass_mode:
            return ()
        return ("rollout_is_weights",) * bool(self.rollout_is) + ("loss_mask",) * bool(self.rollout_rs)


def _criterion(name: str, text: str) -> Criterion:
    over, _, estimator = name.rpartition("_")
    low, high = _bounds(f"rollout_rs_threshold of {name}", text, single_from=1 if estimator == "k1" else 0)
    if estimator == "k1":
        return Criterion(over, estimator, math.log(low or 1 / high), math.log(high))
    if low is not None:
        raise ValueError(
            f"rollout_rs_threshold of {name} is {text.strip()!r}; expected one number, the maximum"
        )
    return Criterion(over, estimator, -math.inf, high)


def _bounds(key: str, text: str, *, single_from: float) -> tuple[float | None, float]:
    """Parse bounds: `2.0` is (None, 2.0), at least `single_from`; `0.5_2.0` is (0.5, 2.0)."""
    first, underscore, second = text.strip().partition("_")
    try:
        low, high = (float(first), float(second)) if underscore else (None, float(first))
    except ValueError:
        low = None
        high = math.nan
    if not (0 < high < math.inf and (low is None or 0 < low <= high)):
        raise ValueError(f'{key} is {text!r}; expected a number above 0, or two as in "0.5_2.0"')
    if low is None and high < single_from:
        raise ValueError(
            f"{key} is {text}, but a single bound of a ratio must not be below 1; write two bounds in quotes, "
            "because Helm, unlike a job file, reads 0.5_5 as 0.55"
        )
    return low, high
