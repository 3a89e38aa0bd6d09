"""The engine: the model, its calls and its weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, Unsupported
from rolemesh.models.distribution import with_head
from rolemesh.models.heads import VocabularyHead
from rolemesh.models.loading import load_causal_lm, named_weights, resolve_dtype, vocabulary_of
from rolemesh.models.supported import check_positions
from rolemesh.services.rollout.engines.eos import end_tokens
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.services.rollout.engines.hf.batch import Batch
from rolemesh.services.rollout.engines.hf.batch_invariance import batch_invariant_rows
from rolemesh.services.rollout.engines.hf.engine_probe import group_attention
from rolemesh.services.rollout.engines.hf.kv_store import KeptRows
from rolemesh.services.rollout.engines.hf.slots import GenerateCall
from rolemesh.services.rollout.engines.sampling import sample
from rolemesh.weights.staging import load
from rolemesh.workers.devices import resolve_device
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.offloading import Offloader, model_tensors

PROBED_ROWS = 256


class HfEngine:
    """Implements rolemesh.services.rollout.engines.Engine on the worker's thread.

    Rows of all calls are decoded together.
    """

    def __init__(self, job: JobConfig, worker: LocalWorker) -> None:
        self._worker = worker
        self.ignore_eos = job.rollout.ignore_eos
        self.max_num_seqs = job.rollout.rows
        self.prompt_width = job.data.max_prompt_length
        self.max_tokens = job.data.max_response_length
        self.device = resolve_device(job.trainer.device)
        dtype = resolve_dtype(job.rollout.dtype, "rollout.dtype", self.device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model = load_causal_lm(job.actor.model, "rollout").to(self.device)
        self.called = self.model
        if job.actor.head_dtype == "float32":
            self.called = with_head(
                self.model, VocabularyHead.of(self.model, self.dtype, job.actor.head_dtype, "rollout")
            )
        _check_lengths(self.model.config, job)
        check_positions(self.model.config, job, "rollout")
        group_attention(self.model)
        ends, self.pad = end_tokens(job)
        self.ends = torch.tensor(ends, device=self.device)
        with self.precision():
            self.min_rows = batch_invariant_rows(self.called, max(PROBED_ROWS, self.max_num_seqs))
        self._frees_memory = job.rollout.free_cache_engine
        self._offloader = Offloader(self._own_tensors, self.device, job.run_dir)
        # Only shapes and dtypes: the weights themselves are moved away while the engine sleeps.
        self.weights = {name: own.to("meta") for name, own in named_weights(self.model).items()}
        self._version = 0
        self._adopted: set[int] = set()  # addresses of the weights' memory that others share
        # Holds as many rows of full length as are decoded together.
        self.kept = KeptRows(self.max_num_seqs * self._row_bytes())
        self._calls: list[GenerateCall] = []
        self._batch: Batch | None = None  # None if there is no call
        self._decoding: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self.model)

    @property
    def is_waited_for(self) -> bool:
        return self._worker.worker_context.thread.is_waited_for

    def precision(self) -> torch.autocast:
        """The context of matrix products."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sample(
        self, logits: Tensor, uniforms: Tensor, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample a token for each row, as `sampling.sample` does. A subclass may sample in another way."""
        return sample(logits, uniforms, sampling)

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        call = GenerateCall(prompts, sampling)
        self._begin(call)
        try:
            while (rows := await call.finished.get()) is not None:
                if isinstance(rows, BaseException):
                    raise rows
                yield rows
        finally:
            await self._end(call)

    def _begin(self, call: GenerateCall) -> None:
        if self._batch is None:
            self._batch = Batch(self)
            self._calls = []
            self._decoding = asyncio.create_task(self._decode(self._batch, self._calls))
        self._calls.append(call)
        self._batch.arriving.append(call)

    async def _end(self, call: GenerateCall) -> None:
        """End a call. Its rows leave the batch before the next step; without a call there is no batch."""
        if call in self._calls:
            self._calls.remove(call)
            call.is_left = True
            assert self._batch is not None
            self._batch.leaving.append(call)
        if not self._calls and self._decoding is not None:
            self._batch = None  # a call that begins now has another one
            await asyncio.wait([self._decoding])

    async def _decode(self, batch: Batch, calls: list[GenerateCall]) -> None:
        """Decode as long as there are calls, several steps at a time, and pass finished rows to the calls.

        A new version of the weights is loaded between two of these jobs.
        """
        error: BaseException | None = None
        try:
            while calls:
                steps = self._worker.run(batch.steps)
                # Run in the context of a waiting call: its trace, and its account of memory.
                for call, rows in await asyncio.create_task(steps, context=calls[0].context):
                    call.finished.put_nowait(rows)
                    call.num_unfinished -= len(rows)
                    if not call.num_unfinished and call in calls:
                        calls.remove(call)
                        call.finished.put_nowait(None)
        except BaseException as failure:
            error = failure
        if self._batch is batch:
            self._batch = None
            self._calls = []
        for call in calls:
            call.finished.put_nowait(error)

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        await self._worker.run(self._load, version, tensors)

    def _load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load a version. On the CPU the tensors become the parameters without a copy.

        So all replicas of a machine share one copy of the weights. Its memory is released when the last replica
        has the next version.
        """
        check_fit(version, tensors, self.weights)
        own = self.model.state_dict(keep_vars=True)
        if self.device.type != "cpu":
            load(tensors, own, self.device)
        else:
            for name, tensor in tensors.items():
                own[name].data = tensor  # a tied weight is the same parameter under each of its names
            self._adopted = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        self._version = version
        self.kept.clear()

    # Only weights are offloaded: keys and values are dropped.

    def _own_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors whose memory only this engine has.

        Adopted weights are not offloaded: this would release no memory, because others hold it too, and
        reloading would make a copy.
        """
        for tensor in model_tensors(self.model):
            if tensor.untyped_storage().data_ptr() not in self._adopted:
                yield tensor

    async def sleep(self) -> int:
        if not self._frees_memory:
            return 0
        if self._decoding is not None and not self._calls:  # the last call has just ended
            await asyncio.wait([self._decoding])
        return await self._worker.run(self._offload)

    def _offload(self) -> int:
        self.kept.clear()
        return self._offloader.offload()

    async def wake(self) -> int:
        return await self._worker.run(self._offloader.reload)

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()  # the engine lives as long as its process

    def close(self) -> None:
        self.kept.clear()

    def _row_bytes(self) -> int:
        """Return the bytes of the keys and values of a row of full length."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        tokens = self.prompt_width + self.max_tokens
        return int(2 * config.num_hidden_layers * heads * width * tokens * self.dtype.itemsize)


def _check_lengths(config: Any, job: JobConfig) -> None:
    text = config.get_text_config()
    length = job.data.max_prompt_length + job.data.max_response_length
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InvalidConfig(
            f"data.max_prompt_length + data.max_response_length is {length}; the model in "
            f"{job.actor.model.path!r} takes at most {limit} tokens"
        )
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and length > window):
        raise Unsupported(
            f"rollout engine hf attends to all {length} tokens; the model in {job.actor.model.path!r} has "
            f"layers {sorted(kinds)} with a window of {window}"
        )
