"""Who may call what under TLS, with real certificates over real channels."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, swap
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from in_process import small_job
from saving import saved
from serving import served

import rolemesh.v1
from rolemesh.catalog.role_specs import ROLES
from rolemesh.errors import InvalidConfig, NotPermitted, RoleUnavailable, WeightsUnavailable
from rolemesh.methods import methods
from rolemesh.rpc import tls
from rolemesh.rpc.calling.clients import ActorClient
from rolemesh.rpc.channels import open_channel
from rolemesh.rpc.contract import ACTOR, CALLERS, WEIGHTS, rpcs
from rolemesh.rpc.serving.access import Permissions
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.rpc.status_codes import ENDED_WHILE_WRITING
from rolemesh.telemetry import metrics
from rolemesh.v1 import data_pb2
from rolemesh.weights.remote import RemoteWeights

JOB, OTHER = "my-job", "other-job"
SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


def services_of(module: Any) -> list[ServiceDescriptor]:
    return list(module.DESCRIPTOR.services_by_name.values())


OURS = [
    service
    for found in pkgutil.iter_modules(rolemesh.v1.__path__)
    if found.name.endswith("_pb2")
    for service in services_of(importlib.import_module(f"rolemesh.v1.{found.name}"))
]


def stated() -> dict[str, set[str]]:
    """Path of each rpc to the roles that the .proto lets call it."""
    return {
        f"/{service.full_name}/{method.name}": {
            data_pb2.Caller.Name(number).removeprefix("CALLER_").lower()
            for number in method.GetOptions().Extensions[data_pb2.callers]
        }
        for service in OURS
        for method in service.methods
    }


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None
    or not re.match(b"OpenSSL [3-9]", subprocess.run(["openssl", "version"], capture_output=True).stdout),
    reason="the page's commands take OpenSSL 3",
)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def server_of(*services: ServiceDescriptor) -> AsyncIterator[str]:
    """A server that is still loading: every admitted caller is told so."""
    server = RoleServer({"actor": services})
    address = await server.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await server.drain(0)


async def ask(channel: grpc.aio.Channel, path: str, arity: str) -> grpc.aio.AioRpcError:
    """How a call ends that carries nothing."""
    call = getattr(channel, arity)(path)(iter(()) if arity.startswith("stream") else b"", timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call if arity.endswith("stream") else as_stream(call):
            pass
    return error.value


async def as_stream(call: Any) -> AsyncIterator[Any]:
    yield await call


def arity_of(path: str) -> str:
    [rpc] = (rpc for service in OURS for rpc in rpcs(service) if rpc.path == path)
    return "_".join("stream" if way else "unary" for way in rpc.streams)


async def passed(channel: grpc.aio.Channel) -> set[str]:
    """Of all rpcs, those that this caller gets to; any other ends with PERMISSION_DENIED."""
    let_in = set()
    for path in stated():
        error = await ask(channel, path, arity_of(path))
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            assert error.details() == "actor is still loading"
            let_in.add(path)
        else:
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED, (path, error)
    return let_in


# -------------------------------------------------------------------------- what the .proto says


def test_every_rpc_of_every_service_says_who_may_call_it() -> None:
    assert {path for path, callers in stated().items() if not callers} == set()
    assert len(stated()) == sum(len(service.methods) for service in OURS) > 20


def test_a_certificate_may_name_every_role_that_is_served() -> None:
    assert set(CALLERS.values()) == {*ROLES, "controller", "operator"}


def test_the_page_says_who_may_call_what() -> None:
    page, full_names = SECURITY.read_text(), {s.name: s.full_name for s in OURS}
    said = {}
    for service, names, callers in re.findall(r"^\| `(\w+)` \| (.+?) \| ([a-z, ]+) \|$", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            said[f"/{full_names[service]}/{name}"] = set(callers.split(", "))
    assert said == stated()


# ------------------------------------------------------------------------------- what is enforced


@pytest.mark.parametrize("caller", ["", *CALLERS.values()])
async def test_each_role_may_call_exactly_what_the_proto_permits(
    caller: str, tmp_path: Path, authority: Authority
) -> None:
    """A certificate without a role may call nothing. The server's own roles give a caller no right."""
    tls.use_keys(swap(tmp_path / "server", authority.keys(JOB, *CALLERS.values())))
    async with server_of(*OURS) as address:
        tls.use_keys(swap(tmp_path / "caller", authority.keys(JOB, *filter(None, [caller]))))
        async with open_channel(address, "actor") as channel:
            assert await passed(channel) == {path for path, callers in stated().items() if caller in callers}


async def test_a_process_of_two_roles_may_do_what_either_may(tmp_path: Path, authority: Authority) -> None:
    tls.use_keys(swap(tmp_path / "server", authority.keys(JOB, "actor")))
    async with server_of(*OURS) as address:
        tls.use_keys(swap(tmp_path / "caller", authority.keys(JOB, "rollout", "operator")))
        async with open_channel(address, "actor") as channel:
            both = {path for path, callers in stated().items() if callers & {"rollout", "operator"}}
            assert await passed(channel) == both


async def test_without_keys_anybody_may_call_anything(tmp_path: Path) -> None:
    tls.use_keys(None)
    async with server_of(*OURS, without_callers()) as address, open_channel(address, "actor") as channel:
        assert await passed(channel) == set(stated())
        error = await ask(channel, "/test.Forgotten/Ask", "unary_unary")
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "names",
    [
        [OTHER, f"controller.{OTHER}"],
        [OTHER, f"controller.{JOB}"],
        [f"controller.{JOB}"],
        [OTHER, JOB, f"controller.{JOB}"],
        [f"controller.{JOB}", JOB],
        [f"controller.{JOB}.{OTHER}", f"controller.controller.{JOB}.{OTHER}"],
    ],
)
async def test_a_certificate_of_another_job_may_not_even_call_health(
    names: list[str], tmp_path: Path, authority: Authority
) -> None:
    tls.use_keys(swap(tmp_path / "server", authority.keys(JOB, "actor")))
    async with server_of(*OURS) as address:
        other = tls.read_keys(swap(tmp_path / "caller", authority.files(*names)))
        pretends = [("grpc.ssl_target_name_override", f"actor.{JOB}")]
        credentials = other.channel_credentials()
        async with grpc.aio.secure_channel(address, credentials, options=pretends) as channel:
            assert await passed(channel) == set()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health(channel)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.value.details() == (f"this process is of job my-job; the caller's certificate is for {names}")


async def health(channel: grpc.aio.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service="live")
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status)


def without_callers() -> ServiceDescriptor:
    """As of a .proto whose author forgot the option."""
    file = FileDescriptorProto(name="forgotten.proto", package="test", syntax="proto3")
    file.message_type.add(name="Empty")
    file.service.add(name="Forgotten").method.add(
        name="Ask", input_type=".test.Empty", output_type=".test.Empty"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return pool.FindServiceByName("test.Forgotten")  # type: ignore[no-untyped-call, no-any-return]


async def test_a_method_without_callers_in_the_proto_is_denied_to_all(
    tmp_path: Path, authority: Authority
) -> None:
    tls.use_keys(swap(tmp_path / "keys", authority.keys(JOB, *CALLERS.values())))
    async with server_of(ACTOR, without_callers()) as address, open_channel(address, "actor") as channel:
        error = await ask(channel, "/test.Forgotten/Ask", "unary_unary")
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert (error.details() or "").startswith("Forgotten.Ask may be called by nobody; the caller's certificate")


async def test_a_service_that_a_library_adds_may_be_called_by_nobody(
    tmp_path: Path, authority: Authority
) -> None:
    tls.use_keys(swap(tmp_path / "keys", authority.keys(JOB, *CALLERS.values())))
    server = grpc.aio.server(interceptors=[Permissions({}, {})])
    behaviour = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("library", {"Ask": behaviour}),))
    port = tls.add_port(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", "actor") as channel:
        assert (await ask(channel, "/library/Ask", "unary_unary")).code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)


async def test_only_the_controllers_key_saves_a_checkpoint(
    tiny_model: Path, tmp_path: Path, authority: Authority
) -> None:
    """A reward's key is refused."""
    job = small_job(tmp_path, tiny_model, "run")
    refused = metrics.SERVER_REQUESTS.labels("actor", "BeginCheckpoint", "PERMISSION_DENIED")
    before = refused._value.get()
    directory = job.run_dir / "global_step_1" / "actor"
    tls.use_keys(swap(tmp_path / "actor", authority.keys(JOB, "actor")))
    async with served("actor", job) as addresses:
        tls.use_keys(swap(tmp_path / "reward", authority.keys(JOB, "reward")))
        async with ActorClient(addresses, methods(job)) as reward:
            with pytest.raises(NotPermitted) as error:
                await saved(reward, directory)
        assert str(error.value).endswith(
            "ActorService.BeginCheckpoint may be called by controller; "
            "the caller's certificate names reward of my-job"
        )
        assert not directory.exists()
        assert refused._value.get() == before + 1
        tls.use_keys(swap(tmp_path / "controller", authority.keys(JOB, "controller")))
        async with ActorClient(addresses, methods(job)) as controller:
            await saved(controller, directory)
        assert (directory / "config.json").exists()


async def test_reflection_answers_those_who_may_call_something_here(
    tmp_path: Path, authority: Authority
) -> None:
    tls.use_keys(swap(tmp_path / "server", authority.keys(JOB, "actor")))
    async with server_of(ACTOR, WEIGHTS) as address:
        answers = {}
        for role in CALLERS.values():
            tls.use_keys(swap(tmp_path / role, authority.keys(JOB, role)))
            async with open_channel(address, "actor") as channel:
                answers[role] = await reflected(channel)
                assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
    listed = {
        name: answer for name, answer in answers.items() if answer is not grpc.StatusCode.PERMISSION_DENIED
    }
    assert listed.keys() == {"controller", "rollout"}
    assert all(
        {"rolemesh.v1.ActorService", "rolemesh.v1.WeightsService"} <= set(names) for names in listed.values()
    )


async def reflected(channel: grpc.aio.Channel) -> Any:
    """The services that reflection lists, or the status that it ends with."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    try:
        async for answer in stub.ServerReflectionInfo(iter([request]), timeout=60):
            return [service.name for service in answer.list_services_response.service]
    except grpc.aio.AioRpcError as error:
        # grpc.aio says so where the call ended while its request was written, before it has read the status.
        return await reflected(channel) if error.details() == ENDED_WHILE_WRITING else error.code()


# ------------------------------------------------------------------------ who a caller wants to see


async def test_no_process_can_pose_as_a_role_outside_its_certificate(
    tiny_model: Path, tmp_path: Path, authority: Authority
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    tls.use_keys(swap(tmp_path / "reward", authority.keys(JOB, "reward")))
    async with server_of(ACTOR, WEIGHTS) as address:
        tls.use_keys(swap(tmp_path / "controller", authority.keys(JOB, "controller")))
        client = ActorClient([address], methods(job), patience_s=0.1)
        async with client:
            with pytest.raises(RoleUnavailable, match="its certificate is not for this role of 'my-job'"):
                await client.wait_until_ready(0.2)
        tls.use_keys(swap(tmp_path / "rollout", authority.keys(JOB, "rollout")))
        for sources in ([address], [address, "127.0.0.1:1"]):  # as the actor, and as a rollout before it
            words = f"from {address}: UNAVAILABLE: its certificate is not for this role of 'my-job'"
            with pytest.raises(WeightsUnavailable, match=words):
                await RemoteWeights(sources, 1, "0" * 64, timeout_s=1).fetch()


# ------------------------------------------------------------------------ commands that make certificates


@needs_openssl
async def test_the_pages_commands_make_certificates_its_table_admits(tmp_path: Path) -> None:
    [commands] = re.findall(r"^```sh\n(.*?)^```", SECURITY.read_text(), re.MULTILINE | re.DOTALL)
    keys = await asyncio.to_thread(made_by, commands, tmp_path)
    tls.use_keys(keys["policy"], "actor", "rollout")
    async with server_of(*OURS) as address:
        for name in keys.keys() - {"policy"}:
            tls.use_keys(keys[name], name)
            async with open_channel(address, "actor") as channel:
                assert await passed(channel) == {path for path, callers in stated().items() if name in callers}
    assert keys.keys() == {"policy", *CALLERS.values()} - {"actor", "rollout"}


@needs_openssl
def test_the_errors_command_mends_the_certificate(tmp_path: Path, authority: Authority) -> None:
    """Of somebody who has one for the job alone, where the authority's key is."""
    keys = tmp_path / "my keys"
    keys.mkdir()
    for name, content in (authority.files(JOB) | {"../ca.crt": authority.certificate}).items():
        (keys / name).write_bytes(content)
    (tmp_path / "ca.key").write_bytes(authority.private)
    with pytest.raises(InvalidConfig) as error:
        tls.KeyFolder(keys, ("actor", "rollout"))
    run("openssl req" + str(error.value).partition("openssl req")[2], tmp_path)
    mended = tls.KeyFolder(keys, ("actor", "rollout")).current()
    assert mended.names == (JOB, f"actor.{JOB}", f"rollout.{JOB}")


def made_by(commands: str, directory: Path) -> dict[str, Path]:
    """The directories of keys, by name; only their owner may read them."""
    run(commands, directory)
    assert {path.stat().st_mode & 0o777 for path in directory.glob("keys/*/tls.key")} == {0o600}
    return {path.name: path for path in (directory / "keys").iterdir()}


def run(command: str, directory: Path) -> None:
    subprocess.run(["sh", "-euc", command], cwd=directory, check=True, capture_output=True)
