"""How far the policy is from the reference, and how dear that is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rolemesh.config.algorithm import KLControlConfig
from rolemesh.errors import InvalidConfig

# Of d = log π − log π_ref on a token drawn from π (Schulman 2020, joschu.net/blog/kl-approx.html).
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: 0.5 * d.square(),
    # e^−d overflows where the reference finds a token far likelier; the clamps keep that token from being all
    "k3": lambda d: _k3(d.clamp(-20, 20)).clamp(-10, 10),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _k3(d: Tensor) -> Tensor:
    return (-d).exp() + d - 1


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, name: str) -> Tensor:
    """KL(π ‖ π_ref) per token.

    Args:
        log_probs: [B, T], the policy's; gradient flows.
        ref_log_probs: [B, T].
        name: kl = k1, abs, mse = k2, low_var_kl = k3; with a `+` behind it the value is that of the name and
            the gradient that of k2, which is unbiased (straight-through).

    Raises:
        InvalidConfig: no such estimator.
    """
    base = name.removesuffix("+")
    if ALIASES.get(base, base) not in ESTIMATORS:
        raise InvalidConfig(
            f"a KL estimator is one of {[*ESTIMATORS, *ALIASES]}, or one with '+'; not {name!r}"
        )
    d = log_probs - ref_log_probs
    kl = ESTIMATORS[ALIASES.get(base, base)](d)
    if base == name:
        return kl
    straight = ESTIMATORS["k2"](d)
    return straight - straight.detach() + kl.detach()


class KLController:
    """β, the weight of the KL in the reward: fixed, or steered to a target KL (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2).

    Args:
        config: algorithm.kl_ctrl.
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.config = config
        self.value = config.kl_coef

    def update(self, kl: float, n: int) -> None:
        """β ← β·(1 + clip(kl/target − 1, ±0.2)·n/horizon); a fixed β stays.

        Args:
            kl: mean KL of a step, nats.
            n: samples of that step.
        """
        if self.config.type == "adaptive":
            error = min(max(kl / self.config.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        """β as it stands; part of the checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes up what state_dict gave."""
        self.value = float(state["value"])
