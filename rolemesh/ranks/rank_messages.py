"""Orders and answers as batches: the messages between rank 0 and a follower (group.proto)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RolemeshError
from rolemesh.rpc.contract import GROUP, rpcs
from rolemesh.rpc.status_codes import to_status
from rolemesh.wire.codec import Encoded, encode

[RPC] = rpcs(GROUP)
LEADER_KEY = "leader"  # in the group's store: rank 0's port and secret

# A connection that is silent for KEEPALIVE_S is asked for a sign of life, and is dead after KEEPALIVE_TIMEOUT_S
# without one. So each end notices within 20 s that the other has vanished or was stopped.
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 10
KEEPALIVE = {
    "grpc.keepalive_time_ms": KEEPALIVE_S * 1000,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_S * 1000,
    "grpc.http2.ping_timeout_ms": KEEPALIVE_TIMEOUT_S
    * 1000,  # of each ping; 60 s by default, also for keepalive
    "grpc.http2.max_pings_without_data": 0,
}
LAST_KEY = "last"  # in the meta of rank 0's last message
REMIND_S = 5.0  # interval at which a waiting rank logs for which rank it waits


@dataclass(frozen=True)
class Order:
    """One rank's part of a command.

    Args:
        number: of the order, from 1 for each role.
        role: runs the command.
        method: the command's name.
        step: of the call that the order serves.
        job: of that call.
        part: the command's batch.
    """

    number: int
    role: str
    method: str
    step: int
    job: str
    part: DataProto

    def encoded(self) -> Encoded:
        """Encode the order.

        Raises:
            InvalidBatch: the part cannot be sent.
        """
        keys = ("number", "role", "method", "step", "job")
        return encode(_batch(self.part, {key: getattr(self, key) for key in keys}))

    @classmethod
    def of(cls, batch: DataProto) -> Order:
        """Read an order.

        Raises:
            InvalidBatch: the batch is no order.
        """
        kinds = {"number": int, "role": str, "method": str, "step": int, "job": str}
        return cls(**_keys(batch, kinds), part=_part(batch))


@dataclass(frozen=True)
class Failure:
    """The error that a command raised on a rank.

    Args:
        error: name of a RolemeshError's class; empty for an unexpected error.
        text: its message.
    """

    error: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        _, text, ((_, name),) = to_status(error)
        return cls(name if isinstance(error, RolemeshError) else "", text)

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else self.text


@dataclass(frozen=True)
class RankAnswer:
    """A rank's answer to an order.

    Args:
        number: of the order.
        role: of the order.
        outcome: the command's answer, or its error.
    """

    number: int
    role: str
    outcome: DataProto | Failure

    def encoded(self) -> Encoded:
        """Encode the answer.

        Raises:
            InvalidBatch: the command's answer cannot be sent.
        """
        keys: dict[str, Any] = {"number": self.number, "role": self.role}
        if isinstance(self.outcome, DataProto):
            return encode(_batch(self.outcome, keys))
        return encode(_batch(DataProto(), keys | {"error": self.outcome.error, "text": self.outcome.text}))

    @classmethod
    def of(cls, batch: DataProto) -> RankAnswer:
        """Read an answer.

        Raises:
            InvalidBatch: the batch is no answer.
        """
        keys = _keys(batch, {"number": int, "role": str})
        if "error" in batch.meta_info:
            return cls(**keys, outcome=Failure(**_keys(batch, {"error": str, "text": str})))
        return cls(**keys, outcome=_part(batch))


def last() -> Encoded:
    """Return rank 0's last message, when it drains: no order follows, and the follower ends its requests."""
    return encode(DataProto(meta_info={LAST_KEY: True}))


def is_last(batch: DataProto) -> bool:
    return batch.meta_info.get(LAST_KEY) is True


def _batch(content: DataProto, keys: Mapping[str, Any]) -> DataProto:
    meta = {**keys, "meta_info": content.meta_info}
    return DataProto(content.tensors, content.non_tensors, meta, content.num_rows)


def _part(batch: DataProto) -> DataProto:
    meta = _keys(batch, {"meta_info": dict})["meta_info"]
    return DataProto(batch.tensors, batch.non_tensors, meta, batch.num_rows)


def _keys(batch: DataProto, kinds: Mapping[str, type]) -> dict[str, Any]:
    for key, kind in kinds.items():
        if type(batch.meta_info.get(key)) is not kind:
            raise InvalidBatch(
                f"expected {key!r} of type {kind.__name__} in meta; got {batch.meta_info!r:.200}"
            )
    return {key: batch.meta_info[key] for key in kinds}
