"""The base of actor and critic: their optimizer, how a mini-batch goes to the ranks, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig, OptimConfig, TrainedFsdpConfig
from rolemesh.dataproto import DataProto
from rolemesh.home import Home
from rolemesh.ranks.sharding import Root
from rolemesh.training.checkpoint import CheckpointWriter, WriteModel, load_checkpoint
from rolemesh.training.optimizer import Optimizer
from rolemesh.training.update_loop import Schedule, learn
from rolemesh.training.usage import GpuUsage
from rolemesh.workers.commands import ShardedBatch, on_all_ranks
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.offloading import Offloader


class TrainedWorker(LocalWorker):
    """Base of the workers of trained roles: the methods of rolemesh.rpc.serving.trained.Trained but `update`.

    Attributes:
        job, device, config: as the role loaded its model.
        root: the model.
        schedule: how an update iterates over its batch.
    """

    job: JobConfig
    device: torch.device
    config: ModelConfig
    root: Root
    schedule: Schedule

    def prepare_training(self, optim: OptimConfig, grad_clip: float, fsdp: TrainedFsdpConfig) -> None:
        """Make the optimizer and the writer of checkpoints, once the attributes above are set.

        Args:
            optim: the role's section.
            grad_clip: the role's key.
            fsdp: how the model is spread over the role's ranks.
        """
        job = self.job
        ranks = self.worker_context.ranks
        self._home = Home.of(job)
        self._checkpoints = CheckpointWriter(self._home, self.role, ranks, dtype=self.config.dtype)
        self.optimizer = Optimizer(
            self.root.model,
            optim,
            grad_clip=grad_clip,
            num_training_steps=job.trainer.total_training_steps,
            updates_per_step=self.schedule.updates_per_step(job),
            role=self.role,
            ranks=ranks,
            offloader_of=partial(Offloader, device=self.device, directory=job.run_dir),
            offload=fsdp.optimizer_offload,
        )
        self.on_demand = self.optimizer.offloader
        self.usage = GpuUsage(self.role, self.config, self.device, ranks.size, self.schedule.epochs)

    # ------------------------------------------------------------------------------- what a role adds

    def loss(self, rows: DataProto, mini_batch: BatchCounts) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        """Compute a micro-batch's shares of the loss and the metrics (update_loop.LossFunction)."""
        raise NotImplementedError

    @property
    def learn_returns(self) -> tuple[str, ...]:
        """Columns of each row that `learn` answers with (rolemesh.training.update_loop.learn)."""
        return ()

    def learning(self) -> AbstractContextManager[None]:
        """Return a context around the passes of a mini-batch."""
        return nullcontext()

    def copy_model(self) -> WriteModel:
        """Copy this rank's rows of the model, and return what writes the copy."""
        raise NotImplementedError

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights as the model holds them."""
        raise NotImplementedError

    def read_weights(self, directory: Path | None) -> Mapping[str, Tensor]:
        """Read this rank's rows of the trained weights from a directory; None: the job's initial ones."""
        raise NotImplementedError

    def loaded(self) -> None:
        """Do what the role does once a checkpoint was loaded."""

    # -------------------------------------------------------------------------------------- training

    def _learn_on_ranks(self, mini_batch: DataProto, counts: BatchCounts) -> Sequence[DataProto]:
        cut = self.schedule.micro_batches
        sharded = ShardedBatch.of(mini_batch, cut, self.worker_context.ranks, mini_batch=list(counts))
        return sharded.by_part(self.usage.seen(self.learn(sharded.parts)))

    @on_all_ranks
    def learn(self, part: DataProto) -> DataProto:
        """Train on this rank's rows of a mini-batch (rolemesh.training.update_loop.learn)."""
        ranks = self.worker_context.ranks
        cut = self.schedule.micro_batches
        with self.learning():
            answer = learn(part, self.root, self.optimizer, cut, ranks, self.loss, self.learn_returns)
        return self.usage.noted(answer)

    # ----------------------------------------------------------------------------------- checkpoints

    @on_worker_thread
    def begin_checkpoint(self, directory: Path) -> None:
        """Copy model and optimizer, and begin to write them (rolemesh/training/checkpoint.py).

        Raises:
            CheckpointFailed: as CheckpointWriter.begin.
        """
        self.copy_checkpoint(self._parts(directory=str(directory)))

    @on_all_ranks
    def copy_checkpoint(self, part: DataProto) -> DataProto:
        """Copy this rank's rows, and begin to write them into the directory in meta_info."""
        self._checkpoints.begin(Path(part.meta_info["directory"]), self.copy_model, self.optimizer)
        return DataProto()

    async def finish_checkpoint(self, directory: Path) -> None:
        """Wait until the checkpoint that was begun last is on disk. Raises CheckpointFailed."""
        await self._checkpoints.finish(directory)

    @on_worker_thread
    def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        """Restore what a checkpoint has, bit for bit; None: the initial state. Raises CheckpointFailed."""
        num_steps = num_training_steps or self.job.trainer.total_training_steps
        self.read_checkpoint(self._parts(directory=str(directory or ""), num_training_steps=num_steps))

    @on_all_ranks
    def read_checkpoint(self, part: DataProto) -> DataProto:
        """Read this rank's rows of the checkpoint in meta_info's directory; empty: of the initial state.

        meta_info also has `num_training_steps`, of the run that begins or goes on.
        """
        self.optimizer.num_training_steps = part.meta_info["num_training_steps"]
        directory = Path(part.meta_info["directory"]) if part.meta_info["directory"] else None
        self._checkpoints.wait()
        weights = self.trained_weights()
        ranks = self.worker_context.ranks
        dtype = self.config.dtype
        load_checkpoint(self._home, directory, weights, self.read_weights, self.optimizer, ranks, dtype=dtype)
        self.loaded()
        return DataProto()

    def close(self) -> None:
        super().close()
        self._checkpoints.close()
