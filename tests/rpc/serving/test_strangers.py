"""Whatever a unary request says, no role opens a foreign path, dials a foreign socket, breaks, or serves less
afterwards. The requests and their fields are read from the .proto: a new one is asked too."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import served_group

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.job import JobConfig, make_job
from rolemesh.rpc.contract import Rpc, deserializer, rpcs, serializer
from rolemesh.services.processes.serve import services_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all

SERVICES = dict.fromkeys(service for role in ROLES for service in services_of(role))
UNARY = [rpc for service in SERVICES for rpc in rpcs(service) if not rpc.streams[0]]
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
OK = grpc.StatusCode.OK
# Fields that are data: any text or number is as good as another, and names nothing outside.
DATA = {"episode", "attempt", "uid", "row", "seed", "turn"}
DATA |= {"text", "cut", "prompt_tokens", "completion_tokens", "num_training_steps"}
NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: [math.nan, math.inf, -math.inf, -1.0],
    FieldDescriptor.TYPE_UINT64: [(1 << 64) - 1, 1 << 63],
    FieldDescriptor.TYPE_UINT32: [0, (1 << 32) - 1],
    FieldDescriptor.TYPE_BOOL: [True],
    FieldDescriptor.TYPE_FIXED64: [0, (1 << 64) - 1],
    FieldDescriptor.TYPE_MESSAGE: [],  # tests/environment/ has them
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a link in it that leads out."""
    parent = tmp_path_factory.mktemp("strangers")
    for name in ("run", "foreign"):
        (parent / name).mkdir()
    (parent / "foreign" / "key").write_text("secret")
    (parent / "foreign" / "key").chmod(0o600)
    (parent / "run" / "link").symlink_to(parent / "foreign")
    (parent / "run" / "dangling").symlink_to(parent / "nothing")
    return parent / "run"


@pytest.fixture(scope="module")
def listener(run_dir: Path) -> Iterator[socket.socket]:
    """A socket at <parent>/socket, to which nobody is to connect."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run_dir.with_name("socket")))
        listening.listen()
        listening.setblocking(False)
        yield listening


@pytest.fixture(scope="module")
def job(tiny_model: Path, run_dir: Path) -> JobConfig:
    trained = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4}
    return make_job(
        {
            "data": {"train_batch_size": 16, "max_prompt_length": 4, "max_response_length": 4},
            "trainer": {"device": "cpu", "default_local_dir": str(run_dir)},
            "actor": {"model": {"path": str(tiny_model)}, **trained},
            "critic": trained,
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(job: JobConfig) -> AsyncIterator[grpc.aio.Channel]:
    """To all roles in one process."""
    async with served_group(list(ROLES), job) as address, grpc.aio.insecure_channel(address) as opened:
        yield opened


async def ask(channel: grpc.aio.Channel, rpc: Rpc, request: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    make: Any = channel.unary_stream if rpc.streams[1] else channel.unary_unary
    call = make(rpc.path, serializer(rpc.request), deserializer(rpc.response))(request, timeout=60)
    try:
        if rpc.streams[1]:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return OK, ""


def named(name: str, service: str = "") -> Rpc:
    return next(rpc for rpc in UNARY if rpc.name == name and service in rpc.service)


def new(rpc: Rpc, **fields: Any) -> Any:
    """A request."""
    return message_factory.GetMessageClass(rpc.request)(**fields)


async def good(channel: grpc.aio.Channel, run_dir: Path, address: str) -> dict[str, Any]:
    """A value for each field with which the requests that have it succeed."""
    rpc = named("PublishWeights")
    call: Any = channel.unary_unary(rpc.path, serializer(rpc.request), deserializer(rpc.response))
    published = await call(new(rpc, version=1))
    return {
        "version": 1, "digest": published.digest, "sources": [address], "directory": str(run_dir / "saved"),
        "num_training_steps": 1, "wait_s": 0.0, "offset": 0, "length": 1, "agents": ["tool_agent"],
        "episode": "e", "attempt": 1, "agent": "tool_agent", "uid": "u", "row": "{}", "messages": [], "seed": 1,
        "turn": 1, "message": None, "text": "", "cut": False, "prompt_tokens": 0, "completion_tokens": 0,
    }  # fmt: skip


def strings(run_dir: Path) -> list[str]:
    """Foreign paths, there and not there, and what gRPC takes for an address of another kind."""
    parent, run = run_dir.parent, run_dir
    paths = [
        f"{parent}/foreign", f"{parent}/nothing", f"{run}/../foreign", f"{run}/../nothing", f"{run}/link",
        f"{run}/link/below", f"{run}/dangling", f"{run}/\0", f"{run}/" + "a" * 300, f"{run}/" + "a/" * 2000,
        "/" * 5000, "..", "\n\x1b[31m\u202e", "a" * 100_000,
    ]  # fmt: skip
    addresses = [
        f"unix:{parent}/socket", f"unix://{parent}/socket", f"unix:{parent}/socket:80", "unix-abstract:x:80",
        "dns:///127.0.0.1:80", "ipv4:127.0.0.1:80", "ipv6:[::1]:80", "vsock:1:80", "127.0.0.1", "127.0.0.1:0",
        "::1:80",
    ]  # fmt: skip
    return paths + addresses


def state(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns)
        for path in (directory, *directory.rglob("*"))
    }


@pytest.mark.parametrize("rpc", UNARY, ids=lambda rpc: rpc.path)
async def test_no_field_of_a_request_takes_a_role_out_of_its_home(
    channel: grpc.aio.Channel, job: JobConfig, run_dir: Path, listener: socket.socket, rpc: Rpc
) -> None:
    values = await good(channel, run_dir, "127.0.0.1:1")
    fields = {field.name: field for field in rpc.request.fields}
    assert fields.keys() <= values.keys(), "say what a good value is"
    before = state(run_dir.parent)
    for name, field in fields.items():
        is_text = field.type == FieldDescriptor.TYPE_STRING
        for hostile in strings(run_dir) if is_text else NUMBERS[field.type]:
            filled = {key: values[key] for key in fields}
            filled[name] = [hostile] if isinstance(values[name], list) else hostile
            code, details = await ask(channel, rpc, new(rpc, **filled))
            assert code in REFUSED | ({OK} if name in DATA else set()), (
                f"{rpc.name}({name}={hostile!r:.80}): {code} {details}"
            )
            assert "secret" not in details
    assert state(run_dir.parent) == before
    with pytest.raises(BlockingIOError):
        listener.accept()
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    held = {key: values[key] for key in ("version", "digest")}
    manifest = named("GetManifest")
    assert await ask(channel, manifest, new(manifest, **held)) == (OK, "")  # what is published stays


@pytest.mark.parametrize("rpc", [r for r in UNARY if r.name.endswith("Checkpoint")], ids=lambda rpc: rpc.path)
async def test_the_answer_to_a_foreign_path_says_nothing_about_it(
    channel: grpc.aio.Channel, run_dir: Path, rpc: Rpc
) -> None:
    for text in ("{run}/../{name}", "{run}/link/{name}", "{parent}/{name}", "{parent}/foreign/{name}"):
        answers = []
        for name in ("key", "foreign", "nothing"):
            path = text.format(run=run_dir, parent=run_dir.parent, name=name)
            code, details = await ask(channel, rpc, new(rpc, directory=path))
            said = re.sub(r"\d+ bytes free", "", details)  # of the disk, which others write to
            answers.append((code, said.replace(repr(path), "PATH").replace(path, "PATH")))
        assert answers[0][0] is grpc.StatusCode.FAILED_PRECONDITION
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("role", ["Actor", "Critic"])
async def test_a_checkpoint_in_its_home_changes_no_other_file(
    channel: grpc.aio.Channel, run_dir: Path, role: str
) -> None:
    home = run_dir / role
    (home / "private").mkdir(parents=True, mode=0o700)
    (home / "key").write_text("secret")
    (home / "key").chmod(0o600)
    before = {path: known for path, known in state(home).items() if path != str(home)}
    begin, finish, load = (named(f"{verb}Checkpoint", role) for verb in ("Begin", "Finish", "Load"))
    assert await ask(channel, begin, new(begin, directory=str(home))) == (OK, "")
    assert await ask(channel, finish, new(finish, directory=str(home))) == (OK, "")
    after = state(home)
    assert {path: after[path] for path in before} == before
    assert {after[path][0] & 0o777 for path in after.keys() - before.keys() - {str(home)}} == {0o644}
    assert await ask(channel, load, new(load, directory=str(home))) == (OK, "")


async def test_an_update_without_a_source_is_refused_before_any_change(
    channel: grpc.aio.Channel, run_dir: Path
) -> None:
    rpc = named("UpdateWeights")
    values = await good(channel, run_dir, "127.0.0.1:1")
    for sources in ([], ["127.0.0.1:1", ""], ["127.0.0.1:1"] * 2000):
        code, details = await ask(channel, rpc, new(rpc, sources=sources, version=2, digest=values["digest"]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, details
