"""The KL divergence of the policy from the reference, and its coefficient in the reward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rolemesh.config.algorithm import KLControlConfig
from rolemesh.errors import InvalidConfig

# Of d = log π − log π_ref on a token drawn from π (Schulman 2020, joschu.net/blog/kl-approx.html).
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: 0.5 * d.square(),
    # e^−d overflows if the reference finds a token far likelier; clamped, that token cannot dominate the mean
    "k3": lambda d: _k3(d.clamp(-20, 20)).clamp(-10, 10),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _k3(d: Tensor) -> Tensor:
    return (-d).exp() + d - 1


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, name: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token, [B, T].

    Args:
        log_probs: [B, T], the policy's; gradient flows.
        ref_log_probs: [B, T], the reference's.
        name: kl = k1, abs, mse = k2, low_var_kl = k3. With `+` appended, the value is the named estimator's and
            the gradient is k2's, which is unbiased (straight-through).

    Raises:
        InvalidConfig: the estimator does not exist.
    """
    base = name.removesuffix("+")
    if ALIASES.get(base, base) not in KL_ESTIMATORS:
        raise InvalidConfig(
            f"expected a KL estimator of {[*KL_ESTIMATORS, *ALIASES]}, or one with '+'; got {name!r}"
        )
    d = log_probs - ref_log_probs
    kl = KL_ESTIMATORS[ALIASES.get(base, base)](d)
    if base == name:
        return kl
    straight = KL_ESTIMATORS["k2"](d)
    return straight - straight.detach() + kl.detach()


class KLController:
    """Holds β, the weight of the KL in the reward: fixed, or adapted to reach a target KL (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2).

    Args:
        config: algorithm.kl_ctrl.
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.config = config
        self.value = config.kl_coef

    def update(self, kl: float, n: int) -> None:
        """Set β ← β·(1 + clip(kl/target − 1, ±0.2)·n/horizon); a fixed β stays.

        Args:
            kl: mean KL of a step, nats.
            n: samples of that step.
        """
        if self.config.type == "adaptive":
            error = min(max(kl / self.config.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the current β, for the checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adapted β from what state_dict returned. A fixed one is the job's, which may differ."""
        if self.config.type == "adaptive":
            self.value = float(state["value"])
