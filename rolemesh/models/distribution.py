"""Compute statistics of the distributions over the vocabulary from hidden states, a chunk of tokens at a time.

The logits of a batch are far larger than its hidden states: with a vocabulary of 152,000, 0.6 MB of float32 per
token. Therefore only one chunk's logits are in memory at a time. The backward pass recomputes them. Without
gradients a CPU takes a chunk apart into blocks that fit in its caches, and a GPU takes a block as large as its
memory allows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolemesh.models.chunks import (
    BLOCK_BYTES,
    LEARNT_BYTES,
    MIN_MATRIX_ROWS,
    tokens_at_once,
    tokens_in_block,
)
from rolemesh.models.heads import VocabularyHead

BLOCK_LOGITS = 2**20  # logits in a CPU's block without gradients, so that it fits in the caches
NO_MASS = -1e30  # a logit whose exp() is 0; -inf or the lowest float would make gradients NaN


class TokenStats(NamedTuple):
    """Statistics of the distribution that each response token is sampled from.

    Args:
        log_probs: [b, T], of the sampled token.
        entropys: [b, T] in nats; None unless requested.
        sum_pi_squared: [b, T], the sum of the squared probabilities of all tokens; None unless requested.
    """

    log_probs: Tensor
    entropys: Tensor | None
    sum_pi_squared: Tensor | None

    def each(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        """Apply a function to each statistic that was requested."""
        entropys, squares = (None if t is None else function(t) for t in self[1:])
        return TokenStats(function(self.log_probs), entropys, squares)


class WantedStatistics(NamedTuple):
    """The statistics to compute, and the temperature of the distribution.

    Args:
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        entropy: compute the entropy.
        entropy_gradient: whether gradient flows through the entropy.
        sum_pi_squared: compute the sum of squared probabilities; no gradient flows through it.
    """

    temperature: float
    entropy: bool
    entropy_gradient: bool
    sum_pi_squared: bool

    def of(self, logits: Tensor, drawn: Tensor, kept_ids: Tensor | None) -> TokenStats:
        """Compute TokenStats [n] of the softmax of logits [n, V], for the sampled tokens [n].

        If kept_ids [n, K] is given, the softmax is over those tokens only.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        place = drawn[:, None]
        if kept_ids is not None:
            logits = logits.gather(-1, kept_ids.clamp(min=0)).to(wide).masked_fill(kept_ids < 0, NO_MASS)
            place = (kept_ids == place).int().argmax(-1, keepdim=True)
        logits = logits.to(wide)
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        log_softmax = torch.log_softmax(logits, -1)
        del logits  # so that at most two copies of a block exist at once
        log_probs = log_softmax.gather(-1, place)[:, 0]
        entropys = squares = None
        if self.entropy and self.entropy_gradient and torch.is_grad_enabled():
            entropys = -(log_softmax.exp() * log_softmax).sum(-1)
        elif self.entropy:
            fixed = log_softmax.detach()
            entropys = fixed.exp().mul_(fixed).sum(-1).neg_()
        if self.sum_pi_squared:
            squares = (2 * log_softmax.detach()).exp_().sum(-1)
        return TokenStats(log_probs, entropys, squares)


def distribution_stats(
    model: Any,
    output: Any,
    hidden: Tensor,
    drawn: Tensor,
    kept_ids: Tensor | None,
    wanted: WantedStatistics,
    vocabulary_head: VocabularyHead | None = None,
) -> TokenStats:
    """Compute TokenStats [n] of the tokens that were sampled after the hidden states.

    Args:
        model: a transformers causal LM.
        output: the output of its body.
        hidden: [n, H], hidden states of that output.
        drawn: [n], ids of the sampled tokens.
        kept_ids: [n, K], ids that could be sampled, padded with -1; None: any token.
        wanted: which statistics to compute.
        vocabulary_head: replaces the model's own head; None: use that.
    """
    num_tokens = len(hidden)
    if 0 < num_tokens < MIN_MATRIX_ROWS:
        again = torch.arange(MIN_MATRIX_ROWS, device=hidden.device) % num_tokens
        hidden = hidden[again]
        drawn = drawn[again]
        kept_ids = None if kept_ids is None else kept_ids[again]

    learns = torch.is_grad_enabled()
    memory_bytes = device_memory(hidden.device)

    def of_chunk(hidden: Tensor, drawn: Tensor, kept_ids: Tensor | None) -> TokenStats:
        if learns or memory_bytes is not None:
            return wanted.of(head(model, output, hidden, vocabulary_head), drawn, kept_ids)
        logits = head(model, output, hidden, vocabulary_head)
        parts = _cut(logits.numel() // BLOCK_LOGITS, logits, drawn, kept_ids)
        return _joined([wanted.of(*part) for part in parts])

    num_chunks = len(hidden) // tokens_at_once(vocabulary := model.config.get_text_config().vocab_size)
    if memory_bytes is not None:
        # Few large chunks: each one launches its kernels again, and adds to the whole gradient.
        logit_bytes = LEARNT_BYTES if learns else BLOCK_BYTES
        num_chunks = -(-len(hidden) // tokens_in_block(vocabulary, memory_bytes, logit_bytes))
    chunks = _cut(num_chunks, hidden, drawn, kept_ids)
    if len(chunks) == 1 or not learns:
        stats = _joined([of_chunk(*chunk) for chunk in chunks])
    else:
        stats = _joined([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])
    return stats.each(lambda column: column[:num_tokens])


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU's whole memory; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _cut(
    num_parts: int, rows: Tensor, drawn: Tensor, kept_ids: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Split into `num_parts` parts, at least one, of even sizes: a small part could get another kernel."""
    parts = max(1, num_parts)
    kept = [None] * parts if kept_ids is None else kept_ids.tensor_split(parts)
    return list(zip(rows.tensor_split(parts), drawn.tensor_split(parts), kept, strict=True))


def _joined(parts: list[TokenStats]) -> TokenStats:
    if len(parts) == 1:
        return parts[0]
    first, *others = zip(*parts, strict=True)
    entropys, squares = (None if column[0] is None else torch.cat(column) for column in others)
    return TokenStats(torch.cat(first), entropys, squares)


def head(model: Any, output: Any, hidden: Tensor, vocabulary_head: VocabularyHead | None = None) -> Tensor:
    """Compute logits [n, V] from hidden states [n, H], as the model does from its body's output.

    transformers has no function for this step. Each causal LM has it in its own `forward`, with a scale
    (Cohere, Granite) or a soft cap (Gemma) after the matrix product. So this runs `forward` on a copy of the
    model whose body returns the given hidden states at once. The copy shares all weights with the model, and
    the model is not changed.

    Args:
        model: a transformers causal LM.
        output: the output of its body; its other fields are kept.
        hidden: [n, H].
        vocabulary_head: as in distribution_stats.
    """
    body = model.get_decoder()
    answer = type(output)(**{**output, "last_hidden_state": hidden[None]})
    answered = copy.copy(body)  # not a new module: Falcon-H1 reads the scale of its logits from the body
    answered.forward = lambda *_, **__: answer
    ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    called = with_head(with_module(model, body, answered), vocabulary_head)
    logits: Tensor = called(input_ids=ids, use_cache=False).logits[0]
    return logits


def with_head(model: Any, vocabulary_head: VocabularyHead | None) -> Any:
    """Make a shallow copy of a causal LM with another head for its own; None: return the model itself."""
    return model if vocabulary_head is None else with_module(model, vocabulary_head.linear, vocabulary_head)


def with_module(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Make a shallow copy of the model with one module replaced, at any depth."""
    if model is old:
        return new
    [name] = [name for name, child in model.named_children() if any(each is old for each in child.modules())]
    made = copy.copy(model)
    made._modules = model._modules | {name: with_module(model.get_submodule(name), old, new)}
    return made
