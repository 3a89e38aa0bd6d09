"""Pulls a version of the weights from the processes that hold it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
from torch import Tensor

from rolemesh.errors import InvalidBatch, InvalidConfig, WeightsUnavailable
from rolemesh.rpc import tls
from rolemesh.rpc.channels import check_address, open_channel
from rolemesh.rpc.contract import WEIGHTS, rpcs, serializer
from rolemesh.rpc.unary_answers import read_answer
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import (
    FetchRangeRequest,
    GetManifestRequest,
    StripedHolders,
    WatchRegionRequest,
    WeightManifest,
)
from rolemesh.weights.manifest import check_digest, check_version, name_of, outline, read_manifest
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.store import WeightStore
from rolemesh.weights.striped_pull import DamagedTwice, HolderFailed, StripedPull
from rolemesh.weights.stripes import check_holders, stripes_of
from rolemesh.weights.weight_source import Fits
from rolemesh.weights.weight_version import WeightVersion
from rolemesh.wire.frame import split_frame

log = logging.getLogger(__name__)

RELAY_WAIT_S = 5.0  # time for a relay to learn of the version; all replicas learn of it at about the same time
MAX_SOURCES = 1024
# Minimum speed of a transfer. A source that does not deliver LEAST_BYTES, or the rest, in STALL_S is left for
# the next. If all sources together do not deliver that in PATIENCE_S, the pull fails. Only verified bytes
# count, so a trickling source cannot hold the receiver until its deadline. A relay on the same machine reports
# its progress every LEAST_BYTES (service.WATCH_BYTES).
LEAST_BYTES = 4 << 20
STALL_S = 10.0
PATIENCE_S = 10.0
RETRY_S = 0.1  # between two rounds
# Status of a call whose server ends: UNAVAILABLE if it is cut, CANCELLED if the server cancels it at shutdown.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
RPCS = {rpc.name: rpc for rpc in rpcs(WEIGHTS)}


class _SourceFailed(Exception):
    """Raised to give up on a source. `reason` labels the metric; if `final`, the source is not asked again."""

    def __init__(self, reason: str, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.final = final


class RemoteWeights:
    """A WeightSource that pulls from the WeightsServices of other processes.

    Args:
        sources: host:port of each holder, in order of preference: relays first, the actor last.
        version: version to pull.
        digest: digest of its manifest.
        timeout_s: deadline in seconds for the whole pull, retries included.
        store: receives the version; others can read its verified bytes there while the rest arrives.

    Raises:
        InvalidBatch: no source, more than MAX_SOURCES, or one that is not host:port; an invalid version or
            digest.
    """

    def __init__(
        self,
        sources: Sequence[str],
        version: int,
        digest: str,
        *,
        timeout_s: float = 300.0,
        store: WeightStore | None = None,
    ) -> None:
        _check_sources(sources)
        check_version(version)
        check_digest(digest)
        self.sources = list(sources)
        self.digest = digest
        self.is_fetched = False
        self._version = version
        self._timeout_s = timeout_s
        self._store = store or WeightStore()
        self._problems: dict[str, str] = {}
        self._striped: StripedPull | None = None  # begun, and of no other source since
        self._fits: Fits = lambda tensors: None

    @property
    def version(self) -> int:
        return self._version

    @property
    def name(self) -> str:
        """The version's `version@digest`."""
        return name_of(self._version, self.digest)

    @property
    def holding(self) -> WeightVersion:
        """The version as this process holds it after `fetch`. Raises WeightsUnavailable once it is released."""
        if (held := self._held()) is None:
            raise WeightsUnavailable(f"weights version {self._version} is no longer held here")
        return held

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        """Pull the version; if this process already holds all of it, return its tensors without a copy."""
        held = self._held()
        self._fits = fits or self._fits
        if held is not None:
            self._fits(outline(held.manifest))
        if held is None or not held.is_whole:
            try:
                async with asyncio.timeout(self._timeout_s):
                    held = await self._pull()
            except TimeoutError:
                raise self._failed(f" within {self._timeout_s:g} s") from None
            finally:
                if (part := self._held()) is not None and not part.is_whole:
                    part.stop("the transfer of the rest failed")
        tensors = held.tensors()
        self.is_fetched = True
        return tensors

    async def _read(self, serialized: bytes) -> WeightManifest:
        """Parse the manifest and check it against the wanted weights.

        Runs in a thread, because the sender determines how long parsing takes.
        """

        def read() -> WeightManifest:
            manifest = read_manifest(serialized, self._version, self.digest)
            self._fits(outline(manifest))
            return manifest

        return await asyncio.to_thread(read)

    def _held(self) -> WeightVersion | None:
        return self._store.find(self._version, self.digest)

    async def _pull(self) -> WeightVersion:
        return await self._map_the_actors() or await self._pull_from_all()

    async def _map_the_actors(self) -> WeightVersion | None:
        """Map the version in the actor's memory, if the actor is on this machine; else return None.

        Nothing is sent, and there is no need to wait for a relay.
        """
        if self._held() is not None:  # already begun from another source
            return None
        async with open_channel(self.sources[-1], "actor") as channel:
            source = _PeerCall(channel, self._version, self.digest)
            try:
                serialized, shared, _ = await source.manifest(0.0)
                manifest = await self._read(serialized)
                region = WeightRegion.open(shared, manifest.region_bytes) if shared else None
                if region is None or not region.is_sealed:
                    return None
                holding = WeightVersion(serialized, manifest, region, "rollout")
                await source.map(holding)
                self._store.put(holding)
                return holding
            except (grpc.aio.AioRpcError, TimeoutError, WeightsUnavailable, InvalidBatch):
                return None  # not reported here: _pull_from_all can ask the actor again, and reports its error

    async def _pull_from_all(self) -> WeightVersion:
        """Try each source in turn, resuming at the last verified byte, until all is here or none is left."""
        candidates = list(self.sources)
        now = asyncio.get_running_loop().time
        last_progress = now()
        before = self._num_verified()
        while candidates and now() < last_progress + PATIENCE_S:
            for address in list(candidates):
                try:
                    return await self._pull_from(address)
                except _SourceFailed as failure:
                    log.warning("weights version %d: giving up on %s: %s", self._version, address, failure)
                    metrics.WEIGHTS_SOURCE_FAILURES.labels(failure.reason).inc()
                    self._problems[address] = str(failure)
                    if failure.final:
                        candidates.remove(address)
                if self._num_verified() >= before + LEAST_BYTES:
                    last_progress = now()
                    before = self._num_verified()
            await asyncio.sleep(RETRY_S)
        raise self._failed()

    def _num_verified(self) -> int:
        held = self._held()
        return held.num_verified if held is not None else 0

    def _failed(self, when: str = "") -> WeightsUnavailable:
        held = self._held()
        have = f"byte {held.num_verified} of {held.num_bytes}" if held is not None else "the manifest"
        reasons = [f"from {address}: {self._problems.get(address, 'no answer')}" for address in self.sources]
        return WeightsUnavailable(
            f"weights version {self._version} did not arrive beyond {have}{when}; " + "; ".join(reasons)
        )

    async def _pull_from(self, address: str) -> WeightVersion:
        kind = "actor" if address == self.sources[-1] else "rollout"
        async with open_channel(address, kind) as channel:
            source = _PeerCall(channel, self._version, self.digest)
            try:
                holding, striped = await self._open(source, 0.0 if kind == "actor" else RELAY_WAIT_S)
                damaged_at = -1
                while not holding.is_whole:
                    if not holding.region.is_own:
                        await source.map(holding)
                        continue
                    if striped is not None and kind == "actor":
                        await self._pull_stripes(holding, source, address, striped)
                        continue
                    self._striped = None
                    if await source.receive(holding, kind):
                        continue
                    if holding.num_verified == damaged_at:
                        damage = f"the piece at byte {damaged_at} arrived damaged twice"
                        raise _SourceFailed("damaged", damage, final=True)
                    damaged_at = holding.num_verified
                return holding
            except (grpc.aio.AioRpcError, TimeoutError, WeightsUnavailable, InvalidBatch) as error:
                raise _failure(error) from error

    async def _pull_stripes(
        self, holding: WeightVersion, source: _PeerCall, address: str, holders: StripedHolders
    ) -> None:
        """Pull from all holders of a striped version: the source, the first, and those that it names."""
        stripes = stripes_of(holders, holding.manifest.piece_bytes)
        pull = self._striped
        if pull is None or (pull.holding, pull.stripes) != (holding, stripes):
            pull = self._striped = StripedPull(holding, stripes)
        addresses = [address, *holders.addresses]
        received = metrics.WEIGHTS_RECEIVED_BYTES.labels("actor")
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(open_channel(each, "actor")) for each in addresses[1:]]
            sources = [source, *(_PeerCall(channel, self._version, self.digest) for channel in channels)]
            try:
                async with _Pace(holding) as pace:
                    await pull.run([each.fetch for each in sources], received.inc, pace.keep)
            except HolderFailed as failure:
                raise _failure(failure.error, addresses[failure.number]) from failure
            except TimeoutError as error:
                raise _failure(error, addresses[pull.is_waiting_for]) from error
            except DamagedTwice as error:
                where = addresses[stripes.holder_of(holding.num_verified)]
                raise _SourceFailed("damaged", f"{error}, from {where}", final=True) from error

    async def _open(self, source: _PeerCall, wait_s: float) -> tuple[WeightVersion, StripedHolders | None]:
        """Return the version to fill: the one begun earlier, or a new one in shared or own memory.

        Also return who holds it, if the source holds only stripes.
        """
        serialized, shared, striped = await source.manifest(wait_s)
        if (held := self._held()) is not None:
            await asyncio.to_thread(held.own)  # the other process may never complete its region
            held.advance(held.num_verified)
            return held, striped
        manifest = await self._read(serialized)
        region = WeightRegion.open(shared, manifest.region_bytes) if shared else None
        holding = WeightVersion(serialized, manifest, region or WeightRegion(manifest.region_bytes), "rollout")
        self._store.put(holding)
        return holding, striped


def _check_sources(sources: Sequence[str]) -> None:
    if not 0 < len(sources) <= MAX_SOURCES:
        raise InvalidBatch(
            f"weights are pulled from 1 to {MAX_SOURCES} sources, the actor last; got {len(sources)}"
        )
    try:
        for source in sources:
            check_address(source)
    except InvalidConfig as error:
        raise InvalidBatch(f"invalid source of weights: {error}") from error


def _failure(error: Exception, where: str = "") -> _SourceFailed:
    """Return why to give up on a source, after an error of calling it, or of calling the holder at `where`."""
    holder = f"holder {where}: " if where else ""
    if isinstance(error, grpc.aio.AioRpcError):
        gone = error.code() in GONE
        message = f"{holder}{error.code().name}: {tls.explain(error.details() or '')}"
        return _SourceFailed("gone" if gone else "refused", message, final=not gone)
    if isinstance(error, TimeoutError):
        slow = f"{holder}fewer than {LEAST_BYTES} bytes were verified in {STALL_S:g} s"
        return _SourceFailed("stalled", slow, final=False)
    return _SourceFailed("refused", f"{holder}{error}", final=True)


class _Pace:
    """Context that raises TimeoutError unless LEAST_BYTES of the version are verified in every STALL_S."""

    def __init__(self, holding: WeightVersion) -> None:
        self._holding = holding
        self._reached = holding.num_verified
        self._timeout = asyncio.timeout(STALL_S)

    async def __aenter__(self) -> _Pace:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._timeout.__aexit__(*exception)

    def keep(self) -> None:
        """Extend the deadline if LEAST_BYTES were verified since the last extension. Call after each gain."""
        if self._holding.num_verified >= self._reached + LEAST_BYTES:
            self._reached = self._holding.num_verified
            self._timeout.reschedule(asyncio.get_running_loop().time() + STALL_S)


class _PeerCall:
    """Calls one holder. A call that does not deliver LEAST_BYTES in STALL_S raises TimeoutError."""

    def __init__(self, channel: grpc.aio.Channel, version: int, digest: str) -> None:
        self._channel = channel
        self._version_fields: dict[str, Any] = {"version": version, "digest": digest}

    async def manifest(self, wait_s: float) -> tuple[bytes, Any, Any]:
        """Return the serialized manifest, the shared region or None, and the holders of stripes or None."""
        call = self._call("GetManifest", GetManifestRequest(**self._version_fields, wait_s=wait_s))
        async with asyncio.timeout(wait_s + STALL_S):
            serialized = await call
            check_holders(memoryview(serialized))
            answer: Any = await read_answer(RPCS["GetManifest"], serialized)
        shared = answer.shared if answer.HasField("shared") else None
        striped = answer.striped if answer.HasField("striped") else None
        return answer.manifest, shared, striped

    async def receive(self, holding: WeightVersion, kind: str) -> bool:
        """Fetch all bytes that are not verified yet. False if a piece arrived damaged."""
        at = holding.num_verified
        end = holding.num_bytes
        received = metrics.WEIGHTS_RECEIVED_BYTES.labels(kind)
        async with _Pace(holding) as pace, aclosing(self.fetch(at, end)) as messages:
            async for data in messages:
                holding.region.write(at, data)
                at += data.nbytes
                received.inc(data.nbytes)
                verified = holding.verified_until(at)
                if verified > holding.num_verified:
                    holding.advance(verified)
                    pace.keep()
                elif at - verified >= holding.manifest.piece_bytes or at == end:
                    return False
        return True

    async def fetch(self, at: int, end: int) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes [at, end), a message at a time; fewer of them, or more, are an error."""
        request = FetchRangeRequest(**self._version_fields, offset=at, length=end - at)
        async with aclosing(self._stream("FetchRange", request)) as frames:
            async for frame in frames:
                _, data = split_frame(frame)
                if not data.nbytes or at + data.nbytes > end:
                    raise WeightsUnavailable(f"got {data.nbytes} bytes at {at} of {end}")
                at += data.nbytes
                yield data
        if at < end:
            raise WeightsUnavailable(f"the stream ended at byte {at} of {end}")

    async def map(self, holding: WeightVersion) -> None:
        """Follow the progress of a region mapped from another process, until it is whole.

        Bytes count as verified as far as that process reports. It seals the region once all of it is verified,
        and nobody can change it after that. So no byte is read here.
        """
        if not holding.region.is_sealed:
            request = WatchRegionRequest(**self._version_fields)
            async with _Pace(holding) as pace, aclosing(self._stream("WatchRegion", request)) as answers:
                async for data in answers:
                    answer: Any = await read_answer(RPCS["WatchRegion"], data)
                    if answer.num_verified < holding.num_bytes:
                        holding.advance(answer.num_verified)
                        pace.keep()
        if not holding.region.is_sealed:
            raise WeightsUnavailable(
                f"the shared region is not sealed: its stream ended at byte {holding.num_verified}"
            )
        metrics.WEIGHTS_RECEIVED_BYTES.labels("memory").inc(holding.num_bytes)
        holding.advance(holding.num_bytes)

    async def _stream(self, name: str, request: Any) -> AsyncGenerator[bytes, None]:
        call = self._call(name, request)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    def _call(self, name: str, request: Any) -> Any:
        rpc = RPCS[name]
        make: Any = self._channel.unary_stream if rpc.streams[1] else self._channel.unary_unary
        return make(rpc.path, serializer(rpc.request))(request)
