"""How a trained role uses its GPUs: the share of their peak rate that an update reaches, and peak memory.

Nothing here waits for the device. On a CPU there are no such metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rolemesh.config.model import ModelConfig, PolicyModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RolemeshError
from rolemesh.planner.device_specs import peak_flops
from rolemesh.planner.shapes import ModelShape, read_shape
from rolemesh.roles import Metrics

log = logging.getLogger(__name__)

# In verl a GB has 1024³ bytes.
PEAK_MEMORY = {
    "actor": ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"),
    "critic": ("perf/max_memory_allocated_gb/critic", "perf/max_memory_reserved_gb/critic"),
}
PEAK_BYTES = "peak_bytes"  # in an answer's meta_info: allocated and reserved by its rank's process


def update_flops(
    shape: ModelShape, batch: DataProto, *, scores: bool = False, adapter: int | None = None
) -> float:
    """Return the operations that a forward and a backward pass over a batch need.

    An addition and a multiplication count as two. What is recomputed does not count. Every row counts whole,
    although a packed pass computes a prompt that rows share only once.

    Args:
        shape: of the model.
        batch: attention_mask and position_ids [B, S], response_mask [B, T].
        scores: the head has one output, not one for each word.
        adapter: the number of its parameters, if only an adapter is trained. Then the matrices below it have no
            gradients of their own.
    """
    mask = batch["attention_mask"]
    tokens = int(mask.sum())
    predicted = int(batch["response_mask"].sum())
    # The positions of a context of n tokens are 0 to n - 1, and the sum of 2p + 1 over them is n².
    squares = 2 * int((batch["position_ids"] * mask).sum()) + tokens
    head = shape.hidden * (1 if scores else shape.vocabulary)
    products = shape.multiplied_parameters * tokens + head * predicted
    weights = 6 * products if adapter is None else 4 * products + 6 * adapter * tokens
    # Two products forward and four backward, of half of the matrix, since attention is causal.
    return float(weights + 6 * shape.layers * shape.heads * shape.head_dim * squares)


class GpuUsage:
    """Measures the updates of a trained role.

    Args:
        role: actor or critic.
        model: its section, with the dtype decided.
        device: of each rank.
        num_ranks: of the role.
        epochs: passes over the batch in an update.
    """

    def __init__(
        self, role: str, model: ModelConfig, device: torch.device, num_ranks: int, epochs: int
    ) -> None:
        self._role = role
        self._epochs = epochs
        self._on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_properties(device).name if self._on_gpu else ""
        rate = peak_flops(name, model.dtype)
        self._shape = _shape(model, role) if rate else None
        self._rate = num_ranks * (rate or 0.0)
        self._adapter: int | None = None
        if self._shape and isinstance(model, PolicyModelConfig) and model.lora_rank:
            self._adapter = self._shape.trained_parameters(model)
        self._peak_bytes = [0, 0]

    def noted(self, answer: DataProto) -> DataProto:
        """Return this rank's answer with the peak memory of its process so far."""
        if self._on_gpu:
            peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            answer.meta_info = {**answer.meta_info, PEAK_BYTES: peaks}
        return answer

    def seen(self, answers: Sequence[DataProto]) -> Sequence[DataProto]:
        """Keep the largest peaks of all ranks' answers, and return the answers."""
        peaks = [answer.meta_info[PEAK_BYTES] for answer in answers if PEAK_BYTES in answer.meta_info]
        self._peak_bytes = [max(of_ranks) for of_ranks in zip(self._peak_bytes, *peaks, strict=True)]
        return answers

    @contextmanager
    def measured(self, batch: DataProto) -> Iterator[Metrics]:
        """Measure the update that the block makes on a batch. Its metrics are complete after it; none on a CPU.

        `perf/mfu/<role>` is the share of the ranks' peak rate at which the batch's operations were done. It is
        left out for a GPU whose rate is not known. The names of peak memory are in PEAK_MEMORY.
        """
        used: Metrics = {}
        began = time.perf_counter()
        yield used
        seconds = time.perf_counter() - began
        if self._shape is not None:
            scores = self._role != "actor"
            flops = self._epochs * update_flops(self._shape, batch, scores=scores, adapter=self._adapter)
            used[f"perf/mfu/{self._role}"] = flops / seconds / self._rate
        if self._on_gpu:
            for name, num_bytes in zip(PEAK_MEMORY[self._role], self._peak_bytes, strict=True):
                used[name] = num_bytes / 2**30


def _shape(model: ModelConfig, role: str) -> ModelShape | None:
    """Read the shape of a model; None if its directory does not have it."""
    try:
        return read_shape(model, role)
    except RolemeshError as error:  # the role can train nevertheless
        log.info("perf/mfu/%s is not reported: %s", role, error)
        return None
