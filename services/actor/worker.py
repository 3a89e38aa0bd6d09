"""The actor and the reference policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolemesh.algos.aggregation import BatchCounts, TokenMean
from rolemesh.algos.rollout_correction import correct
from rolemesh.batch_validation import BatchValidator
from rolemesh.config import JobConfig
from rolemesh.config.actor import ActorConfig
from rolemesh.config.model import FsdpConfig, ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import Unsupported
from rolemesh.methods import methods
from rolemesh.models.distribution import TokenStats
from rolemesh.models.heads import VocabularyHead
from rolemesh.models.loading import load_tokenizer, named_weights, vocabulary_of, with_dtype
from rolemesh.models.lora import Adapter
from rolemesh.models.micro_batches import MicroBatches
from rolemesh.models.packed.load_probe import prepare_body
from rolemesh.models.sequence import DTYPES, check_sequences, loss_columns, merge_micro_batches, token_stats
from rolemesh.models.sharded import copy_policy, load_policy, read_policy
from rolemesh.models.supported import check_positions
from rolemesh.ranks.collective_errors import on_first
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.ulysses import check_heads
from rolemesh.roles import Metrics
from rolemesh.services.actor.objective import check_policy_loss, choose_tokens, policy_objective
from rolemesh.services.actor.publishing import published_dtype
from rolemesh.training.checkpoint import WriteModel
from rolemesh.training.update_loop import Schedule, checkpoint_activations, update
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.weight_source import WeightSource
from rolemesh.workers.commands import ShardedBatch, on_all_ranks
from rolemesh.workers.devices import resolve_device
from rolemesh.workers.local import LocalWorker, by_rows, on_worker_thread
from rolemesh.workers.offloading import Offloader, model_tensors
from rolemesh.workers.trained_worker import TrainedWorker
from rolemesh.workers.worker_context import WorkerContext


class PolicyWorker(LocalWorker):
    """Base of actor and reference: a policy that computes log-probabilities.

    Args:
        job: its temperature defines the distribution that responses are sampled from.
        role: actor or reference.
        config: the role's model.
        fsdp: how it is spread over the role's ranks.
        micro_batches: how rows are split for forward passes.
        worker_context: as LocalWorker's.
        adapt: adds an adapter to the model.
        frozen: the model is never trained.

    Raises:
        ModelNotFound: the model directory is absent or incomplete.
        InvalidConfig: the device does not exist or has no such dtype, the architecture is not causal or cannot
            run without padding, its positions do not suit the rows' lengths, or its head cannot have float32
            logits.
    """

    def __init__(
        self,
        job: JobConfig,
        role: str,
        config: ModelConfig,
        fsdp: FsdpConfig,
        micro_batches: MicroBatches,
        worker_context: WorkerContext | None,
        adapt: Callable[[Any], Adapter] | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__(role, worker_context)
        self.job = job
        self.role = role
        self.device = resolve_device(job.trainer.device)
        self.config = config = with_dtype(config, role, self.device)
        ranks = self.worker_context.ranks
        self.root, self.adapter = load_policy(config, role, ranks, fsdp, self.device, adapt, frozen=frozen)
        self.methods = methods(job)
        self.validator = BatchValidator.of(self.methods, role, vocabulary_of(self.model))
        check_positions(self.model.config, job, role)
        self.root(lambda model: prepare_body(model.get_decoder(), role, config))
        if ranks.ulysses:
            key = f"{role}.ulysses_sequence_parallel_size"
            check_heads(self.model.config.get_text_config(), ranks.ulysses.size, key)
        head_dtype = job.actor.head_dtype
        self.vocabulary_head = VocabularyHead.of(self.model, DTYPES[config.dtype], head_dtype, role)
        self.offloader = Offloader(lambda: model_tensors(self.root), self.device, job.run_dir)
        self._micro_batches = micro_batches
        self._temperature = job.temperature

    @property
    def model(self) -> Any:
        """The transformers model; its weights are whole only within a call of `root`."""
        return self.root.model

    def _one_cast(self) -> AbstractContextManager[None]:
        """Within the context the head's weight does not change, and is cast at most once."""
        return self.vocabulary_head.kept() if self.vocabulary_head else nullcontext()

    def _stats(
        self, batch: DataProto, *, method: str = "compute_log_probs", **wanted: bool
    ) -> dict[str, Tensor]:
        """Compute TokenStats of every row by name: [B, T] on the CPU, 0 where response_mask is False.

        Only the columns that `method` declares are read. For `wanted` see `forward`.
        """
        name = f"{self.role}.{method}"
        batch = self.methods[name].prune(batch)
        check_sequences(batch, name)
        sharded = ShardedBatch.of(batch, self._micro_batches, self.worker_context.ranks, **wanted)
        return dict(sharded.gather(self.forward(sharded.parts)).tensors)

    @on_all_ranks
    @torch.no_grad()
    def forward(self, part: DataProto) -> DataProto:
        """Compute TokenStats of this rank's rows.

        meta_info may have `entropy` and `sum_pi_squared`, to compute these too, and `adapter_off`, to compute
        with the adapter's base model.
        """
        entropy, sum_pi_squared = (bool(part.meta_info.get(name)) for name in ("entropy", "sum_pi_squared"))
        passes: list[tuple[Tensor, TokenStats]] = []
        adapter = self.adapter if part.meta_info.get("adapter_off") else None
        with adapter.off() if adapter else nullcontext(), self._one_cast():
            for at, _ in self._micro_batches.passes(part, self.worker_context.ranks):
                stats = self.root(
                    token_stats,
                    part.select_idxs(at),
                    temperature=self._temperature,
                    device=self.device,
                    dtype=self.config.dtype,
                    entropy=entropy,
                    sum_pi_squared=sum_pi_squared,
                    vocabulary_head=self.vocabulary_head,
                    ulysses=self.worker_context.ranks.ulysses,
                )
                passes.append((at, stats))
        names = [name for name, cells in passes[0][1]._asdict().items() if cells is not None] if passes else []
        return DataProto(
            {
                name: merge_micro_batches(
                    [(at, getattr(stats, name)) for at, stats in passes], part["response_mask"]
                )
                for name in names
            }
        )


class ReferenceWorker(PolicyWorker):
    """Implements rolemesh.roles.Reference."""

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        size = job.reference.log_prob_micro_batch_size_per_gpu
        model = job.reference_model
        fsdp = job.reference.fsdp_config
        cut = MicroBatches.of(job, "reference", model, size)
        super().__init__(job, "reference", model, fsdp, cut, worker_context, frozen=True)

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Compute ref_log_probs [B, T], 0 where response_mask is False."""
        return DataProto({"ref_log_probs": self._stats(batch)["log_probs"]})


class ActorWorker(PolicyWorker, TrainedWorker):
    """Implements rolemesh.roles.Actor.

    Raises:
        ModelNotFound: the model directory is absent or incomplete, or has no tokenizer.
        InvalidConfig: the adapter does not fit the model; or as PolicyWorker.
    """

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        actor = job.actor
        self._held: PublishedWeights | None = None
        check_policy_loss(job, resolve_device(job.trainer.device))
        self.schedule = Schedule(
            mini_batch_size=actor.ppo_mini_batch_size * job.rollout.n,
            micro_batches=MicroBatches.of(job, "actor", actor.model, actor.ppo_micro_batch_size_per_gpu),
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=actor.seed,
        )
        self.tokenizer = load_tokenizer(actor.model, "actor")
        adapt = self._adapter_of(actor) if actor.model.lora_rank else None
        micro_batches = self.schedule.micro_batches
        super().__init__(job, "actor", actor.model, actor.fsdp_config, micro_batches, worker_context, adapt)
        self._published_dtype = published_dtype(job, self.device, self.config.dtype)
        checkpoint_activations(self.model, actor.model, self.device)
        self.prepare_training(actor.optim, actor.grad_clip, actor.fsdp_config)

    def _adapter_of(self, actor: ActorConfig) -> Callable[[Any], Adapter]:
        return lambda model: Adapter(model, actor.model, actor.seed, self.worker_context.ranks)

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Compute old_log_probs, entropys and the other columns that the job's method declares.

        Each is [B, T], 0 where response_mask is False.
        """
        writes = self.methods["actor.compute_log_probs"].writes
        columns = self._stats(batch, entropy=True, sum_pi_squared="sum_pi_squared" in writes)
        return DataProto({"old_log_probs": columns.pop("log_probs"), **columns})

    @by_rows
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Compute ref_log_probs [B, T] with the base model, adapter off; 0 where response_mask is False.

        Raises:
            Unsupported: the actor has no adapter.
        """
        if self.adapter is None:
            raise Unsupported(
                "actor.compute_ref_log_probs needs an actor with an adapter, but actor.model.lora_rank is 0"
            )
        columns = self._stats(batch, method="compute_ref_log_probs", adapter_off=True)
        return DataProto({"ref_log_probs": columns["log_probs"]})

    @on_worker_thread
    def update(self, batch: DataProto) -> Metrics:
        """Train on the batch.

        Raises:
            InvalidBatch: a column is missing, or the rows do not divide into mini-batches.
            UpdateFailed: a gradient is not finite; that optimizer step was skipped.
        """
        self.loads.take()  # of log-probs: which of them are computed together depends on when rows come
        with self.usage.measured(batch) as used:
            metrics = update(
                self.methods["actor.update"],
                batch,
                self.optimizer,
                self.schedule,
                self._learn_on_ranks,
                self._prepare if self.job.policy_loss.choose else None,
                self._mismatch if self.job.policy_loss.corrects else None,
            )
        if self.job.actor.use_kl_loss:
            metrics["kl_coef"] = self.job.actor.kl_loss_coef
        metrics = {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}
        return metrics | self.loads.take() | used

    def _prepare(self, mini_batch: DataProto) -> DataProto:
        """Add the column that the loss chooses from the whole mini-batch."""
        log_probs = self._stats(mini_batch)["log_probs"]
        return choose_tokens(mini_batch, log_probs, self.job, self.optimizer.num_updates)

    @property
    def learn_returns(self) -> tuple[str, ...]:
        """What `_mismatch` compares, if the loss corrects by it."""
        return ("log_probs", "old_log_probs", "response_mask") if self.job.policy_loss.corrects else ()

    def learning(self) -> AbstractContextManager[None]:
        """Return a context in which the head's weight is cast at most once."""
        return self._one_cast()

    def loss(self, rows: DataProto, mini_batch: BatchCounts) -> tuple[Tensor, dict[str, Tensor | TokenMean]]:
        stats = self.root(
            token_stats,
            rows,
            temperature=self._temperature,
            device=self.device,
            dtype=self.config.dtype,
            entropy=self.job.actor.entropy_coeff != 0,
            entropy_gradient=True,
            vocabulary_head=self.vocabulary_head,
            ulysses=self.worker_context.ranks.ulysses,
        )
        loss = self.job.policy_loss
        if loss.corrects:
            rows["log_probs"] = stats.log_probs.detach()
        read = loss_columns(rows, self.device, loss.reads)
        return policy_objective(stats.log_probs, stats.entropys, read, mini_batch, self.job)

    def _mismatch(self, rows: DataProto) -> Metrics:
        """Measure how far the policy under training is from the engine's, in bypass_mode."""
        log_probs = rows["log_probs"], rows["old_log_probs"], rows["response_mask"]
        return correct(*log_probs, self.job.algorithm.rollout_correction).metrics

    @on_worker_thread
    def publish_weights(self, version: int) -> WeightSource:
        """Copy the current weights, under a version, in the dtype of the rollout's engine."""
        self.hold_weights(self._parts(version=version))
        held = self._held
        self._held = None
        assert held is not None
        return held

    @on_all_ranks
    def hold_weights(self, part: DataProto) -> DataProto:
        """Copy this rank's rows of the weights to the ranks that hold them, under the version in meta_info."""
        version = part.meta_info["version"]
        ranks = self.worker_context.ranks
        stripe_server = self.worker_context.stripe_server
        if stripe_server:
            stripe_server.clear(f"version {version} is being published")  # free its memory first
        held = PublishedWeights(
            version,
            self.adapter.base_weights() if self.adapter else named_weights(self.model),
            self.adapter.deltas() if self.adapter else {},
            ranks,
            dtype=self._published_dtype,
            serve=stripe_server.serve if stripe_server else None,
            is_for_all="rollout" in self.job.plan.of_role("actor").roles,
        )
        if stripe_server:
            stripe_server.put(held)
        self._held = held if ranks.rank == 0 else None
        return DataProto()

    def copy_model(self) -> WriteModel:
        """Copy this rank's rows of model or adapter, and return what writes the copy and the tokenizer."""
        write = self.adapter.copy() if self.adapter else copy_policy(self.model, self.worker_context.ranks)

        def write_with_tokenizer(into: Path, ranks: Ranks) -> None:
            write(into, ranks)
            on_first(ranks, self.tokenizer.save_pretrained, into)

        return write_with_tokenizer

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the adapter's weights, or all without one."""
        return self.adapter.weights if self.adapter else named_weights(self.model)

    def read_weights(self, directory: Path | None) -> Mapping[str, Tensor]:
        """Read this rank's rows of them from a directory; None: the job's initial ones."""
        if self.adapter:
            return self.adapter.read(directory)
        config = self.config.model_copy(update={"path": str(directory)}) if directory else self.config
        return read_policy(self.model, config, "actor")

    def loaded(self) -> None:
        """Forget the weights of before that this rank holds for rollouts."""
        if self.worker_context.stripe_server:
            self.worker_context.stripe_server.clear("a checkpoint was loaded")
