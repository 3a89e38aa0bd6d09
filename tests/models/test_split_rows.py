"""A row in which another prompt begins has the numbers of the rows that its contexts would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequences import sequence_batch
from test_packing import causal_lm, uneven
from torch import Tensor
from torch.testing import assert_close

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import check_sequences, token_stats
from rolemesh.services.controller.stages.experience import join
from rolemesh.wire.limits import MAX_CONTEXTS

PROMPT = 30


def split(rows: DataProto, begin: int) -> DataProto:
    """Rows in which another prompt, of two tokens, begins at a token of the response."""
    mask, positions = rows["response_mask"].clone(), rows["position_ids"].clone()
    mask[:, begin : begin + 2] = False
    there = rows["attention_mask"][:, PROMPT + begin :].bool()
    positions[:, PROMPT + begin :] = torch.where(
        there, torch.arange(there.shape[1]), positions[:, PROMPT + begin :]
    )
    return DataProto({**rows.tensors, "response_mask": mask, "position_ids": positions})


def parts(rows: DataProto, begin: int) -> tuple[DataProto, DataProto]:
    """The contexts of those rows, as rows."""
    column = torch.arange(rows["input_ids"].shape[1])
    made = []
    for here in (column < PROMPT + begin, column >= PROMPT + begin):
        attended = rows["attention_mask"] * here
        sampled = rows["response_mask"] & here[PROMPT:]
        made.append(DataProto({**rows.tensors, "attention_mask": attended, "response_mask": sampled}))
    return made[0], made[1]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["Qwen2", "Mistral"])
def test_contexts_match_separate_rows_in_numbers_and_gradients(kind: str, packed: bool) -> None:
    model, rows = causal_lm(kind), split(uneven(9), 7)
    if packed:
        remove_padding(model.get_decoder(), "actor")
    going_on = rows["attention_mask"][:, PROMPT + 7].bool()
    rows = rows.select_idxs(going_on.nonzero().flatten())
    before, after = parts(rows, 7)
    apart = DataProto.concat([before, after])
    mask = torch.cat([before["response_mask"], after["response_mask"]])

    def weighted(batch: DataProto, weights: Tensor) -> list[Tensor]:
        model.zero_grad()
        stats = token_stats(model, batch, temperature=0.7)
        (stats.log_probs * weights).sum().backward()
        return [stats.log_probs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    weights = torch.linspace(-1, 1, rows["response_mask"].numel()).view(rows["response_mask"].shape)
    whole, *gradients = weighted(rows, weights)
    pieces, *expected = weighted(apart, weights.repeat(2, 1))
    first, second = pieces.chunk(2)
    assert_close(whole, torch.where(before["response_mask"], first, second) * rows["response_mask"])
    assert mask.sum() == rows["response_mask"].sum() > 0
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other)


def test_one_context_changes_no_bit_in_another() -> None:
    model, rows = causal_lm("Qwen2", torch.float32), split(uneven(6), 7)
    remove_padding(model.get_decoder(), "actor")
    other = rows["input_ids"].clone()
    other[:, :PROMPT] = (other[:, :PROMPT] + 1) * rows["attention_mask"][:, :PROMPT]
    with torch.no_grad():
        kept = token_stats(model, rows, temperature=1.0).log_probs
        changed = token_stats(model, DataProto({**rows.tensors, "input_ids": other}), temperature=1.0).log_probs
    later = rows["response_mask"].clone()
    later[:, :9] = False
    assert torch.equal(kept[later], changed[later])
    assert not torch.equal(kept[:, :7], changed[:, :7])


def test_positions_begin_again_where_a_prompt_replaces_another() -> None:
    batch = DataProto(
        {
            "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
            "prompt_mask": torch.tensor([[False, True, True], [True, True, True]]),
            "responses": torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 0, 0]], dtype=torch.bool),
            "turns": torch.tensor([[1, -2, 2, -3, -3, 3], [1, -2, 2, 0, 0, 0]]),
            "contexts": torch.tensor([[0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]]),
            "row": torch.arange(2),
        }
    )
    assert join(batch)["position_ids"].tolist() == [[0, 0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 5, 5, 5]]


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (lambda positions: positions - 7 * (positions >= 7), "token 1 of row 0 .* has position 0"),
        (lambda positions: positions * 0, "response token 0 of row 0"),
    ],
)
def test_a_prompt_has_a_token_that_nobody_sampled(positions: Any, says: str) -> None:
    rows = sequence_batch(1, seed=3)
    full = rows["attention_mask"] * 0 + 1
    mask = torch.ones_like(rows["response_mask"])
    batch = DataProto({**rows.tensors, "attention_mask": full, "response_mask": mask})
    batch["position_ids"] = positions(full.cumsum(1) - 1)
    with pytest.raises(InvalidBatch, match=says):
        check_sequences(batch, "actor.update")


@pytest.mark.parametrize(
    "positions",
    [
        lambda positions: positions - 5 * (positions >= 8),  # begins again at 3
        lambda positions: positions + 3,
        lambda positions: positions + 3 * (positions >= 8),
        lambda positions: positions.flip(1),
    ],
)
def test_positions_go_up_by_one_or_begin_again_at_0(positions: Any) -> None:
    rows = sequence_batch(1, seed=3)
    full = rows["attention_mask"] * 0 + 1
    batch = DataProto({**rows.tensors, "attention_mask": full, "position_ids": positions(full.cumsum(1) - 1)})
    with pytest.raises(InvalidBatch, match=r"one more than the token before it, expected"):
        check_sequences(batch, "actor.update")


def test_a_row_has_so_many_contexts_and_no_more() -> None:
    width = 2 * MAX_CONTEXTS
    for num_contexts in (MAX_CONTEXTS, MAX_CONTEXTS + 1):
        columns = torch.arange(2 * num_contexts)[None]
        mask = columns[:, 1:] % 2 == 1
        batch = DataProto(
            {
                "input_ids": columns * 0,
                "attention_mask": columns * 0 + 1,
                "position_ids": columns % 2,
                "response_mask": mask[:, 1:],
            }
        )
        if num_contexts > MAX_CONTEXTS:
            with pytest.raises(InvalidBatch, match=f"begin again at 0 more than {MAX_CONTEXTS - 1} times"):
                check_sequences(batch, "actor.update")
        else:
            assert batch["input_ids"].shape[1] == width
            check_sequences(batch, "actor.update")
