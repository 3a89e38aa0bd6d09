"""Error to status and back, by one table that the page for people repeats."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import grpc
import pytest

from rolemesh import errors
from rolemesh.errors import RolemeshError, RoleUnavailable
from rolemesh.rpc.status_codes import (
    BARE,
    ENDED_WHILE_WRITING,
    MAX_DETAIL_BYTES,
    STATUS,
    from_status,
    to_status,
)

DOMAIN = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, RolemeshError) and cls is not RolemeshError
]


def over_the_wire(error: Exception) -> RolemeshError:
    code, details, trailing = to_status(error)
    metadata = grpc.aio.Metadata(*trailing)
    return from_status(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details), "reward.X at a:1, step 3"
    )


@pytest.mark.parametrize("cls", DOMAIN)
def test_every_error_has_a_status_and_survives_the_wire(cls: type[RolemeshError]) -> None:
    back = over_the_wire(cls("row 7 is empty"))
    assert type(back) is cls
    assert str(back) == "reward.X at a:1, step 3: row 7 is empty"


def test_a_subclass_travels_as_the_nearest_class_of_the_table() -> None:
    class Odd(errors.InvalidBatch):
        pass

    assert type(over_the_wire(Odd("x"))) is errors.InvalidBatch


def test_an_unexpected_error_is_internal_with_class_and_message() -> None:
    code, details, _ = to_status(ZeroDivisionError("division by zero"))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "ZeroDivisionError: division by zero")
    assert type(over_the_wire(ZeroDivisionError("division by zero"))) is errors.RoleFailed


@pytest.mark.parametrize("code", list(BARE))
def test_a_status_of_grpc_itself_has_a_class(code: grpc.StatusCode) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "")
    back = from_status(bare, "here")
    assert type(back) is BARE[code]
    assert str(back) == f"here: {code.name}"


def test_a_status_that_the_table_lacks_is_a_failed_role() -> None:
    odd = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    back = from_status(odd, "here")
    assert type(back) is errors.RoleFailed
    assert str(back) == "here: gone"


def test_a_call_that_ended_during_its_request_is_a_lost_replica() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), ENDED_WHILE_WRITING
    )
    back = from_status(error, "here")
    assert type(back) is RoleUnavailable
    assert str(back) == "here: the call ended while its request was being sent"


def test_a_long_message_is_cut_to_fit_a_header() -> None:
    """gRPC refuses trailers above 8 KiB, and writes each byte of this text as three characters."""
    _, details, _ = to_status(errors.InvalidBatch("ü" * 10_000))
    assert len(details.encode()) < 2100
    assert details.endswith("the role's log has the rest)")


def test_a_message_is_cut_above_its_limit_and_between_characters() -> None:
    """A ü is two bytes, so one that begins at the last allowed byte is left out."""
    for whole in ("x" * MAX_DETAIL_BYTES, "ü" * (MAX_DETAIL_BYTES // 2)):
        assert to_status(errors.InvalidBatch(whole))[1] == whole
    for long, kept in (("x" * 2001, "x" * 2000), ("x" + "ü" * 1000, "x" + "ü" * 999)):
        assert to_status(errors.InvalidBatch(long))[1] == f"{kept} … (the role's log has the rest)"


def test_a_lone_surrogate_in_a_message_is_escaped() -> None:
    """JSON has them, and so may a row's uid; gRPC's details are UTF-8."""
    code, details, _ = to_status(errors.RewardFailed("row \ud800: no rule"))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "row \\ud800: no rule")
    _, details, _ = to_status(errors.InvalidBatch("\udfff" * 10_000))
    assert details.startswith("\\udfff\\udfff")
    assert len(details.encode()) < 2100


@pytest.mark.parametrize("cls", [errors.InvalidBatch, ZeroDivisionError])
def test_an_error_whose_str_raises_has_a_status_too(cls: type[Exception]) -> None:
    class Mute(cls):  # type: ignore[misc,valid-type]
        def __str__(self) -> str:
            raise KeyError("message")

    code, details, _ = to_status(Mute())
    assert code is to_status(cls())[0]
    assert details.endswith("its message cannot be formatted (KeyError)")


def test_the_page_of_errors_has_the_status_of_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {cls.__name__: code.name for cls, code in STATUS.items()}
