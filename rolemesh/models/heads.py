"""Heads: a policy's under autocast, and those that give one number per token (the critic's value, a score)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.dynamic_module_utils import custom_object_save
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_body, load_body_outline, load_score_head, model_directory
from rolemesh.ranks.collective_errors import on_first
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import copied, write_rows


class VocabularyHead(nn.Module):
    """Stands for a policy's linear head where matrix products are in a narrow type.

    Hidden states and weight are rounded to that type, as autocast does, and products are summed in float32.
    It differs from autocast in two ways. The weight's gradient is float32, so that the sum over many chunks of
    tokens is as exact as one chunk. And the weight is cast once for all passes within `kept`.

    With `wide` the logits stay float32 (as with vLLM's head_dtype: float32; MiniMax-M1, arXiv:2506.13585).
    bfloat16 would round those between 8 and 16 to multiples of 1/16.

    Args:
        linear: the model's head; its weights are used, not copied.
        dtype: of the products' operands, bfloat16 or float16.
        wide: logits are float32; else they are rounded to `dtype`.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, wide: bool) -> None:
        super().__init__()
        self.linear = linear
        self._dtype = dtype
        self._logits = torch.float32 if wide else dtype
        self._keeps = False
        self._cast: Tensor | None = None

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, head_dtype: str, role: str) -> VocabularyHead | None:
        """Make the head that a policy has in autocast to `dtype`; None if the model's own does as well.

        Args:
            model: a transformers causal LM, with its adapter.
            dtype: of matrix products.
            head_dtype: actor.head_dtype.
            role: for the message.

        Raises:
            InvalidConfig: head_dtype is float32, and the model's head is not a plain matrix.
        """
        linear = model.get_output_embeddings()
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        if type(linear) is nn.Linear:
            return cls(linear, dtype, head_dtype == "float32")
        if head_dtype == "float32":
            raise InvalidConfig(
                f"{role}: actor.head_dtype is float32, but the head of {type(model).__name__} is not a plain "
                f"matrix ({type(linear).__name__}); set head_dtype to model"
            )
        return None

    @property
    def weight(self) -> Tensor:
        """[V, H], the model's own."""
        return self.linear.weight

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Cast the weight at most once within the context, where it must not change."""
        outer = self._keeps
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = outer
            if not outer:
                self._cast = None

    def _narrow_weight(self) -> Tensor:
        if self._cast is not None:
            return self._cast
        narrow = self.weight.detach().to(self._dtype)
        if self._keeps and self.weight.dtype != self._dtype:  # else it is the weight's own memory
            self._cast = narrow
        return narrow

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., H] to logits [..., V]."""
        with torch.autocast(hidden.device.type, enabled=False):
            rows = hidden.flatten(0, -2)
            narrow = self._narrow_weight()
            logits = head_product(rows, self.weight, narrow, self._logits)
            if self.linear.bias is not None:
                logits = logits + self.linear.bias.to(self._dtype).to(logits.dtype)
        return logits.view(*hidden.shape[:-1], -1)


class HeadProduct(torch.autograd.Function):
    """Computes logits [n, V] of hidden states [n, H], and the float32 gradient of the weight [V, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, narrow: Tensor, logits: torch.dtype) -> Tensor:
        rounded = hidden.to(narrow.dtype)
        ctx.save_for_backward(rounded, narrow)
        ctx.hidden = hidden.dtype
        ctx.weight = weight.dtype
        return product(rounded, narrow.t(), logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rounded, narrow = ctx.saved_tensors
        gradient = gradient.to(narrow.dtype)
        of_hidden = of_weight = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_hidden = product(gradient, narrow, ctx.hidden)
            if ctx.needs_input_grad[1]:
                of_weight = product(gradient.t(), rounded, ctx.weight)
        return of_hidden, of_weight, None, None


head_product: Callable[..., Tensor] = HeadProduct.apply


def product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices [n, k] and [k, m] of one narrow type; sums are float32, and rounded to `dtype` once.

    A GPU does so at the speed of the narrow type. A CPU has no such kernel, and multiplies in `dtype`.
    """
    if dtype == one.dtype:
        return one @ other
    if one.is_cuda:
        return torch.mm(one, other, out_dtype=dtype)
    return one.to(dtype) @ other.to(dtype)


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
        self.score = ScoreHead(body.config.get_text_config().hidden_size, seed)
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
        for part in (self.body.config, self.body):
            if part._auto_class is not None:  # its class is of the model directory, in files of Python
                custom_object_save(part, directory, self.body.config)
        settings = self.body.config.to_dict()
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
        settings |= {"dtype": "float32"}
        known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(self.body.config), None)
        settings["architectures"] = [known.__name__ if known else type(self.body).__name__]
        (directory / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
