"""Try a model in engine hf when it is loaded, before anything is generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolemesh.errors import InvalidConfig, Unsupported
from rolemesh.models.packed.load_probe import TOLERANCE, are_close, is_of_the_machine
from rolemesh.services.rollout.engines.hf.cached_attention import (
    GROUPED_ATTENTION,
    Columns,
    Decoding,
    Reading,
    Token,
)

PROMPT = 7  # tokens of the probe's longer prompt
SHORTER = 3  # its other prompt has so many tokens fewer


@torch.inference_mode()
def group_attention(model: Any) -> None:
    """Switch a model to the engine's attention, and test that it computes the same as before.

    Two prompts of unequal length are read together, and one token of each is decoded. The logits must be those
    of each row alone. It detects every architecture in which tokens interact outside of transformers' attention
    interface, or that keeps more of a row than keys and values.

    Args:
        model: a transformers causal LM with float32 weights.

    Raises:
        InvalidConfig: its own numbers are not finite.
        Unsupported: it gives other numbers or an error.
        torch.OutOfMemoryError, torch.AcceleratorError: the machine failed, not the model.
    """
    device = model.get_input_embeddings().weight.device
    columns = torch.arange(PROMPT + 1)
    ids = torch.stack([columns, columns.flip(0)]).to(device)
    rows = [ids[:1], ids[1:, SHORTER:]]
    positions = [torch.arange(row.shape[1], device=device)[None] for row in rows]
    expected = [
        model(input_ids=row, position_ids=at, use_cache=False).logits[0]
        for row, at in zip(rows, positions, strict=True)
    ]
    if not all(logits.isfinite().all() for logits in expected):
        raise InvalidConfig("rollout: the model's logits are not finite, so its weights are damaged")
    try:
        model.set_attn_implementation(GROUPED_ATTENTION)
        found = _read_and_decoded(model, ids)
        if not are_close(torch.cat(found), torch.cat(expected), TOLERANCE["float32"]):
            raise InvalidConfig("rows that are decoded together change each other's numbers")
    except Exception as error:
        if is_of_the_machine(error):
            raise
        raise Unsupported(
            f"rollout engine hf cannot run {type(model).__name__} ({error}); set rollout.name to vllm"
        ) from error


def _read_and_decoded(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the logits [tokens, V] of each row; the last token is decoded, the others are read.

    Args:
        ids: [2, PROMPT + 1]; the second row's first SHORTER tokens are padding.
    """
    device = ids.device
    both = torch.arange(2, device=ids.device)
    visible = torch.ones(2, PROMPT, dtype=torch.bool, device=device)
    visible[1, :SHORTER] = False
    layers = [Columns(2, PROMPT + 1) for _ in range(model.config.get_text_config().num_hidden_layers)]
    read = model(
        input_ids=ids[:, :PROMPT],
        position_ids=(visible.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        reading=Reading(visible, [(layers, 0, both)]),
    ).logits
    mask = torch.zeros(2, 1, 1, PROMPT + 1, device=device)
    mask[1, ..., :SHORTER] = -torch.inf
    decoded = model(
        input_ids=ids[None, :, PROMPT],
        position_ids=visible.sum(1)[None],
        use_cache=False,
        reading=Decoding([Token(layers, mask, 2, PROMPT)]),
    ).logits
    return [torch.cat([read[row][visible[row]], decoded[0, row : row + 1]]) for row in range(2)]
