"""KL estimators and the controller by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rolemesh.algos.kl import KLController, kl_penalty
from rolemesh.config.algorithm import KLControlConfig
from rolemesh.errors import InvalidConfig

# d = log π − log π_ref = 0.5, −1
LOG_PROBS, REF_LOG_PROBS = tensor([[-1.0, -3.0]]), tensor([[-1.5, -2.0]])
K3 = [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1]
VALUES = {
    "kl": [0.5, -1.0],
    "k1": [0.5, -1.0],
    "abs": [0.5, 1.0],
    "mse": [0.125, 0.5],
    "k2": [0.125, 0.5],
    "low_var_kl": K3,
    "k3": K3,
}
GRADIENTS = {  # in log π
    "k1": [1.0, 1.0],
    "abs": [1.0, -1.0],
    "k2": [0.5, -1.0],
    "k3": [1 - math.exp(-0.5), 1 - math.e],
}


@pytest.mark.parametrize("name", VALUES)
def test_each_estimator_gives_the_numbers_worked_by_hand(name: str) -> None:
    assert_close(kl_penalty(LOG_PROBS, REF_LOG_PROBS, name), tensor([VALUES[name]]))


@pytest.mark.parametrize("name", GRADIENTS)
def test_each_estimators_gradient_is_the_one_worked_by_hand(name: str) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    kl_penalty(log_probs, REF_LOG_PROBS, name).sum().backward()
    assert log_probs.grad is not None
    assert_close(log_probs.grad, tensor([GRADIENTS[name]]))


@pytest.mark.parametrize("name", VALUES)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    kl = kl_penalty(log_probs, REF_LOG_PROBS, name + "+")
    kl.sum().backward()
    assert torch.equal(kl.detach(), kl_penalty(LOG_PROBS, REF_LOG_PROBS, name))
    assert log_probs.grad is not None
    assert_close(log_probs.grad, tensor([GRADIENTS["k2"]]))


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "low_var_kl+", "k1+", "abs+", "mse+"])
def test_each_gradient_by_finite_differences(name: str) -> None:
    """With a plus they are those of the mean squared half, ½d²; without, those of the estimator's own value."""
    valued = "k2" if name.endswith("+") else name
    ref_log_probs = torch.tensor([-1.5, -2.0, -0.7, -4.0], dtype=torch.float64)
    log_probs = torch.tensor([-1.0, -3.0, -0.9, -1.2], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_penalty(log_probs, ref_log_probs, name).sum(), log_probs)
    step = 1e-6
    above, below = (kl_penalty(log_probs.detach() + h, ref_log_probs, valued) for h in (step, -step))
    assert_close(gradient, (above - below) / (2 * step), rtol=1e-8, atol=1e-8)


def test_k3_beyond_its_clamps_has_a_gradient_only_with_a_plus() -> None:
    """d = −3 has e³ − 4, above 10; d = −25 is beyond 20 too."""
    for name, expected in (("k3", [0.0, 0.0]), ("k3+", [-3.0, -25.0])):
        log_probs = tensor([[-4.0, -30.0]], requires_grad=True)
        kl = kl_penalty(log_probs, tensor([[-1.0, -5.0]]), name)
        assert_close(kl.detach(), tensor([[10.0, 10.0]]))
        (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
        assert_close(gradient, tensor([expected]))


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_k3_gradient_is_finite_where_its_exponential_overflows(name: str) -> None:
    """e^100 is no float32, and infinity times the 0 of the outer clamp would be no number."""
    log_probs = tensor([[-100.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_penalty(log_probs, tensor([[0.0]]), name).sum(), log_probs)
    assert_close(gradient, tensor([[-100.0 if name == "k3+" else 0.0]]))


def test_k3_is_held_at_10() -> None:
    far = kl_penalty(tensor([[-100.0, 0.0, 0.0]]), tensor([[0.0, -5.0, -100.0]]), "k3")
    assert_close(far, tensor([[10.0, math.exp(-5) + 4, 10.0]]))


@pytest.mark.parametrize("name", ["k4", "k1++", "", "+"])
def test_an_unknown_estimator_is_named(name: str) -> None:
    with pytest.raises(InvalidConfig, match="KL estimator"):
        kl_penalty(LOG_PROBS, REF_LOG_PROBS, name)


def test_a_fixed_coefficient_stays() -> None:
    control = KLController(KLControlConfig(kl_coef=0.02))
    control.update(kl=5.0, n=1000)
    assert control.value == 0.02
    raised = KLController(KLControlConfig(kl_coef=0.05))  # between two starts, as a runbook advises
    raised.load_state_dict(control.state_dict())
    assert raised.value == 0.05


def test_an_adaptive_coefficient_follows_the_target() -> None:
    config = KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=100)
    control = KLController(config)
    control.update(kl=2.2, n=10)  # 10 % above: 1 + 0.1·0.1
    assert control.value == pytest.approx(0.101)
    control.update(kl=50.0, n=10)  # far above counts as 20 %
    assert control.value == pytest.approx(0.101 * 1.02)
    control.update(kl=0.0, n=10)  # far below as −20 %
    assert control.value == pytest.approx(0.101 * 1.02 * 0.98)
    resumed = KLController(config)
    resumed.load_state_dict(control.state_dict())
    assert resumed.value == control.value
