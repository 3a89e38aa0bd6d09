"""A reward model: one number for each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolemesh.config.model import FsdpConfig, ModelConfig
from rolemesh.dataproto.transfer import on_device
from rolemesh.errors import ModelNotFound
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import with_dtype
from rolemesh.models.packed.attention import is_packed
from rolemesh.models.packed.load_probe import prepare_body
from rolemesh.models.sequence import autocast, lay_out
from rolemesh.models.sharded import load_score_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import Root
from rolemesh.ranks.ulysses import Ulysses, check_heads


class RewardModel:
    """A sequence- or token-classification model whose head has one output.

    Args:
        root: of the model, which may be spread over ranks.
        config: its section.
        device: of this rank.
        ulysses: the ranks that compute the same rows together; None: this one alone.
    """

    def __init__(
        self, root: Root, config: ModelConfig, device: torch.device, ulysses: Ulysses | None = None
    ) -> None:
        self.root = root
        self.config = config
        self.device = device
        self._ulysses = ulysses

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
        fsdp: FsdpConfig | None = None,
    ) -> RewardModel:
        """Load a reward model from a Hugging Face directory.

        Args:
            config: its section.
            device: of this rank.
            ranks: over which it is spread; None: this one alone.
            fsdp: how it is spread.

        Raises:
            ModelNotFound: the directory is absent or incomplete, or has no head with one output.
            InvalidConfig: it is not causal; or its heads do not divide among the ranks that compute the same
                rows; or the device has no such dtype.
        """
        role = "reward.reward_model"
        on = torch.device(device)
        ranks = ranks or Ranks.alone()
        config = with_dtype(config, role, on)
        root = load_score_model(config, role, ranks, fsdp or FsdpConfig(), on, seed=0, frozen=True)
        if not root.model.has_trained_head:
            raise ModelNotFound(
                f"{role}: {config.path} is not a reward model: it has no score head (a sequence- or "
                "token-classification directory has one)"
            )
        root(lambda model: prepare_body(model.body, role, config))
        if ranks.ulysses:
            key = f"{role}.ulysses_sequence_parallel_size"
            check_heads(root.model.body.config.get_text_config(), ranks.ulysses.size, key)
        return cls(root, config, on, ranks.ulysses)

    @property
    def model(self) -> ScoreModel:
        """Body and head; their weights are whole only within a call of `root`."""
        model: ScoreModel = self.root.model
        return model

    @torch.no_grad()
    def score(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the head's output at each row's last token that is not padding. Every rank calls it.

        Args:
            input_ids, attention_mask, position_ids: [B, S] integers or bool, on the CPU; padding on
                either side.

        Returns:
            [B] float32, on the CPU.
        """
        last = (attention_mask * torch.arange(input_ids.shape[1])).argmax(-1, keepdim=True)
        mask = attention_mask.long().scatter(1, last, 1)  # a row without tokens gets one
        inputs, places = lay_out(input_ids, mask, position_ids, is_packed(self.model.body), self.device)
        return self.root(self._scores, inputs, places.gather(1, last)[:, 0]).float().cpu()

    def _scores(self, model: ScoreModel, inputs: dict[str, Any], last: Tensor) -> Tensor:
        ulysses = self._ulysses
        num_rows = len(last)
        mine = last[:0]
        if ulysses is not None:
            inputs, mine, last = ulysses.part(inputs, last)
        inputs, last, mine = on_device((inputs, last, mine), self.device)
        with autocast(self.device, self.config.dtype):
            hidden = model(**inputs).flatten(0, 1)
        scores: Tensor = model.score(hidden[last])
        return scores if ulysses is None else ulysses.whole(scores, mine, num_rows)
