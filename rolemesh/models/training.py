"""The loop that actor and critic share: passes, mini-batches, micro-batches, an optimizer step for each
mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig, TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.optimizer import Optimizer

# (a micro-batch, response_mask of the mini-batch that it is part of) -> its share of the loss, and its shares
# of what is reported
LossFunction = Callable[[DataProto, Tensor], tuple[Tensor, dict[str, Tensor]]]


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
) -> dict[str, float]:
    """Trains on a batch.

    Args:
        batch: on the model's device.
        loss_of: the loss; shares of micro-batches add up to the mini-batch's.
        prepare: adds columns to each mini-batch before it is cut: what a loss must choose among all its tokens.

    Returns:
        Means over the mini-batches of what loss_of reports and of grad_norm; lr, the learning rate used.

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
        sums: dict[str, Tensor] = {}
        for rows in schedule.micro_batches.cut(mini_batch):
            loss, shares = loss_of(mini_batch.select_idxs(rows), mini_batch["response_mask"])
            torch.autograd.backward(loss)
            for name, share in shares.items():
                sums[name] = sums[name] + share.detach() if name in sums else share.detach()
        lr = optimizer.lr
        grad_norm = optimizer.step()
        history.append({name: float(total) for name, total in sums.items()} | {"grad_norm": grad_norm})
    means = {name: sum(entry[name] for entry in history) / len(history) for name in history[0]}
    return means | {"lr": lr}
