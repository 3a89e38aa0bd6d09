"""What comes with a call, whichever it is: bytes that are no message, too many of them, and metadata."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from batches import correct
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from in_process import small_job
from serving import served

import rolemesh.v1
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.job import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed
from rolemesh.methods import methods
from rolemesh.rpc.contract import GROUP, Rpc, rpcs
from rolemesh.rpc.metadata import STEP_KEY
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.rpc.status_codes import ENDED_WHILE_WRITING, ERROR_KEY
from rolemesh.services.controller.service.servicer import SERVICE as CONTROLLER
from rolemesh.services.controller.service.servicer import ControllerServicer
from rolemesh.services.controller.service.status import RunStatus
from rolemesh.services.processes.serve import group_server, load_group, services_of
from rolemesh.v1 import frame_pb2
from rolemesh.wire.limits import MAX_REQUEST_BYTES
from rolemesh.wire.streams import send

BYTES = b"\xff" * 40
TOO_LONG = b"\x7a\x80\x80\x40" + bytes(MAX_REQUEST_BYTES)  # any message with a field that it does not know


def every_service() -> set[str]:
    """Of all .proto files, also those that nobody has written yet."""
    names = [name for _, name, _ in pkgutil.iter_modules(rolemesh.v1.__path__) if name.endswith("_pb2")]
    files = [importlib.import_module(f"rolemesh.v1.{name}") for name in names]
    return {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}


@asynccontextmanager
async def everything_served(job: JobConfig) -> AsyncIterator[list[tuple[str, Rpc, grpc.aio.Channel]]]:
    """Every rpc of every service: its role, and a channel to who serves it."""
    async with AsyncExitStack() as stack:
        places: list[tuple[str, ServiceDescriptor, str]] = []
        for role in ROLES:
            [address] = await stack.enter_async_context(served(role, job))
            places += [(role, service, address) for service in services_of(role)]
        server = RoleServer({"controller": [CONTROLLER]})
        address = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.drain, 0)
        await server.ready({CONTROLLER: ControllerServicer(RunStatus("run"))})
        places.append(("controller", CONTROLLER, address))
        calls = []
        for role, service, address in places:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            calls += [(role, rpc, channel) for rpc in rpcs(service)]
        # Rank 0 serves GroupService, to its followers alone: tests/ranks/test_executor.py.
        assert {rpc.service for _, rpc, _ in calls} == every_service() - {GROUP.full_name}
        yield calls


async def ending(
    rpc: Rpc,
    channel: grpc.aio.Channel,
    request: bytes | DataProto,
    metadata: Mapping[str, str] | None = None,
) -> tuple[str, str, str]:
    """Status, class and words of a call's end. Where grpc.aio lost them, as the call ended while its request
    was being written, the call is made again."""
    sent: Any = one(request) if rpc.takes_batch and isinstance(request, bytes) else request
    if isinstance(request, DataProto):
        sent = send(request)
    kind = "_".join("stream" if is_stream else "unary" for is_stream in rpc.streams)
    call = getattr(channel, kind)(rpc.path)(sent, metadata=tuple((metadata or {}).items()))
    try:
        async with asyncio.timeout(60):
            if rpc.streams[1]:
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        if error.details() == ENDED_WHILE_WRITING:
            return await ending(rpc, channel, request, metadata)
        trailing: Any = error.trailing_metadata() or ()
        return error.code().name, dict(trailing).get(ERROR_KEY, ""), error.details() or ""
    return "OK", "", ""


async def one(request: bytes) -> AsyncIterator[bytes]:
    yield request


async def test_every_rpc_refuses_bytes_that_are_no_request(tiny_model: Path, tmp_path: Path) -> None:
    """An rpc that somebody adds is asked here too: each service of the .proto files must be served, and each of
    its methods."""
    unlike_expected = {}
    async with everything_served(small_job(tmp_path, tiny_model, "run")) as calls:
        for role, rpc, channel in calls:
            requests = {"no message": BYTES, "steps": BYTES, "too long": TOO_LONG}
            for how, request in requests.items():
                metadata = {STEP_KEY: "9" * 5000} if how == "steps" else {}
                status, error, words = await ending(rpc, channel, request, metadata)
                if (status, error) != ("INVALID_ARGUMENT", "InvalidBatch") or not words.startswith(f"{role}."):
                    unlike_expected[f"{rpc.path} {how}"] = (status, error, words)
                if {"steps": STEP_KEY, "too long": "at most"}.get(how, "") not in words and not rpc.takes_batch:
                    unlike_expected[f"{rpc.path} {how}"] = (status, error, words)
    assert unlike_expected == {}


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ({}, "OK"),
        ({STEP_KEY: "7", "rolemesh-job": "%ff%00%0a%ZZ%", "rolemesh-call": "x" * 2000}, "OK"),
        ({"rolemesh-timeline": "no", "rolemesh-weights-version": "none", "rolemesh-other": "x"}, "OK"),
        ({STEP_KEY: "1" * 18}, "OK"),
        ({STEP_KEY: "1" * 19}, "INVALID_ARGUMENT"),
        ({STEP_KEY: ""}, "INVALID_ARGUMENT"),
        ({STEP_KEY: "-1"}, "INVALID_ARGUMENT"),
        ({STEP_KEY: "1e3"}, "INVALID_ARGUMENT"),
        ({"rolemesh-job": "x" * 100_000}, "RESOURCE_EXHAUSTED"),  # gRPC's own: headers are limited
    ],
    ids=str,
)
async def test_metadata_is_read_or_refused(
    metadata: dict[str, str], status: str, tiny_model: Path, tmp_path: Path
) -> None:
    server = RoleServer({"controller": [CONTROLLER]})
    address = await server.start("127.0.0.1:0")
    await server.ready({CONTROLLER: ControllerServicer(RunStatus("run"))})
    [rpc] = [rpc for rpc in rpcs(CONTROLLER) if rpc.name == "GetStatus"]
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await ending(rpc, channel, b"", metadata))[0] == status
        assert (await ending(rpc, channel, b""))[0] == "OK"
    await server.drain(0)


def new_service(name: str, *methods_: tuple[str, bool]) -> ServiceDescriptor:
    """A service whose methods take Frames: a stream of them, or one."""
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{name}.proto", package=name, syntax="proto3", dependency=[frame_pb2.DESCRIPTOR.name]
    )
    service = file.service.add(name="New")
    for method, streams in methods_:
        frame = f".{frame_pb2.Frame.DESCRIPTOR.full_name}"
        service.method.add(name=method, input_type=frame, output_type=frame, client_streaming=streams,
                           server_streaming=True)  # fmt: skip
    return pool.AddSerializedFile(file.SerializeToString()).services_by_name["New"]


async def test_an_undeclared_batch_is_an_error_before_anybody_calls(tiny_model: Path, tmp_path: Path) -> None:
    class Servicer:
        def __init__(self, validator: Any = None) -> None:
            self.validator = validator

        async def ComputeLogProbs(self, batch: DataProto, context: Any) -> AsyncIterator[DataProto]:
            yield batch

        ComputeNew = ComputeLogProbs

    job = small_job(tmp_path, tiny_model, "run")
    [worker], _ = await load_group(["reference"], job)
    service = new_service("undeclared", ("ComputeLogProbs", True), ("ComputeNew", True))
    server = RoleServer({"reference": [service]})
    for validator in (None, worker.validator):
        with pytest.raises(RoleFailed, match=r"undeclared.New/Compute\w+ takes a batch.*rolemesh/methods.py"):
            await server.ready({service: Servicer(validator)})
    with pytest.raises(
        RoleFailed, match=r"/unary.New/ComputeLogProbs takes a single Frame; a request must be one message"
    ):
        RoleServer({"reference": [new_service("unary", ("ComputeLogProbs", False))]})


async def test_a_declared_rpc_of_a_new_service_is_guarded_without_more(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Its servicer has no line about checks, sees only what is declared, and answers with batches."""
    seen = []

    class Servicer:
        def __init__(self, validator: Any) -> None:
            self.validator = validator

        async def ComputeLogProbs(self, batch: DataProto, context: Any) -> AsyncIterator[DataProto]:
            seen.append(sorted(batch.columns))
            yield batch

    job = small_job(tmp_path, tiny_model, "run")
    [worker], _ = await load_group(["reference"], job)
    service = new_service("declared", ("ComputeLogProbs", True))
    method = methods(job)["reference.compute_log_probs"]
    server = RoleServer({"reference": [service]})
    address = await server.start("127.0.0.1:0")
    await server.ready({service: Servicer(worker.validator)})
    [rpc] = rpcs(service)
    batch = correct(method, 2, prompt=48, response=8)
    more = DataProto({**batch.tensors, "another": batch["input_ids"]}, {}, {"key": [1]})
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await ending(rpc, channel, more))[0] == "OK"
        wrong = DataProto({**batch.tensors, "input_ids": batch["input_ids"] - 300})
        status, error, words = await ending(rpc, channel, wrong)
        assert (status, error) == ("INVALID_ARGUMENT", "InvalidBatch")
        assert words.startswith("reference.compute_log_probs: column 'input_ids', row 0, position 0, is ")
    assert seen == [sorted(method.reads)]
    await server.drain(0)


async def test_a_group_checks_requests_as_each_of_its_roles_does(tiny_model: Path, tmp_path: Path) -> None:
    """Two roles behind one port: each has the vocabulary of its model and its own methods."""
    job = small_job(tmp_path, tiny_model, "run")
    server = group_server(["critic", "reward"])
    workers, servicers = await load_group(["critic", "reward"], job)
    await server.ready(servicers)
    assert [sorted(worker.validator.methods) for worker in workers] == [
        ["ComputeValues", "Update"],
        ["ComputeScores"],
    ]
