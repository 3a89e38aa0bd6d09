"""Masks of responses: all their tokens, and those of the last context."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch


def token_mask(batch: DataProto) -> Tensor:
    """Return [B, T] bool: True on every token of a response, also where an environment wrote it.

    Args:
        batch: with response_mask, and turns if responses are conversations.
    """
    mask: Tensor = batch["turns"] != 0 if "turns" in batch else batch["response_mask"]
    return mask


def last_contexts(batch: DataProto) -> DataProto:
    """Return what the policy saw last with what it said to that, as prompts and responses.

    Args:
        batch: with the columns of prompts and responses, and with turns and contexts if responses are
            conversations.

    Returns:
        prompts [B, P], responses [B, T] and their masks, bool. Where another prompt took the place of the
        row's, prompt_mask is False, and response_mask is True from that prompt on.

    Raises:
        InvalidBatch: contexts go down.
    """
    prompt = batch["prompt_mask"].bool()
    response = token_mask(batch)
    if "contexts" in batch:
        contexts = torch.where(response, batch["contexts"], 0).cummax(1).values
        if len(bad := (response & (contexts != batch["contexts"])).nonzero()):
            raise InvalidBatch(f"column 'contexts', row {int(bad[0, 0])}, goes down at {int(bad[0, 1])}")
        last = contexts[:, -1:]
        prompt = prompt & (last == 0)
        response = response & (contexts == last)
    columns = {name: batch[name] for name in ("prompts", "responses")}
    return DataProto({**columns, "prompt_mask": prompt, "response_mask": response})
