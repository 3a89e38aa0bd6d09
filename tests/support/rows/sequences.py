"""Batches of random sequences, as the controller would send them to actor and critic."""

from __future__ import annotations

import torch

from rolemesh.dataproto import DataProto


def sequence_batch(
    num_rows: int, *, prompt: int = 6, response: int = 10, seed: int = 0, answers: int = 1
) -> DataProto:
    """Left-padded prompts and right-padded responses of random lengths, with experience columns.

    Every third row has a token in the middle of its response that the policy did not sample. Each prompt has
    this many answers, one row after the other.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def normal() -> torch.Tensor:
        return torch.randn(num_rows, response, generator=generator)

    column = torch.arange(prompt + response)
    asked = torch.arange(num_rows) // answers * answers  # the row whose prompt each row has
    begins = (prompt - integers(1, prompt + 1, num_rows)[:, None])[asked]
    ends = prompt + integers(1, response + 1, num_rows)[:, None]
    attention_mask = ((column >= begins) & (column < ends)).long()
    response_mask = attention_mask[:, prompt:].bool()
    response_mask[::3, 1:2] = False
    old_log_probs = -normal().abs() * response_mask - 5 * response_mask
    tokens = integers(0, 250, num_rows, prompt + response)
    tokens[:, :prompt] = tokens[asked, :prompt]
    return DataProto(
        {
            "input_ids": tokens * attention_mask + 256 * (1 - attention_mask),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "old_log_probs": old_log_probs,
            "ref_log_probs": old_log_probs + 0.1 * normal() * response_mask,
            "advantages": normal(),
            "values": normal() * response_mask,
            "returns": normal(),
        }
    )
