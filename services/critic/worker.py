"""The critic."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, BatchCounts, TokenMean
from rolemesh.algos.value_loss import clipped_value_loss
from rolemesh.batch_validation import BatchValidator
from rolemesh.config import JobConfig
from rolemesh.config.actor import CriticConfig
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import named_weights, vocabulary_of, with_dtype
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.packed.load_probe import prepare_body
from rolemesh.models.sequence import check_sequences, loss_columns, merge_micro_batches, token_values
from rolemesh.models.sharded import load_score_model, read_score_model
from rolemesh.models.supported import check_positions
from rolemesh.ranks.ulysses import check_heads
from rolemesh.roles import Metrics
from rolemesh.training.checkpoint import WriteModel
from rolemesh.training.update_loop import Schedule, checkpoint_activations, update
from rolemesh.workers.commands import ShardedBatch, on_all_ranks
from rolemesh.workers.devices import resolve_device
from rolemesh.workers.local import by_rows, on_worker_thread
from rolemesh.workers.offloading import Offloader, model_tensors
from rolemesh.workers.trained_worker import TrainedWorker
from rolemesh.workers.worker_context import WorkerContext


class CriticWorker(TrainedWorker):
    """Implements rolemesh.roles.Critic.

    Raises:
        ModelNotFound: the model directory is absent or incomplete.
        InvalidConfig: the architecture is not causal or cannot run without padding, or its positions do not
            suit the rows' lengths; or the device does not exist or has no such dtype.
    """

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        super().__init__("critic", worker_context)
        critic = job.critic
        self.job = job
        self.device = resolve_device(job.trainer.device)
        self.config = with_dtype(job.critic_model, "critic", self.device)
        assert critic.ppo_epochs is not None, "JobConfig fills it in"
        assert critic.shuffle is not None, "JobConfig fills it in"
        self.schedule = Schedule(
            mini_batch_size=job.mini_batch_size("critic") * job.rollout.n,
            micro_batches=MicroBatches.of(job, "critic", self.config, critic.ppo_micro_batch_size_per_gpu),
            epochs=critic.ppo_epochs,
            shuffle=critic.shuffle,
            seed=critic.seed,
        )
        ranks = self.worker_context.ranks
        fsdp = self.config.fsdp_config
        self.root = load_score_model(self.config, "critic", ranks, fsdp, self.device, critic.seed)
        self.methods = methods(job)
        self.validator = BatchValidator.of(self.methods, "critic", vocabulary_of(self.model.body))
        check_positions(self.model.body.config, job, "critic")
        self.root(lambda model: prepare_body(model.body, "critic", self.config))
        if ranks.ulysses:
            key = "critic.ulysses_sequence_parallel_size"
            check_heads(self.model.body.config.get_text_config(), ranks.ulysses.size, key)
        checkpoint_activations(self.model.body, self.config, self.device)
        self.prepare_training(critic.optim, critic.grad_clip, self.config.fsdp_config)
        self.offloader = Offloader(lambda: model_tensors(self.root), self.device, job.run_dir)

    @property
    def model(self) -> ScoreModel:
        """Body and value head; their weights are whole only within a call of `root`."""
        model: ScoreModel = self.root.model
        return model

    @by_rows
    def compute_values(self, batch: DataProto) -> DataProto:
        """Compute values [B, T] before each response token is sampled, 0 where response_mask is False."""
        batch = self.methods["critic.compute_values"].prune(batch)
        check_sequences(batch, "critic.compute_values")
        sharded = ShardedBatch.of(batch, self.schedule.micro_batches, self.worker_context.ranks)
        return sharded.gather(self.forward(sharded.parts))

    @on_all_ranks
    @torch.no_grad()
    def forward(self, part: DataProto) -> DataProto:
        """Compute values [B, T] of this rank's rows."""
        passes = [
            (at, self._values(part.select_idxs(at)))
            for at, _ in self.schedule.micro_batches.passes(part, self.worker_context.ranks)
        ]
        return DataProto({"values": merge_micro_batches(passes, part["response_mask"])})

    def _values(self, rows: DataProto) -> Tensor:
        how = {"device": self.device, "dtype": self.config.dtype, "ulysses": self.worker_context.ranks.ulysses}
        values: Tensor = self.root(token_values, rows, **how)
        return values

    @on_worker_thread
    def update(self, batch: DataProto) -> Metrics:
        """Train on the batch.

        Raises:
            InvalidBatch: a column is missing, or the rows do not divide into mini-batches.
            UpdateFailed: a gradient is not finite; that optimizer step was skipped.
        """
        method = self.methods["critic.update"]
        self.loads.take()  # of values: which of them are computed together depends on when rows come
        with self.usage.measured(batch) as used:
            metrics = update(method, batch, self.optimizer, self.schedule, self._learn_on_ranks)
        return {f"critic/{name}": value for name, value in metrics.items()} | self.loads.take() | used

    def loss(self, rows: DataProto, mini_batch: BatchCounts) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        return value_objective(self._values(rows), loss_columns(rows, self.device), mini_batch, self.job.critic)

    def copy_model(self) -> WriteModel:
        """Copy this rank's rows of the model, and return what writes the copy."""
        return self.model.copy(self.worker_context.ranks)

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the weights of body and value head."""
        return named_weights(self.model)

    def read_weights(self, directory: Path | None) -> dict[str, Tensor]:
        """Read this rank's rows of them from a directory; None: the job's initial ones."""
        config = self.config.model_copy(update={"path": str(directory)}) if directory else self.config
        return read_score_model(self.model, config, "critic", self.job.critic.seed)


def value_objective(
    values: Tensor, rows: DataProto, mini_batch: BatchCounts, config: CriticConfig
) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
    """Compute the loss that the critic minimises, and its metrics.

    Args:
        values: [b, T] of a micro-batch.
        rows: the micro-batch, with response_mask, values (before the update) and returns. Also loss_mask if
            rollout_correction rejects tokens.
        mini_batch: counts of the micro-batch's mini-batch.
        config: the section critic.

    Returns:
        The micro-batch's shares of the mini-batch's loss and metrics. Means are over the tokens of the loss.
    """
    assert config.loss_agg_mode is not None, "JobConfig fills it in"
    mask = rows["loss_mask"] if "loss_mask" in rows else rows["response_mask"]
    loss, clipped = clipped_value_loss(
        values,
        rows["values"],
        rows["returns"],
        mask,
        cliprange_value=config.cliprange_value,
        aggregate=Aggregation.of(mini_batch, config.loss_agg_mode, config.loss_scale_factor),
    )
    return loss, {
        "vf_loss": loss,
        "vf_clipfrac": TokenMean.over(clipped, mask),
        "vpred_mean": TokenMean.over(values, mask),
    }
