"""The training loop of actor and critic: passes, mini-batches, micro-batches, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.config import JobConfig
from rolemesh.config.model import TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.methods import Method
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.sequence import check_sequences
from rolemesh.ranks.ranks import Ranks
from rolemesh.roles import Metrics
from rolemesh.training.optimizer import Optimizer

# (a micro-batch, counts of its mini-batch) -> its share of the loss, and its shares of the metrics
LossFunction = Callable[[DataProto, BatchCounts], tuple[Tensor, dict[str, Tensor | TokenMean]]]
# Runs `learn` on every rank, on the ranks' rows of a mini-batch, and returns their answers.
Learn = Callable[[DataProto, BatchCounts], Sequence[DataProto]]


def checkpoint_activations(model: Any, config: TrainedModelConfig, device: torch.device) -> None:
    """Enable activation checkpointing if configured: the backward pass keeps only the input of each block.

    The inputs stay on the device, or in host memory with enable_activation_offload (not if the device is a
    CPU).

    Args:
        model: a transformers model.
        config: its section.
        device: that it computes on; its weights may be elsewhere (fsdp_config.param_offload).
    """
    if config.enable_gradient_checkpointing:
        offload = config.enable_activation_offload and device.type != "cpu"
        model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)


@dataclass(frozen=True)
class Schedule:
    """How an update iterates over its batch.

    Args:
        mini_batch_size: rows per optimizer step.
        micro_batches: how a mini-batch is split for forward and backward passes.
        epochs: passes over the batch.
        shuffle: shuffle the rows in every pass; else keep their order.
        seed: of the shuffle.
    """

    mini_batch_size: int
    micro_batches: MicroBatches
    epochs: int
    shuffle: bool
    seed: int

    def updates_per_step(self, job: JobConfig) -> int:
        """Return the number of optimizer steps in a training step."""
        return job.data.train_batch_size * job.rollout.n // self.mini_batch_size * self.epochs

    def mini_batches(self, batch: DataProto, optimizer: Optimizer) -> Iterator[DataProto]:
        """Yield the mini-batches of all passes.

        The order of rows in a pass depends only on the seed and the number of optimizer steps before it. A
        resumed run therefore needs no other state.
        """
        for _ in range(self.epochs):
            rows = batch
            if self.shuffle:
                seed = [self.seed % 2**64, optimizer.num_updates]
                order = np.random.default_rng(seed).permutation(len(batch))
                rows = batch.select_idxs(torch.from_numpy(order))
            yield from rows.split(self.mini_batch_size)


def update(
    method: Method,
    batch: DataProto,
    optimizer: Optimizer,
    schedule: Schedule,
    learn_on_ranks: Learn,
    prepare: Callable[[DataProto], DataProto] | None = None,
    report: Callable[[DataProto], Metrics] | None = None,
) -> Metrics:
    """Run a role's `update`: check the batch, and train on it.

    Args:
        method: the role's method; it declares the columns that are read.
        batch: as received.

    See `train` for the other arguments, the result and the errors. Also raises InvalidBatch if a column is
    missing or the columns do not fit together.
    """
    batch = method.prune(batch)
    check_sequences(batch, f"{method.role}.{method.name}")
    return train(batch, optimizer, schedule, learn_on_ranks, prepare, report)


def train(
    batch: DataProto,
    optimizer: Optimizer,
    schedule: Schedule,
    learn_on_ranks: Learn,
    prepare: Callable[[DataProto], DataProto] | None = None,
    report: Callable[[DataProto], Metrics] | None = None,
) -> Metrics:
    """Train every rank's model on a batch. Rank 0 calls it.

    Args:
        batch: on the CPU.
        optimizer: of this rank.
        schedule: splits the batch into mini-batches.
        learn_on_ranks: trains on a mini-batch.
        prepare: adds columns to each mini-batch before it is sharded, e.g. the tokens that a loss selects from
            the whole mini-batch.
        report: computes further metrics of a mini-batch, from the rows that `learn` returned.

    Returns:
        The metrics of the loss and of report, and grad_norm, each the mean over the mini-batches; but the
        maximum of metrics whose name ends in _max, and the minimum of those in _min. Also lr, the learning rate
        used.

    Raises:
        InvalidBatch: the rows do not divide into mini-batches.
        UpdateFailed: a gradient is not finite.
    """
    if not len(batch) or len(batch) % schedule.mini_batch_size:
        raise InvalidBatch(
            f"{optimizer.role}.update: {len(batch)} rows do not divide into mini-batches of "
            f"{schedule.mini_batch_size}"
        )
    history: list[Metrics] = []
    for mini_batch in schedule.mini_batches(batch, optimizer):
        if prepare is not None:
            mini_batch = prepare(mini_batch)
        lr = optimizer.lr
        answers = learn_on_ranks(mini_batch, BatchCounts.of(mini_batch["response_mask"]))
        metrics = _over_ranks([answer.meta_info["totals"] for answer in answers])
        metrics["grad_norm"] = answers[0].meta_info["grad_norm"]
        if report is not None:
            metrics |= report(DataProto.concat([DataProto(each.tensors) for each in answers if len(each)]))
        history.append(metrics)
    return _over_mini_batches(history) | {"lr": lr}


def learn(
    part: DataProto,
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: MicroBatches,
    ranks: Ranks,
    loss_of: LossFunction,
    returns: Sequence[str] = (),
) -> DataProto:
    """Train one rank's model on a mini-batch: add up the gradients of its own rows, and make an optimizer step.

    The gradients of all ranks are added before the step (rolemesh/ranks/sharding.py). No gradient is left for
    the next call, even after an error.

    Args:
        part: the rank's rows, on the CPU. meta_info has `mini_batch`, the BatchCounts of the whole mini-batch.
        model: the model that the optimizer trains; the Root of one that may be sharded.
        optimizer: makes one step.
        micro_batches: cuts the rows.
        ranks: all of which call this.
        loss_of: the loss; the shares of micro-batches sum to the mini-batch's loss.
        returns: columns to return, which may be ones that loss_of added.

    Returns:
        The rows that count, with those columns. In meta_info `totals`, the rank's shares of the metrics, each a
        sum or a sum with its number of tokens; and grad_norm.

    Raises:
        UpdateFailed: a gradient is not finite, on any rank.
    """
    mini_batch = BatchCounts(*part.meta_info["mini_batch"])
    shares: dict[str, list[Tensor | TokenMean]] = {}
    passed: dict[str, list[Tensor]] = {name: [] for name in returns}
    _train_mode(model)
    try:
        for at, counts in micro_batches.passes(part, ranks):
            rows = part.select_idxs(at)
            loss, own = loss_of(rows, mini_batch)
            torch.autograd.backward(loss if counts else 0 * loss)
            if not counts:
                continue
            for name, share in own.items():
                shares.setdefault(name, []).append(share.detach() if isinstance(share, Tensor) else share)
            for name, columns in passed.items():
                columns.append(rows[name])
        grad_norm = optimizer.step()
    except BaseException as error:
        _abandon(model, error)
        raise
    finally:
        model.eval()
    facts = {"totals": _totals(shares), "grad_norm": grad_norm}
    answer = {name: torch.cat(columns).cpu() for name, columns in passed.items() if columns}
    return DataProto(answer, meta_info=facts)


def _abandon(model: nn.Module, error: BaseException) -> None:
    """Drop the gradients of passes that failed; free and reset what autograd and FSDP held for them.

    Raises:
        RuntimeError: this torch cannot reset FSDP. It is none of our errors, so the group of ranks ends.
    """
    model.zero_grad()  # of gathered weights, which have gradients of their own until these are reduced
    if isinstance(model, FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            why = f"torch {torch.__version__} cannot go on with sharded weights after it (2.13 can)"
            raise RuntimeError(f"{type(error).__name__}: {error}; {why}") from error
        model.reset_iter_state()
        model.zero_grad()  # of the rank's own rows
    # On a CPU, autograd's queue of this thread keeps a failed backward pass until the next one begins.
    torch.autograd.backward(torch.zeros((), requires_grad=True))


def _train_mode(model: nn.Module) -> None:
    """Set training mode on the modules that can checkpoint activations, and evaluation mode on all others.

    In training mode a mixture of experts may multiply its input by noise (Mixtral's jitter), or draw its
    experts (PhiMoE). An update computes the policy that compute_log_probs and the engine do, so it has neither.
    """
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")


def _totals(shares: Mapping[str, Sequence[Tensor | TokenMean]]) -> dict[str, list[float]]:
    """Sum the shares of a rank's micro-batches, by name: [sum], or [sum, number of tokens].

    All numbers come from the device as one copy; float64 has every float32 and every number of tokens.
    """
    sums: dict[str, list[Any]] = {}
    for name, of_name in shares.items():
        means = [share for share in of_name if isinstance(share, TokenMean)]
        parts = [[mean.total for mean in means], [mean.num_tokens for mean in means]] if means else [of_name]
        sums[name] = [sum(part) for part in parts]
    totals = [total.double() for each in sums.values() for total in each]
    numbers = iter(torch.stack(totals).tolist() if totals else [])
    return {name: [next(numbers) for _ in each] for name, each in sums.items()}


def _over_ranks(totals: Sequence[Mapping[str, Sequence[float]]]) -> Metrics:
    """Sum the ranks' totals; a mean over no tokens is 0."""
    metrics: Metrics = {}
    for name in totals[0]:
        of_ranks = (rank[name] for rank in totals if rank)  # empty where a rank has no row that counts
        total, *num_tokens = map(sum, zip(*of_ranks, strict=True))
        metrics[name] = total / max(1, num_tokens[0]) if num_tokens else total
    return metrics


def _over_mini_batches(history: list[Metrics]) -> Metrics:
    values: dict[str, list[float]] = {}
    for name, value in (item for metrics in history for item in metrics.items()):
        values.setdefault(name, []).append(value)
    extremes = {"max": max, "min": min}
    return {name: extremes.get(name.rpartition("_")[2], fmean)(of_name) for name, of_name in values.items()}
