"""From a batch of sequences to a number for each response token.

A row's numbers must not depend on its neighbours, bit for bit. On a CPU they do not, as long as a padded
row's width is the same (the job's P and T are fixed; without padding attention sees to it) and matrix products
do not take other kernels for fewer rows. On Intel's processors MKL's strict mode sees to that
(rolemesh/__init__.py). On others no forward pass has fewer than MIN_MATRIX_ROWS tokens: on one thread 16 were
enough for every shape tried.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.chunks import MIN_MATRIX_ROWS
from rolemesh.models.distribution import TokenStats, Wanted, distribution_stats
from rolemesh.models.heads import ScoreModel
from rolemesh.models.packing import is_packed, pack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Matrix products in `dtype` (a ModelConfig's); weights stay float32."""
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")


def lay_out(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, packed: bool
) -> tuple[dict[str, Any], Tensor]:
    """A forward pass over rows, with padding or without.

    Args:
        input_ids, attention_mask, position_ids: [b, S].
        packed: lay the rows' tokens end to end, equal beginnings once; rolemesh/models/packing.py.

    Returns:
        What the model's body is called with; and [b, S], where in its flattened output each position is (of
        padding: some other).
    """
    rows, width = input_ids.shape
    if not packed:
        ids, mask, positions = steady_rows(input_ids, attention_mask, position_ids)
        places = torch.arange(rows * width, device=ids.device).view(rows, width)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}, places
    inputs, places = pack(input_ids, attention_mask, position_ids)
    return {**inputs, "use_cache": False}, places


def before_responses(rows: DataProto, packed: bool) -> tuple[dict[str, Any], Tensor]:
    """A forward pass over what response tokens are predicted from, which a row's last token is not.

    Args:
        rows: the columns of roles.SEQUENCE [b, ...].

    Returns:
        What the model's body is called with; and [tokens], where in its flattened output the token before each
        response token is.
    """
    ids, attended, positions = (rows[name] for name in ("input_ids", "attention_mask", "position_ids"))
    fed = attended[:, :-1].bool()
    if packed:
        fed = fed & (attended[:, 1:].bool() | (attended.sum(1, keepdim=True) == 1))
    inputs, places = lay_out(ids[:, :-1], fed.to(attended.dtype), positions[:, :-1], packed)
    mask = rows["response_mask"]
    return inputs, places[:, -mask.shape[1] :][mask]


def scatter(cells: Tensor, mask: Tensor) -> Tensor:
    """Numbers [n] where mask [b, T] is True, 0 elsewhere; n of them are."""
    return torch.zeros(mask.shape, dtype=cells.dtype, device=cells.device).masked_scatter(mask, cells)


def steady_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors [b, S] with their rows repeated until there are MIN_MATRIX_ROWS tokens. Where b or S is of the
    usual size there are."""
    rows, width = tensors[0].shape
    wanted = max(rows, -(-MIN_MATRIX_ROWS // width))
    if wanted == rows:
        return list(tensors)
    index = torch.arange(wanted, device=tensors[0].device) % rows
    return [tensor[index] for tensor in tensors]


def check_sequences(batch: DataProto, method: str) -> None:
    """Raises InvalidBatch where the columns of roles.SEQUENCE, and loss_mask and kept_ids if they are there, do
    not fit together."""
    sequences = {name: list(batch[name].shape) for name in ("input_ids", "attention_mask", "position_ids")}
    mask = batch["response_mask"]
    width = batch["input_ids"].shape[-1]
    if len({tuple(shape) for shape in sequences.values()}) > 1 or mask.dim() != 2 or mask.shape[1] >= width:
        raise InvalidBatch(
            f"{method}: input_ids, attention_mask and position_ids [B, P + T] and response_mask [B, T] with "
            f"P > 0 expected; got {sequences | {'response_mask': list(mask.shape)}}"
        )
    attended, sampled = (x.bool().cpu().numpy() for x in (batch["attention_mask"], mask))
    prompt = width - mask.shape[1]
    if not attended[:, prompt - 1].all() or (sampled > attended[:, prompt:]).any():
        raise InvalidBatch(
            f"{method}: a prompt's last token at column P - 1, and response_mask True on tokens alone, "
            "expected; attention_mask says otherwise"
        )
    if "loss_mask" in batch and (batch["loss_mask"] > mask).any():
        raise InvalidBatch(f"{method}: loss_mask is True where response_mask is False")
    begins = (attended[:, 1:] > attended[:, :-1]).sum(1) + attended[:, 0]
    if (begins > 1).any():
        raise InvalidBatch(
            f"{method}: row {int(begins.argmax())} of attention_mask has a hole; prompt and response are to "
            "lie end to end, with padding on the left and on the right alone"
        )
    if "kept_ids" in batch:
        kept_ids, responses = batch["kept_ids"], batch["input_ids"][:, width - mask.shape[1] :]
        if kept_ids.shape[:-1] != mask.shape:
            raise InvalidBatch(
                f"{method}: kept_ids [B, T, K] of response_mask {list(mask.shape)} expected; got "
                f"{list(kept_ids.shape)}"
            )
        if (strange := mask & (kept_ids != responses[..., None]).all(-1)).any():
            row, token = strange.nonzero()[0].tolist()
            raise InvalidBatch(
                f"{method}: response token {token} of row {row} is {int(responses[row, token])}, which is not "
                "among the kept_ids that it was drawn from"
            )


def token_stats(
    model: Any,
    rows: DataProto,
    *,
    temperature: float,
    dtype: str = "float32",
    entropy: bool = True,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
) -> TokenStats:
    """Return statistics of the response tokens under the distribution that they were sampled from.

    With truncated sampling this is the distribution over the tokens that could be drawn. An engine's
    log-probabilities are of this distribution. Over the whole vocabulary every ratio would be off by the mass
    that was cut off, and the updated model would truncate to a different set. So the kept tokens are replayed
    ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Args:
        model: a transformers causal LM.
        rows: the columns of roles.SEQUENCE [b, ...], on the model's device; kept_ids [b, T, K] where sampling
            truncates.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        dtype: a ModelConfig's.
        entropy: compute it too.
        entropy_gradient: whether gradient flows through it.
        sum_pi_squared: compute it too; no gradient flows through it.

    Returns:
        float32 (float64 of a float64 model). Cells where response_mask is False hold some finite number.
    """
    body = model.get_decoder()
    inputs, before = before_responses(rows, is_packed(body))
    mask = rows["response_mask"]
    drawn = rows["input_ids"][:, -mask.shape[1] :][mask]
    kept_ids = rows["kept_ids"][mask].long() if "kept_ids" in rows else None
    wanted = Wanted(temperature, entropy, entropy_gradient, sum_pi_squared)
    with autocast(mask.device, dtype):
        output = body(**inputs)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, before)
        stats = distribution_stats(model, output, hidden, drawn, kept_ids, wanted)
    return stats.each(lambda cells: scatter(cells, mask))


def token_values(model: ScoreModel, rows: DataProto, *, dtype: str = "float32") -> Tensor:
    """The critic's value [b, T] before each response token is sampled, float32 (float64 of a float64 model).

    Args:
        model: body and value head.
        rows: the columns of roles.SEQUENCE [b, ...], on the model's device.
        dtype: a ModelConfig's.
    """
    mask = rows["response_mask"]
    inputs, before = before_responses(rows, is_packed(model.body))
    with autocast(mask.device, dtype):
        hidden = model(**inputs).flatten(0, 1)
    return scatter(model.score(hidden.index_select(0, before)), mask)
