"""Divide a version among several machines, in stripes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rolemesh.errors import InvalidBatch, InvalidConfig, WeightsUnavailable
from rolemesh.rpc.channels import check_address
from rolemesh.v1.weights_pb2 import GetManifestResponse, StripedHolders
from rolemesh.wire.frame import LENGTH_DELIMITED, fields
from rolemesh.wire.limits import MAX_ANSWER_FIELDS, MAX_HOLDERS

# Size of a stripe, 16 MiB: large next to a call's overhead. It is not larger, because a receiver verifies and
# relays bytes in order, so a relay gets them in bursts of one stripe of each machine.
STRIPE_PIECES = 4


@dataclass(frozen=True)
class Stripes:
    """Stripe i of a region belongs to holder i modulo their number.

    Args:
        stripe_bytes: size of a stripe; the last may be shorter.
        num_holders: number of holders, 1 or more.
    """

    stripe_bytes: int
    num_holders: int

    def holder_of(self, at: int) -> int:
        """Return the holder of a byte."""
        return at // self.stripe_bytes % self.num_holders

    def end_of(self, at: int) -> int:
        """Return the end of the stripe that has a byte."""
        return (at // self.stripe_bytes + 1) * self.stripe_bytes

    def next_of(self, holder: int, at: int) -> int:
        """Return the first byte at or after `at` that belongs to a holder; it may lie beyond the region."""
        stripe = at // self.stripe_bytes
        ahead = (holder - stripe) % self.num_holders
        return (stripe + ahead) * self.stripe_bytes if ahead else at

    def parts(self, holder: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges within [start, end) that belong to a holder, in order."""
        while (start := self.next_of(holder, start)) < end:
            stop = min(end, self.end_of(start))
            yield start, stop
            start = stop


@dataclass(frozen=True)
class HeldStripes:
    """The stripes of a version that this process holds.

    Args:
        stripes: how the version is divided.
        number: of this holder.
        addresses: host:port of holders 1, 2 and so on.
    """

    stripes: Stripes
    number: int
    addresses: Sequence[str]

    def check(self, start: int, end: int) -> None:
        """Raise InvalidBatch unless the bytes [start, end) lie in one of this holder's stripes."""
        stripes = self.stripes
        if start < end and not (stripes.holder_of(start) == self.number and end <= stripes.end_of(start)):
            raise InvalidBatch(
                f"asked for bytes {start} to {end} of holder {self.number} of {stripes.num_holders}: a range "
                f"must lie in one of its stripes of {stripes.stripe_bytes} bytes"
            )

    def message(self) -> StripedHolders:
        """Return the message for a receiver."""
        return StripedHolders(stripe_bytes=self.stripes.stripe_bytes, addresses=self.addresses)


def check_holders(answer: memoryview) -> None:
    """Raise InvalidBatch if a serialized GetManifestResponse names more holders than there may be."""
    for number, wire_type, start, end in fields(answer, MAX_ANSWER_FIELDS, "a GetManifestResponse"):
        if number == GetManifestResponse.STRIPED_FIELD_NUMBER and wire_type == LENGTH_DELIMITED:
            for _ in fields(answer[start:end], MAX_HOLDERS, "a list of holders"):
                pass


def stripes_of(holders: StripedHolders, piece_bytes: int) -> Stripes:
    """Check a received message, and return how the version is divided.

    Raises:
        WeightsUnavailable: there are no stripes or holders, too many holders, an address that is not host:port,
            or stripes that are not whole pieces.
    """
    if not holders.stripe_bytes or holders.stripe_bytes % piece_bytes:
        raise WeightsUnavailable(f"stripes of {holders.stripe_bytes} bytes, and pieces of {piece_bytes}")
    if not 0 < len(holders.addresses) < MAX_HOLDERS:
        raise WeightsUnavailable(f"{len(holders.addresses)} more holders; 1 to {MAX_HOLDERS - 1} are accepted")
    try:
        for address in holders.addresses:
            check_address(address)
    except InvalidConfig as error:
        raise WeightsUnavailable(f"invalid address of a holder: {error}") from error
    return Stripes(holders.stripe_bytes, len(holders.addresses) + 1)
