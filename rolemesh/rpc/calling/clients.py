"""Clients of the roles over gRPC. Each class implements its Protocol of rolemesh/roles.py, like a worker.

Every answer is checked against its method's declaration (rolemesh/batch_validation.py), because servers are not
trusted: a reward pod runs user code. An answer that does not fit raises RoleFailed.

Create a client with e.g. `RewardClient(addresses, methods(job), timeout_s=job.trainer.rpc_timeout_s)`. Use it
with `async with`, or call `close`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from rolemesh.batch_validation import BatchValidator
from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RolemeshError, RoleTimeout, RoleUnavailable, WeightsUnavailable
from rolemesh.fingerprint import Fingerprint
from rolemesh.methods import Method
from rolemesh.roles import Metrics
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.calling.dispatch import ATTEMPTS_PER_REPLICA, Dispatcher
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.channels import check_address
from rolemesh.rpc.metadata import TERM_KEY, VERSION_KEY
from rolemesh.rpc.term import Term
from rolemesh.tasks import gather
from rolemesh.v1.actor_pb2 import PublishWeightsRequest
from rolemesh.v1.checkpoint_pb2 import BeginCheckpointRequest, FinishCheckpointRequest, LoadCheckpointRequest
from rolemesh.v1.rollout_pb2 import UpdateWeightsRequest
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.weight_source import WeightSource

T = TypeVar("T")
MAX_RELAYS = 7  # that a replica may pull a version of the weights from, besides the actor


class RoleClient:
    """Base of every client: a pool of one role's replicas, and the methods of the role.

    Args:
        addresses: host:port of each replica, exactly one for a trained role. Or a Members, which reports
            addresses from `async with` on, as replicas join and leave. Several addresses of one server are one
            replica. If two servers of a trained role answer, every later call raises InvalidConfig.
        methods: rolemesh.methods.methods(job).
        timeout_s: seconds; the deadline of every call. Time behind the client's earlier calls does not count
            (deadlines.py).
        patience_s: seconds that a call waits while no replica is alive, before it fails.
        may_grow: replicas may join during a call, so work is held back for them.
        rows_at_once: rows that an engine of the role decodes at once; 0: unknown.
        vocabulary: vocabulary size of the role's model; None: unknown, so ids in answers have no upper bound.
        expected: the fingerprint that replicas must have to get work; None: any.

    Raises:
        InvalidConfig: there is no address, one is not host:port or occurs twice, or a trained role has several.
    """

    role: ClassVar[str]

    def __init__(
        self,
        addresses: Sequence[str] | Members,
        methods: Mapping[str, Method],
        *,
        timeout_s: float = 1800.0,
        patience_s: float = 10.0,
        may_grow: bool = False,
        rows_at_once: int = 0,
        vocabulary: int | None = None,
        expected: Fingerprint | None = None,
    ) -> None:
        spec = ROLES[self.role]
        self._members = None if isinstance(addresses, Sequence) else addresses
        fixed = list(addresses) if isinstance(addresses, Sequence) else []
        if not self._members and (not fixed or len(set(fixed)) < len(fixed)):
            raise InvalidConfig(f"{self.role} needs the address of each replica exactly once; got {fixed}")
        for address in fixed:
            check_address(address)
        if len(fixed) > 1 and spec.trained:
            raise InvalidConfig(f"{self.role} has exactly one replica; got {len(fixed)} addresses: {fixed}")
        self._methods = methods
        self._timeout_s = timeout_s
        self.pool = ReplicaPool(
            self.role,
            fixed,
            patience_s=patience_s,
            may_grow=may_grow,
            full_rows=2 * rows_at_once,
            trained=spec.trained,
            expected=expected,
        )
        self._dispatcher = Dispatcher(
            self.pool,
            load(spec.service),
            timeout_s,
            rows_at_once=rows_at_once,
            trained=spec.trained,
            validator=BatchValidator.of(methods, self.role, vocabulary),
        )

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every replica serves; with Members, until one does.

        Raises:
            RoleUnavailable: it took longer than timeout_s seconds; the message names each replica's problem.
            InvalidConfig: another role serves at an address, or two servers of a trained role answer.
        """
        await self.pool.wait_until_ready(timeout_s)

    async def close(self) -> None:
        """Close the channels; running calls end with RoleFailed."""
        await self.pool.close()

    async def __aenter__(self) -> Self:
        if self._members:
            self.pool.follow(self._members)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _batch(self, name: str, batch: DataProto) -> DataProto:
        method = self._methods[f"{self.role}.{name}"]
        answer: DataProto = await self._dispatcher.call(method.rpc, method.prune(batch))
        return answer

    async def _update(self, batch: DataProto) -> Metrics:
        method = self._methods[f"{self.role}.update"]
        answer = await self._dispatcher.call(method.rpc, method.prune(batch))
        return dict(answer.metrics)


class _Trained(RoleClient):
    """Base of clients of a role that trains weights and saves them."""

    def __init__(
        self,
        addresses: Sequence[str] | Members,
        methods: Mapping[str, Method],
        *,
        term: Term | None = None,
        **like_every_client: Any,
    ) -> None:
        """Make the client.

        Args:
            addresses, methods, like_every_client: as RoleClient.
            term: the controller's, sent with every call. None: the role answers until a controller has it.
        """
        super().__init__(addresses, methods, **like_every_client)
        if term:
            self._dispatcher.metadata[TERM_KEY] = term.to_metadata()

    async def update(self, batch: DataProto) -> Metrics:
        return await self._update(batch)

    async def begin_checkpoint(self, directory: Path) -> None:
        request = BeginCheckpointRequest(directory=_absolute(directory))
        await self._dispatcher.call("BeginCheckpoint", request)

    async def finish_checkpoint(self, directory: Path) -> None:
        request = FinishCheckpointRequest(directory=_absolute(directory))
        await self._dispatcher.call("FinishCheckpoint", request)

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        request = LoadCheckpointRequest(
            directory=_absolute(directory) if directory else "", num_training_steps=num_training_steps or 0
        )
        await self._dispatcher.call("LoadCheckpoint", request)


class ActorClient(_Trained):
    """Implements rolemesh.roles.Actor."""

    role = "actor"

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_log_probs", batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_ref_log_probs", batch)

    async def publish_weights(self, version: int) -> WeightSource:
        """Publish the weights at the actor. Return the source from which rollouts pull them."""
        answer = await self._dispatcher.call("PublishWeights", PublishWeightsRequest(version=version))
        return RemoteWeights([actor.address for actor in self.pool.live], version, answer.digest)


class ReferenceClient(RoleClient):
    """Implements rolemesh.roles.Reference."""

    role = "reference"

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_log_probs", batch)


class CriticClient(_Trained):
    """Implements rolemesh.roles.Critic."""

    role = "critic"

    async def compute_values(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_values", batch)


class RewardClient(RoleClient):
    """Implements rolemesh.roles.Reward."""

    role = "reward"

    async def compute_scores(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_scores", batch)


class RolloutClient(RoleClient):
    """Implements rolemesh.roles.Rollout.

    Weight versions never mix. Each request names the version distributed last, and a replica that does not hold
    it refuses. A replica that returns gets the version before any work.
    """

    role = "rollout"

    def __init__(
        self,
        addresses: Sequence[str] | Members,
        methods: Mapping[str, Method],
        *,
        sync_timeout_s: float = 300.0,
        **like_every_client: Any,
    ) -> None:
        """Make the client.

        Args:
            addresses, methods, like_every_client: as RoleClient.
            sync_timeout_s: seconds for a replica to load a version of the weights.
        """
        super().__init__(addresses, methods, **like_every_client)
        self._sync_timeout_s = sync_timeout_s

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto, None]:
        method = self._methods["rollout.generate"]
        finished = cast(
            AsyncGenerator[DataProto, None],
            self._dispatcher.stream_rows(method.rpc, method.prune(prompts)),
        )
        async with aclosing(finished):
            async for rows in finished:
                yield rows

    async def update_weights(self, source: WeightSource) -> None:
        """Send a version of the weights to every live replica, in a chain.

        Each replica pulls from the replica before it in the chain, or else from one further back
        (`relays_among`), or from the actor. A replica that fails leaves the pool, and returns when it has the
        version.

        Raises:
            WeightsUnavailable: no replica could load the version; the message has the reason of each. Replicas
                keep their old weights.
        """
        if not isinstance(source, RemoteWeights):
            raise WeightsUnavailable(
                f"weights version {source.version} are held only in this process, but a rollout service pulls "
                "from an address; publish them from an actor that is served"
            )

        async def take(replica: Replica, earlier: Sequence[Replica]) -> None:
            sources = [*(each.address for each in relays_among(earlier)), *source.sources]
            request = UpdateWeightsRequest(sources=sources, version=source.version, digest=source.digest)
            await self._dispatcher.tell("UpdateWeights", replica, request, self._sync_timeout_s)

        async def bring_up_to_date(replica: Replica) -> None:
            await take(replica, self.pool.live)

        self._dispatcher.metadata[VERSION_KEY] = source.name
        self.pool.on_return = bring_up_to_date
        for _ in range(ATTEMPTS_PER_REPLICA):
            await self.pool.wait_for_live()
            live = self.pool.live
            problems = await gather(*(_problem(take(replica, live[:i])) for i, replica in enumerate(live)))
            for replica, problem in zip(live, problems, strict=True):
                if problem:
                    self.pool.suspect(replica, str(problem))
            if not all(problems):
                return
            if any(not isinstance(p, RoleUnavailable) or isinstance(p, RoleTimeout) for p in problems):
                break
        failed = "; ".join(str(problem) for problem in problems)
        raise WeightsUnavailable(f"no rollout could load weights version {source.version}: {failed}")


def relays_among(earlier: Sequence[T]) -> list[T]:
    """Choose which of the replicas before one in the chain it may pull the weights from, in this order.

    Those 1, 2, 4, … 64 places before it, so a request has the same size for any number of replicas. Each place
    is twice as far back as the one before, because neighbours often fail together, with their machine.

    Args:
        earlier: the replicas before it, in the order of the chain.
    """
    return [earlier[-(2**k)] for k in range(MAX_RELAYS) if 2**k <= len(earlier)]


async def _problem(call: Awaitable[None]) -> RolemeshError | None:
    try:
        await call
    except RolemeshError as error:
        return error
    return None


def _absolute(directory: Path) -> str:
    """Make a path absolute, because the role may have another working directory."""
    return str(directory.absolute())
