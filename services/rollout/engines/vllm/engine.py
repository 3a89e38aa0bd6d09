"""The engine: rows in, finished rows out, weights swapped between decode steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed, RoleUnavailable, Unsupported
from rolemesh.models.loading import load_outline, named_weights, resolve_device, vocabulary_of
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.services.rollout.engines.vllm.arguments import (
    end_tokens,
    engine_arguments,
    names_versions,
    prepare_environment,
    sampling_arguments,
)
from rolemesh.services.rollout.engines.vllm.region import shared_region, tensors_in

R = TypeVar("R")

LIVENESS_S = 1.0  # vLLM leaves calls unanswered when it dies, so it is looked after as often as this
SEED_BITS = 2**63 - 1  # vLLM takes a seed of -1 for none


class VllmEngine:
    """Implements rolemesh.services.rollout.engines.Engine on vLLM's AsyncLLM, with processes of its own."""

    def __init__(self, job: JobConfig) -> None:
        prepare_environment(resolve_device(job.trainer.device))
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._job = job
        outline = load_outline(job.actor.model, "rollout")
        self.weights = named_weights(outline)
        self.vocabulary: int = vocabulary_of(outline)
        self._ends, self._pad = end_tokens(job, outline)
        self._on_cpu = current_platform.device_type == "cpu"
        try:
            self._llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(job, outline)))
        except ValueError as error:  # vLLM's and pydantic's word for settings that do not go together
            raise InvalidConfig(f"rollout: vLLM refuses the settings: {error}") from error
        self._version = 0
        self._asleep = False
        self._changing = asyncio.Lock()  # weights, or sleep
        self._numbers = itertools.count()  # names of requests
        self._rows: set[asyncio.Task[Any]] = set()
        self._names_versions = names_versions()
        self._gate = _Gate()

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        ids, mask = prompts["prompts"], prompts["prompt_mask"].bool()
        arguments = sampling_arguments(self._job, sampling, self._ends)
        finished: asyncio.Queue[asyncio.Task[tuple[int, Any, int]]] = asyncio.Queue()
        rows = []
        for row, seed in enumerate(prompts["seeds"].tolist()):
            tokens = ids[row][mask[row]].tolist()
            rows.append(asyncio.create_task(self._row(row, tokens, {**arguments, "seed": seed & SEED_BITS})))
            rows[-1].add_done_callback(finished.put_nowait)
        self._rows.update(rows)
        try:
            left = len(rows)
            while left:
                done = [await finished.get()]
                while not finished.empty():
                    done.append(finished.get_nowait())
                left -= len(done)
                if any(row.cancelled() for row in done):
                    raise RoleUnavailable("rollout: the engine was closed")
                yield self._columns([row.result() for row in done], sampling.num_kept)
        finally:
            for task in rows:
                task.cancel()  # which aborts it in vLLM
            await asyncio.gather(*rows, return_exceptions=True)
            self._rows.difference_update(rows)

    async def _row(self, row: int, tokens: list[int], arguments: Mapping[str, Any]) -> tuple[int, Any, int]:
        """The row, vLLM's completion of it, and the version that was in use when it began."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        async with self._gate.passed():
            llm, version = self._living(), self._version
            with _in_our_words():
                prompt = {"type": "token", "prompt_token_ids": tokens}
                requests = llm.generate(prompt, params, str(next(self._numbers)))
                outputs = [output async for output in requests]
        completion = outputs[-1].outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RoleUnavailable(f"rollout: vLLM gave up row {row}: {completion.finish_reason}")
        return row, completion, version

    def _columns(self, done: list[tuple[int, Any, int]], num_kept: int) -> DataProto:
        shape = (len(done), self._job.data.max_response_length)
        columns = {
            "row": torch.tensor([row for row, _, _ in done]),
            "responses": torch.full(shape, self._pad),
            "response_mask": torch.zeros(shape, dtype=torch.bool),
            "rollout_log_probs": torch.zeros(shape),
            "weight_versions": torch.full(shape, -1),
        }
        if num_kept:
            columns["kept_ids"] = torch.full((*shape, num_kept), -1, dtype=torch.int32)
        for i, (_, completion, version) in enumerate(done):
            tokens = torch.tensor(completion.token_ids)
            n = len(tokens)
            log_probs = torch.tensor(completion.logprobs.logprobs).view(n, num_kept + 1)
            columns["responses"][i, :n] = tokens
            columns["response_mask"][i, :n] = True
            columns["rollout_log_probs"][i, :n] = log_probs[:, 0]  # the drawn token's, then the likeliest
            columns["weight_versions"][i, :n] = version
            for span in getattr(completion, "weight_versions", None) or ():
                if span.version.isdecimal():  # before the first swap it has a name of vLLM's own
                    columns["weight_versions"][i, span.start : span.end] = int(span.version)
            if num_kept:
                likeliest = torch.tensor(completion.logprobs.token_ids).view(n, num_kept + 1)[:, 1:]
                columns["kept_ids"][i, :n] = _kept(tokens, likeliest, log_probs[:, 1:])
        return DataProto(columns)

    # --------------------------------------------------------------------------- weights

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        check_fit(version, tensors, self.weights)
        # Once begun it is brought to its end, also if who asked for it has gone.
        await asyncio.shield(asyncio.ensure_future(self._swap(version, tensors)))

    async def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        async with self._changing:
            if self._asleep:
                raise Unsupported("rollout: the engine sleeps, and takes no weights before it wakes")
            with shared_region(tensors) as region:
                room = tensors_in(*region)
                await asyncio.to_thread(lambda: [room[name].copy_(tensors[name]) for name in room])
                async with self._paused():
                    await self._on_all_ranks("take_weights", *region)
                    if self._names_versions:
                        await self._answer(self._living().update_weight_version(str(version)))
                    self._version = version

    async def read_weights(self) -> dict[str, Tensor]:
        """What the engine computes with, in rollout.dtype, under the names of `named_weights`.

        Raises:
            Unsupported: the layers are split over several ranks.
        """
        if self._job.rollout.tensor_model_parallel_size > 1:
            raise Unsupported("rollout: the weights of several ranks are not read back")
        dtype = getattr(torch, self._job.rollout.dtype)
        with shared_region({name: own.to(dtype) for name, own in self.weights.items()}) as region:
            (found,) = await self._on_all_ranks("give_weights", *region)
            read = tensors_in(*region)
            return {name: read[name].clone() for name in found}

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Between two decode steps, with an empty cache; rows that were running go on afterwards."""
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
        """Around what changes all the weights: what fails half-way has left nobody knows which, and the engine
        ends."""
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
            with self._whole_or_ended():
                await self._answer(self._living().pause_generation(mode="keep", clear_cache=True))
                moved = await self._move("release_memory", "sleep", 1)  # level 1: weights to host memory
            self._asleep = True
            return moved

    async def wake(self) -> int:
        async with self._changing:
            if not self._asleep:
                return 0
            with self._whole_or_ended():
                moved = await self._move("restore_memory", "wake_up")
                await self._answer(self._living().resume_generation())
            self._asleep = False
            return moved

    async def _move(self, on_cpu: str, on_cuda: str, *arguments: Any) -> int:
        """Weights away or back, by a method of the workers; vLLM's own do it on CUDA alone. Returns bytes."""
        if not self._job.rollout.free_cache_engine:
            return 0
        if self._on_cpu:
            moved: int = sum(await self._on_all_ranks(on_cpu))
            return moved
        await self._on_all_ranks(on_cuda, *arguments)
        itemsize = getattr(torch, self._job.rollout.dtype).itemsize
        return sum(weight.numel() * itemsize for weight in self.weights.values())

    async def watch(self) -> None:
        while True:
            self._living()
            await asyncio.sleep(LIVENESS_S)

    def close(self) -> None:
        for row in self._rows:
            row.cancel()
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = None  # or it would shut down once more at the interpreter's end

    # ------------------------------------------------------------------------- its processes

    async def _on_all_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the workers; the answer of each rank."""
        return await self._answer(self._living().collective_rpc(method, args=arguments))

    async def _answer(self, call: Awaitable[R]) -> R:
        """A call's answer, or the word that nobody is there to give one."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                self._living()
                await asyncio.wait([answer], timeout=LIVENESS_S)
            with _in_our_words():
                return answer.result()
        finally:
            answer.cancel()

    def _living(self) -> Any:
        """The engine, if there is one still."""
        if self._llm is None or self._llm.errored:
            raise RoleUnavailable("rollout: vLLM's engine has ended; its log says why")
        return self._llm


class _Gate:
    """Lets rows pass unless it is shut, which waits for those that have passed to leave."""

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


@contextmanager
def _in_our_words() -> Iterator[None]:
    """vLLM's errors by their meaning."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise RoleUnavailable(f"rollout: vLLM's engine has ended; its log says why ({error})") from None
    except Exception as error:
        raise RoleFailed(f"rollout: {type(error).__name__}: {error}") from error


def _kept(tokens: Tensor, likeliest: Tensor, log_probs: Tensor) -> Tensor:
    """The tokens that could be drawn.

    Args:
        tokens: [n] that were drawn.
        likeliest: [n, K] ids, the likeliest first.
        log_probs: [n, K] theirs; -inf where a token was cut off.

    Returns:
        [n, K] int32, -1 where a token was cut off.
    """
    kept = likeliest.where(log_probs.isfinite(), -1)
    # Of tokens as likely as the k-th vLLM keeps all; a drawn one takes the place of its equal.
    lacks = ~(kept == tokens[:, None]).any(1)
    kept[lacks, -1] = tokens[lacks]
    return kept.int()
