"""`rolemesh run` as a person uses it: it ends as it should, it ends when it is told to, and it leaves no
process behind, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from in_process import course, small_job, train
from serving import gate

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.services.processes.launch import check_engine

DEADLINE_S = 240  # five processes import torch on a busy machine

# Says that the first training row is being scored, and waits until it may go on.
GATED = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info, started, go_on, marker):
    if extra_info["split"] == "train" and not os.path.exists(marker):
        open(marker, "w").close()
        for path, flags, act in ((started, os.O_WRONLY, lambda fd: os.write(fd, b".")),
                                 (go_on, os.O_RDONLY, lambda fd: os.read(fd, 1))):
            fd = os.open(path, flags)
            act(fd)
            os.close(fd)
    return sum(character.isdigit() for character in solution_str) / 8
"""


class Launched:
    """A `rolemesh` command and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, words: str) -> str:
        """Reads its output up to a line with these words."""
        assert self.process.stdout is not None
        seen = ""
        async with asyncio.timeout(DEADLINE_S):
            while words not in seen:
                line = await self.process.stdout.readline()
                assert line, f"it ended without saying {words!r}; it said:\n{seen}"
                seen += line.decode()
        return seen

    def ended(self) -> asyncio.Task[int]:
        """Done when the process is."""
        return asyncio.create_task(self.process.wait())

    async def end(self) -> tuple[int, str]:
        """Exit code, and the rest of its output."""
        async with asyncio.timeout(DEADLINE_S):
            rest, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, rest.decode()


@asynccontextmanager
async def rolemesh(*arguments: str) -> AsyncIterator[Launched]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        limit=2**20,
    )
    try:
        yield Launched(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def written(job: JobConfig, directory: Path) -> str:
    path = directory / "job.yaml"
    path.write_text(job.to_yaml())
    return str(path)


def gated(job: JobConfig, directory: Path, *fifos: Path) -> JobConfig:
    """The job with a reward that waits for the test, once."""
    function = directory / "gated.py"
    function.write_text(GATED)
    started, go_on = map(str, fifos)
    kwargs = {"started": started, "go_on": go_on, "marker": str(directory / "marker")}
    custom = job.reward.custom_reward_function.model_copy(
        update={"path": str(function), "reward_kwargs": kwargs}
    )
    return job.model_copy(update={"reward": job.reward.model_copy(update={"custom_reward_function": custom})})


def pids(job: JobConfig) -> dict[str, int]:
    """The job's role processes by name."""
    files = (job.run_dir / "logs").glob("*.address.json")
    return {path.name.removesuffix(".address.json"): json.loads(path.read_text())["pid"] for path in files}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def all_end(job: JobConfig, within_s: float) -> None:
    """Returns when no role process of the job lives."""
    async with asyncio.timeout(within_s):
        while any(lives(pid) for pid in pids(job).values()):  # noqa: ASYNC110  # not our children
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("placement", "processes"),
    [
        (
            "placement.replicas.reward=2",
            {"actor-0", "rollout-0", "reference-0", "critic-0", "reward-0", "reward-1"},
        ),
        ("placement.strategy=hybrid", {"policy-0", "judges-0"}),
    ],
)
async def test_a_run_in_processes_ends_with_the_bits_of_one_in_process(
    tiny_model: Path, tmp_path: Path, placement: str, processes: set[str]
) -> None:
    overrides = ("trainer.save_freq=4", "trainer.test_freq=2", placement)
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == 0, output
    assert "4 of 4" in output
    assert set(pids(job)) == processes
    assert not any(map(lives, pids(job).values()))
    assert (job.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "other").mkdir()
    same = small_job(tmp_path / "other", tiny_model, "run", *overrides)
    await train(same)
    assert course(job) == course(same)
    weights = [j.run_dir / "global_step_4" / "actor" / "model.safetensors" for j in (job, same)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


async def test_ctrl_c_lets_the_step_end_saves_drains_and_the_run_goes_on_under_another_placement(
    tiny_model: Path, tmp_path: Path
) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        plain = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=100")
        job = gated(plain, tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())  # step 1 runs
            launched.process.send_signal(signal.SIGINT)
            await launched.says("ends after this step")
            go_on.open()
            code, output = await launched.end()
        assert code == 130, output
        assert "stopped after step 1" in output
        assert [record["training/global_step"] for record in course(job)] == [0, 1]
        assert (job.run_dir / "latest").read_text().strip() == "global_step_1"
        assert not any(map(lives, pids(job).values()))

        # where the roles are is no part of a checkpoint
        async with rolemesh("run", written(job, tmp_path), "placement.strategy=hybrid") as again:
            code, output = await again.end()
        assert code == 0, output
        assert {"policy-0", "judges-0"} <= set(pids(job))
    (tmp_path / "other").mkdir()
    unbroken = small_job(tmp_path / "other", tiny_model, "run", "trainer.save_freq=100")
    await train(unbroken)
    assert course(job) == course(unbroken)


async def test_kill_9_of_the_launcher_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        job = gated(small_job(tmp_path, tiny_model, "run"), tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())
            assert len(pids(job)) == 5
            assert all(map(lives, pids(job).values()))
            launched.process.kill()
            await launched.process.wait()
            await all_end(job, within_s=DEADLINE_S)  # also the reward, whose function never returns


@pytest.mark.parametrize(
    ("strategy", "victim", "words"),
    [
        ("standalone", "critic-0", "critic-0 (pid"),
        ("hybrid", "policy-0", "policy-0 (with actor, rollout, reference,"),
    ],
)
async def test_a_killed_process_ends_the_run_with_its_name_its_roles_and_its_last_words(
    tiny_model: Path, tmp_path: Path, strategy: str, victim: str, words: str
) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        plain = small_job(tmp_path, tiny_model, "run", f"placement.strategy={strategy}")
        job = gated(plain, tmp_path, started.path, go_on.path)
        async with rolemesh("run", written(job, tmp_path)) as launched:
            async with asyncio.timeout(DEADLINE_S):
                await started.passed(launched.ended())
            os.kill(pids(job)[victim], signal.SIGKILL)
            await launched.says(f"error: {words}")
            go_on.open()
            code, output = await launched.end()
        assert code == 1
        assert "ready" in output  # the end of the log
        assert not any(map(lives, pids(job).values()))


async def test_a_role_that_never_becomes_ready_is_named_with_its_log(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "gate") as waits:
        job = small_job(tmp_path, tiny_model, "run", "trainer.ready_timeout_s=40")
        (tmp_path / "reward.py").write_text(
            f"import os\nos.read(os.open({str(waits.path)!r}, os.O_RDONLY), 1)\n"
        )
        async with rolemesh("run", written(job, tmp_path)) as launched:
            code, output = await launched.end()
    assert code == 1
    assert "reward was not ready within 40 s (asked since" in output
    assert "reward-0 (pid" in output
    assert "listens on" in output
    assert not any(map(lives, pids(job).values()))


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
async def test_what_is_wrong_from_the_start_is_told_before_any_process_starts(
    tiny_model: Path, tmp_path: Path, override: str, words: str
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    async with rolemesh("run", written(job, tmp_path), *override.split()) as launched:
        code, output = await launched.end()
    assert code in (1, 2)
    assert output.startswith("error: ")
    assert words in output
    assert pids(job) == {}


def test_where_vllm_is_not_installed_a_launcher_says_so_before_any_process_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what the import system keeps of a module that is not there
    with pytest.raises(InvalidConfig, match=r"vLLM is not installed: .*make vllm"):
        check_engine(small_job(tmp_path, tiny_model, "run", "rollout.name=vllm"))


async def test_a_model_that_was_cut_short_is_refused_before_any_process_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    os.truncate(broken / "model.safetensors", 100_000)
    job = small_job(tmp_path, broken, "run")
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code in (1, 2)
    assert f"{broken / 'model.safetensors'} is not whole: by its header it has" in output
    assert pids(job) == {}


async def test_a_damaged_model_fails_with_the_roles_own_words(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"F32", b"F23"))
    job = small_job(tmp_path, broken, "run")
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == 1
    assert "exited with code 2" in output
    assert str(broken) in output
    assert not any(map(lives, pids(job).values()))
