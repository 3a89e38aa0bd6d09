"""A reward model: one number for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound
from rolemesh.models.heads import ScoreModel
from rolemesh.models.sequence import autocast, steady_rows


class RewardModel:
    """A sequence- or token-classification model whose head gives one number."""

    def __init__(self, model: ScoreModel, config: ModelConfig, device: torch.device | str) -> None:
        self.model = model.to(device)
        self.config = config
        self.device = torch.device(device)

    @classmethod
    def load(cls, config: ModelConfig, device: torch.device | str = "cpu") -> RewardModel:
        """From a Hugging Face directory.

        Raises:
            ModelNotFound: the directory is not there, not whole, or has no head with one number.
        """
        model = ScoreModel.load(config, "reward.reward_model")
        if not model.has_trained_head:
            raise ModelNotFound(
                f"reward.reward_model: {config.path} is not a reward model: it has no score head (a sequence- "
                "or token-classification directory has one)"
            )
        return cls(model, config, device)

    @torch.no_grad()
    def score(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The head's number at the last token that is not padding.

        Args:
            input_ids, attention_mask, position_ids: [B, S] integers or bool; padding on either side.

        Returns:
            [B] float32, on the CPU.
        """
        rows = len(input_ids)
        ids, mask, positions = (
            t.to(self.device) for t in steady_rows(input_ids, attention_mask.long(), position_ids)
        )
        with autocast(self.device, self.config.dtype):
            hidden = self.model(ids, mask, positions)
        columns = torch.arange(mask.shape[1], device=self.device)
        last = (mask * columns).argmax(-1)
        scores: Tensor = self.model.score(hidden[torch.arange(len(hidden), device=self.device), last])
        return scores[:rows].float().cpu()
