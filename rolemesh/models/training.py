"""The loop that actor and critic share: passes, mini-batches, micro-batches, an optimizer step for each
mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolemesh.algos.aggregation import TokenMean
from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig, TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.optimizer import Optimizer

# (a micro-batch, response_mask of the mini-batch that it is part of) -> its share of the loss, and its shares
# of what is reported
LossFunction = Callable[[DataProto, Tensor], tuple[Tensor, dict[str, Tensor | TokenMean]]]


def refuse_float16(config: ModelConfig, role: str) -> None:
    """Gradients below 6e-8 vanish in float16 unless the loss is scaled; bfloat16 has float32's range.

    Raises:
        InvalidConfig: the dtype is float16.
    """
    if config.dtype == "float16":
        raise InvalidConfig(f"{role}.model.dtype float16 is not for training; bfloat16 or float32 is")


def checkpoint_activations(model: Any, config: TrainedModelConfig) -> None:
    """Of what the forward pass computes, only the input of each block is kept for the backward pass, on the
    device or in the host's memory, if the configuration says so.

    Args:
        model: a transformers model.
    """
    if config.enable_gradient_checkpointing:
        kwargs, offload = (
            {"use_reentrant": False},
            config.enable_activation_offload and model.device.type != "cpu",
        )
        model.gradient_checkpointing_enable(kwargs, offload=offload)


@dataclass(frozen=True)
class Schedule:
    """How a batch is gone through.

    Args:
        mini_batch_size: rows per optimizer step.
        micro_batches: how these are cut for forward and backward passes.
        epochs: passes.
        shuffle: a new order of rows in every pass; else as they come.
        seed: of the orders.
    """

    mini_batch_size: int
    micro_batches: MicroBatches
    epochs: int
    shuffle: bool
    seed: int

    def updates_per_step(self, job: JobConfig) -> int:
        """Optimizer steps in a training step."""
        return job.data.train_batch_size * job.rollout.n // self.mini_batch_size * self.epochs

    def mini_batches(self, batch: DataProto, optimizer: Optimizer) -> Iterator[DataProto]:
        """The mini-batches of all passes. The order of a pass is a function of the seed and of the number of
        optimizer steps made before it, so a resumed run needs no other memory."""
        for _ in range(self.epochs):
            rows = batch
            if self.shuffle:
                order = np.random.default_rng([self.seed, optimizer.num_updates]).permutation(len(batch))
                rows = batch.select_idxs(torch.from_numpy(order))
            yield from rows.split(self.mini_batch_size)


def train(
    batch: DataProto,
    optimizer: Optimizer,
    schedule: Schedule,
    loss_of: LossFunction,
    prepare: Callable[[DataProto], DataProto] | None = None,
    report: Callable[[DataProto], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Trains on a batch.

    Args:
        batch: on the model's device.
        loss_of: the loss; shares of micro-batches add up to the mini-batch's.
        prepare: adds columns to each mini-batch before it is cut: what a loss must choose among all its tokens.
        report: what else to report of a mini-batch, from its rows with the columns that loss_of added to them.

    Returns:
        Means over the mini-batches of what loss_of and report tell and of grad_norm, but the greatest of what
        ends with max and the least of what ends with min; lr, the learning rate used.

    Raises:
        InvalidBatch: the rows do not divide into mini-batches.
        UpdateFailed: a gradient is not finite.
    """
    if not len(batch) or len(batch) % schedule.mini_batch_size:
        raise InvalidBatch(
            f"{optimizer.role}.update: {len(batch)} rows do not divide into mini-batches of "
            f"{schedule.mini_batch_size}"
        )
    history: list[dict[str, float]] = []
    for mini_batch in schedule.mini_batches(batch, optimizer):
        if prepare is not None:
            mini_batch = prepare(mini_batch)
        parts: dict[str, list[Tensor | TokenMean]] = {}
        passed: list[DataProto] = []
        for at in schedule.micro_batches.cut(mini_batch):
            rows = mini_batch.select_idxs(at)
            loss, shares = loss_of(rows, mini_batch["response_mask"])
            torch.autograd.backward(loss)
            for name, share in shares.items():
                parts.setdefault(name, []).append(share.detach() if isinstance(share, Tensor) else share)
            if report is not None:
                passed.append(rows)
        lr = optimizer.lr
        metrics = {name: _whole(of_name) for name, of_name in parts.items()}
        metrics["grad_norm"] = optimizer.step()
        history.append(metrics | (report(DataProto.concat(passed)) if report is not None else {}))
    return _over_mini_batches(history) | {"lr": lr}


def _whole(parts: Sequence[Tensor | TokenMean]) -> float:
    """What the parts of the micro-batches make together; a mean of nothing is 0."""
    means = [part for part in parts if isinstance(part, TokenMean)]
    if means:
        return float(sum(mean.total for mean in means)) / max(1, int(sum(mean.num_tokens for mean in means)))
    return float(sum(part for part in parts if isinstance(part, Tensor)))


def _over_mini_batches(history: list[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in (told for metrics in history for told in metrics.items()):
        values.setdefault(name, []).append(value)
    extremes = {"max": max, "min": min}
    return {name: extremes.get(name.rpartition("_")[2], fmean)(of_name) for name, of_name in values.items()}
