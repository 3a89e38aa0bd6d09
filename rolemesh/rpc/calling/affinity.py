"""Remembers which replica answered a row of several turns last: it may have kept the row's keys and values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from zlib import crc32

from rolemesh.dataproto import DataProto
from rolemesh.rpc.calling.replica import Replica

MAX_ROWS = 1 << 16  # rows whose replica is remembered; about 10 MB


class ReplicaAffinity:
    """Remembers the replicas of the rows that were answered last.

    The memory is a hint. No answer depends on it, so a wrong or forgotten replica costs only time.
    """

    def __init__(self) -> None:
        self._addresses: OrderedDict[int, str] = OrderedDict()

    def note(self, batch: DataProto, rows: Iterable[int], replica: Replica) -> None:
        """Remember that a replica answered these rows of a request. It has no effect if they have one turn."""
        if "turns" in batch:
            for row in rows:
                key = _key(batch, row)
                self._addresses[key] = replica.address
                self._addresses.move_to_end(key)
            while len(self._addresses) > MAX_ROWS:
                self._addresses.popitem(last=False)

    def of(self, batch: DataProto) -> str:
        """Return the address that answered most rows of a request last; empty if none is known."""
        if "turns" not in batch or not self._addresses:
            return ""
        found = Counter(self._addresses.get(_key(batch, row), "") for row in range(len(batch)))
        del found[""]
        return found.most_common(1)[0][0] if found else ""


def _key(batch: DataProto, row: int) -> int:
    """Hash a row's prompt and seed; two rows seldom have the same number."""
    names = ("prompts", "prompt_mask", "seeds")
    return hash(tuple(crc32(batch[name][row].numpy().tobytes()) for name in names))
