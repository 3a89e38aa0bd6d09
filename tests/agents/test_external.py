"""Programs that know nothing of Rolemesh talk to real engines: their rows are those of the same conversation
with tool_agent, and exactly what the engine was fed and sampled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import recorded, train
from seen import Seen
from serving import Process, serve_process
from weighed import FOLDER, environment, forget_plugin, running, talked, weighing_job, weighing_model

from rolemesh.agents.template import Template
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import EnvironmentFailed
from rolemesh.forwarding import Forwarding
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Environment, Rollout
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.services.rollout.worker import RolloutWorker

EXACT = ("prompts", "prompt_mask", "input_ids", "attention_mask", "position_ids", "responses", "response_mask")
EXACT += ("turns", "rollout_log_probs", "weight_versions", "seeds")


@pytest.fixture(autouse=True)
def without_the_plugin() -> Iterator[None]:
    yield
    forget_plugin()


@pytest.fixture(scope="module")
def model(talkative_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighing_model(talkative_model, tmp_path_factory.mktemp("weighing"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def rollout(folder: Path, model: Path) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(weighing_job(folder, model, "tool_agent"))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
async def by_tool_agent(folder: Path, model: Path, rollout: RolloutWorker) -> DataProto:
    return await rows_of(weighing_job(folder, model, "tool_agent"), rollout)


# Two of the six prompts, whose four conversations have one, two and three turns. A command has a process for
# each conversation, which imports its client for a second.
FEW, ROWS_OF_FEW = range(3, 5), slice(6, 10)


async def rows_of(job: JobConfig, rollout: Rollout, prompts: range = range(6)) -> DataProto:
    async with environment(job) as client:
        return await talked(job, rollout, client, prompts=prompts)


def assert_equal(a: DataProto, b: DataProto) -> None:
    for name in EXACT:
        assert torch.equal(a[name], b[name]), name


async def test_a_program_and_tool_agent_make_equal_rows(
    folder: Path, model: Path, rollout: RolloutWorker, by_tool_agent: DataProto
) -> None:
    assert {int(row.max()) for row in by_tool_agent["turns"]} >= {1, 3}
    seen = Seen(rollout)
    batch = await rows_of(weighing_job(folder, model, "weigher"), seen)
    assert_equal(batch, by_tool_agent)
    for row, facts in enumerate(batch["conversation"]):
        sampled = (batch["turns"][row] > 0).nonzero()
        assert batch["environment_rewards"][row].nonzero().tolist() == [sampled[-1].tolist()]
        assert batch["environment_rewards"][row].sum() == 0.5
        assert facts["turns"] == batch["turns"][row].max()
    # What the engine was asked and what it answered, added up, is the row.
    for asked, answer in seen.turns:
        row = batch["seeds"].tolist().index(int(asked["seeds"][0]))
        fed, new = asked["turns"][0] != 0, answer["response_mask"][0]
        assert torch.equal(asked["prompts"][0], batch["prompts"][row])
        assert torch.equal(asked["responses"][0, fed], batch["responses"][row, fed])
        for name in ("responses", "rollout_log_probs", "weight_versions"):
            assert torch.equal(answer[name][0, new], batch[name][row, new])
    assert len(seen.turns) == sum(facts["turns"] for facts in batch["conversation"])


async def test_a_program_that_streams_gets_the_same_bits(
    folder: Path, model: Path, rollout: RolloutWorker, by_tool_agent: DataProto
) -> None:
    assert_equal(await rows_of(weighing_job(folder, model, "streamer"), rollout), by_tool_agent)


async def test_a_command_in_python_gets_the_same_bits(
    folder: Path, model: Path, rollout: RolloutWorker, by_tool_agent: DataProto
) -> None:
    """That the same client may stream, is shown in this process, above."""
    command = running(sys.executable, FOLDER / "weigher.py")
    rows = await rows_of(weighing_job(folder, model, "external", command), rollout, FEW)
    assert {int(row.max()) for row in rows["turns"]} == {1, 2, 3}
    assert_equal(rows, by_tool_agent[ROWS_OF_FEW])


@pytest.fixture(scope="session")
def node_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "weigher.mjs"):
        shutil.copy(FOLDER / name, directory)
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("THE CLIENT OF NODE IS NOT TESTED: there is no node, or no npm")
    install = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    done = subprocess.run(install, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"THE CLIENT OF NODE IS NOT TESTED: npm ci failed: {done.stderr[-500:]}")
    return directory / "weigher.mjs"


@pytest.mark.parametrize("streams", [(), ("stream",)], ids=["whole", "streamed"])
async def test_a_command_in_node_gets_the_same_bits(
    folder: Path,
    model: Path,
    rollout: RolloutWorker,
    by_tool_agent: DataProto,
    node_program: Path,
    streams: tuple[str, ...],
) -> None:
    command = running("node", node_program, *streams)
    rows = await rows_of(weighing_job(folder, model, "external", command), rollout, FEW)
    assert {int(row.max()) for row in rows["turns"]} == {1, 2, 3}
    assert_equal(rows, by_tool_agent[ROWS_OF_FEW])


class Killing(Forwarding[Environment]):
    """Kills a replica that has just got a turn, in the middle of many conversations."""

    def __init__(self, environment: EnvironmentClient, victim: Process) -> None:
        super().__init__(environment)
        self._homes, self._victim, self.attempts = environment._homes, victim, set[int]()

    async def open_episode(self, request: Any) -> Any:
        self.attempts.add(request.attempt)
        return await self._role.open_episode(request)

    async def act(self, request: Any) -> Any:
        home = next(home for key, home in self._homes.items() if key.startswith(f"{request.episode}@"))
        if home.replica.address == self._victim.address and self._victim.process.returncode is None:
            self._victim.process.kill()
            await self._victim.process.wait()
        return await self._role.act(request)


@pytest.mark.usefixtures("soon_gone")
async def test_a_replica_that_is_killed_in_the_middle_changes_no_bit(
    folder: Path, model: Path, tmp_path: Path, rollout: RolloutWorker, by_tool_agent: DataProto
) -> None:
    job = weighing_job(folder, model, "weigher")
    (tmp_path / "other").mkdir()
    async with (
        serve_process("environment", job, tmp_path) as one,
        serve_process("environment", job, tmp_path / "other") as other,
        EnvironmentClient([one.address, other.address], methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        killing = Killing(client, one)
        batch = await talked(job, rollout, killing)
    assert_equal(batch, by_tool_agent)
    assert killing.attempts == {1, 2}


async def test_a_limited_turn_is_a_prefix_of_the_unlimited_one(
    folder: Path, model: Path, rollout: RolloutWorker
) -> None:
    """The program asks for at most five tokens a turn."""
    seen, job = Seen(rollout), weighing_job(folder, model, "brief")
    batch = await rows_of(job, seen)
    template = Template(tokenizer := load_tokenizer(job.actor.model))
    assert {facts["turns"] for facts in batch["conversation"]} == {3.0}
    for asked, answer in seen.turns:
        row = batch["seeds"].tolist().index(int(asked["seeds"][0]))
        number = int(asked["turns"].abs().max()) or 1
        mine = batch["turns"][row] == number
        first = answer["response_mask"][0].nonzero().flatten()[:5]
        assert torch.equal(mine.nonzero().flatten(), first)
        for name in ("responses", "rollout_log_probs", "weight_versions"):
            assert torch.equal(batch[name][row, first], answer[name][0, first])
        ids = batch["responses"][row, first].tolist()
        end = "<|im_end|>" if ids[-1] == tokenizer.eos_token_id else ""
        added = batch["responses"][row, batch["turns"][row] == -(number + 1)].tolist()
        assert added == (template.after_turn([{"role": "user", "content": "on"}], end) if number < 3 else [])
    beyond = batch["turns"] == 0
    assert (batch["weight_versions"][beyond] == -1).all()
    assert (batch["rollout_log_probs"][beyond] == 0).all()


async def test_a_prompt_that_is_too_long_is_named(folder: Path, model: Path, rollout: RolloutWorker) -> None:
    expected = r"row train-\d+: agent wordy: its prompt has \d+ tokens .*max_prompt_length is 512"
    with pytest.raises(EnvironmentFailed, match=expected):
        await rows_of(weighing_job(folder, model, "wordy"), rollout)


async def test_a_page_trains_on_programs_and_twice_with_the_same_bits(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    runs = []
    for run in ("first", "second"):
        dumps = tmp_path / run / "dumps"
        (tmp_path / run).mkdir()
        job = weighing_job(
            tmp_path / run, model, "brief", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1",
            f"trainer.rollout_data_dir={dumps}", "trainer.test_freq=1", "data.max_prompt_length=48",
            "data.max_response_length=80",
        )  # fmt: skip
        summary = await train(job)
        runs.append(recorded(job))
    assert runs[0] == runs[1]
    assert summary.records[-1]["conversation/turns/mean"] > 1
    for row in map(json.loads, (dumps / "1.jsonl").read_text().splitlines()):
        assert "Be brief." in row["input"]  # the prompt is the program's


async def test_the_documented_program_runs(
    folder: Path, model: Path, tmp_path: Path, rollout: RolloutWorker
) -> None:
    documented = (FOLDER.parents[3] / "docs" / "agents.md").read_text().partition("# agent.py\n")[2]
    (tmp_path / "agent.py").write_text(documented.partition("```")[0])
    job = weighing_job(folder, model, "external", running(sys.executable, tmp_path / "agent.py"))
    for facts in (await rows_of(job, rollout, FEW))["conversation"]:
        assert facts["turns_taken"] >= facts["turns"] >= 1
