"""Engines: what generates. A new one is a file here, a line in LOADERS and a name in RolloutConfig.

The law of every engine: a row's response and log-probabilities depend on its prompt, its seed, the weights
and the sampling parameters alone; not on the rows beside it, their order, the number of replicas, a restart.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.workers.local import LocalWorker


class Engine(Protocol):
    """Generation with weights that can be replaced."""

    @property
    def version(self) -> int:
        """Of the weights in use; 0 is the model directory's."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows; prompts have no others."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What `load_weights` takes, under the same names: shapes and dtypes, on the device `meta`."""
        ...

    def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        """One response for each row; calls may overlap.

        Args:
            prompts: `prompts` [B, P] int64 left-padded, `prompt_mask` [B, P] bool, `seeds` [B] int64.
            sampling: how tokens are drawn. `n` is the caller's: rows come repeated, each with its seed.

        Yields:
            Rows as they finish: `row` [b] int64 (position in the request), `responses` [b, T] int64 with the
            end token, `response_mask` [b, T] bool, `rollout_log_probs` [b, T] float32 (of the distribution
            that the token was drawn from), `weight_versions` [b, T] int64, and where sampling.num_kept is not 0
            `kept_ids` [b, T, num_kept] int32: the tokens that could be drawn, the drawn one among them, in any
            order, then -1. All on the CPU, and no other column. Leaving the iterator ends the generation soon.
        """
        ...

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes up a version between two decode steps. Rows that are being made go on with it, their keys and
        values made anew: a token has exactly the distribution of the version that its `weight_versions` names,
        given all tokens before it.

        Args:
            version: of the weights.
            tensors: under the names of rolemesh.models.loading.named_weights, on the CPU. Nobody writes to
                them: an engine may keep them and compute with them, and must not write to them either.

        Raises:
            WeightsUnavailable: the tensors are not this model's; the old weights stay.
        """
        ...

    async def sleep(self) -> int:
        """Gives the device memory of weights and KV cache to others; nothing generates meanwhile.

        Returns:
            bytes moved away (rolemesh.workers.parking), for the metrics.
        """
        ...

    async def wake(self) -> int:
        """Takes it back: the same weights, an empty cache. Returns bytes moved."""
        ...

    async def watch(self) -> None:
        """Never returns.

        Raises:
            RoleUnavailable: the engine has ended and will not generate again, but in a new process.
        """
        ...

    def close(self) -> None:
        """Gives back what the engine holds."""
        ...


def _load_hf(job: JobConfig, worker: LocalWorker) -> Engine:
    from rolemesh.services.rollout.engines.hf import HfEngine

    return HfEngine(job, worker)


def _load_vllm(job: JobConfig, worker: LocalWorker) -> Engine:
    from rolemesh.services.rollout.engines.vllm.engine import VllmEngine

    return VllmEngine(job)


def _load_openai(job: JobConfig, worker: LocalWorker) -> Engine:
    from rolemesh.services.rollout.engines.openai.engine import OpenAIEngine

    return OpenAIEngine(job)


# Each imports its engine when it is asked for: an engine that is not used need not be installed.
LOADERS: dict[str, Callable[[JobConfig, LocalWorker], Engine]] = {
    "hf": _load_hf,
    "vllm": _load_vllm,
    "openai": _load_openai,
}


def load_engine(job: JobConfig, worker: LocalWorker) -> Engine:
    """The engine that rollout.name says, with actor.model's weights.

    Args:
        worker: has the thread on which an engine without one of its own computes.

    Raises:
        InvalidConfig: no engine has that name.
        ModelNotFound: actor.model.path holds no usable model.
    """
    if job.rollout.name not in LOADERS:
        raise InvalidConfig(f"rollout.name is {job.rollout.name!r}; engines: {', '.join(LOADERS)}")
    return LOADERS[job.rollout.name](job, worker)
