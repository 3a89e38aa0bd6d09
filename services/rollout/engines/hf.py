"""Engine `hf`: a transformers causal LM with a KV cache. For the CPU, and the reference for other engines.

Rows are decoded in batches of at most rollout.max_num_seqs that begin together; finished rows leave. Bits: a
row's numbers do not depend on its neighbours as long as no matrix has too few rows (`neutral_rows`) and every
width depends on the step alone. So small batches are filled up by repeating a row, prompts keep their full
width, attention at token t is over the same P + t columns for every row, and an attention mask is always
given (transformers drops one that masks nothing, and takes another kernel).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, Unsupported
from rolemesh.models.loading import load_causal_lm, load_tokenizer, named_weights, resolve_device, vocabulary_of
from rolemesh.services.rollout.engines.attention import GROUPED_ATTENTION, Columns
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.services.rollout.engines.sampling import draw_uniforms, sample
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.parking import Parking, model_tensors

MIN_ROWS = 16
PROBED_ROWS = 256
# Compaction copies the cache, so it waits until a quarter of the rows have ended: on uneven answers half the
# time of none; after every tenth row, or every second, it pays less.
COMPACT_AT = 0.75
# Steps are made for so long before the rows that they ended are handed over, which costs a small model as much
# as all that a step does beside the model.
STEPS_S = 0.05


class HfEngine:
    """Implements rolemesh.services.rollout.engines.Engine on the worker's thread, one call after another."""

    def __init__(self, job: JobConfig, worker: LocalWorker) -> None:
        self._worker = worker
        self.ignore_eos = job.rollout.ignore_eos
        self._max_num_seqs = job.rollout.max_num_seqs
        self.max_tokens = job.data.max_response_length
        self.device = resolve_device(job.trainer.device)
        self._dtype: torch.dtype = getattr(torch, job.rollout.dtype)
        self.model = load_causal_lm(job.actor.model, "rollout").to(self.device)
        if self.device.type == "cpu":
            self.model.set_attn_implementation(GROUPED_ATTENTION)
        _check_lengths(self.model.config, job)
        tokenizer = load_tokenizer(job.actor.model, "rollout")
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        if not ends:
            raise InvalidConfig(f"rollout: {job.actor.model.path} names no EOS token")
        self.ends = torch.tensor(sorted(ends), device=self.device)
        self.pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        with self.precision():
            self.min_rows = neutral_rows(self.model, max(PROBED_ROWS, self._max_num_seqs))
        self._frees_memory = job.rollout.free_cache_engine
        self._parking = Parking(self._own_tensors, self.device, job.run_dir)
        # Their outline: the weights themselves are elsewhere while the engine sleeps.
        self.weights = {name: own.to("meta") for name, own in named_weights(self.model).items()}
        self._version = 0
        self._adopted: set[int] = set()  # addresses of memory that holds weights and is others' too
        self._turn = asyncio.Lock()  # calls wait in line

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self.model)

    @property
    def is_waited_for(self) -> bool:
        return self._worker.thread.is_waited_for

    def precision(self) -> torch.autocast:
        """The context that matrix products run in."""
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32)

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        finished: asyncio.Queue[DataProto | None] = asyncio.Queue()  # holds no more than the request's rows
        decoding = asyncio.create_task(self._decode(prompts, sampling, finished.put_nowait))
        decoding.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (rows := await finished.get()) is not None:
                yield rows
            await decoding
        finally:
            decoding.cancel()
            await asyncio.wait([decoding])

    async def _decode(
        self, prompts: DataProto, sampling: SamplingConfig, finish: Callable[[DataProto], None]
    ) -> None:
        """Gives finished rows to `finish`. Some steps at a time are a job on the worker's thread, and a new
        version of the weights is another, between two of them."""
        async with self._turn:
            for first in range(0, len(prompts), self._max_num_seqs):
                some = prompts[first : first + self._max_num_seqs]
                batch = await self._worker.run(_Batch, self, some, sampling)
                while batch.num_unfinished:
                    if rows := await self._worker.run(batch.steps):
                        rows["row"] = rows["row"] + first
                        finish(rows)

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        await self._worker.run(self._load, version, tensors)

    def _load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """On the CPU the tensors become the parameters and are not copied: all replicas of a machine compute
        with one copy of the weights. Its memory goes when the last of them has the next version."""
        check_fit(version, tensors, self.weights)
        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if self.device.type == "cpu":
                    own[name].data = tensor  # a tied one is the same parameter under its other names
                else:
                    own[name].copy_(tensor)
        if self.device.type == "cpu":
            self._adopted = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        self._version = version

    # Keys and values are there only while something generates.

    def _own_tensors(self) -> Iterator[Tensor]:
        """What only this engine has. Adopted weights stay where they are: to let them go would release nothing
        that others hold, and to bring them back would make a copy."""
        for tensor in model_tensors(self.model):
            if tensor.untyped_storage().data_ptr() not in self._adopted:
                yield tensor

    async def sleep(self) -> int:
        return await self._worker.run(self._parking.park) if self._frees_memory else 0

    async def wake(self) -> int:
        return await self._worker.run(self._parking.unpark)

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()  # it lives as long as its process

    def close(self) -> None:
        return None


class _Batch:
    """Rows that are decoded together. `_index` and `_lengths` [b] are of those in the forward, where rows that
    have ended stay until the next compaction; `_kept_ids` [B, ...] is of all rows; other tensors are [b', ...],
    with repetitions of the first row up to min_rows."""

    def __init__(self, engine: HfEngine, prompts: DataProto, sampling: SamplingConfig) -> None:
        device, (rows, self._width), tokens = engine.device, prompts["prompts"].shape, engine.max_tokens
        self.num_unfinished: int = rows
        self._engine, self._sampling = engine, sampling
        self._version = engine.version  # that made what is in the cache
        self._versions: list[int] = []  # that made each token
        self._index = torch.arange(rows, device=device)
        self._lengths = torch.full((rows,), tokens, device=device)  # of the responses, as far as it is known
        forward = self._filled_up(self._index)
        self._uniforms = draw_uniforms(prompts["seeds"].tolist(), tokens).to(device)[forward]
        mask = prompts["prompt_mask"].to(device=device, dtype=torch.bool)[forward]
        # To the right of the prompt lie response tokens; every later token sees them.
        self._visible = F.pad(mask, (0, tokens), value=True)
        self._positions = (self._visible.cumsum(1) - 1).clamp(min=0)
        self._ids = F.pad(prompts["prompts"].to(device)[forward], (0, tokens))
        self._log_probs = torch.zeros(len(forward), tokens, device=device)
        shape = (rows, tokens, sampling.num_kept)
        self._kept_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        layers = engine.model.config.get_text_config().num_hidden_layers
        self._cache = Cache(layers=[Columns(self._width + tokens) for _ in range(layers)])

    def steps(self) -> DataProto | None:
        """Makes a token of every row; and others, until a compaction is due, something waits for the thread, or
        STEPS_S have passed. Returns the rows that these ended, if any; `row` says which of the batch."""
        before, unfinished, until = len(self._versions), self.num_unfinished, time.monotonic() + STEPS_S
        if self._is_sparse:
            self._compact()
        self._step()
        while self.num_unfinished and not (
            self._is_sparse or self._engine.is_waited_for or time.monotonic() >= until
        ):
            self._step()
        return self._ended_since(before) if self.num_unfinished < unfinished else None

    @property
    def _is_sparse(self) -> bool:
        """Whether so many rows have ended that a compaction is due."""
        return max(self.num_unfinished, self._engine.min_rows) <= COMPACT_AT * len(self._index)

    @torch.inference_mode()
    def _step(self) -> None:
        """Makes token t of every row."""
        t, engine, lengths = len(self._versions), self._engine, self._lengths
        with engine.precision():
            logits = self._logits()
        tokens, self._log_probs[:, t], kept_ids = sample(logits, self._uniforms[:, t], self._sampling)
        self._ids[:, self._width + t] = tokens
        if self._sampling.num_kept:
            self._kept_ids[self._index, t] = kept_ids[: len(lengths)]
        self._versions.append(engine.version)
        if not engine.ignore_eos:
            ends = torch.isin(tokens[: len(lengths)], engine.ends)
            self._lengths = torch.where(ends, lengths.clamp(max=t + 1), lengths)
        self.num_unfinished = int((self._lengths > t + 1).sum())

    def _ended_since(self, before: int) -> DataProto:
        """Rows that have ended, not within the first `before` tokens."""
        made, (_, tokens) = len(self._versions), self._log_probs.shape
        ended = ((self._lengths > before) & (self._lengths <= made)).nonzero()[:, 0]
        mask = torch.arange(tokens, device=ended.device) < self._lengths[ended][:, None]
        versions = F.pad(torch.tensor(self._versions, device=ended.device), (0, tokens - made))
        columns = {
            "row": self._index[ended],
            "responses": torch.where(mask, self._ids[ended, self._width :], self._engine.pad),
            "response_mask": mask,
            "rollout_log_probs": torch.where(mask, self._log_probs[ended], 0),
            "weight_versions": torch.where(mask, versions, -1),
        }
        if self._sampling.num_kept:
            columns["kept_ids"] = torch.where(mask[..., None], self._kept_ids[self._index[ended]], -1)
        return DataProto({name: column.cpu() for name, column in columns.items()})

    def _logits(self) -> Tensor:
        """[b, V] after the last token of every row. Under new weights keys and values are made anew: a token
        has the distribution of the version that it names, given all tokens before it."""
        if self._version != self._engine.version:
            self._version = self._engine.version
            for layer in self._cache.layers:
                layer.forget()
        end = self._width + len(self._versions)
        start = self._cache.get_seq_length()
        ids, visible, positions = self._ids[:, start:end], self._visible[:, :end], self._positions[:, start:end]
        if start > 0:
            return self._forward(ids, visible[:, None, None], positions)
        # Nothing is known yet. Answers to one prompt have it in common: it is read once, and handed to each.
        _, group = torch.unique(torch.cat([ids, visible], 1), dim=0, return_inverse=True)
        some = torch.empty_like(group[: int(group.max()) + 1])
        some[group] = torch.arange(len(group), device=group.device)
        some = self._filled_up(some)
        # Padding attends to itself: a softmax over nothing would be NaN, and spread.
        see = torch.ones(end, end, dtype=torch.bool, device=ids.device).tril()
        mask = (visible[some][:, None, None] & see) | torch.eye(end, dtype=torch.bool, device=ids.device)
        logits = self._forward(ids[some], mask, positions[some])
        for layer in self._cache.layers:
            layer.keep(group)
        return logits[group]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """[b, V] after the last of the tokens [b, n], which see what the mask [b, 1, n or 1, end] lets them."""
        output = self._engine.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.inference_mode()
    def _compact(self) -> None:
        keep = (self._lengths > len(self._versions)).nonzero()[:, 0]
        self._index, self._lengths = self._index[keep], self._lengths[keep]
        forward = self._filled_up(keep)
        self._uniforms, self._ids, self._log_probs = (
            tensor[forward] for tensor in (self._uniforms, self._ids, self._log_probs)
        )
        self._visible, self._positions = self._visible[forward], self._positions[forward]
        for layer in self._cache.layers:
            layer.keep(forward)

    def _filled_up(self, index: Tensor) -> Tensor:
        """The index, its first entry repeated up to min_rows."""
        return torch.cat([index, index[:1].expand(max(0, self._engine.min_rows - len(index)))])


@torch.inference_mode()
def neutral_rows(model: nn.Module, most: int) -> int:
    """How many rows a batch needs for the bits of each not to depend on how many there are.

    Libraries take other kernels for matrices of few rows, and may cut the sum in pieces for several threads:
    MKL does so up to 2, 5, 10 or 15 rows (64, 128, 256, 512 and more inputs) on one thread, up to 129 rows
    (896 inputs) on two. The kernel follows from the shapes alone, so random numbers through one linear layer
    of each shape show it.

    Args:
        model: whose linear layers are tried.
        most: the size that all others are held against; the answer if no smaller one agrees with it.

    Returns:
        `most`, halved as often as all layers agree, down to MIN_ROWS.
    """
    linears = {module.weight.shape: module for module in model.modules() if isinstance(module, nn.Linear)}
    generator = torch.Generator().manual_seed(0)
    tried = []
    for linear in linears.values():
        inputs = torch.randn(most, linear.in_features, generator=generator).to(linear.weight)
        tried.append((linear, inputs, linear(inputs)))
    rows = most
    while rows > MIN_ROWS:
        fewer = max(MIN_ROWS, rows // 2)
        if not all(torch.equal(linear(inputs[-fewer:]), outputs[-fewer:]) for linear, inputs, outputs in tried):
            break
        rows = fewer
    return rows


def _check_lengths(config: Any, job: JobConfig) -> None:
    text = config.get_text_config()
    length = job.data.max_prompt_length + job.data.max_response_length
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InvalidConfig(
            f"data.max_prompt_length + data.max_response_length is {length}; the model in "
            f"{job.actor.model.path!r} takes {limit} tokens"
        )
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and length > window):
        raise Unsupported(
            f"rollout engine hf attends to all {length} tokens; the model in {job.actor.model.path!r} has "
            f"layers {sorted(kinds)} with a window of {window}"
        )
