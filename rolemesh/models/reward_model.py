"""A reward model: one number for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound
from rolemesh.models.heads import ScoreModel
from rolemesh.models.packing import is_packed, remove_padding
from rolemesh.models.sequence import autocast, lay_out


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
        if config.use_remove_padding:
            remove_padding(model.body, "reward.reward_model")
        return cls(model, config, device)

    @torch.no_grad()
    def score(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The head's number at the last token that is not padding.

        Args:
            input_ids, attention_mask, position_ids: [B, S] integers or bool; padding on either side.

        Returns:
            [B] float32, on the CPU.
        """
        ids, positions = input_ids.to(self.device), position_ids.to(self.device)
        columns = torch.arange(ids.shape[1], device=self.device)
        last = (attention_mask.to(self.device) * columns).argmax(-1, keepdim=True)
        mask = attention_mask.to(self.device).long().scatter(1, last, 1)  # a row without tokens has one
        inputs, places = lay_out(ids, mask, positions, is_packed(self.model.body))
        with autocast(self.device, self.config.dtype):
            hidden = self.model(**inputs).flatten(0, 1)
        scores: Tensor = self.model.score(hidden[places.gather(1, last)[:, 0]])
        return scores.float().cpu()
