"""From a batch of sequences to a number for each response token.

A row's numbers must not depend on its neighbours, bit for bit. On a CPU they do not, as long as the width is
the same (the job's P and T are fixed) and matrix products do not take other kernels for fewer rows. On Intel's
processors MKL's strict mode sees to that (rolemesh/__init__.py). On others no forward pass has fewer than
MIN_MATRIX_ROWS tokens: on one thread 16 were enough for every shape tried.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.heads import ScoreModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_MATRIX_ROWS = 256  # tokens in a forward pass
NO_MASS = -1e30  # a logit whose exp() is 0; of -inf, and of the lowest number, gradients would be NaN


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Matrix products in `dtype` (a ModelConfig's); weights stay float32."""
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")


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
    """Raises InvalidBatch where the columns of roles.SEQUENCE, and kept_ids if they are there, do not fit
    together."""
    sequences = {name: list(batch[name].shape) for name in ("input_ids", "attention_mask", "position_ids")}
    mask = batch["response_mask"]
    width = batch["input_ids"].shape[-1]
    if len({tuple(shape) for shape in sequences.values()}) > 1 or mask.dim() != 2 or mask.shape[1] >= width:
        raise InvalidBatch(
            f"{method}: input_ids, attention_mask and position_ids [B, P + T] and response_mask [B, T] with "
            f"P > 0 expected; got {sequences | {'response_mask': list(mask.shape)}}"
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


class TokenStats(NamedTuple):
    """Of the distribution that each response token is drawn from.

    Args:
        log_probs: [b, T], of the token.
        entropys: [b, T] in nats; None unless asked for.
        sum_pi_squared: [b, T], the sum of the squared probabilities of all tokens; None unless asked for.
    """

    log_probs: Tensor
    entropys: Tensor | None
    sum_pi_squared: Tensor | None


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
    """The response tokens under the distribution that they are drawn from.

    Where sampling truncates, that is the distribution over the tokens which could be drawn. An engine's
    log-probabilities are of it, and over the whole vocabulary every ratio of the two would be off by the mass
    that was cut off; the model under training would besides cut off others. So the kept tokens are replayed
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
    num_rows, num_tokens = rows["response_mask"].shape
    ids, mask, positions = steady_rows(rows["input_ids"], rows["attention_mask"], rows["position_ids"])
    # The position before the first response token predicts it. A few more where the head would have too few.
    kept = max(num_tokens + 1, min(ids.shape[1], -(-MIN_MATRIX_ROWS // len(ids))))
    with autocast(ids.device, dtype):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=kept,
        ).logits[:num_rows, -num_tokens - 1 : -1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    drawn = rows["input_ids"][:, -num_tokens:, None]
    if "kept_ids" in rows:
        kept_ids = rows["kept_ids"].long()
        logits = logits.gather(-1, kept_ids.clamp(min=0)).to(wide).masked_fill(kept_ids < 0, NO_MASS)
        drawn = (kept_ids == drawn).int().argmax(-1, keepdim=True)  # its place among them
    logits = logits.to(wide)
    if temperature not in (0, 1):
        logits = logits / temperature
    log_softmax = torch.log_softmax(logits, -1)
    log_probs = log_softmax.gather(-1, drawn)[..., 0]
    entropys = squares = None
    if entropy:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropys = -(log_softmax.exp() * log_softmax).sum(-1)
    if sum_pi_squared:
        squares = (2 * log_softmax.detach()).exp().sum(-1)
    return TokenStats(log_probs, entropys, squares)


def token_values(model: ScoreModel, rows: DataProto, *, dtype: str = "float32") -> Tensor:
    """The critic's value [b, T] before each response token is sampled, float32 (float64 of a float64 model).

    Args:
        model: body and value head.
        rows: the columns of roles.SEQUENCE [b, ...], on the model's device.
        dtype: a ModelConfig's.
    """
    num_rows, num_tokens = rows["response_mask"].shape
    ids, mask, positions = steady_rows(rows["input_ids"], rows["attention_mask"], rows["position_ids"])
    with autocast(ids.device, dtype):
        hidden = model(ids, mask, positions)
    values: Tensor = model.score(hidden[:num_rows, -num_tokens - 1 : -1])
    return values
