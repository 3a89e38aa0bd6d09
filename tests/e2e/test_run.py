"""`rolemesh run` as a person uses it: it ends as it should, it ends when it is told to, and it leaves no
process behind, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest
from forks import own_server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from in_process import recorded, small_job, train
from in_process_commands import rolemesh as command
from launched import DEADLINE_S, gated, rolemesh, written
from serving import gate
from stopping import stopping

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, RolemeshError, RoleUnavailable
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.command_line.controller_client import follow
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.processes import fork_server
from rolemesh.services.processes.launch import beside, check_engine
from rolemesh.services.processes.role_processes import role_processes
from rolemesh.v1 import controller_pb2 as pb


def pids(job: JobConfig) -> dict[str, int]:
    """The job's role processes by name."""
    files = (job.run_dir / "logs").glob("*.address.json")
    return {path.name.removesuffix(".address.json"): json.loads(path.read_text())["pid"] for path in files}


def living(job: JobConfig) -> set[str]:
    """The names of the job's role processes that live: their standard error is their log.

    A process that got the same pid later has another one, and one that has ended has none.
    """
    found = set()
    for name, pid in pids(job).items():
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/2") == str((job.run_dir / "logs" / f"{name}.log").resolve()):
                found.add(name)
    return found


async def states_of(shown: AsyncIterator[pb.GetStatusResponse | RolemeshError]) -> list[int]:
    """The states among what `rolemesh watch` shows of a run."""
    return [answer.state async for answer in shown if isinstance(answer, pb.GetStatusResponse)]


async def all_end(job: JobConfig, within_s: float) -> None:
    """Returns when no role process of the job lives."""
    async with asyncio.timeout(within_s):
        while living(job):  # noqa: ASYNC110  # not our children
            await asyncio.sleep(0.05)


async def health(address: str) -> int:
    """What a server says of itself as a whole."""
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S, wait_for_ready=True)
    return int(answer.status)


async def is_saved(job: JobConfig, step: int) -> None:
    """Returns when the next start would go on from the checkpoint of this step."""
    latest = job.run_dir / "latest"
    while not latest.exists() or latest.read_text().strip() != f"global_step_{step}":  # noqa: ASYNC110  # a file
        await asyncio.sleep(0.02)


async def test_a_run_in_processes_ends_with_the_bits_of_one_in_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = (
        *("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2"),
        "placement.replicas.reward=2",
    )
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == 0, output
    assert "2 of 2" in output
    assert "curves.png" in output
    assert set(pids(job)) == {"actor-0", "rollout-0", "reference-0", "critic-0", "reward-0", "reward-1"}
    assert not living(job)
    assert (job.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "other").mkdir()
    same = small_job(tmp_path / "other", tiny_model, "run", *overrides)
    await train(same)
    assert recorded(job) == recorded(same)
    weights = [j.run_dir / "global_step_2" / "actor" / "model.safetensors" for j in (job, same)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


async def test_ctrl_c_saves_and_the_run_resumes_in_another_placement(tiny_model: Path, tmp_path: Path) -> None:
    """The step ends first, and the processes drain."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        two_steps = ("trainer.save_freq=100", "trainer.total_training_steps=2")
        overrides = (*two_steps, "placement.strategy=hybrid")
        plain = small_job(tmp_path, tiny_model, "run", *overrides)
        job = gated(plain, tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())  # step 1 runs
            launched.process.send_signal(signal.SIGINT)
            await launched.says("stopping after this step")
            go_on.open()
            code, output = await launched.end()
        assert code == 130, output
        assert "stopped after step 1" in output
        assert [record["training/global_step"] for record in recorded(job)] == [0, 1]
        assert (job.run_dir / "latest").read_text().strip() == "global_step_1"
        assert not living(job)

        # where the roles are is no part of a checkpoint
        assert set(pids(job)) == {"policy-0", "scoring-0"}
        async with rolemesh("run", written(job, tmp_path), "placement.strategy=collocate") as again:
            code, output = await again.end()
        assert code == 0, output
        assert "all-0" in pids(job)
    (tmp_path / "other").mkdir()
    unbroken = small_job(tmp_path / "other", tiny_model, "run", *two_steps)
    await train(unbroken)
    assert recorded(job) == recorded(unbroken)


async def test_kill_9_of_the_launcher_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        plain = small_job(tmp_path, tiny_model, "run", "placement.strategy=hybrid")
        job = gated(plain, tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())
            assert living(job) == {"policy-0", "scoring-0"}
            launched.process.kill()
            await launched.process.wait()
            await all_end(job, within_s=DEADLINE_S)  # also the reward, whose function never returns


async def test_a_killed_process_ends_the_run_and_is_named_with_its_log(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The error names its roles, too, and shows the end of its log."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        plain = small_job(tmp_path, tiny_model, "run", "placement.strategy=hybrid")
        job = gated(plain, tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())
            os.kill(pids(job)["policy-0"], signal.SIGKILL)
            await launched.says("error: policy-0 (with actor, rollout, reference, pid")
            go_on.open()
            code, output = await launched.end()
        assert code == 1
        assert "ready" in output  # the end of the log
        assert not living(job)


async def test_a_run_recovers_from_lost_roles_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """One rank of two is killed after step 1, and after step 2 a process of four roles. Watchers stay."""
    overrides = (
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
        "placement.strategy=custom",
        "placement.groups={actor: [actor], others: [rollout, reference, critic, reward]}",
        "placement.ranks={actor: 2}",
    )
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    with gate(tmp_path / "reached") as reached, gate(tmp_path / "release") as release:
        # Steps have 8 rows. Each start begins after a checkpoint, and stops in the second step from there.
        stopped = stopping(job, reached.path, release.path, "9")
        async with rolemesh("run", written(stopped, tmp_path)) as launched:
            for step, victim in ((1, "actor-0-rank-1"), (2, "others-0")):
                async with asyncio.timeout(DEADLINE_S):
                    await reached.passed(launched.ended())
                    await is_saved(job, step)
                if step == 1:
                    watching = asyncio.create_task(states_of(follow(str(job.run_dir))))
                os.kill(pids(job)[victim], signal.SIGKILL)
                release.open(1)
            code, output = await launched.end()
    assert code == 0, output
    states = await watching
    assert states[-1] == pb.RUN_STATE_FINISHED
    assert pb.RUN_STATE_FAILED not in states
    # The lines of its log stay lines.
    assert re.search(r"^actor-0-rank-1 \(pid \d+\) was killed by SIGKILL; the end of .*:\n  \| ", output, re.M)
    assert "others-0 (with rollout, reference, critic, reward, pid" in output
    assert output.count("starting all roles anew") == 2
    assert not living(job)

    (tmp_path / "other").mkdir()
    unbroken = small_job(tmp_path / "other", tiny_model, "run", *overrides)
    async with rolemesh("run", written(unbroken, tmp_path / "other")) as launched:
        code, output = await launched.end()
    assert code == 0, output
    assert recorded(job) == recorded(unbroken)
    for role in ("actor", "critic"):
        files = [j.run_dir / "global_step_3" / role / "model.safetensors" for j in (job, unbroken)]
        assert files[0].read_bytes() == files[1].read_bytes()


async def test_a_run_that_was_asked_to_stop_is_not_started_anew(tiny_model: Path, tmp_path: Path) -> None:
    steps = ("trainer.save_freq=1", "trainer.total_training_steps=3", "placement.strategy=collocate")
    plain = small_job(tmp_path, tiny_model, "run", *steps)
    with gate(tmp_path / "reached") as reached, gate(tmp_path / "release") as release:
        job = stopping(plain, reached.path, release.path, "9")  # in step 2
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await reached.passed(launched.ended())
                await is_saved(job, 1)
                watching = follow(str(job.run_dir))
                await anext(watching)  # it must be connected before the controller ends
            launched.process.send_signal(signal.SIGINT)
            await launched.says("stopping after this step")
            os.kill(pids(job)["all-0"], signal.SIGKILL)
            states = asyncio.create_task(states_of(watching))
            code, output = await launched.end()
    assert code == 1, output
    assert "error: all-0 (with" in output
    assert "starting all roles anew" not in output
    assert (await states)[-1] == pb.RUN_STATE_FAILED
    assert not living(job)


async def test_a_role_that_never_becomes_ready_is_named_with_its_log(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher asks when the other roles are ready, so a second is enough to find the one that is not."""
    monkeypatch.setattr(fork_server, "server", own_server())  # the command line has one, too
    others = ("actor", "rollout", "reference", "critic")
    groups = f"placement.groups={{others: [{', '.join(others)}], reward: [reward]}}"
    overrides = ("trainer.ready_timeout_s=1", "placement.strategy=custom", groups)
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    with gate(tmp_path / "gate") as waits:
        (tmp_path / "reward.py").write_text(
            f"import os\nos.read(os.open({str(waits.path)!r}, os.O_RDONLY), 1)\n"
        )
        async with role_processes(job) as processes:
            addresses = await processes.addresses(DEADLINE_S)
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(new_client(role, addresses[role], job)) for role in others
                ]
                await until_ready(clients, DEADLINE_S)
            assert await health(addresses["reward"][0]) == health_pb2.HealthCheckResponse.NOT_SERVING
            run = Run(job, load_tokenizer(job.actor.model))
            with pytest.raises(RoleUnavailable) as error:
                await beside(processes, drive(run, addresses, "127.0.0.1:0", None))
            assert living(job) == {"others-0", "reward-0"}
    said = str(error.value)
    assert "reward was not ready within 1 s (waiting since" in said
    assert "reward-0 (pid" in said
    assert "listening on" in said
    assert not living(job)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_trainig_steps=2", "did you mean 'trainer.total_training_steps'"),
        ("data.train_batch_size=7", "does not divide"),
        ("data.train_files=absent.parquet", "absent.parquet"),
        ("actor.model.path=absent", "absent"),
        ("critic.model.path=absent", "critic: no such model directory: absent"),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=absent", "absent is not a checkpoint"),
    ],
)
def test_a_known_error_is_reported_before_any_process_starts(
    tiny_model: Path, tmp_path: Path, override: str, words: str
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    answer = command("run", written(job, tmp_path), *override.split())
    assert answer.returncode in (1, 2)
    assert answer.stderr.startswith("error: ")
    assert words in answer.stderr
    assert pids(job) == {}


async def test_a_wrong_job_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("trainer: {total_trainig_steps: 2}")
    async with rolemesh("run", str(tmp_path / "job.yaml")) as launched:
        code, output = await launched.end()
    assert code == 2
    (line,) = output.splitlines()
    assert line.startswith("error: ")


def test_a_missing_vllm_is_reported_before_any_process_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what the import system keeps of a module that is not there
    with pytest.raises(InvalidConfig, match=r"vLLM is not installed: .*make vllm"):
        check_engine(small_job(tmp_path, tiny_model, "run", "rollout.name=vllm"))


def test_a_truncated_model_is_refused_before_any_process_starts(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    os.truncate(broken / "model.safetensors", 100_000)
    job = small_job(tmp_path, broken, "run")
    answer = command("run", written(job, tmp_path))
    assert answer.returncode in (1, 2)
    assert f"{broken / 'model.safetensors'} cannot be read: " in answer.stderr
    assert "copy or download it again" in answer.stderr
    assert pids(job) == {}


async def test_a_damaged_model_fails_with_the_roles_own_words(tiny_model: Path, tmp_path: Path) -> None:
    """A tensor has another name. Only who loads the model misses it."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.weight", b"model.norm.weighs"))
    job = small_job(tmp_path, broken, "run", "placement.strategy=collocate")
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == 1
    assert "exited with code 2" in output
    assert str(broken) in output
    assert not living(job)
