"""The roles over gRPC: each class implements its Protocol of rolemesh/roles.py. A page cannot tell a client
from a worker. Every answer is held against its method's declaration (rolemesh/door.py): one that is not what
the method writes is RoleFailed. A reward pod runs anybody's code.

All are made alike: `RewardClient(addresses, methods(job), timeout_s=job.trainer.rpc_timeout_s)`, used with
`async with`, or closed with `close`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from google.protobuf.descriptor import ServiceDescriptor

from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import InvalidConfig, RolemeshError, RoleTimeout, RoleUnavailable, WeightsUnavailable
from rolemesh.roles import Method, Metrics
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.calling.dispatch import ATTEMPTS_PER_REPLICA, Dispatcher
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.channels import check_address
from rolemesh.rpc.contract import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT
from rolemesh.rpc.metadata import VERSION_KEY
from rolemesh.tasks import gather
from rolemesh.v1.actor_pb2 import PublishWeightsRequest
from rolemesh.v1.checkpoint_pb2 import LoadCheckpointRequest, SaveCheckpointRequest
from rolemesh.v1.rollout_pb2 import UpdateWeightsRequest
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.source import WeightSource


class RoleClient:
    """What every client is: the replicas of one role, and the methods it prunes batches for.

    Args:
        addresses: host:port of each replica, exactly one for a role that is trained; or who tells them, from
            `async with` on, as replicas come and go.
        methods: rolemesh.roles.methods(job).
        timeout_s: seconds; the deadline of every call.
        patience_s: seconds that a call waits while every replica is gone, before it fails.
        may_grow: replicas may join in the midst of a call: work is held back for them.
        rows_at_once: that an engine of the role decodes at once; 0: unknown.
        vocabulary: how many token ids the role's model knows; None: unknown, and ids that the role answers with
            have no upper bound.

    Raises:
        InvalidConfig: no address, one that is not host:port, or several for a role that has one replica.
    """

    role: ClassVar[str]
    service: ClassVar[ServiceDescriptor]
    has_replicas: ClassVar[bool] = True

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
    ) -> None:
        self._members = None if isinstance(addresses, Sequence) else addresses
        fixed = list(addresses) if isinstance(addresses, Sequence) else []
        if not self._members and (not fixed or len(set(fixed)) < len(fixed)):
            raise InvalidConfig(f"{self.role} needs the address of each replica, once; got {fixed}")
        for address in fixed:
            check_address(address)
        if len(fixed) > 1 and not self.has_replicas:
            raise InvalidConfig(f"{self.role} has one replica; got {len(fixed)} addresses: {fixed}")
        self._methods = methods
        self.pool = ReplicaPool(
            self.role, fixed, patience_s=patience_s, may_grow=may_grow, full_rows=2 * rows_at_once
        )
        self._dispatcher = Dispatcher(
            self.pool,
            self.service,
            timeout_s,
            rows_at_once=rows_at_once,
            trained=not self.has_replicas,
            door=Door.of(methods, self.role, vocabulary),
        )

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when every replica serves; where replicas come and go, when one does. Raises RoleUnavailable:
        which one did not, since when, and why."""
        await self.pool.wait_until_ready(timeout_s)

    async def close(self) -> None:
        """Closes the channels; calls that run are cancelled."""
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
    """A role with weights of its own to train and to keep."""

    has_replicas = False

    async def update(self, batch: DataProto) -> Metrics:
        return await self._update(batch)

    async def save_checkpoint(self, directory: Path) -> None:
        request = SaveCheckpointRequest(directory=_absolute(directory))
        await self._dispatcher.call("SaveCheckpoint", request)

    async def load_checkpoint(self, directory: Path | None) -> None:
        request = LoadCheckpointRequest(directory=_absolute(directory) if directory else "")
        await self._dispatcher.call("LoadCheckpoint", request)


class ActorClient(_Trained):
    """Implements rolemesh.roles.Actor."""

    role, service = "actor", ACTOR

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_log_probs", batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_ref_log_probs", batch)

    async def publish_weights(self, version: int) -> WeightSource:
        """The weights stay at the actor; the source says where rollouts pull them."""
        answer = await self._dispatcher.call("PublishWeights", PublishWeightsRequest(version=version))
        return RemoteWeights([actor.address for actor in self.pool.live], version, answer.digest)


class ReferenceClient(RoleClient):
    """Implements rolemesh.roles.Reference."""

    role, service = "reference", REFERENCE

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_log_probs", batch)


class CriticClient(_Trained):
    """Implements rolemesh.roles.Critic."""

    role, service = "critic", CRITIC

    async def compute_values(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_values", batch)


class RewardClient(RoleClient):
    """Implements rolemesh.roles.Reward."""

    role, service = "reward", REWARD

    async def compute_scores(self, batch: DataProto) -> DataProto:
        return await self._batch("compute_scores", batch)


class RolloutClient(RoleClient):
    """Implements rolemesh.roles.Rollout. Versions never mix: each request names the version that was last
    given out, a replica that does not hold it refuses, and a replica that comes back gets it before work."""

    role, service = "rollout", ROLLOUT

    def __init__(
        self,
        addresses: Sequence[str] | Members,
        methods: Mapping[str, Method],
        *,
        sync_timeout_s: float = 300.0,
        **like_every_client: Any,
    ) -> None:
        """Like every client; sync_timeout_s: seconds for a replica to take a version of the weights."""
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
        """Every replica that is there takes the version, each from the one before it (the first from the
        actor). One that cannot leaves the pool, and comes back when it can.

        Raises:
            WeightsUnavailable: no replica could take it; the message says why for each. The old weights stay.
        """
        if not isinstance(source, RemoteWeights):
            raise WeightsUnavailable(
                f"weights version {source.version} are held in this process alone; a rollout service pulls "
                "from an address (publish them from an actor that is served)"
            )

        async def take(replica: Replica, relays: Sequence[Replica]) -> None:
            sources = [*(relay.address for relay in reversed(relays)), *source.sources]
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
        raise WeightsUnavailable(f"no rollout could take weights version {source.version}: {failed}")


async def _problem(call: Awaitable[None]) -> RolemeshError | None:
    try:
        await call
    except RolemeshError as error:
        return error
    return None


def _absolute(directory: Path) -> str:
    """The role's working directory may be another."""
    return str(directory.absolute())
