"""The critic on one device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rolemesh.algos.aggregation import Aggregation, TokenMean
from rolemesh.algos.value_loss import clipped_value_loss
from rolemesh.config import JobConfig
from rolemesh.config.critic import CriticConfig
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.home import Home
from rolemesh.models.checkpoint import load_checkpoint, save_checkpoint
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import resolve_device, vocabulary_of
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.optimizer import Optimizer
from rolemesh.models.packing import remove_padding
from rolemesh.models.sequence import check_sequences, token_values
from rolemesh.models.training import Schedule, checkpoint_activations, refuse_float16, train
from rolemesh.roles import Metrics, methods
from rolemesh.workers.local import LocalWorker, by_rows, on_worker_thread
from rolemesh.workers.parking import Parking, model_tensors


class CriticWorker(LocalWorker):
    """Implements rolemesh.roles.Critic.

    Raises:
        ModelNotFound: the model directory is not there or not whole.
        InvalidConfig: float16, which would need loss scaling; an architecture that cannot go without padding.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__("critic")
        critic = job.critic
        self.job, self.config = job, job.critic_model
        self._home = Home.of(job)
        refuse_float16(self.config, "critic")
        assert critic.ppo_epochs is not None, "JobConfig fills it in"
        assert critic.shuffle is not None, "JobConfig fills it in"
        self.schedule = Schedule(
            mini_batch_size=job.critic_mini_batch_size * job.rollout.n,
            micro_batches=MicroBatches.of(job, "critic", self.config, critic.ppo_micro_batch_size_per_gpu),
            epochs=critic.ppo_epochs,
            shuffle=critic.shuffle,
            seed=critic.seed,
        )
        self.device = resolve_device(job.trainer.device)
        self.model = ScoreModel.load(self.config, "critic", seed=critic.seed).to(self.device)
        self.door = Door.of(methods(job), "critic", vocabulary_of(self.model.body))
        if self.config.use_remove_padding:
            remove_padding(self.model.body, "critic")
        checkpoint_activations(self.model.body, self.config)
        self.optimizer = Optimizer(
            self.model,
            critic.optim,
            grad_clip=critic.grad_clip,
            num_training_steps=job.trainer.total_training_steps,
            updates_per_step=self.schedule.updates_per_step(job),
            role="critic",
        )
        self.parking = Parking(
            lambda: [*model_tensors(self.model), *self.optimizer.tensors()], self.device, job.run_dir
        )

    @by_rows
    @torch.no_grad()
    def compute_values(self, batch: DataProto) -> DataProto:
        """values [B, T] before each response token is sampled, 0 where response_mask is False."""
        batch = methods(self.job)["critic.compute_values"].prune(batch)
        check_sequences(batch, "critic.compute_values")
        values = torch.zeros(batch["response_mask"].shape)
        for at in self.schedule.micro_batches.cut(batch):
            rows = batch.select_idxs(at).to(self.device)
            predicted = token_values(self.model, rows, dtype=self.config.dtype)
            values[at] = torch.where(rows["response_mask"], predicted, 0).cpu()
        return DataProto({"values": values})

    @on_worker_thread
    def update(self, batch: DataProto) -> Metrics:
        """Trains on the batch.

        Raises:
            InvalidBatch: a column is missing, or the rows do not divide into mini-batches.
            UpdateFailed: a gradient is not finite; that step was not taken.
        """
        batch = methods(self.job)["critic.update"].prune(batch)
        check_sequences(batch, "critic.update")
        self.model.train()
        try:
            metrics = train(batch.to(self.device), self.optimizer, self.schedule, self._loss)
        finally:
            self.model.eval()
        return {f"critic/{name}": value for name, value in metrics.items()}

    def _loss(self, rows: DataProto, mini_batch_mask: Tensor) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        values = token_values(self.model, rows, dtype=self.config.dtype)
        return value_objective(values, rows, mini_batch_mask, self.job.critic)

    @on_worker_thread
    def save_checkpoint(self, directory: Path) -> None:
        """Model and optimizer: rolemesh/models/checkpoint.py. Raises CheckpointFailed."""
        save_checkpoint(self._home, directory, self.model.save_pretrained, self.optimizer)

    @on_worker_thread
    def load_checkpoint(self, directory: Path | None) -> None:
        """Takes up what save_checkpoint wrote, bit for bit; None: begins anew. Raises CheckpointFailed."""

        def read_weights(path: Path | None) -> dict[str, Tensor]:
            config = self.config.model_copy(update={"path": str(path)}) if path else self.config
            return ScoreModel.load(config, "critic", seed=self.job.critic.seed).state_dict()

        load_checkpoint(self._home, directory, self.model.state_dict(), read_weights, self.optimizer)


def value_objective(
    values: Tensor, rows: DataProto, mini_batch_mask: Tensor, config: CriticConfig
) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
    """What the critic minimises.

    Args:
        values: [b, T] of a micro-batch.
        rows: the micro-batch: response_mask, values (before the update), returns; loss_mask where
            rollout_correction rejects tokens.
        mini_batch_mask: response_mask [B, T] of the mini-batch that it is part of.

    Returns:
        The micro-batch's shares of the mini-batch's loss and of what is reported: means over the tokens that
        count for the loss.
    """
    assert config.loss_agg_mode is not None, "JobConfig fills it in"
    mask = rows["loss_mask"] if "loss_mask" in rows else rows["response_mask"]
    loss, clipped = clipped_value_loss(
        values,
        rows["values"],
        rows["returns"],
        mask,
        cliprange_value=config.cliprange_value,
        aggregate=Aggregation.of(mini_batch_mask, config.loss_agg_mode, config.loss_scale_factor),
    )
    return loss, {
        "vf_loss": loss,
        "vf_clipfrac": TokenMean.over(clipped, mask),
        "vpred_mean": TokenMean.over(values, mask),
    }
