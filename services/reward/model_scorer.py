"""Scores from a reward model, with the batch converted to the model's input."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer, vocabulary_of
from rolemesh.models.reward_model import RewardModel
from rolemesh.models.supported import check_positions
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import Root
from rolemesh.threads import progress
from rolemesh.workers.devices import resolve_device

log = logging.getLogger(__name__)


class ModelScorer:
    """Scores prompts with their responses by `reward.reward_model`.

    On a CPU with MKL the bits of a row's score do not depend on the other rows of the call, because widths
    depend on the row alone.

    Args:
        job: the job.
        policy_tokenizer: decodes rows for a reward model with another tokenizer.
        vocabulary: size of the policy's vocabulary; a reward model with a smaller one gets retokenized text.
        ranks: over which the model is spread.

    Raises:
        ModelNotFound: the reward model is absent or incomplete.
    """

    def __init__(self, job: JobConfig, policy_tokenizer: Any, vocabulary: int, ranks: Ranks) -> None:
        config = job.reward.reward_model
        self._ranks = ranks
        self._width = job.data.max_prompt_length + job.data.max_response_length
        self._micro_batch = config.micro_batch_size_per_gpu
        self._policy_tokenizer = policy_tokenizer
        self._tokenizer = load_tokenizer(config.model, "reward.reward_model")
        self.device = resolve_device(job.trainer.device)
        self._scores = RewardModel.load(config.model, self.device, ranks, config.model.fsdp_config)
        check_positions(self._scores.model.body.config, job, "reward.reward_model")
        # A policy's embedding is often larger than its tokenizer's vocabulary, and it may sample any id of it.
        same_tokens = self._tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self._same_ids = same_tokens and vocabulary <= vocabulary_of(self._scores.model.body)
        if not self._same_ids and policy_tokenizer.chat_template and ranks.rank == 0:
            log.warning(
                "reward.reward_model: its tokens are not those of the policy, so it scores texts without "
                "special tokens and without a chat format. A model of chats was trained on other texts"
            )

    @property
    def root(self) -> Root:
        """The model on the device."""
        return self._scores.root

    def score(self, rows: DataProto) -> Tensor:
        """Compute the score of each row, [B] float32. Every rank calls it, with rows of its own."""
        passes = list(self._inputs(rows))
        num_passes = self._ranks.most(len(passes))
        scores = torch.zeros(len(rows))
        for at, ids, mask in passes:
            progress()
            scores[at] = self._forward(ids, mask)
        for _ in range(num_passes - len(passes)):  # a rank with fewer passes repeats a row of its first
            self._forward(passes[0][1][:1], passes[0][2][:1])
        return scores

    def _inputs(self, rows: DataProto) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the passes: positions of rows [b], their tokens and mask [b, width]."""
        tokens = torch.cat([rows["prompts"], rows["responses"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["response_mask"]], 1)
        if self._same_ids:
            parts = (torch.arange(len(rows)), tokens, mask)
            yield from zip(*(torch.split(part, self._micro_batch) for part in parts), strict=True)
            return
        ids = self._retokenised(tokens, mask)
        # rounded up to a multiple of S
        widths = [-(-max(1, len(row)) // self._width) * self._width for row in ids]
        for width in sorted(set(widths)):
            at = torch.tensor([row for row in range(len(ids)) if widths[row] == width])
            for some in torch.split(at, self._micro_batch):
                yield some, *self._padded([ids[row] for row in some.tolist()], width)

    def _retokenised(self, tokens: Tensor, mask: Tensor) -> list[list[int]]:
        """Return the reward model's ids of each row's text; tokenizers use all cores for a list of texts."""
        rows = [row[there].tolist() for row, there in zip(tokens, mask, strict=True)]
        texts = self._policy_tokenizer.batch_decode(rows, skip_special_tokens=True)
        ids: list[list[int]] = self._tokenizer(texts)["input_ids"]
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
        return self._scores.score(input_ids, attention, (attention.cumsum(1) - 1).clamp(min=0))
