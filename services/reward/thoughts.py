"""Finds the tokens of a response that are thoughts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPENS = "<think>"
CLOSES = "</think>"


def thought_tokens(responses: Tensor, response_mask: Tensor, tokenizer: Any) -> Tensor:
    """Mark the tokens strictly between <think> and the first </think>.

    All tokens are marked if the response has no </think>, or nothing between the tags. If a response has
    </think> without <think>, its prompt had the opening tag, as in many chat templates; then thoughts begin at
    its first token.

    A tag may span several tokens, and these may contain other text; a token with a character of a tag is not
    marked. Tags are searched in the concatenated texts of the tokens, each decoded by itself. This may decode
    some text differently (half of a multi-byte character, a leading space), but never a tag.

    Args:
        responses: [B, T] int64.
        response_mask: [B, T] bool.
        tokenizer: of the responses.

    Returns:
        [B, T] bool, False where response_mask is False.
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
