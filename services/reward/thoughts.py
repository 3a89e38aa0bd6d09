"""Which tokens of a response are thoughts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPENS, CLOSES = "<think>", "</think>"


def thought_tokens(responses: Tensor, response_mask: Tensor, tokenizer: Any) -> Tensor:
    """True on the tokens strictly between <think> and the first </think>; on all of a response without them, or
    with nothing between them. Where a response closes what it did not open, its prompt did, as many chat
    templates do: then its first token is the first thought.

    A tag may be one token or several, and its first and last token may have other text in them: of a token that
    has a character of a tag nothing counts. Tags are found in the tokens' texts, one after the other. That each
    is decoded by itself is of no matter: what comes out differently then (half a character of several bytes, a
    space at the beginning) is not in a tag.

    Args:
        responses: [B, T] int64.
        response_mask: [B, T] bool.
        tokenizer: of the responses.

    Returns:
        [B, T] bool, False where response_mask is.
    """
    texts = {
        token: tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for token in set(responses[response_mask].tolist())
    }
    thoughts = response_mask.clone()
    for row, (response, mask) in enumerate(zip(responses, response_mask, strict=True)):
        pieces = [texts[token] for token in response[mask].tolist()]
        text = "".join(pieces)
        if (closes := text.find(CLOSES)) < 0:
            continue
        opens = text.find(OPENS, 0, closes)
        first = 0 if opens < 0 else opens + len(OPENS)
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        between = (starts >= first) & (ends <= closes)
        if between.any():
            thoughts[row, mask] = between
    return thoughts
