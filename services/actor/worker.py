"""The actor and the reference policy on one device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rolemesh.algos.aggregation import TokenMean
from rolemesh.algos.rollout_correction import correct
from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import Unsupported
from rolemesh.home import Home
from rolemesh.models.checkpoint import load_checkpoint, save_checkpoint
from rolemesh.models.loading import load_causal_lm, load_tokenizer, named_weights, resolve_device, vocabulary_of
from rolemesh.models.lora import Adapter
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.optimizer import Optimizer
from rolemesh.models.packing import remove_padding
from rolemesh.models.sequence import check_sequences, token_stats
from rolemesh.models.training import Schedule, checkpoint_activations, refuse_float16, train
from rolemesh.roles import Metrics, methods
from rolemesh.services.actor.objective import choose_tokens, policy_loss_of, policy_objective
from rolemesh.weights.held import HeldWeights
from rolemesh.weights.source import WeightSource
from rolemesh.workers.local import LocalWorker, by_rows, on_worker_thread
from rolemesh.workers.parking import Parking, model_tensors


class PolicyWorker(LocalWorker):
    """A policy that tells log-probabilities: what actor and reference have in common.

    Args:
        job: its rollout.temperature is that of the distribution which responses are drawn from.
        role: actor or reference.
        config: the role's model.
        micro_batches: how rows are cut for forward passes.

    Raises:
        ModelNotFound: the model directory is not there or not whole.
        InvalidConfig: a device that is not there; an architecture that cannot go without padding.
    """

    def __init__(self, job: JobConfig, role: str, config: ModelConfig, micro_batches: MicroBatches) -> None:
        super().__init__(role)
        self.job, self.role, self.config = job, role, config
        self.device = resolve_device(job.trainer.device)
        self.model = load_causal_lm(config, role).to(self.device)
        self.door = Door.of(methods(job), role, vocabulary_of(self.model))
        if config.use_remove_padding:
            remove_padding(self.model.get_decoder(), role)
        self.parking = Parking(self._tensors, self.device, job.run_dir)
        self._micro_batches = micro_batches
        self._temperature = 0.0 if job.rollout.greedy else job.rollout.temperature

    def _tensors(self) -> Iterable[Tensor]:
        """What is on the device."""
        return model_tensors(self.model)

    @torch.no_grad()
    def _stats(
        self,
        batch: DataProto,
        *,
        method: str = "compute_log_probs",
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """TokenStats by name, those asked for: [B, T] on the CPU, 0 where response_mask is False. The columns
        are those that `method` reads."""
        name = f"{self.role}.{method}"
        batch = methods(self.job)[name].prune(batch)
        check_sequences(batch, name)
        columns: dict[str, Tensor] = {}
        for at in self._micro_batches.cut(batch):
            rows = batch.select_idxs(at).to(self.device)
            stats = token_stats(
                self.model,
                rows,
                temperature=self._temperature,
                dtype=self.config.dtype,
                entropy=entropy,
                sum_pi_squared=sum_pi_squared,
            )
            for name, cells in stats._asdict().items():
                if cells is not None:
                    column = columns.setdefault(name, cells.new_zeros(batch["response_mask"].shape).cpu())
                    column[at] = torch.where(rows["response_mask"], cells, 0).cpu()
        return columns


class ReferenceWorker(PolicyWorker):
    """Implements rolemesh.roles.Reference."""

    def __init__(self, job: JobConfig) -> None:
        size = job.reference.log_prob_micro_batch_size_per_gpu
        cut = MicroBatches.of(job, "reference", job.reference_model, size)
        super().__init__(job, "reference", job.reference_model, cut)

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """ref_log_probs [B, T], 0 where response_mask is False."""
        return DataProto({"ref_log_probs": self._stats(batch)["log_probs"]})


class ActorWorker(PolicyWorker):
    """Implements rolemesh.roles.Actor.

    Raises:
        ModelNotFound: the model directory is not there, not whole, or has no tokenizer.
        InvalidConfig: float16, which would need loss scaling; an adapter that does not fit the model.
    """

    def __init__(self, job: JobConfig) -> None:
        actor = job.actor
        refuse_float16(actor.model, "actor")
        self.schedule = Schedule(
            mini_batch_size=actor.ppo_mini_batch_size * job.rollout.n,
            micro_batches=MicroBatches.of(job, "actor", actor.model, actor.ppo_micro_batch_size_per_gpu),
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=actor.seed,
        )
        self.tokenizer = load_tokenizer(actor.model, "actor")
        super().__init__(job, "actor", actor.model, self.schedule.micro_batches)
        self._home = Home.of(job)
        self.adapter = Adapter(self.model, actor.model, actor.seed) if actor.model.lora_rank else None
        checkpoint_activations(self.model, actor.model)
        self.optimizer = Optimizer(
            self.model,
            actor.optim,
            grad_clip=actor.grad_clip,
            num_training_steps=job.trainer.total_training_steps,
            updates_per_step=self.schedule.updates_per_step(job),
            role="actor",
        )

    def _tensors(self) -> Iterable[Tensor]:
        return [*model_tensors(self.model), *self.optimizer.tensors()]

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """old_log_probs, entropys and what else the job's method writes, [B, T], 0 where response_mask is
        False."""
        writes = methods(self.job)["actor.compute_log_probs"].writes
        columns = self._stats(batch, entropy=True, sum_pi_squared="sum_pi_squared" in writes)
        return DataProto({"old_log_probs": columns.pop("log_probs"), **columns})

    @by_rows
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """ref_log_probs [B, T] of the base model, 0 where response_mask is False.

        Raises:
            Unsupported: the actor has no adapter that could be off.
        """
        if self.adapter is None:
            raise Unsupported(
                "actor.compute_ref_log_probs is of an actor with an adapter, and actor.model.lora_rank is 0"
            )
        with self.adapter.off():
            columns = self._stats(batch, method="compute_ref_log_probs")
        return DataProto({"ref_log_probs": columns["log_probs"]})

    @on_worker_thread
    def update(self, batch: DataProto) -> Metrics:
        """Trains on the batch.

        Raises:
            InvalidBatch: a column is missing, or the rows do not divide into mini-batches.
            UpdateFailed: a gradient is not finite; that step was not taken.
        """
        batch = methods(self.job)["actor.update"].prune(batch)
        check_sequences(batch, "actor.update")
        self.model.train()
        try:
            metrics = train(
                batch.to(self.device),
                self.optimizer,
                self.schedule,
                self._loss,
                self._prepare,
                self._mismatch if policy_loss_of(self.job).corrects else None,
            )
        finally:
            self.model.eval()
        if self.job.actor.use_kl_loss:
            metrics["kl_coef"] = self.job.actor.kl_loss_coef
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def _prepare(self, mini_batch: DataProto) -> DataProto:
        """With what the loss must know of the whole mini-batch."""
        if policy_loss_of(self.job).choose is None:
            return mini_batch
        log_probs = self._stats(mini_batch)["log_probs"].to(self.device)
        return choose_tokens(mini_batch, log_probs, self.job, self.optimizer.num_updates)

    def _loss(self, rows: DataProto, mini_batch_mask: Tensor) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        stats = token_stats(
            self.model,
            rows,
            temperature=self._temperature,
            dtype=self.config.dtype,
            entropy=self.job.actor.entropy_coeff != 0,
            entropy_gradient=True,
        )
        if policy_loss_of(self.job).corrects:
            rows["log_probs"] = stats.log_probs.detach()
        return policy_objective(stats.log_probs, stats.entropys, rows, mini_batch_mask, self.job)

    def _mismatch(self, rows: DataProto) -> Metrics:
        """With bypass_mode, how far the policy under training is from the engine's."""
        log_probs = rows["log_probs"], rows["old_log_probs"], rows["response_mask"]
        return correct(*log_probs, self.job.algorithm.rollout_correction).metrics

    @on_worker_thread
    def publish_weights(self, version: int) -> WeightSource:
        """A copy of the weights as they are now, under a version."""
        if self.adapter:
            return HeldWeights(version, self.adapter.base_weights(), self.adapter.deltas())
        return HeldWeights(version, named_weights(self.model))

    @on_worker_thread
    def save_checkpoint(self, directory: Path) -> None:
        """Model, tokenizer and optimizer: rolemesh/models/checkpoint.py. Raises CheckpointFailed."""

        def write_model(into: Path) -> None:
            (self.adapter.save if self.adapter else self.model.save_pretrained)(into)
            self.tokenizer.save_pretrained(into)

        save_checkpoint(self._home, directory, write_model, self.optimizer)

    @on_worker_thread
    def load_checkpoint(self, directory: Path | None) -> None:
        """Takes up what save_checkpoint wrote, bit for bit; None: begins anew. Raises CheckpointFailed."""

        def read_weights(path: Path | None) -> dict[str, Tensor]:
            config = self.config.model_copy(update={"path": str(path)}) if path else self.config
            weights: dict[str, Tensor] = load_causal_lm(config, "actor").state_dict()
            return weights

        if self.adapter:
            load_checkpoint(self._home, directory, self.adapter.weights, self.adapter.read, self.optimizer)
        else:
            load_checkpoint(self._home, directory, self.model.state_dict(), read_weights, self.optimizer)
