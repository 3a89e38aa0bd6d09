"""A number for each token: the critic's value, the reward model's score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from rolemesh.config.model import ModelConfig
from rolemesh.models.loading import load_body, load_score_head, model_directory


class ScoreHead(nn.Module):
    """hidden·weight + bias. A product and a sum over one row, and not a matrix product with one column: the
    kernels of the latter give a row other last bits when it has other neighbours.

    Args:
        hidden_size: width of the body.
        seed: of the initial weights, normal with standard deviation 0.02/√hidden_size: values start near 0.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = 0.02 / hidden_size**0.5
        self.weight = nn.Parameter(torch.randn(1, hidden_size, generator=generator) * scale)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] of any float type to [...] float32 (float64 of float64)."""
        hidden = hidden.to(self.weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return (hidden * self.weight[0]).sum(-1) + self.bias


class ScoreModel(nn.Module):
    """A body and a head with one number, laid out on disk as Hugging Face lays out ...ForTokenClassification.

    Args:
        body: a transformers model without a head.
        seed: of the head, where the directory had none.
    """

    def __init__(self, body: Any, seed: int) -> None:
        super().__init__()
        self.body = body
        self.score = ScoreHead(body.config.hidden_size, seed)
        self.has_trained_head = False

    @classmethod
    def load(cls, config: ModelConfig, role: str, seed: int = 0) -> ScoreModel:
        """From a causal LM (a new head) or a sequence- or token-classification directory (its head).

        Raises:
            ModelNotFound: the directory is not there, not whole, or its head gives several numbers.
        """
        model = cls(load_body(config, role), seed)
        directory = model_directory(config, role)
        if head := load_score_head(directory, model.body.config.hidden_size):
            weight, bias = head
            with torch.no_grad():
                model.score.weight[0].copy_(weight)
                model.score.bias.copy_(bias if bias is not None else torch.zeros(1))
            model.has_trained_head = True
        return model.eval()

    def forward(self, **inputs: Any) -> Tensor:
        """Hidden states [b, S, H] of the body, for what it is called with; `score` makes numbers of those that
        are wanted."""
        hidden: Tensor = self.body(**inputs).last_hidden_state
        return hidden

    def save_pretrained(self, directory: Path) -> None:
        """config.json and model.safetensors, for AutoModelForTokenClassification (where transformers has
        such a class for the architecture) and for ScoreModel.load."""
        prefix = self.body.base_model_prefix
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.body.state_dict().items()}
        tensors |= {"score.weight": self.score.weight, "score.bias": self.score.bias}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        settings = self.body.config.to_dict()
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
        settings |= {"dtype": "float32"}
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(self.body.config), None)
        settings["architectures"] = [known.__name__ if known else type(self.body).__name__]
        (directory / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
