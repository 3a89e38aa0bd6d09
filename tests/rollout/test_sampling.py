"""The filtered distribution by hand, and that tokens come out of it as often as they should."""

from typing import Any

import pytest
import torch

from rolemesh.config.rollout import RolloutConfig, SamplingConfig
from rolemesh.services.rollout.engines.sampling import draw_uniforms, log_distribution, sample

# Probabilities 0.1, 0.4, 0.2, 0.3 of tokens 0 to 3.
LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


def distribution(**sampling: float) -> list[float]:
    return log_distribution(LOGITS, SamplingConfig(**sampling)).exp()[0].tolist()


def test_without_filters_it_is_the_softmax():
    assert distribution() == pytest.approx([0.1, 0.4, 0.2, 0.3])


def test_temperature_a_half_squares_the_probabilities():
    assert distribution(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30])


def test_top_k_keeps_the_k_likeliest_and_renormalises():
    assert distribution(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert distribution(top_k=9) == pytest.approx([0.1, 0.4, 0.2, 0.3])


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    assert distribution(top_p=0.69) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert distribution(top_p=0.71) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert distribution(top_p=1e-6) == pytest.approx([0, 1, 0, 0])


def test_top_p_measures_mass_in_what_top_k_left():
    # 4/7 = 0.571: of all tokens the first has 0.4 and would not reach 0.5 alone.
    assert distribution(top_k=2, top_p=0.5) == pytest.approx([0, 1, 0, 0])


def test_of_equal_tokens_the_lower_ids_are_kept():
    logits = torch.zeros(1, 6)
    assert log_distribution(logits, SamplingConfig(top_k=2)).exp()[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    kept = log_distribution(logits, SamplingConfig(top_p=0.4)).exp()[0]
    assert kept.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0])


def test_greedy_takes_the_lowest_id_of_the_likeliest_tokens():
    """The log-probability is the plain one."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    for sampling in (SamplingConfig(temperature=0), SamplingConfig(do_sample=False, top_k=1, temperature=0.5)):
        token, log_prob, _ = sample(logits, torch.tensor([0.99], dtype=torch.float64), sampling)
        assert token.tolist() == [1]
        assert log_prob.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_a_uniform_number_draws_a_token_by_inverse_cdf():
    """The token whose share of the cumulative distribution the number falls into."""
    uniforms = torch.tensor(
        [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.6999, 0.7001, 1 - 2**-53], dtype=torch.float64
    )
    tokens, log_probs, _ = sample(LOGITS.expand(8, 4), uniforms, SamplingConfig())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert log_probs.dtype == torch.float32
    assert log_probs.exp().tolist() == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.2, 0.2, 0.3, 0.3])


def test_a_token_without_mass_is_never_drawn_even_at_the_ends():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    tokens, _, _ = sample(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), SamplingConfig())
    assert tokens.tolist() == [1, 2]


def kept(**sampling: float) -> list[int]:
    uniforms = torch.zeros(1, dtype=torch.float64)
    kept_ids = sample(LOGITS, uniforms, RolloutConfig(**sampling))[2]
    assert kept_ids.dtype == torch.int32
    return kept_ids[0].tolist()


def test_kept_tokens_are_those_of_any_mass_the_likeliest_first():
    assert kept(top_k=3) == [1, 3, 2]
    assert kept(top_k=3, top_p=0.7) == [1, 3, -1]  # of 0.9 they have 4/9 and 3/9
    assert kept(top_k=6) == [1, 3, 2, 0, -1, -1]
    assert kept(top_k=6, top_p=0.85) == [1, 3, 2, -1, -1, -1]
    assert kept() == kept(top_k=3, do_sample=False) == []


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9}]
)
def test_frequencies_follow_the_distribution(filters: dict[str, float]):
    sampling, draws = SamplingConfig(**filters), 20_000
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    expected = log_distribution(logits, sampling).exp()[0] * draws
    uniforms = draw_uniforms(range(draws // 10), 10).flatten()  # across rows and along them
    tokens, _, _ = sample(logits.expand(draws, 8), uniforms, sampling)
    counts = torch.bincount(tokens, minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi_square < 24.3  # 0.1 % of 7 degrees of freedom; fewer have less


def test_a_stream_is_the_rows_own_and_a_prefix_of_a_longer_one():
    alone = draw_uniforms([7], 5)
    among = draw_uniforms([3, 7, -1], 9)
    assert torch.equal(alone[0], among[1, :5])
    assert not torch.equal(among[0], among[2])
    assert ((among >= 0) & (among < 1)).all()
    assert torch.equal(draw_uniforms([-(2**63), 2**63 - 1], 1).isfinite(), torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 2}, {"do_sample": False}])
def test_non_finite_logits_give_a_token_of_non_finite_log_prob(wrong: float, sampling: dict[str, Any]) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 1] = wrong
    tokens, log_probs, _ = sample(logits, torch.tensor([0.5, 0.5]).double(), SamplingConfig(**sampling))
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert log_probs.isfinite().tolist() == [False, True]
