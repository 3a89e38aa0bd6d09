"""Scores from a reward model: the batch as the model wants to see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer, resolve_device, vocabulary_of
from rolemesh.models.reward_model import RewardModel


class ModelScorer:
    """Scores prompts with responses by `reward.reward_model`.

    On a CPU with MKL a row's score has the same bits whatever other rows share the call: widths depend on
    the row alone.

    Args:
        vocabulary: of the policy; a reward model that knows fewer ids reads the text.

    Raises:
        ModelNotFound: the reward model is not there.
    """

    def __init__(self, job: JobConfig, policy_tokenizer: Any, vocabulary: int) -> None:
        config = job.reward.reward_model
        self._width = job.data.max_prompt_length + job.data.max_response_length
        self._micro_batch = config.micro_batch_size_per_gpu
        self._policy_tokenizer = policy_tokenizer
        self._tokenizer = load_tokenizer(config.model, "reward.reward_model")
        self.device = resolve_device(job.trainer.device)
        self._scores = RewardModel.load(config.model, self.device)
        # A policy's table of tokens is often larger than its tokenizer, and it may answer with any of them.
        same_tokens = self._tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self._same_ids = same_tokens and vocabulary <= vocabulary_of(self._scores.model.body)

    @property
    def model(self) -> nn.Module:
        """What is on the device."""
        return self._scores.model

    def score(self, rows: DataProto) -> Tensor:
        """[B] float32."""
        if self._same_ids:
            return self._forward(
                torch.cat([rows["prompts"], rows["responses"]], 1),
                torch.cat([rows["prompt_mask"], rows["response_mask"]], 1),
            )
        ids = [self._retokenised(rows, row) for row in range(len(rows))]
        widths = [-(-max(1, len(row)) // self._width) * self._width for row in ids]  # up to a multiple of S
        scores = torch.zeros(len(ids))
        for width in sorted(set(widths)):
            at = [row for row in range(len(ids)) if widths[row] == width]
            scores[at] = self._forward(*self._padded([ids[row] for row in at], width))
        return scores

    def _retokenised(self, rows: DataProto, row: int) -> list[int]:
        prompt = rows["prompts"][row][rows["prompt_mask"][row]]
        response = rows["responses"][row][rows["response_mask"][row]]
        text = self._policy_tokenizer.decode(torch.cat([prompt, response]), skip_special_tokens=True)
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _padded(self, ids: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
        pad = self._tokenizer.pad_token_id
        full = torch.full((len(ids), width), self._tokenizer.eos_token_id if pad is None else pad)
        mask = torch.zeros((len(ids), width), dtype=torch.bool)
        for row, tokens in enumerate(ids):
            full[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return full, mask

    def _forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        attention = mask.to(torch.int64)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        parts = (torch.split(part, self._micro_batch) for part in (input_ids, attention, positions))
        return torch.cat([self._scores.score(*rows) for rows in zip(*parts, strict=True)])
