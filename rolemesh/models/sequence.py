"""Compute a number for each response token of a batch of sequences.

A row's numbers must not depend on its neighbours, bit for bit. On a CPU this holds under two conditions. First,
a padded row always has the same width: the job's P and T are fixed, and packed attention pads by the row's own
length. Second, matrix products do not choose other kernels for fewer rows. On Intel's processors MKL's strict
mode ensures that (rolemesh/__init__.py). For others, no forward pass has fewer than MIN_MATRIX_ROWS tokens; on
one thread 16 were enough for every shape tried.

This holds for dense models. In a mixture of experts, an expert multiplies the tokens of all rows that are
routed to it. Their number depends on the neighbours, and a row's numbers vary with it by rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.dataproto.transfer import on_device
from rolemesh.errors import InvalidBatch
from rolemesh.models.chunks import MIN_MATRIX_ROWS
from rolemesh.models.distribution import TokenStats, WantedStatistics, distribution_stats
from rolemesh.models.heads import ScoreModel, VocabularyHead
from rolemesh.models.packed.attention import is_packed
from rolemesh.models.packed.layout import pack
from rolemesh.ranks.ulysses import Ulysses
from rolemesh.wire.limits import MAX_CONTEXTS

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Return a context for matrix products in `dtype` (a ModelConfig's); weights stay float32."""
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")


def lay_out(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, packed: bool, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    """Prepare a forward pass over rows, with padding or without.

    A row in which another prompt takes the place of all before it (its positions begin again at 0) is computed
    as several: a token sees its own context alone.

    Args:
        input_ids, attention_mask, position_ids: [b, S] on the CPU.
        packed: lay the rows' tokens end to end, with shared prefixes once; rolemesh/models/packed/.

    Returns:
        The inputs of the model's body; and [b, S], the index of each position in its flattened output
        (arbitrary for padding). Both are still on the CPU.
    """
    if (part := contexts(attention_mask, position_ids)).any():
        num_parts = part.amax(1) + 1
        row = torch.arange(len(part), device=part.device).repeat_interleave(num_parts)
        first = num_parts.cumsum(0) - num_parts
        own = part[row] == (torch.arange(len(row), device=part.device) - first[row])[:, None]
        columns = input_ids[row], attention_mask[row] * own, position_ids[row]
        inputs, places = _laid_out(*columns, packed, device)
        return inputs, places.gather(0, first[:, None] + part)
    return _laid_out(input_ids, attention_mask, position_ids, packed, device)


def contexts(attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Return [b, S], how often the positions of a row have begun again at 0 up to each cell."""
    attended = attention_mask.bool()
    again = attended[:, 1:] & attended[:, :-1] & (position_ids[:, 1:] == 0)
    return torch.cat([torch.zeros_like(attended[:, :1]), again], dim=1).cumsum(1)


def _laid_out(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, packed: bool, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    rows, width = input_ids.shape
    if not packed:
        ids, mask, positions = pad_to_min_rows(input_ids, attention_mask, position_ids)
        places = torch.arange(rows * width, device=ids.device).view(rows, width)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}, places
    inputs, places = pack(input_ids, attention_mask, position_ids, device)
    return {**inputs, "use_cache": False}, places


def before_responses(rows: DataProto, packed: bool, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Prepare a forward pass that predicts the response tokens; it leaves out each row's last token.

    Args:
        rows: the columns of roles.SEQUENCE [b, ...], on the CPU.
        packed, device: as in lay_out.

    Returns:
        The inputs of the model's body; and [tokens], the index in its flattened output of the token before each
        response token. Both are still on the CPU.
    """
    ids, attended, positions = (rows[name] for name in ("input_ids", "attention_mask", "position_ids"))
    fed = attended[:, :-1].bool()
    if packed:
        fed = fed & (attended[:, 1:].bool() | (attended.sum(1, keepdim=True) == 1))
    inputs, places = lay_out(ids[:, :-1], fed.to(attended.dtype), positions[:, :-1], packed, device)
    mask = rows["response_mask"]
    return inputs, places[:, -mask.shape[1] :][mask]


def loss_columns(rows: DataProto, device: torch.device, reads: Collection[str] = ()) -> DataProto:
    """Return the columns of a micro-batch that its loss reads, on the device.

    Args:
        rows: on the CPU.
        device: that computes.
        reads: columns that are wanted even if they only say where the tokens of the pass are.
    """
    unread = {"input_ids", "attention_mask", "position_ids", "kept_ids"} - set(reads)
    return DataProto({name: tensor for name, tensor in rows.tensors.items() if name not in unread}).to(device)


def merge_micro_batches(passes: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Copy the numbers of all micro-batches to the CPU, when the last one has been given to the device.

    Args:
        passes: the rows of each micro-batch, and its numbers [b, T] on the device.
        mask: response_mask [B, T].

    Returns:
        [B, T], 0 where the mask is False.
    """
    cells = torch.cat([cells for _, cells in passes]).cpu()
    column = cells.new_zeros(mask.shape)
    rows = [at for at, _ in passes]
    for at, own in zip(
        rows, torch.split(cells, [len(at) for at in rows]), strict=True
    ):  # the last counts, if one is twice
        column[at] = own
    return torch.where(mask, column, 0)


def scatter(cells: Tensor, mask: Tensor) -> Tensor:
    """Put numbers [n] into the n cells where mask [b, T] is True; other cells are 0."""
    return torch.zeros(mask.shape, dtype=cells.dtype, device=cells.device).masked_scatter(mask, cells)


def pad_to_min_rows(*tensors: Tensor) -> list[Tensor]:
    """Repeat the rows of tensors [b, S] until there are at least MIN_MATRIX_ROWS tokens.

    Batches of the usual size have enough and are returned unchanged.
    """
    rows, width = tensors[0].shape
    wanted = max(rows, -(-MIN_MATRIX_ROWS // width))
    if wanted == rows:
        return list(tensors)
    index = torch.arange(wanted, device=tensors[0].device) % rows
    return [tensor[index] for tensor in tensors]


def check_sequences(batch: DataProto, method: str) -> None:
    """Raise InvalidBatch unless the columns of roles.SEQUENCE, loss_mask and kept_ids (if any) fit together."""
    sequences = {name: list(batch[name].shape) for name in ("input_ids", "attention_mask", "position_ids")}
    mask = batch["response_mask"]
    width = batch["input_ids"].shape[-1]
    if len({tuple(shape) for shape in sequences.values()}) > 1 or mask.dim() != 2 or mask.shape[1] >= width:
        raise InvalidBatch(
            f"{method}: expected input_ids, attention_mask and position_ids [B, P + T] and response_mask "
            f"[B, T] with P > 0; got {sequences | {'response_mask': list(mask.shape)}}"
        )
    attended, sampled = (x.bool().cpu().numpy() for x in (batch["attention_mask"], mask))
    prompt = width - mask.shape[1]
    if not attended[:, prompt - 1].all() or (sampled > attended[:, prompt:]).any():
        raise InvalidBatch(
            f"{method}: expected a prompt's last token at column P - 1, and response_mask True only on tokens; "
            "attention_mask contradicts this"
        )
    if "loss_mask" in batch and (batch["loss_mask"] > mask).any():
        raise InvalidBatch(f"{method}: loss_mask is True where response_mask is False")
    begins = (attended[:, 1:] > attended[:, :-1]).sum(1) + attended[:, 0]
    if (begins > 1).any():
        raise InvalidBatch(
            f"{method}: row {int(begins.argmax())} of attention_mask has a hole; expected prompt and response "
            "without a gap, with padding only on the left and on the right"
        )
    positions = batch["position_ids"]
    goes_on = torch.cat([positions[:, :1] == 0, positions[:, 1:] == positions[:, :-1] + 1], dim=1)
    if len(bad := ((positions != 0) & ~goes_on & batch["attention_mask"].bool()).nonzero()):
        row, token = bad[0].tolist()
        raise InvalidBatch(
            f"{method}: token {token} of row {row} has position {int(positions[row, token])}; 0, or one more "
            "than the token before it, expected"
        )
    part = contexts(batch["attention_mask"], positions)
    if len(bad := (part[:, -mask.shape[1] :] > part[:, -mask.shape[1] - 1 : -1]).logical_and(mask).nonzero()):
        row, token = bad[0].tolist()
        raise InvalidBatch(
            f"{method}: response token {token} of row {row} is sampled, but has position 0, as a prompt's first"
        )
    if len(many := (part.amax(1) >= MAX_CONTEXTS).nonzero()):
        raise InvalidBatch(
            f"{method}: the positions of row {int(many[0])} begin again at 0 more than {MAX_CONTEXTS - 1} times"
        )
    if "kept_ids" in batch:
        kept_ids = batch["kept_ids"]
        responses = batch["input_ids"][:, width - mask.shape[1] :]
        if kept_ids.shape[:-1] != mask.shape:
            raise InvalidBatch(
                f"{method}: expected kept_ids [B, T, K] for response_mask {list(mask.shape)}; got "
                f"{list(kept_ids.shape)}"
            )
        if (strange := mask & (kept_ids != responses[..., None]).all(-1)).any():
            row, token = strange.nonzero()[0].tolist()
            raise InvalidBatch(
                f"{method}: response token {token} of row {row} is {int(responses[row, token])}, which is not "
                "among the kept_ids that it was sampled from"
            )


def token_stats(
    model: Any,
    rows: DataProto,
    *,
    temperature: float,
    device: torch.device = CPU,
    dtype: str = "float32",
    entropy: bool = True,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    vocabulary_head: VocabularyHead | None = None,
    ulysses: Ulysses | None = None,
) -> TokenStats:
    """Return statistics of the response tokens under the distribution that they were sampled from.

    With truncated sampling this is the distribution over the tokens that could be drawn. An engine's
    log-probabilities are of this distribution. Over the whole vocabulary every ratio would be off by the mass
    that was cut off, and the updated model would truncate to a different set. So the kept tokens are replayed
    ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Args:
        model: a transformers causal LM.
        rows: the columns of roles.SEQUENCE [b, ...], on the CPU; kept_ids [b, T, K] where sampling truncates.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        device: that computes.
        dtype: a ModelConfig's.
        entropy: compute it too.
        entropy_gradient: whether gradient flows through it.
        sum_pi_squared: compute it too; no gradient flows through it.
        vocabulary_head: stands for the model's own head; None: that itself, under autocast.
        ulysses: the ranks that compute these rows together; None: this one alone.

    Returns:
        On the device, float32 (float64 of a float64 model). Cells where response_mask is False hold some finite
        number.
    """
    body = model.get_decoder()
    inputs, before = before_responses(rows, is_packed(body), device)
    mask = rows["response_mask"]
    mine = before[:0]
    drawn = rows["input_ids"][:, -mask.shape[1] :][mask]
    kept_ids = rows["kept_ids"][mask].long() if "kept_ids" in rows else None
    wanted = WantedStatistics(temperature, entropy, entropy_gradient, sum_pi_squared)
    num_tokens = len(drawn)
    if ulysses is not None:
        inputs, mine, before = ulysses.part(inputs, before)
        drawn = drawn[mine]
        kept_ids = None if kept_ids is None else kept_ids[mine]
    inputs, before, drawn, kept_ids, mask, mine = on_device(
        (inputs, before, drawn, kept_ids, mask, mine), device
    )
    with autocast(device, dtype), vocabulary_head.kept() if vocabulary_head else nullcontext():
        output = body(**inputs)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, before)
        stats = distribution_stats(model, output, hidden, drawn, kept_ids, wanted, vocabulary_head)
    if ulysses is not None:
        stats = stats.each(lambda cells: ulysses.whole(cells, mine, num_tokens))
    return stats.each(lambda cells: scatter(cells, mask))


def token_values(
    model: ScoreModel,
    rows: DataProto,
    *,
    device: torch.device = CPU,
    dtype: str = "float32",
    ulysses: Ulysses | None = None,
) -> Tensor:
    """Compute the critic's value [b, T] before each response token is sampled; float64 for a float64 model,
    else float32.

    Args:
        model: body and value head.
        rows: the columns of roles.SEQUENCE [b, ...], on the CPU.
        device: that computes.
        dtype: a ModelConfig's.
        ulysses: the ranks that compute these rows together; None: this one alone.
    """
    inputs, before = before_responses(rows, is_packed(model.body), device)
    mask = rows["response_mask"]
    mine = before[:0]
    num_tokens = len(before)
    if ulysses is not None:
        inputs, mine, before = ulysses.part(inputs, before)
    inputs, before, mask, mine = on_device((inputs, before, mask, mine), device)
    with autocast(device, dtype):
        hidden = model(**inputs).flatten(0, 1)
    values = model.score(hidden.index_select(0, before))
    return scatter(values if ulysses is None else ulysses.whole(values, mine, num_tokens), mask)
