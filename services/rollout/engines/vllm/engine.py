"""The engine: generates rows with vLLM, and swaps weights between decode steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed, RoleUnavailable, Unsupported
from rolemesh.models.loading import model_directory, named_weights, resolve_dtype, vocabulary_of
from rolemesh.services.rollout.engines.eos import end_tokens
from rolemesh.services.rollout.engines.fitting import check_fit, load_served_outline
from rolemesh.services.rollout.engines.token_rows import RowToGenerate, blank_answer, rows_to_generate
from rolemesh.services.rollout.engines.vllm.engine_args import (
    engine_arguments,
    names_versions,
    prepare_environment,
    restored_environment,
    sampling_arguments,
)
from rolemesh.services.rollout.engines.vllm.reload import check_reload
from rolemesh.tasks import as_they_end
from rolemesh.weights.manifest import lay_out
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.tensors import RegionTensors
from rolemesh.workers.devices import resolve_device
from rolemesh.workers.local import LocalWorker

if TYPE_CHECKING:  # tests/rollout/test_names_of_vllm.py checks values of these types against vLLM's source
    from vllm.inputs import TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

R = TypeVar("R")

ENDED = "rollout: vLLM's engine has ended; its log says why"
LIVENESS_S = 1.0  # interval of checks that vLLM is alive, because a dead vLLM leaves calls unanswered
STATS_EVERY = 10  # such intervals between two lines of vLLM's log on its throughput, as of vLLM's server


class VllmEngine:
    """Implements rolemesh.services.rollout.engines.Engine on vLLM's AsyncLLM, which has its own processes."""

    def __init__(self, job: JobConfig) -> None:
        with restored_environment():
            device = resolve_device(job.trainer.device)
            prepare_environment(device, logs=not job.rollout.disable_log_stats)
            dtype = resolve_dtype(job.rollout.dtype, "rollout.dtype", device)
            rollout = job.rollout.model_copy(update={"dtype": dtype})
            self._start(job.model_copy(update={"rollout": rollout}))
        self._version = 0
        self._held: RegionTensors | None = None  # the weights in use, if a sleep is to drop them
        self._may_drop: bool | None = None  # whether a sleep may drop them; None: not known yet
        self._asleep = False
        self._is_bare = False  # awake without weights and KV cache; see `wake`
        self._changing = asyncio.Lock()  # for changes of weights, and for sleep and wake
        self._numbers = itertools.count()  # names of requests
        self._rows: set[asyncio.Task[Any]] = set()
        self._names_versions = names_versions()
        self._gate = _Gate()

    def _start(self, job: JobConfig) -> None:
        """Start vLLM's processes; they inherit this process's environment."""
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        check_reload(Path(vllm.__file__).parent, vllm.__version__)
        self._job = job
        model_directory(job.actor.model, "rollout")  # whose weights vLLM reads
        outline = load_served_outline(job.actor.model)
        dtype: torch.dtype = getattr(torch, job.rollout.dtype)
        self.weights = {
            name: own.to(dtype) if own.is_floating_point() else own
            for name, own in named_weights(outline).items()
        }
        self.vocabulary: int = vocabulary_of(outline)
        self._ends, self._pad = end_tokens(job)
        self._on_cpu = current_platform.device_type == "cpu"
        try:
            settings = AsyncEngineArgs(**engine_arguments(job, outline))
            self._llm: AsyncLLM | None = AsyncLLM.from_engine_args(settings)
        except ValueError as error:  # raised by vLLM and pydantic for settings that contradict each other
            raise InvalidConfig(f"rollout: vLLM refuses the settings: {error}") from error

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        await self._filled()
        arguments = sampling_arguments(self._job, sampling, self._ends)
        rows = [asyncio.create_task(self._row(row, arguments)) for row in rows_to_generate(prompts)]
        self._rows.update(rows)
        try:
            async with aclosing(as_they_end(rows)) as finished:  # a cancelled row is aborted in vLLM
                async for done in finished:
                    if any(row.cancelled() for row in done):
                        raise RoleUnavailable(ENDED)
                    yield self._columns([row.result() for row in done], sampling.num_kept)
        finally:
            self._rows.difference_update(rows)

    async def _row(
        self, row: RowToGenerate, arguments: Mapping[str, Any]
    ) -> tuple[RowToGenerate, CompletionOutput, int]:
        """Return the row, vLLM's completion, and the version in use when the row began."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        own = {"seed": row.seed, "max_tokens": self._job.data.max_response_length - row.begun}
        params = SamplingParams(**arguments, **own, output_kind=RequestOutputKind.FINAL_ONLY)
        async with self._gate.passed():
            llm = self._living()
            version = self._version
            with _in_our_words():
                prompt: TokensInput = {"type": "token", "prompt_token_ids": row.tokens}
                requests = llm.generate(prompt, params, str(next(self._numbers)))
                outputs: list[RequestOutput] = [output async for output in requests]
        completion: CompletionOutput = outputs[-1].outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RoleUnavailable(f"rollout: vLLM did not finish row {row.row}: {completion.finish_reason}")
        return row, completion, version

    def _columns(self, done: list[tuple[RowToGenerate, CompletionOutput, int]], num_kept: int) -> DataProto:
        rows = [row.row for row, _, _ in done]
        columns = blank_answer(rows, self._job.data.max_response_length, pad=self._pad, num_kept=num_kept)
        for i, (row, completion, version) in enumerate(done):
            tokens = torch.tensor(completion.token_ids)
            num_tokens = len(tokens)
            first = row.begun
            here = slice(first, first + num_tokens)
            flat: FlatLogprobs = completion.logprobs
            log_probs = torch.tensor(flat.logprobs).view(num_tokens, num_kept + 1)
            columns["responses"][i, here] = tokens
            columns["response_mask"][i, here] = True
            columns["rollout_log_probs"][i, here] = log_probs[:, 0]  # the sampled token's, then the likeliest
            columns["weight_versions"][i, here] = version
            for span in getattr(completion, "weight_versions", None) or ():
                if span.version.isdecimal():  # before the first swap vLLM uses a name of its own
                    columns["weight_versions"][i, first + span.start : first + span.end] = int(span.version)
            if num_kept:
                likeliest = torch.tensor(flat.token_ids).view(num_tokens, num_kept + 1)[:, 1:]
                columns["kept_ids"][i, here] = _kept(tokens, likeliest, log_probs[:, 1:])
        return DataProto(columns)

    # --------------------------------------------------------------------------- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        check_fit(version, tensors, self.weights)
        # A swap that has begun is completed even if its caller cancels.
        await asyncio.shield(asyncio.ensure_future(self._swap(version, tensors)))

    async def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        async with self._changing:
            if self._asleep:
                raise Unsupported("rollout: the engine sleeps, and takes no weights before it wakes")
            held = tensors if isinstance(tensors, RegionTensors) else await _copy(version, tensors)
            place = held.place
            may_drop = await self._may_drop_weights()
            async with self._bare() if self._is_bare else self._paused():
                await self._on_all_ranks("take_weights", *place)
                if self._names_versions:
                    await self._answer(self._living().update_weight_version(str(version)))
                self._version = version
                self._held = held if may_drop else None

    async def read_weights(self) -> dict[str, Tensor]:
        """Read back the weights in use, in rollout.dtype, under the names of `named_weights`.

        Raises:
            Unsupported: the layers are split over several ranks.
        """
        if self._job.rollout.tensor_model_parallel_size > 1:
            raise Unsupported("rollout: reading back the weights of several ranks is not supported")
        await self._filled()
        manifest = lay_out(self._version, self.weights)
        read = RegionTensors(manifest, WeightRegion(manifest.region_bytes))
        (found,) = await self._on_all_ranks("give_weights", *read.place)
        return {name: read[name].clone() for name in found}

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation between two decode steps, with an empty cache; running rows continue afterwards."""
        if not self._names_versions:
            await self._gate.shut()
        try:
            with self._whole_or_ended():
                await self._answer(self._living().pause_generation(mode="keep", clear_cache=True))
                yield
                await self._answer(self._living().resume_generation())
        finally:
            self._gate.open()

    @contextmanager
    def _whole_or_ended(self) -> Iterator[None]:
        """Close the engine if a change of all weights fails: it is unknown which weights have changed."""
        try:
            yield
        except Exception:
            self.close()
            raise

    # ----------------------------------------------------------------------------- sleep

    async def sleep(self) -> int:
        async with self._changing:
            if self._asleep:
                return 0
            if self._is_bare:  # still paused, and without weights: no row has come since it woke
                self._asleep = True
                self._is_bare = False
                return 0
            with self._whole_or_ended():
                await self._answer(self._living().pause_generation(mode="keep", clear_cache=True))
                level = 1 if self._held is None else 2  # 1 copies the weights to the host, 2 drops them
                moved = await self._move("release_memory", "sleep", level)
            self._asleep = True
            return moved if level == 1 else 0

    async def _may_drop_weights(self) -> bool:
        """Return whether a sleep may drop the weights. Then their version is held until the next one is loaded.

        Where the engine never sleeps it is not held: the host would have two while it receives one.
        """
        if self._may_drop is None:
            may = self._job.rollout.free_cache_engine and not (self._job.has_own_device or self._on_cpu)
            self._may_drop = may and not any(await self._on_all_ranks("has_loose_tensors"))
        return self._may_drop

    async def wake(self) -> int:
        """Wake vLLM. If its weights were dropped, new ones usually follow, so it stays bare until a version is
        loaded, or until rows need the version that it had."""
        async with self._changing:
            if not self._asleep:
                return 0
            moved = 0
            self._is_bare = self._held is not None
            if not self._is_bare:
                with self._whole_or_ended():
                    moved = await self._move("restore_memory", "wake_up")
                    await self._answer(self._living().resume_generation())
            self._asleep = False
        return moved + (await self._filled() if self._rows else 0)

    async def _filled(self) -> int:
        """Load the version that a bare vLLM had, even if the caller cancels. Return the number of bytes."""
        return await asyncio.shield(asyncio.ensure_future(self._fill())) if self._is_bare else 0

    async def _fill(self) -> int:
        async with self._changing:
            if not self._is_bare:
                return 0
            assert self._held is not None, "only what the host has is dropped"
            async with self._bare():
                await self._on_all_ranks("take_weights", *self._held.place)
            return self._held.region.num_bytes

    @asynccontextmanager
    async def _bare(self) -> AsyncIterator[None]:
        """Give a bare vLLM memory for its weights, and once they are loaded its KV cache. Then it generates.

        In this order the cache does not yet take memory that the loading needs.
        """
        with self._whole_or_ended():
            await self._on_all_ranks("wake_up", ["weights"])
            yield
            await self._on_all_ranks("wake_up", ["kv_cache"])
            await self._answer(self._living().resume_generation())
            self._is_bare = False

    async def _move(self, on_cpu: str, on_cuda: str, *arguments: Any) -> int:
        """Release or restore weights by a method of the workers. vLLM's own methods work only on CUDA.

        Returns:
            number of bytes moved.
        """
        if not self._job.rollout.free_cache_engine:
            return 0
        if self._on_cpu:
            return int(sum(await self._on_all_ranks(on_cpu)))
        await self._on_all_ranks(on_cuda, *arguments)
        itemsize = getattr(torch, self._job.rollout.dtype).itemsize
        return sum(weight.numel() * itemsize for weight in self.weights.values())

    async def watch(self) -> None:
        for number in itertools.count(1):
            llm = self._living()
            if number % STATS_EVERY == 0:
                await llm.do_log_stats()  # does nothing with disable_log_stats
            await asyncio.sleep(LIVENESS_S)

    def close(self) -> None:
        for row in self._rows:
            row.cancel()
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = None  # otherwise it would shut down again at the interpreter's exit

    # ------------------------------------------------------------------------- its processes

    async def _on_all_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the workers; return the answer of each rank."""
        return await self._answer(self._living().collective_rpc(method, args=arguments))

    async def _answer(self, call: Awaitable[R]) -> R:
        """Return a call's answer. Raises RoleUnavailable if the engine ends before it answers."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                self._living()
                await asyncio.wait([answer], timeout=LIVENESS_S)
            with _in_our_words():
                return answer.result()
        finally:
            answer.cancel()

    def _living(self) -> AsyncLLM:
        """Return vLLM's engine. Raises RoleUnavailable if it has ended."""
        if self._llm is None or self._llm.errored:
            raise RoleUnavailable(ENDED)
        return self._llm


class _Gate:
    """Lets rows enter while it is open. `shut` waits until all rows have left."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def shut(self) -> None:
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()


async def _copy(version: int, tensors: Mapping[str, Tensor]) -> RegionTensors:
    """Copy tensors of no region into one, which vLLM's processes can map."""
    copy = await asyncio.to_thread(PublishedWeights, version, tensors)
    return await copy.fetch()


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Convert vLLM's errors to this project's."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise RoleUnavailable(f"{ENDED} ({error})") from None
    except Exception as error:
        raise RoleFailed(f"rollout: {type(error).__name__}: {error}") from error


def _kept(tokens: Tensor, likeliest: Tensor, log_probs: Tensor) -> Tensor:
    """Return the tokens that could be sampled.

    Args:
        tokens: [n] sampled tokens.
        likeliest: [n, K] ids, the likeliest first.
        log_probs: [n, K] of these ids; -inf where a token was cut off.

    Returns:
        [n, K] int32, -1 where a token was cut off.
    """
    kept = likeliest.where(log_probs.isfinite(), -1)
    # vLLM keeps all tokens as likely as the k-th; a sampled one that is not listed replaces the last listed.
    lacks = ~(kept == tokens[:, None]).any(1)
    kept[lacks, -1] = tokens[lacks]
    return kept.int()


def load_vllm(job: JobConfig, worker: LocalWorker) -> VllmEngine:
    """Make the engine. It computes nothing on the worker's thread."""
    return VllmEngine(job)
