"""Rows are cut by length: by hand, and by what holds for any lengths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.models.micro_batches import MicroBatches, balance, within


def test_the_longest_row_goes_first_and_to_the_emptiest_part() -> None:
    """8 | 7; 6 joins 7; 5 joins 8; 4 joins either (13 each): the first."""
    assert balance([4, 8, 5, 7, 6], 2, 5) == [[0, 1, 2], [3, 4]]
    assert balance([9, 1, 1, 1], 2, 2) == [[0, 3], [1, 2]]  # by rows the second part could hold all three
    assert balance([5, 5, 5, 5], 4, 1) == [[0], [1], [2], [3]]


def test_parts_hold_all_rows_once_within_the_token_limit() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(1, 50) for _ in range(draw.randint(1, 40))]
        parts = within(lengths, 50)
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert all(0 < sum(lengths[row] for row in part) <= 50 for part in parts)
        assert len(parts) <= 1 + 1.5 * sum(lengths) / 50
    assert within([], 50) == []


def rows_of(lengths: list[int], width: int = 10, prompts: list[int] | None = None) -> DataProto:
    """Every row with a prompt of its own, unless it is told which."""
    mask = (torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]).long()
    ids = torch.tensor(prompts or range(len(lengths)))[:, None].expand(mask.shape)
    positions = torch.arange(width).expand(mask.shape).clone()
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return DataProto({**columns, "response_mask": mask[:, 1:].bool()})


def test_each_context_of_a_row_counts_with_its_padding() -> None:
    rows = rows_of([8, 8, 8, 8])
    rows["position_ids"][0, 4:] = torch.arange(6)  # two contexts
    rows["position_ids"][2, [3, 6]] = 0  # three
    settings = MicroBatches(num_rows=4, max_tokens=30, packed=False, balanced=True)
    assert sorted(part.tolist() for part in settings.cut(rows)) == [[0], [1, 3], [2]]
    with pytest.raises(InvalidBatch, match="row 2 has 30 tokens with its padding"):
        replace(settings, max_tokens=20).cut(rows)


def test_padding_counts_where_it_goes_through_the_model() -> None:
    rows = rows_of([2, 2, 2, 2])

    def cut(**kinds: Any) -> list[list[int]]:
        kinds = {"num_rows": 3, "max_tokens": None, "packed": True, "balanced": True} | kinds
        return [part.tolist() for part in MicroBatches(**kinds).cut(rows)]

    assert cut(max_tokens=10) == [[0, 1, 2, 3]]
    assert cut(max_tokens=10, packed=False) == [[0], [1], [2], [3]]
    assert cut() == [[0, 2], [1, 3]]
    assert cut(balanced=False) == cut(packed=False) == [[0, 1, 2], [3]]
    assert MicroBatches(3, None, True, True).cut(rows_of([])) == []


def test_balance_batch_evens_out_the_tokens_of_micro_batches() -> None:
    """Rows of 8, 8, 2 and 2 tokens by twos: 10 and 10 where they are balanced, 16 and 4 in their order."""
    cuts = {}
    for balanced in (True, False):
        job = make_job({"trainer": {"balance_batch": balanced}, "actor": {"model": {"path": "m"}}})
        micro_batches = MicroBatches.of(job, "actor", job.actor.model, 2)
        cuts[balanced] = [part.tolist() for part in micro_batches.cut(rows_of([8, 8, 2, 2]))]
    assert cuts == {True: [[0, 2], [1, 3]], False: [[0, 1], [2, 3]]}


def test_answers_to_one_prompt_stay_together_where_they_fit() -> None:
    """Ten rows to the prompts a, b, a, b, a, b, b, b, c, c, of 4 tokens each."""
    rows = rows_of([4] * 10, prompts=[0, 1, 0, 1, 0, 1, 1, 1, 2, 2])

    def cut(num_rows: int, max_tokens: int | None = None) -> list[list[int]]:
        return [part.tolist() for part in MicroBatches(num_rows, max_tokens, True, True).cut(rows)]

    assert cut(1, 20) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]  # a and two of b, three of b and c
    assert cut(1, 12) == [[0, 2], [1, 3, 4], [5, 6], [7, 8, 9]]  # a part is not full: parts are even
    assert cut(1, 4) == [[row] for row in range(10)]
    by_twos = rows_of([4] * 8, prompts=[0, 1, 0, 1, 2, 2, 2, 2])
    parts = [part.tolist() for part in MicroBatches(4, None, True, True).cut(by_twos)]
    assert sorted(map(len, parts)) == [4, 4]
    assert all({0, 2} <= set(part) or not {0, 2} & set(part) for part in parts)
    assert all({1, 3} <= set(part) or not {1, 3} & set(part) for part in parts)


def test_micro_batches_hold_all_rows_once_whatever_the_groups() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randint(1, 30)
        rows = rows_of(
            [draw.randint(2, 10) for _ in range(count)], prompts=[draw.randint(0, 6) for _ in range(count)]
        )
        tokens, num_rows = rows["attention_mask"].sum(1), draw.randint(1, 8)
        for most in (None, draw.randint(10, 40)):
            parts = MicroBatches(num_rows, most, True, True).cut(rows)
            assert sorted(torch.cat(parts).tolist()) == list(range(count))
            assert all(part.tolist() == sorted(part.tolist()) for part in parts)
            if most is None:
                assert len(parts) == -(-count // num_rows)
                assert all(len(part) <= num_rows for part in parts)
            else:
                assert all(tokens[part].sum() <= most for part in parts)
                assert len(parts) <= 1 + len(within(tokens.tolist(), most))


@pytest.mark.parametrize(("packed", "tokens"), [(True, "9 tokens"), (False, "10 tokens with its padding")])
def test_a_row_that_no_pass_may_hold_is_refused(packed: bool, tokens: str) -> None:
    sections = {"actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8, "ppo_mini_batch_size": 4}}
    job = make_job(
        merge({"data": {"train_batch_size": 4, "max_prompt_length": 4, "max_response_length": 4}}, sections)
    )
    model = job.actor.model.model_copy(update={"use_remove_padding": packed})
    with pytest.raises(InvalidBatch, match=f"has {tokens}, and actor.ppo_max_token_len_per_gpu is 8"):
        MicroBatches.of(job, "actor", model, 4).cut(rows_of([2, 9, 8]))


DATA = {"data": {"train_batch_size": 4, "max_prompt_length": 60, "max_response_length": 40}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 8}},
            r"actor\.ppo_mini_batch_size is 4.* actor\.ppo_micro_batch_size_per_gpu 8",
        ),
        (
            {"actor": {"ppo_mini_batch_size": 4, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 99}},
            r"actor\.ppo_max_token_len_per_gpu is 99, .*100 tokens .*max_prompt_length and data\.max_resp",
        ),
        (
            {"critic": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 99}},
            r"critic\.ppo_max_token_len_per_gpu is 99",
        ),
        (
            {
                "actor": {"use_kl_loss": True},
                "reference": {"log_prob_max_token_len_per_gpu": 9, "log_prob_use_dynamic_bsz": True},
            },
            r"reference\.log_prob_max_token_len_per_gpu is 9, ",
        ),
        (
            {"actor": {"model": {"enable_activation_offload": True, "enable_gradient_checkpointing": False}}},
            "enable_activation_offload is true, but enable_gradient_checkpointing is false",
        ),
    ],
)  # fmt: skip
def test_batches_that_contradict_are_refused(sections: dict[str, Any], words: str) -> None:
    small = {
        role: {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4} for role in ("actor", "critic")
    }
    make_job(merge(DATA, small))
    with pytest.raises(InvalidConfig, match=words):
        make_job(merge(merge(DATA, small), sections))


def test_a_token_budget_below_max_length_is_refused_by_this_key() -> None:
    actor = {"ppo_mini_batch_size": 4, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 99}
    sections = {
        "algorithm": {"page": "sft"},
        "data": {"train_batch_size": 4, "max_length": 100},
        "actor": actor,
    }
    with pytest.raises(
        InvalidConfig, match=r"actor\.ppo_max_token_len_per_gpu is 99, .*100 tokens \(data\.max_length\)"
    ):
        make_job(sections)


def test_token_budgets_that_are_left_out_are_the_actors() -> None:
    dynamic = {"ppo_mini_batch_size": 4, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 500}
    job = make_job(merge(DATA, {"actor": dynamic}))
    assert [job.max_tokens(role) for role in ("actor", "critic", "reference")] == [500, 32768, 500]
    job = make_job(
        merge(DATA, {"actor": dynamic, "critic": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4}})
    )
    assert job.max_tokens("critic") is None


def test_rows_are_divided_among_ranks_once_each_and_evenly() -> None:
    draw = random.Random(1)
    for _ in range(200):
        count, num_ranks = draw.randint(1, 30), draw.randint(1, 9)
        rows = rows_of(
            [draw.randint(2, 10) for _ in range(count)], prompts=[draw.randint(0, 6) for _ in range(count)]
        )
        tokens = rows["attention_mask"].sum(1)
        for most, packed, balanced in [
            (None, True, True),
            (None, True, False),
            (None, False, True),
            (40, True, True),
        ]:
            parts = MicroBatches(draw.randint(1, 8), most, packed, balanced).shard(rows, num_ranks)
            assert len(parts) == num_ranks
            assert sorted(torch.cat(parts).tolist()) == list(range(count))
            assert all(part.tolist() == sorted(part.tolist()) for part in parts)
            sizes = [len(part) for part in parts]
            assert all(sizes[: sizes.index(0)] if 0 in sizes else sizes), (
                "a rank without rows comes before another"
            )
            if most is None:
                assert max(sizes) == -(-count // num_ranks)  # as few micro-batches as possible
            else:
                spread = [int(tokens[part].sum()) for part in parts]
                assert max(spread) <= int(tokens.sum()) / num_ranks + 10


def test_answers_to_a_prompt_go_to_one_rank_where_that_is_even() -> None:
    rows = rows_of([4] * 8, prompts=[0, 1, 0, 1, 2, 2, 3, 3])
    for most in (None, 20):
        parts = [part.tolist() for part in MicroBatches(2, most, True, True).shard(rows, 2)]
        prompts = [{int(rows["input_ids"][row, 0]) for row in part} for part in parts]
        assert sorted(map(len, parts)) == [4, 4]
        assert not prompts[0] & prompts[1]


def test_a_row_that_no_pass_may_hold_is_not_sharded() -> None:
    with pytest.raises(InvalidBatch, match=r"row 2 has 9 tokens, and critic\.ppo_max_token_len_per_gpu is 8"):
        MicroBatches(1, 8, True, True, "critic.ppo_max_token_len_per_gpu").shard(rows_of([3, 4, 9]), 2)
