"""A version of the weights, pulled from whoever holds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from torch import Tensor

from rolemesh.errors import InvalidBatch, InvalidConfig, WeightsUnavailable
from rolemesh.rpc import tls
from rolemesh.rpc.answers import read_answer
from rolemesh.rpc.channels import check_address, open_channel
from rolemesh.rpc.contract import WEIGHTS, rpcs, serializer
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import FetchRangeRequest, GetManifestRequest, WatchRegionRequest, WeightManifest
from rolemesh.weights.held import Holding
from rolemesh.weights.manifest import check_digest, check_version, name_of, outline, read_manifest
from rolemesh.weights.region import Region
from rolemesh.weights.source import Fits
from rolemesh.weights.store import WeightStore
from rolemesh.wire.frame import split_frame

log = logging.getLogger(__name__)

RELAY_WAIT_S = 5.0  # for a relay to be told of the version; all are told at about the same time
MAX_SOURCES = 1024
# How fast weights must arrive: a source that does not bring LEAST_BYTES, or the rest, in STALL_S is left for
# the next; when all of them together do not in PATIENCE_S, nobody is asked again. Only verified bytes count:
# else a source that trickles would hold the receiver to its deadline. A relay on the same machine says at
# each LEAST_BYTES how many it has (service.WATCH_BYTES).
LEAST_BYTES = 4 << 20
STALL_S = 10.0
PATIENCE_S = 10.0
RETRY_S = 0.1  # between two rounds
# How a call ends when its server does: cut, or cancelled by the server's last act.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
RPCS = {rpc.name: rpc for rpc in rpcs(WEIGHTS)}


class _Left(Exception):
    """A source is left for the next; `reason` is for the metric, `final`: it is not asked again."""

    def __init__(self, reason: str, message: str, final: bool) -> None:
        super().__init__(message)
        self.reason, self.final = reason, final


class RemoteWeights:
    """Implements rolemesh.weights.source.WeightSource by pulling from WeightsServices.

    Args:
        sources: host:port of each holder, the best first: relays, the actor last.
        version: which one to pull.
        digest: of its manifest.
        timeout_s: seconds for the whole, whatever is tried again.
        store: where the version goes, and can be read by others as far as it is verified.

    Raises:
        InvalidBatch: no source, too many or one that is not host:port; a version or a digest that none is.
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
        self.sources, self.digest = list(sources), digest
        self.is_fetched = False
        self._version, self._timeout_s = version, timeout_s
        self._store = store or WeightStore()
        self._problems: dict[str, str] = {}
        self._fits: Fits = lambda tensors: None

    @property
    def version(self) -> int:
        return self._version

    @property
    def name(self) -> str:
        """Number and digest."""
        return name_of(self._version, self.digest)

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        """Not copied where this process holds the version already."""
        held, self._fits = self._held(), fits or self._fits
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
                    part.stop("the rest could not be had")
        tensors = held.tensors()
        self.is_fetched = True
        return tensors

    async def _read(self, serialized: bytes) -> WeightManifest:
        """The manifest, if it is of the weights that are wanted. On a thread: it takes as long as its sender
        likes it to."""

        def read() -> WeightManifest:
            manifest = read_manifest(serialized, self._version, self.digest)
            self._fits(outline(manifest))
            return manifest

        return await asyncio.to_thread(read)

    def _held(self) -> Holding | None:
        return self._store.find(self._version, self.digest)

    async def _pull(self) -> Holding:
        return await self._map_the_actors() or await self._pull_from_all()

    async def _map_the_actors(self) -> Holding | None:
        """The version in the actor's own memory, where that is of this machine: no byte is sent, and nobody
        waits for a relay to have it."""
        if self._held() is not None:  # begun elsewhere
            return None
        async with open_channel(self.sources[-1], "actor") as channel:
            source = _Source(channel, self._version, self.digest)
            try:
                serialized, shared = await source.manifest(0.0)
                manifest = await self._read(serialized)
                region = Region.open(shared, manifest.region_bytes) if shared else None
                if region is None or not region.is_sealed:
                    return None
                holding = Holding(serialized, manifest, region, "rollout")
                await source.map(holding)
                self._store.put(holding)
                return holding
            except (grpc.aio.AioRpcError, TimeoutError, WeightsUnavailable, InvalidBatch):
                return None  # what the matter is will be told by whoever asks it next

    async def _pull_from_all(self) -> Holding:
        """Goes from source to source, on from the last verified byte, until all is there or nobody is left."""
        candidates, now = list(self.sources), asyncio.get_running_loop().time
        last_progress, before = now(), self._num_verified()
        while candidates and now() < last_progress + PATIENCE_S:
            for address in list(candidates):
                try:
                    return await self._pull_from(address)
                except _Left as left:
                    log.warning("weights version %d: %s is left: %s", self._version, address, left)
                    metrics.WEIGHTS_SOURCE_FAILURES.labels(left.reason).inc()
                    self._problems[address] = str(left)
                    if left.final:
                        candidates.remove(address)
                if self._num_verified() >= before + LEAST_BYTES:
                    last_progress, before = now(), self._num_verified()
            await asyncio.sleep(RETRY_S)
        raise self._failed()

    def _num_verified(self) -> int:
        held = self._held()
        return held.num_verified if held is not None else 0

    def _failed(self, when: str = "") -> WeightsUnavailable:
        held = self._held()
        have = f"byte {held.num_verified} of {held.num_bytes}" if held is not None else "the manifest"
        told = [f"from {address}: {self._problems.get(address, 'no answer')}" for address in self.sources]
        return WeightsUnavailable(
            f"weights version {self._version} did not arrive beyond {have}{when}; " + "; ".join(told)
        )

    async def _pull_from(self, address: str) -> Holding:
        kind = "actor" if address == self.sources[-1] else "rollout"
        async with open_channel(address, kind) as channel:
            source = _Source(channel, self._version, self.digest)
            try:
                holding = await self._open(source, 0.0 if kind == "actor" else RELAY_WAIT_S)
                damaged = 0
                while not holding.is_whole:
                    if not holding.region.is_own:
                        await source.map(holding)
                        continue
                    damaged += not await source.receive(holding, kind)
                    if damaged == 2:
                        raise _Left("damaged", f"the piece at byte {holding.num_verified}, twice", final=True)
                return holding
            except grpc.aio.AioRpcError as error:
                gone = error.code() in GONE
                message = f"{error.code().name}: {tls.explain(error.details() or '')}"
                raise _Left("gone" if gone else "refused", message, final=not gone) from error
            except TimeoutError as error:
                slow = f"fewer than {LEAST_BYTES} bytes were verified in {STALL_S:g} s"
                raise _Left("stalled", slow, final=False) from error
            except (WeightsUnavailable, InvalidBatch) as error:
                raise _Left("refused", str(error), final=True) from error

    async def _open(self, source: _Source, wait_s: float) -> Holding:
        """The version as far as it is here, with memory for the rest."""
        serialized, shared = await source.manifest(wait_s)
        if (held := self._held()) is not None:
            await asyncio.to_thread(held.own)  # another's memory may never be finished
            held.advance(held.num_verified)
            return held
        manifest = await self._read(serialized)
        region = Region.open(shared, manifest.region_bytes) if shared else None
        holding = Holding(serialized, manifest, region or Region(manifest.region_bytes), "rollout")
        self._store.put(holding)
        return holding


def _check_sources(sources: Sequence[str]) -> None:
    if not 0 < len(sources) <= MAX_SOURCES:
        raise InvalidBatch(
            f"weights are pulled from 1 to {MAX_SOURCES} sources, the actor last; got {len(sources)}"
        )
    try:
        for source in sources:
            check_address(source)
    except InvalidConfig as error:
        raise InvalidBatch(f"a source of weights: {error}") from error


class _Pace:
    """Ends what is done within it with TimeoutError, unless a holding gains LEAST_BYTES in every STALL_S."""

    def __init__(self, holding: Holding) -> None:
        self._holding, self._reached = holding, holding.num_verified
        self._timeout = asyncio.timeout(STALL_S)

    async def __aenter__(self) -> _Pace:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._timeout.__aexit__(*exception)

    def keep(self) -> None:
        """To be called where more is verified."""
        if self._holding.num_verified >= self._reached + LEAST_BYTES:
            self._reached = self._holding.num_verified
            self._timeout.reschedule(asyncio.get_running_loop().time() + STALL_S)


class _Source:
    """The calls to one holder. One that does not bring LEAST_BYTES in STALL_S is TimeoutError."""

    def __init__(self, channel: grpc.aio.Channel, version: int, digest: str) -> None:
        self._channel = channel
        self._of: dict[str, Any] = {"version": version, "digest": digest}

    async def manifest(self, wait_s: float) -> tuple[bytes, Any]:
        """The serialized manifest, and the shared region or None."""
        call = self._call("GetManifest", GetManifestRequest(**self._of, wait_s=wait_s))
        async with asyncio.timeout(wait_s + STALL_S):
            answer: Any = await read_answer(RPCS["GetManifest"], await call)
        return answer.manifest, answer.shared if answer.HasField("shared") else None

    async def receive(self, holding: Holding, kind: str) -> bool:
        """Fetches what is not verified yet. False: a piece came damaged."""
        at, end = holding.num_verified, holding.num_bytes
        received = metrics.WEIGHTS_RECEIVED_BYTES.labels(kind)
        request = FetchRangeRequest(**self._of, offset=at, length=end - at)
        async with _Pace(holding) as pace, aclosing(self._stream("FetchRange", request)) as frames:
            async for frame in frames:
                _, data = split_frame(frame)
                if not data.nbytes or at + data.nbytes > end:
                    raise WeightsUnavailable(f"got {data.nbytes} bytes at {at} of {end}")
                holding.region.write(at, data)
                at += data.nbytes
                received.inc(data.nbytes)
                verified = holding.verified_until(at)
                if verified > holding.num_verified:
                    holding.advance(verified)
                    pace.keep()
                elif at - verified >= holding.manifest.piece_bytes or at == end:
                    return False
        if at < end:
            raise WeightsUnavailable(f"the stream ended at byte {at} of {end}")
        return True

    async def map(self, holding: Holding) -> None:
        """Takes up what lies in the other process's memory, as far as that one says that it is verified; the
        whole once it is sealed, which it is when all of it is verified: nobody can have changed it since. So no
        byte is read here."""
        if not holding.region.is_sealed:
            request = WatchRegionRequest(**self._of)
            async with _Pace(holding) as pace, aclosing(self._stream("WatchRegion", request)) as answers:
                async for data in answers:
                    answer: Any = await read_answer(RPCS["WatchRegion"], data)
                    if answer.num_verified < holding.num_bytes:
                        holding.advance(answer.num_verified)
                        pace.keep()
        if not holding.region.is_sealed:
            raise WeightsUnavailable(f"the shared region is not sealed at byte {holding.num_verified}")
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
