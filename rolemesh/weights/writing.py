"""Writes the rows of a model's tensors, which the ranks of a role hold, into the regions of a version.

Ranks that can map each other's memory are one machine. The first rank of each machine makes a region, and the
others of the machine map it. A rank writes rows for its own machine directly into this region.
Rows for other machines go to their first ranks, by one exchange of all ranks for a few tensors at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolemesh.ranks.collective_errors import gather_texts, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import is_in_rows, local, memory_of, own_rows, rows_of, whole
from rolemesh.v1.weights_pb2 import SharedRegion, WeightManifest, WeightSpec
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.staging import Staging, Writers
from rolemesh.weights.stripes import Stripes
from rolemesh.wire.dtypes import FROM_WIRE

Part = tuple[int, int]  # first byte of a part of a region, and its end


@dataclass(frozen=True)
class Machines:
    """The machines of a group of ranks.

    Args:
        rank: this process's.
        first: for each rank, the first rank of its machine, which holds the machine's region.
        shared: for each rank, where others can open its region; an empty path: nowhere.
        region: of this rank's machine.
    """

    rank: int
    first: Sequence[int]
    shared: Sequence[SharedRegion]
    region: WeightRegion

    @cached_property
    def holders(self) -> Sequence[int]:
        """The first ranks of all machines."""
        return sorted({*self.first})

    @property
    def is_holder(self) -> bool:
        """True if this rank holds its machine's region."""
        return self.first[self.rank] == self.rank

    @classmethod
    def of(cls, num_bytes: int, ranks: Ranks) -> Machines:
        """Make the regions of a version, and find out which ranks can map which. Every rank calls it.

        Raises:
            WeightsUnavailable: a machine lacks the memory.
        """
        with raise_on_all_ranks(ranks):
            region = WeightRegion(num_bytes, is_filled=False)
        own = region.shared or SharedRegion()
        lines = (text.partition("\n") for text in gather_texts(ranks, f"{own.path}\n{own.name}"))
        shared = [SharedRegion(path=path, name=name) for path, _, name in lines]
        found = ((other, WeightRegion.open_to_fill(shared[other], num_bytes)) for other in range(ranks.rank))
        with raise_on_all_ranks(ranks):
            nearest, mapped = next(((other, opened) for other, opened in found if opened), (ranks.rank, region))
        nearest_of = ranks.all_numbers(nearest)
        first = [near if nearest_of[near] == near else rank for rank, near in enumerate(nearest_of)]
        return cls(ranks.rank, first, shared, region if first[ranks.rank] == ranks.rank else mapped)


@dataclass(frozen=True)
class WantedBytes:
    """Which bytes of a version go to which ranks.

    Args:
        machines: the group's.
        receivers: the first ranks of the machines that get any.
        stripes: in which the bytes are sent to the receivers; None: each gets all.
    """

    machines: Machines
    receivers: Sequence[int]
    stripes: Stripes | None = None

    def parts(self, receiver: int, start: int, end: int) -> Iterator[Part]:
        """Yield the ranges within [start, end) that a receiver gets."""
        if self.stripes:
            return self.stripes.parts(self.receivers.index(receiver), start, end)
        return iter([(start, end)])

    def sender(self, receiver: int, holding: Sequence[int]) -> int:
        """Return which of the ranks that hold the same rows sends them.

        It is a rank of the receiver's machine, if there is one. Else the ranks take turns.
        """
        near = [rank for rank in holding if self.machines.first[rank] == receiver]
        return near[0] if near else holding[self.receivers.index(receiver) % len(holding)]


def write_rows(
    manifest: WeightManifest,
    wanted: WantedBytes,
    tensors: Mapping[str, Tensor],
    deltas: Mapping[str, Callable[[], Tensor]],
    ranks: Ranks,
) -> None:
    """Write the rows of all tensors into the regions. Every rank calls it.

    In addition to its shard, a rank has at most twice the bytes of the largest tensor at any time.

    Args:
        manifest: where each tensor lies.
        wanted: what goes where.
        tensors: whole or sharded, in the order of the manifest.
        deltas: as PublishedWeights'.
        ranks: the role's.

    Raises:
        OSError: a region could not be written, on every rank.
    """
    held = _held_by_all(manifest, tensors, ranks)
    writer = _StripeWriter(wanted, ranks, max((spec.num_bytes for spec in manifest.weights), default=0))
    pairs = [*zip(manifest.weights, tensors.values(), strict=True)]
    for turn in _turns(manifest):
        for at in turn:
            spec, tensor = pairs[at]
            delta = deltas[spec.name]() if spec.name in deltas else None
            source = tensor if is_in_rows(tensor) else whole(tensor)
            writer.add(spec, held[:, at], source, delta)
            del delta, source
        writer.exchange([(manifest.weights[at].offset, held[:, at]) for at in turn])
    writer.finish()
    with raise_on_all_ranks(ranks):
        writer.check()


def _turns(manifest: WeightManifest) -> Iterator[range]:
    """Yield tensors by number: as many in succession as have the bytes of the largest one together."""
    sizes = [spec.num_bytes for spec in manifest.weights]
    most = max(sizes, default=0)
    first = 0
    total = 0
    for at, size in enumerate(sizes):
        if total + size > most:
            yield range(first, at)
            first = at
            total = 0
        total += size
    yield range(first, len(sizes))


def _held_by_all(manifest: WeightManifest, tensors: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """Return the bytes of each tensor that each rank has: [ranks, tensors, 2] int64, first and end."""
    own = [_own_part(spec, tensor) for spec, tensor in zip(manifest.weights, tensors.values(), strict=True)]
    table = torch.zeros(ranks.size, len(own), 2, dtype=torch.int64)
    table[ranks.rank] = torch.tensor(own, dtype=torch.int64).view(-1, 2)
    return ranks.total(table)


def _own_part(spec: WeightSpec, tensor: Tensor) -> Part:
    if not isinstance(tensor, DTensor) or not is_in_rows(tensor) or not spec.num_bytes:
        return 0, spec.num_bytes
    rows = rows_of(tensor)
    row_bytes = spec.num_bytes // spec.shape[0]
    return rows.start * row_bytes, rows.stop * row_bytes


class _StripeWriter:
    """Writes and sends rows. An error of writing is raised by `check`: other ranks may still wait for this one.

    Args:
        wanted: what goes where.
        ranks: the role's.
        largest: bytes of the largest tensor; a rank sends no more at a time.
    """

    def __init__(self, wanted: WantedBytes, ranks: Ranks, largest: int) -> None:
        self._largest = largest
        self._wanted = wanted
        self._ranks = ranks
        self._machines = wanted.machines
        self._outbox: dict[int, list[Tensor]] = {}  # by receiver
        region = self._machines.region
        self._writers = Writers(lambda at, data: region.fill(at, memory_of(data)))
        self._staging: Staging | None = None  # for tensors on a GPU

    def add(self, spec: WeightSpec, held: Tensor, source: Tensor, delta: Tensor | None) -> None:
        """Write this rank's rows of a tensor that are for its machine, and keep the others for `exchange`."""
        rank = self._ranks.rank
        own = held[self._ranks.rank].tolist()
        holding = (held == held[rank]).all(1).nonzero().flatten().tolist()
        mine = [to for to in self._wanted.receivers if self._wanted.sender(to, holding) == rank]
        start, end = own
        if start == end or not mine:
            return
        rows = local(source).detach()
        if delta is not None:
            rows = rows + own_rows(delta, source)
        rows = rows.to(FROM_WIRE[spec.dtype])  # before it leaves the device
        data = rows.contiguous().reshape(-1).view(torch.uint8)
        base = spec.offset + start
        if any(to != self._machines.first[rank] for to in mine):
            data = data.cpu()  # for the exchange
        for to in mine:
            for first, last in self._wanted.parts(to, base, spec.offset + end):
                part = data[first - base : last - base]
                if to != self._machines.first[rank]:
                    self._outbox.setdefault(to, []).append(part)
                elif part.device.type == "cpu":
                    self._writers.write([(first, part)])
                else:
                    self._stage(first, part)

    def _stage(self, at: int, data: Tensor) -> None:
        if self._staging is None:
            self._staging = Staging(self._writers, data.device)
        self._staging.put(at, data)

    def finish(self) -> None:
        """Write the copies that are still on their way from the device."""
        if self._staging is not None:
            self._staging.finish()
        self._writers.close()

    def check(self) -> None:
        """Raise the OSError of the first write that failed."""
        if self._writers.failure is not None:
            raise self._writers.failure

    def exchange(self, turn: Sequence[tuple[int, Tensor]]) -> None:
        """Send the kept rows, and write those from the ranks of other machines. Every rank calls it.

        Args:
            turn: of each tensor its offset, and which bytes of it each rank has.
        """
        receivers = self._wanted.receivers
        if receivers == [0] and not any(self._machines.first):
            return
        rounds = self._num_rounds(turn)
        for number in range(rounds):
            some = (number * len(receivers) // rounds, (number + 1) * len(receivers) // rounds)
            self._exchange(turn, receivers[slice(*some)])

    def _num_rounds(self, turn: Sequence[tuple[int, Tensor]]) -> int:
        """Return the number of rounds of receivers, so that no rank sends more than the largest tensor in one.

        Every rank comes to the same number. Bytes in stripes have one receiver each, and need one round.
        """
        if self._wanted.stripes:
            return 1
        num_receivers = len(self._wanted.receivers)
        sent = 0
        for _, held in turn:
            copies = Counter((start, end) for start, end in held.tolist() if start < end)
            if copies:
                largest = max(end - start for start, end in copies)
                sent += largest * -(-num_receivers // min(copies.values()))
        return max(1, min(num_receivers, -(-sent // max(1, self._largest))))

    def _exchange(self, turn: Sequence[tuple[int, Tensor]], receivers: Sequence[int]) -> None:
        coming: list[list[Part]] = [[] for _ in range(self._ranks.size)]
        if self._ranks.rank in receivers:
            for offset, held in turn:
                for sender, part in self._senders(offset, held):
                    coming[sender].append(part)
        sent = [self._outbox.pop(rank, []) if rank in receivers else [] for rank in range(self._ranks.size)]
        sizes = [sum(end - start for start, end in parts) for parts in coming]
        received = self._ranks.exchange(sent, sizes)
        arrived = []
        at = 0
        for start, end in (part for parts in coming for part in parts):
            arrived.append((start, received[at : at + end - start]))
            at += end - start
        self._writers.write(arrived)

    def _senders(self, offset: int, held: Tensor) -> Iterator[tuple[int, Part]]:
        """Yield the parts of a tensor that other machines send to this one, each with its sender."""
        holding: dict[tuple[int, int], list[int]] = {}
        for rank, (start, end) in enumerate(held.tolist()):
            if start < end:
                holding.setdefault((start, end), []).append(rank)
        to = self._ranks.rank
        for (start, end), having in holding.items():
            sender = self._wanted.sender(to, having)
            if self._machines.first[sender] != to:
                for part in self._wanted.parts(to, offset + start, offset + end):
                    yield sender, part
