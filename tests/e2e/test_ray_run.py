"""Ranks that Ray starts: the bits of any other launcher, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from in_process import recorded, small_job
from launched import DEADLINE_S, gated, rolemesh, written
from left import listening, marked, none_is_left
from rendering import objects, of_kind
from server_addresses import reserved_port
from serving import gate, served

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.processes.ray_cluster import LOCAL_SETTINGS
from rolemesh.services.processes.role_processes import role_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANKED = (
    "algorithm.adv_estimator=grpo",  # without a critic and a reference, a run has four processes
    "algorithm.use_kl_in_reward=false",
    "placement.ranks.actor=2",
    "trainer.save_freq=2",
)
BY_RAY = "placement.launcher=ray"


def new_mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of all that the test starts from here on."""
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("STARTED_BY", mark)
    return mark


def job_in(directory: Path, model: Path, *overrides: str) -> JobConfig:
    directory.mkdir()
    return small_job(directory, model, "run", *RANKED, *overrides)


def outcome(job: JobConfig) -> object:
    """Every metric of every step, and the last checkpoint, byte for byte."""
    files = sorted(path for path in (job.run_dir / "global_step_4" / "actor").rglob("*") if path.is_file())
    assert {"model.safetensors", "optimizer.safetensors"} <= {path.name for path in files}
    return recorded(job), [path.read_bytes() for path in files]


@pytest.mark.timeout(900)  # four times five processes import torch
async def test_processes_torchrun_and_ray_give_the_same_bits(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a rank under Ray dies."""
    by_processes = job_in(tmp_path / "processes", tiny_model)
    async with rolemesh("run", written(by_processes, tmp_path / "processes")) as launched:
        code, output = await launched.end()
    assert code == 0, output

    by_torchrun = job_in(tmp_path / "torchrun", tiny_model)
    async with (
        torchrun(by_torchrun, tmp_path / "torchrun") as actor,
        served("rollout", by_torchrun) as rollout,
        served("reward", by_torchrun) as reward,
    ):
        run = Run(by_torchrun, load_tokenizer(by_torchrun.actor.model))
        addresses = {"actor": [actor], "rollout": rollout, "reward": reward}
        await drive(run, addresses, "127.0.0.1:0", None)

    mark = new_mark(monkeypatch)
    by_ray = job_in(tmp_path / "ray", tiny_model, BY_RAY)
    async with rolemesh("run", written(by_ray, tmp_path / "ray")) as launched:
        async with asyncio.timeout(DEADLINE_S):
            while not (by_ray.run_dir / "global_step_2").exists():  # noqa: ASYNC110  # another process's
                await asyncio.sleep(0.02)
        processes = marked(mark)
        assert sum(b"ray::RayRank" in command(pid) for pid in processes) == 2
        assert all(address.is_loopback for address in listening(processes))
        assert no_dashboard(processes)
        victim = json.loads((by_ray.run_dir / "logs" / "actor-0-rank-1.address.json").read_text())["pid"]
        os.kill(victim, signal.SIGKILL)
        code, output = await launched.end()
    assert code == 0, output
    assert f"actor-0-rank-1 (pid {victim}) was killed by SIGKILL" in output
    assert output.count("starting all roles anew") == 1
    assert marked(mark) == set()

    assert outcome(by_processes) == outcome(by_torchrun)
    assert outcome(by_processes) == outcome(by_ray)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def no_dashboard(pids: set[int]) -> bool:
    """Whether the process that would have Ray's dashboard is there, and listens on nothing."""
    found = {pid for pid in pids if b"ray/dashboard/dashboard.py" in command(pid)}
    return len(found) == 1 and not listening(found)


@asynccontextmanager
async def torchrun(job: JobConfig, directory: Path) -> AsyncIterator[str]:
    """Serve the actor's ranks as docs/ranks.md says; yield rank 0's address."""
    by_torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        process = await asyncio.create_subprocess_exec(
            *(*by_torchrun, "--no-python", sys.executable, "-m", "rolemesh", "serve", "actor"),
            *("--config", written(job, directory), "--listen", address),
        )
        try:
            yield address
        finally:
            process.terminate()
            await process.wait()


async def test_a_killed_launcher_takes_ray_and_the_ranks_with_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it hears SIGINT beside Ray."""
    mark = new_mark(monkeypatch)
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        job = gated(job_in(tmp_path / "job", tiny_model, BY_RAY), tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())  # step 1 runs
            launched.process.send_signal(signal.SIGINT)
            await launched.says("stopping after this step")  # a step that cannot end before the launcher dies
            launched.process.kill()
        await none_is_left(mark, DEADLINE_S)


def test_ranks_without_room_in_ray_name_the_request_and_the_room() -> None:
    program = """
        import asyncio
        from rolemesh.errors import RoleUnavailable
        from rolemesh.services.processes.ray_cluster import ray_cluster

        async def main():
            async with ray_cluster(2, 240) as cluster:
                try:
                    await cluster.reserve("actor", 3, 0, 1)
                except RoleUnavailable as error:
                    print(error)
                print(len(await cluster.reserve("actor", 2, 0, 60)), "slots")

        asyncio.run(main())
    """
    # In a process of its own: Ray reads its settings where it is first imported, and vLLM imports it.
    command = [sys.executable, "-c", textwrap.dedent(program)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    refused, reserved = output.stdout.splitlines() or [output.stderr, ""]
    assert refused.startswith(
        "Ray had no room for 3 ranks of actor, each with CPU 1, GPU 0, and the first on 127.0.0.1, within 1 s. "
        "The cluster has 127.0.0.1 (CPU 2, GPU 0); free: CPU 2, GPU 0. Lower placement.ranks"
    )
    assert reserved == "2 slots"


@contextmanager
def gone_cluster(monkeypatch: pytest.MonkeyPatch, listens: bool) -> Iterator[socket.socket]:
    """Set RAY_ADDRESS to a port that refuses connections, or that accepts them and never answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if listens:
            bound.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray asks at 127.0.0.1 itself
        yield bound


@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "silent"])
async def test_a_silent_cluster_is_an_error_that_names_ray_address(
    listens: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has trainer.ready_timeout_s to answer."""
    with gone_cluster(monkeypatch, listens) as cluster:
        job = job_in(tmp_path / "job", tiny_model, BY_RAY, "trainer.ready_timeout_s=3")
        async with rolemesh("run", written(job, tmp_path)) as launched, asyncio.timeout(60):
            code, output = await launched.end()
        assert code == 1, output
        error = " ".join(output[output.index("error:") :].split())
        assert error.startswith(
            f"error: no Ray cluster at RAY_ADDRESS=127.0.0.1:{cluster.getsockname()[1]} answered within "
            "trainer.ready_timeout_s, 3 s. Start it (`ray start --head`), set RAY_ADDRESS to one that runs, or "
            "unset RAY_ADDRESS"
        )
    assert not list((job.run_dir / "logs").glob("*.log"))


async def test_a_run_that_waits_for_a_cluster_ends_at_a_signal(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gone_cluster(monkeypatch, listens=True) as cluster:
        cluster.setblocking(False)
        job = job_in(tmp_path / "job", tiny_model, BY_RAY)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                connection, _ = await asyncio.get_running_loop().sock_accept(cluster)
            with connection:
                launched.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    code, output = await launched.end()
    assert code == 128 + signal.SIGTERM, output


def test_the_charts_ray_head_needs_a_token_and_has_no_dashboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs no Ray Client server, either."""
    mark, token = new_mark(monkeypatch), "0" * 64
    with head_of_the_chart(mark, token) as address:
        processes = marked(mark)
        commands = b"".join(map(command, processes))
        assert b"raylet" in commands
        assert b"ray.util.client.server" not in commands
        assert no_dashboard(processes)
        assert asked(address) == asked(address, "1" * 64) == grpc.StatusCode.UNAUTHENTICATED
        assert asked(address, token) == grpc.StatusCode.OK


@contextmanager
def head_of_the_chart(mark: str, token: str) -> Iterator[str]:
    """Start the Ray of a RayCluster's head pod on the loopback interface; yield its address."""
    roles = {"actor": {"gpus": 16}}
    (cluster,) = of_kind(objects({"placement": {"ranks": {"actor": 16}}, "roles": roles}), "RayCluster")
    head = cluster["spec"]["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    here = {"node-ip-address": "127.0.0.1", "port": "0", "node-manager-port": "0", "num-cpus": "1"}
    with tempfile.TemporaryDirectory(prefix="rolemesh-ray-", ignore_cleanup_errors=True) as directory:
        given = head["rayStartParams"] | here | {"num-gpus": "0", "temp-dir": directory}
        options = [f"--{name}" + f"={value}" * (value != "true") for name, value in given.items()]
        environment = os.environ | LOCAL_SETTINGS | {
            "KUBERAY_GEN_RAY_START_CMD": f"ray start --head {' '.join(options)} --block",  # as KubeRay makes it
            "RAY_AUTH_MODE": cluster["spec"]["authOptions"]["mode"],
            "RAY_AUTH_TOKEN": token,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        # `rolemesh --help` in place of `rolemesh serve`
        start = [*container["command"], "--help"]
        try:
            output = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
            assert output.returncode == 0, output.stdout + output.stderr
            yield (Path(directory) / "ray_current_cluster").read_text()
        finally:
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def asked(address: str, token: str = "") -> grpc.StatusCode:
    """Ask the head of a cluster for its nodes, as a stranger or with a token."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        method = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        return method.future(b"", metadata=metadata, timeout=DEADLINE_S).code()


async def test_a_missing_ray_is_reported_before_any_process_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what the import system keeps of a module that is not there
    job = job_in(tmp_path / "job", tiny_model, BY_RAY)
    with pytest.raises(InvalidConfig, match=r"Ray is not installed \(.*\): pip install 'rolemesh\[ray\]'"):
        async with role_processes(job):
            pass
    assert not list((job.run_dir / "logs").glob("*.log"))
