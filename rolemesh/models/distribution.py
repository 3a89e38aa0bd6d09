"""From hidden states to numbers of the distributions over the vocabulary, a chunk of tokens at a time.

The logits of a batch are far larger than its hidden states: at a vocabulary of 152,000, 0.6 MB of float32 a
token. So no more of them exist than a chunk's, and in the backward pass they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolemesh.models.chunks import MIN_MATRIX_ROWS, tokens_at_once

BLOCK_LOGITS = 2**20  # as many logits are worked on at a time where no gradient is kept: what caches hold
NO_MASS = -1e30  # a logit whose exp() is 0; of -inf, and of the lowest number, gradients would be NaN


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

    def each(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        """The function of each that was asked for."""
        entropys, squares = (None if t is None else function(t) for t in self[1:])
        return TokenStats(function(self.log_probs), entropys, squares)


class Wanted(NamedTuple):
    """What is computed of a distribution, and of which.

    Args:
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        entropy: the entropy.
        entropy_gradient: whether gradient flows through it.
        sum_pi_squared: the sum of squares; no gradient flows through it.
    """

    temperature: float
    entropy: bool
    entropy_gradient: bool
    sum_pi_squared: bool

    def of(self, logits: Tensor, drawn: Tensor, kept_ids: Tensor | None) -> TokenStats:
        """Of the softmax of logits [n, V], for the tokens drawn [n]; over kept_ids [n, K] alone if given."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        place = drawn[:, None]
        if kept_ids is not None:
            logits = logits.gather(-1, kept_ids.clamp(min=0)).to(wide).masked_fill(kept_ids < 0, NO_MASS)
            place = (kept_ids == place).int().argmax(-1, keepdim=True)
        logits = logits.to(wide)
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        log_softmax = torch.log_softmax(logits, -1)
        log_probs = log_softmax.gather(-1, place)[:, 0]
        entropys = squares = None
        if self.entropy:
            with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
                entropys = -(log_softmax.exp() * log_softmax).sum(-1)
        if self.sum_pi_squared:
            squares = (2 * log_softmax.detach()).exp().sum(-1)
        return TokenStats(log_probs, entropys, squares)


def distribution_stats(
    model: Any, output: Any, hidden: Tensor, drawn: Tensor, kept_ids: Tensor | None, wanted: Wanted
) -> TokenStats:
    """TokenStats [n] of the tokens that are drawn after the hidden states.

    Args:
        model: a transformers causal LM.
        output: what its body returned.
        hidden: [n, H] of it.
        drawn: [n] token ids.
        kept_ids: [n, K] token ids, what could be drawn, -1 beyond; None: any token.
    """
    num_tokens = len(hidden)
    if 0 < num_tokens < MIN_MATRIX_ROWS:
        again = torch.arange(MIN_MATRIX_ROWS, device=hidden.device) % num_tokens
        hidden, drawn = hidden[again], drawn[again]
        kept_ids = None if kept_ids is None else kept_ids[again]

    def of_chunk(hidden: Tensor, drawn: Tensor, kept_ids: Tensor | None) -> TokenStats:
        logits = head(model, output, hidden)
        if torch.is_grad_enabled():
            return wanted.of(logits, drawn, kept_ids)
        parts = _cut(logits.numel() // BLOCK_LOGITS, logits, drawn, kept_ids)
        return _joined([wanted.of(*part) for part in parts])

    chunks = _cut(len(hidden) // tokens_at_once(model.config.vocab_size), hidden, drawn, kept_ids)
    if len(chunks) == 1 or not torch.is_grad_enabled():
        stats = _joined([of_chunk(*chunk) for chunk in chunks])
    else:
        stats = _joined([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])
    return stats.each(lambda column: column[:num_tokens])


def _cut(
    num_parts: int, rows: Tensor, drawn: Tensor, kept_ids: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """In as many parts, at least one, of even sizes: none is so small that kernels would treat it otherwise."""
    parts = max(1, num_parts)
    kept = [None] * parts if kept_ids is None else kept_ids.tensor_split(parts)
    return list(zip(rows.tensor_split(parts), drawn.tensor_split(parts), kept, strict=True))


def _joined(parts: list[TokenStats]) -> TokenStats:
    if len(parts) == 1:
        return parts[0]
    first, *others = zip(*parts, strict=True)
    entropys, squares = (None if column[0] is None else torch.cat(column) for column in others)
    return TokenStats(torch.cat(first), entropys, squares)


def head(model: Any, output: Any, hidden: Tensor) -> Tensor:
    """Logits [n, V] of hidden states [n, H]: what the model makes of its body's output. Whatever it does to
    them (a scale, a soft cap) is done, since it is the model itself that is run, on a body that has answered.

    Args:
        model: a transformers causal LM.
        output: what its body returned, for what else is in it.
    """
    answer = type(output)(**{**output, "last_hidden_state": hidden[None]})
    with _answering(model.get_decoder(), answer):
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@contextmanager
def _answering(body: nn.Module, answer: Any) -> Iterator[None]:
    body.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        del body.forward
