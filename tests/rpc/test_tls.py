"""Mutual TLS with real certificates: who is let in, who is told what, and keys that change while calls run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import HOUR, Authority, swap
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_addresses import reserved_port
from serving import gate, reward_batch, reward_job, served

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc import tls
from rolemesh.rpc.calling.clients import ActorClient, RewardClient
from rolemesh.rpc.channels import RoleChannel, open_channel
from rolemesh.rpc.contract import REWARD
from rolemesh.rpc.metadata import FINGERPRINT_KEY, LIFE_KEY, WHY_KEY
from rolemesh.rpc.serving.server import RoleServer

JOB, OTHER = "my-job", "other-job"
ROLES = ("reward", "controller")  # of the process that has all keys of a test
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def keys(tmp_path: Path, authority: Authority) -> Path:
    return swap(tmp_path / "keys", authority.keys(JOB, *ROLES))


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> JobConfig:
    return reward_job(tiny_model, tmp_path / "job")


@asynccontextmanager
async def reward_with(job: JobConfig, keys: Path | None) -> AsyncIterator[str]:
    """A reward whose process has these keys; its address."""
    tls.use_keys(keys)
    async with served("reward", job) as [address]:
        yield address


def client(address: str, job: JobConfig, keys: Path | None) -> RewardClient:
    """Of a process that has these keys."""
    tls.use_keys(keys)
    return RewardClient([address], methods(job), patience_s=0.1)


async def problem(client: RewardClient) -> str:
    async with client:
        with pytest.raises(RoleUnavailable) as error:
            await client.wait_until_ready(0.2)
        return str(error.value)


async def test_two_processes_of_a_job_understand_each_other(job: JobConfig, keys: Path, tmp_path: Path) -> None:
    """Whatever the address, the certificate's first name counts."""
    async with reward_with(job, keys) as address, client(address, job, keys) as reward:
        await reward.wait_until_ready(60)
        assert (await reward.compute_scores(reward_batch(3)))["token_level_scores"].sum(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("server", "caller", "words"),
    [
        ("job", None, "hangs up on a plain connection: if it has keys, give this process --tls-dir too"),
        (None, "job", "speaks plain, and this process has keys: start it with --tls-dir too"),
        ("stranger", "job", "its certificate is not of the authority in {caller}/ca.crt"),
        ("job", "trusting stranger", "its ca.crt lacks the authority of {caller}/tls.crt"),
        ("expired", "job", "its certificate has expired: renew the keys in its --tls-dir"),
        ("job", "expired", "refuses this process's certificate: {caller}/tls.crt expired at "),
        ("job", "other job", "its certificate is not for this role of 'other-job': is it another job's"),
        (
            "actor",
            "job",
            "its certificate is not for this role of 'my-job': is it another job's, or another role's?",
        ),
    ],
)
async def test_a_tls_mismatch_error_says_what_to_look_at(
    job: JobConfig, tmp_path: Path, authority: Authority, server: str | None, caller: str | None, words: str
) -> None:
    stranger = Authority("stranger")
    kinds = {
        "job": authority.keys(JOB, *ROLES),
        "expired": authority.keys(JOB, *ROLES, lasts=-HOUR),
        "stranger": stranger.keys(JOB, *ROLES),
        "trusting stranger": stranger.keys(JOB, *ROLES, trusted=authority.certificate),
        "other job": authority.keys(OTHER, *ROLES),
        "actor": authority.keys(JOB, "actor"),
    }
    servers = swap(tmp_path / "server", kinds[server]) if server else None
    callers = swap(tmp_path / "caller", kinds[caller]) if caller else None
    async with reward_with(job, servers) as address:
        said = await problem(client(address, job, callers))
    assert said.startswith("reward was not ready within 0.2 s")
    assert f"at {address}: it" in said
    assert words.format(caller=callers) in said


async def test_a_certified_role_that_is_not_served_is_an_error_at_once(
    job: JobConfig, tmp_path: Path, authority: Authority
) -> None:
    keys = swap(tmp_path / "keys", authority.keys(JOB, *ROLES, "actor"))
    async with reward_with(job, keys) as address, ActorClient([address], methods(job)) as actor:
        async with asyncio.timeout(60):
            with pytest.raises(InvalidConfig, match=r"actor at .*: another role serves there, not actor"):
                await actor.wait_until_ready(600.0)


async def test_a_caller_of_another_job_is_refused_by_the_server_too(
    job: JobConfig, keys: Path, tmp_path: Path, authority: Authority
) -> None:
    """Here the caller does not check the server's name."""
    other = tls.read_keys(swap(tmp_path / "other", authority.keys(OTHER, *ROLES)))
    pretends = [("grpc.ssl_target_name_override", f"reward.{JOB}")]
    async with (
        reward_with(job, keys) as address,
        grpc.aio.secure_channel(address, other.channel_credentials(), options=pretends) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.stream_unary("/rolemesh.v1.RewardService/ComputeScores")(iter([b""]))
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    said = "this process is of job my-job; the caller's certificate is for ['other-job', 'reward.other-job', "
    assert (error.value.details() or "").startswith(said)


class Healthy(health_pb2_grpc.HealthServicer):
    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=SERVING)


@pytest.mark.parametrize(
    ("common_name", "names", "accepted"),
    [
        (f"reward.{JOB}", (), True),
        (f"*.{JOB}", (), True),
        (f"actor.{JOB}", (), False),
        (f"reward.{JOB}", (OTHER,), False),
        ("process", (f"*.{JOB}",), True),
    ],
)
async def test_without_alternative_names_the_common_name_counts(
    keys: Path, authority: Authority, common_name: str, names: tuple[str, ...], accepted: bool
) -> None:
    """gRPC compares so, and a client does not see the certificate. docs/security.md warns authorities of it."""
    files = authority.files(*names, common_name=common_name)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Healthy(), server)
    pair = (files["tls.key"], files["tls.crt"])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    tls.use_keys(keys)
    async with open_channel(f"127.0.0.1:{port}", "reward") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        if accepted:
            assert (await check).status == SERVING
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await check
            assert "its certificate is not for this role of" in tls.explain(error.value.details() or "")
    await server.stop(None)


# -------------------------------------------------------------------------------------- new keys


async def answer(channel: RoleChannel) -> int:
    """What the server says to a call that is made now."""
    stub = health_pb2_grpc.HealthStub(channel.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service="reward"), timeout=60)).status)


async def test_no_call_fails_while_keys_change(
    tiny_model: Path, tmp_path: Path, keys: Path, authority: Authority
) -> None:
    """A call that began with the first keys ends with the last ones in place; a new connection has the last."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as held:
        slow = reward_job(tiny_model, tmp_path / "slow", started=str(started.path), gate=str(held.path))
        quick = reward_job(tiny_model, tmp_path / "quick")
        async with (
            reward_with(slow, keys) as slow_at,
            reward_with(quick, keys) as quick_at,
            client(slow_at, slow, keys) as slow_reward,
            client(quick_at, quick, keys) as reward,
        ):
            running = asyncio.create_task(slow_reward.compute_scores(reward_batch(1)))
            await started.passed(running)
            for _ in range(4):
                swap(keys, authority.keys(JOB, *ROLES))
                for _ in range(5):
                    scores = await reward.compute_scores(reward_batch(2))
                    assert scores["token_level_scores"].sum(1).tolist() == [0, 1]
            held.open()
            assert len(await running) == 1
            swap(keys, authority.keys(JOB, *ROLES, lasts=-HOUR))
            said = await problem(client(quick_at, quick, swap(tmp_path / "fresh", authority.keys(JOB, *ROLES))))
            assert "its certificate has expired" in said


async def connected_before_its_keys_expire(address: str, callers: Path, authority: Authority) -> RoleChannel:
    """A channel with keys that soon expire. If they expired before the handshake, the next ones last longer."""
    lasts = timedelta(seconds=2)
    while True:
        tls.use_keys(swap(callers, authority.keys(JOB, *ROLES, lasts=lasts)))
        channel = RoleChannel(address, "reward")
        try:
            assert await answer(channel) == NOT_SERVING
        except grpc.aio.AioRpcError:
            await channel.close()
            if lasts > timedelta(minutes=1):
                raise
            lasts *= 2
        else:
            return channel


async def test_a_line_whose_keys_have_expired_goes_on_with_new_ones(
    tmp_path: Path, authority: Authority
) -> None:
    """The server comes back under the same address, so the old connection has to be made anew."""
    servers, callers = swap(tmp_path / "server", authority.keys(JOB, *ROLES)), tmp_path / "caller"
    first, second = RoleServer({"reward": [REWARD]}), RoleServer({"reward": [REWARD]})
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        tls.use_keys(servers)
        await first.start(address)
        channel = await connected_before_its_keys_expire(address, callers, authority)
        connected, expiring = channel.channel, tls.current_keys()
        assert expiring is not None
        await asyncio.sleep((expiring.expires - datetime.now(UTC)).total_seconds())
        swap(callers, authority.keys(JOB, *ROLES))
        await first.drain(0)
        await connected.wait_for_state_change(grpc.ChannelConnectivity.READY)  # the server is gone
        tls.use_keys(servers)
        await second.start(address)
        tls.use_keys(callers)
        assert await answer(channel) == NOT_SERVING
        assert channel.channel is not connected
        await channel.close()
        await second.drain(0)


async def test_calls_go_on_while_one_end_lacks_a_new_authoritys_keys(
    tmp_path: Path, authority: Authority
) -> None:
    """The nodes of a cluster get a Secret's new content within a minute of each other, not at once."""
    servers = swap(tmp_path / "server", authority.keys(JOB, *ROLES))
    callers = swap(tmp_path / "caller", authority.keys(JOB, *ROLES))
    new = Authority("new")
    tls.use_keys(servers)
    server = RoleServer({"reward": [REWARD]})
    channel = RoleChannel(await server.start("127.0.0.1:0"), "reward")
    tls.use_keys(callers)
    await answer(channel)
    old = channel.channel
    swap(callers, new.keys(JOB, *ROLES))
    for _ in range(20):
        assert await answer(channel) == NOT_SERVING
    assert channel.channel is old  # the next one is refused
    swap(servers, new.keys(JOB, *ROLES))
    async with asyncio.timeout(100):
        while channel.channel is old:
            assert await answer(channel) == NOT_SERVING
    assert await answer(channel) == NOT_SERVING
    await channel.close()
    await server.drain(0)


def test_half_written_keys_are_not_used(
    keys: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A person copies files one by one, and the key is of another certificate for a moment."""
    folder = tls.KeyFolder(keys)
    before, new = folder.current(), authority.keys(JOB, *ROLES)
    (keys / "tls.crt").unlink()
    (keys / "tls.crt").write_bytes(new["tls.crt"])
    plain = {name: (keys / name).read_bytes() for name in new}
    (keys / "..data").unlink()
    for name, content in plain.items():
        (keys / name).unlink()
        (keys / name).write_bytes(content)
    assert folder.current() is before
    assert "tls.key is not the key of tls.crt" in caplog.text
    (keys / "tls.key").write_bytes(new["tls.key"])
    assert folder.current().certificate == new["tls.crt"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tls.key": None}, "No such file or directory.*tls.key"),
        ({"tls.crt": b"no certificate"}, "must be PEM"),
        ({"tls.key": Authority().keys(JOB)["tls.key"]}, "tls.key is not the key of tls.crt"),
        ({"ca.crt": b""}, "must be PEM"),
        (Authority().files(), "must have a DNS name"),
        (Authority().files("*.svc"), "must have a DNS name"),
        (Authority().keys(JOB, "actor", "*"), r"has the DNS name '\*.my-job'; name each role, as ROLE.my-job"),
        (
            Authority().files(f"actor.{JOB}", JOB),
            "must be the job's, and 'actor.my-job' is the actor of another job",
        ),
        (
            Authority().files(f"Actor.{JOB}"),
            f"'Actor.{JOB}' is the Actor of another job; put the job's name before",
        ),
    ],
)
def test_keys_that_cannot_be_used_are_named(
    tmp_path: Path, authority: Authority, change: dict[str, Any], words: str
) -> None:
    files = authority.keys(JOB, *ROLES) | change
    directory = swap(
        tmp_path / "keys", {name: content for name, content in files.items() if content is not None}
    )
    with pytest.raises(InvalidConfig, match=words):
        tls.use_keys(directory)


async def test_with_keys_only_health_is_plain(keys: Path) -> None:
    tls.use_keys(keys)
    server = RoleServer({"reward": [REWARD]}, fingerprints={"reward": "of the job"})
    server.why = lambda: "waits for /a/secret/model"
    plain, secure = await server.start_health("127.0.0.1:0"), await server.start("127.0.0.1:0")
    request = health_pb2.HealthCheckRequest(service="live")
    async with grpc.aio.insecure_channel(plain) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service, status in (("live", SERVING), ("reward", NOT_SERVING)):
            call = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert (await call).status == status
            assert not [key for key, _ in await call.trailing_metadata() if key.startswith("rolemesh")]
            watched = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await watched.read()).status == status
            watched.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/rolemesh.v1.RewardService/ComputeScores")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(secure) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
            await health_pb2_grpc.HealthStub(channel).Check(request)
    async with open_channel(secure, "reward") as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="reward"))
        assert (await call).status == NOT_SERVING
        trailing = dict(await call.trailing_metadata())
    assert trailing[FINGERPRINT_KEY] == "of the job"
    assert trailing[WHY_KEY] == "waits for /a/secret/model"
    assert trailing[LIFE_KEY] == server.life
    await server.drain(0)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["my-job", "reward.my-job"], True),
        (["my-job", "REWARD.My-Job"], True),  # DNS knows no letter case
        (["other", "*.my-job"], True),
        (["reward.my-job"], True),  # of a job with that name, or of the role: nobody can tell
        (["my-job"], False),
        (["my-job", "actor.my-job"], False),
        (["my-job", "*"], False),
        (["my-job", "*.*"], False),
        (["my-job", "r*.my-job"], False),
        (["my-job", "reward.my-job.svc"], False),
        (["my-job", "x.reward.my-job"], False),
        (["*.my-job.svc", "*.reward.my-job"], False),
    ],
)
async def test_a_caller_accepts_the_servers_that_the_page_says(
    names: list[str], taken: bool, tmp_path: Path, authority: Authority
) -> None:
    """Whatever the authority signed, also for a server that is not ours and checks none of its own names."""
    shown = tls.read_keys(swap(tmp_path / "server", authority.files("first", *names)))
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(shown.key, shown.certificate)], authority.certificate, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    tls.use_keys(swap(tmp_path / "caller", authority.keys(JOB, "controller")))
    async with open_channel(f"127.0.0.1:{port}", "reward") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    code, words = error.value.code(), tls.explain(error.value.details() or "")
    assert (code is grpc.StatusCode.UNIMPLEMENTED) is taken, (code, words)
    assert ("its certificate is not for this role of 'my-job'" in words) is not taken
    await server.stop(0)
