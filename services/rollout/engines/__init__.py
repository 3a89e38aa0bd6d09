"""Engines generate responses. rolemesh/catalog/engines.py declares each.

Every engine follows one law. A row's response and log-probabilities depend only on its prompt, its response so
far, its seed, the weights and the sampling parameters. They do not depend on other rows, their order, the
number of replicas, a restart, or on whether keys and values of earlier turns were kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.workers.local import LocalWorker


class Engine(Protocol):
    """Generation with weights that can be replaced."""

    @property
    def version(self) -> int:
        """Version of the weights in use; 0: the model directory's."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model; prompts contain no other ids."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Names, shapes and dtypes of the tensors for `load_weights`, as tensors on the device `meta`."""
        ...

    def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        """Generate one response for each row; calls may overlap.

        Args:
            prompts: `prompts` [B, P] int64 left-padded, `prompt_mask` [B, P] bool, `seeds` [B] int64. If rows
                may be continued, `turns` [B, T] int64 (COLUMNS in rolemesh/columns.py) and `responses` [B, T]
                int64, the response so far: a row continues after as many tokens as it has non-zero turns, which
                come first and are fewer than T. An engine may keep keys and values of these rows.
            sampling: how tokens are sampled. The caller applies `n`: it repeats rows, each with its own seed.

        Yields:
            Rows as they finish, with the new tokens alone, each at its own position: `row` [b] int64 (position
            in the request), `responses` [b, T] int64 with the end token, `response_mask` [b, T] bool,
            `rollout_log_probs` [b, T] float32 (in the distribution from which the token was sampled),
            `weight_versions` [b, T] int64, and, if sampling.num_kept is not 0, `kept_ids` [b, T, num_kept]
            int32: the tokens that could be sampled, with the sampled one, in any order, then -1. All are on the
            CPU, and there is no other column. After the iterator is closed, generation soon ends.
        """
        ...

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Swap a version in between two decode steps.

        Rows in progress continue with the new version, and their keys and values are computed again. So a
        token has exactly the distribution of the version that its `weight_versions` names, given all tokens
        before it.

        Args:
            version: version of the weights.
            tensors: under the names of rolemesh.models.loading.named_weights, on the CPU. Nobody writes to
                them: an engine may keep them and compute with them, but must not write to them.

        Raises:
            WeightsUnavailable: the tensors do not fit this model; the old weights stay in use.
        """
        ...

    async def sleep(self) -> int:
        """Release the device memory of weights and KV cache; nothing generates until `wake`.

        Returns:
            number of bytes moved to the CPU or a file (rolemesh.workers.offloading), for the metrics.
        """
        ...

    async def wake(self) -> int:
        """Restore the same weights and an empty cache. Returns the number of bytes moved."""
        ...

    async def watch(self) -> None:
        """Run until the engine ends; never returns.

        Raises:
            RoleUnavailable: the engine has ended; only a new process can generate again.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...


def load_engine(job: JobConfig, worker: LocalWorker) -> Engine:
    """Load the engine that rollout.name names, with actor.model's weights.

    Args:
        worker: an engine without its own thread computes on the worker's.

    Raises:
        InvalidConfig: the engine is not installed, or cannot do what the job asks.
        ModelNotFound: actor.model.path has no usable model.
    """
    engine: Engine = job.engine.load()(job, worker, **job.rollout.options)
    return engine
