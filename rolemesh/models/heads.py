"""Heads that give one number per token: the critic's value, the reward model's score."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from rolemesh.config.model import ModelConfig
from rolemesh.models.loading import load_body, load_body_outline, load_score_head, model_directory
from rolemesh.ranks.agreement import on_first
from rolemesh.ranks.files import copied, write_rows
from rolemesh.ranks.ranks import Ranks


class ScoreHead(nn.Module):
    """Computes hidden·weight + bias, as a product and a sum over each row.

    It is not a matrix product with one column: in such kernels the last bits of a row depend on its neighbours.

    Args:
        hidden_size: width of the body.
        seed: of the initial weights, which are normal with standard deviation 0.02/√hidden_size, so values
            start near 0.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = 0.02 / hidden_size**0.5
        self.weight = nn.Parameter(torch.randn(1, hidden_size, generator=generator) * scale)
        self.bias = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def load(self, directory: Path) -> bool:
        """Take the weights of a model directory's head; False without any change if it has none.

        Raises:
            ModelNotFound: the head has more than one output, or another width.
        """
        head = load_score_head(directory, self.weight.shape[1])
        if head is None:
            return False
        weight, bias = head
        self.weight[0].copy_(weight)
        self.bias.copy_(bias if bias is not None else torch.zeros(1))
        return True

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., H] of any float type to numbers [...] of the weights' type."""
        hidden = hidden.to(self.weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return (hidden * self.weight[0]).sum(-1) + self.bias


class ScoreModel(nn.Module):
    """A body and a head with one output, in the on-disk layout of Hugging Face's ...ForTokenClassification.

    Args:
        body: a transformers model without a head.
        seed: of a new head.
    """

    def __init__(self, body: Any, seed: int) -> None:
        super().__init__()
        self.body = body
        self.score = ScoreHead(body.config.hidden_size, seed)
        self.has_trained_head = False

    @classmethod
    def load(cls, config: ModelConfig, role: str, seed: int = 0) -> ScoreModel:
        """Load a causal LM (with a new head) or a sequence- or token-classification model (with its head).

        Raises:
            ModelNotFound: the directory is absent or incomplete, or its head has several outputs.
        """
        model = cls(load_body(config, role), seed)
        model.has_trained_head = model.score.load(model_directory(config, role))
        return model.eval()

    @classmethod
    def outline(cls, config: ModelConfig, role: str) -> ScoreModel:
        """Make a model without reading its weights: on the device `meta`, as load_outline's.

        Raises:
            ModelNotFound: the directory is absent or has no such model.
        """
        model = cls(load_body_outline(config, role), 0)
        model.score.to("meta")
        return model.eval()

    def forward(self, **inputs: Any) -> Tensor:
        """Return the body's hidden states [b, S, H]. Apply `score` to those whose numbers are needed."""
        hidden: Tensor = self.body(**inputs).last_hidden_state
        return hidden

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model, by their names on disk.

        ScoreModel.load reads them, and so does AutoModelForTokenClassification if transformers has such a class
        for the architecture.
        """
        prefix = self.body.base_model_prefix
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.body.state_dict().items()}
        return tensors | {f"score.{name}": tensor for name, tensor in self.score.state_dict().items()}

    def copy(self, ranks: Ranks) -> Callable[[Path, Ranks], None]:
        """Copy the model to host memory. Return what writes config.json and model.safetensors of the copy.

        Every rank calls both.
        """
        tensors = copied(self.saved_tensors(), ranks)

        def write(into: Path, ranks: Ranks) -> None:
            on_first(ranks, self._save_config, into)
            write_rows(into / "model.safetensors", tensors, ranks, {"format": "pt"})

        return write

    def _save_config(self, directory: Path) -> None:
        settings = self.body.config.to_dict()
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
        settings |= {"dtype": "float32"}
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(self.body.config), None)
        settings["architectures"] = [known.__name__ if known else type(self.body).__name__]
        (directory / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
