"""What the tutorials show is true: their job files load, and their code does what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rendering import helm, objects

from rolemesh.agents.environment import Observation, Outcome
from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.plugin_imports import forget
from rolemesh.config.base import leaves, merge, parse_overrides
from rolemesh.config.job import JobConfig, load_job, make_job
from rolemesh.errors import InvalidConfig
from rolemesh.services.command_line.job_files import write_job_files
from rolemesh.services.controller.pages.choice import record_step

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
KEYS = set(leaves(JobConfig))
SECTIONS = {key.rsplit(".", n)[0] for key in KEYS for n in range(1, key.count(".") + 1)}


def text(name: str) -> str:
    return (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(name), re.MULTILINE | re.DOTALL)


def table_rows(name: str, header: str) -> list[list[str]]:
    table = text(name).partition(f"{header}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[1:]]


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_the_function_of_the_reward_tutorial_gives_what_is_shown() -> None:
    names: dict[str, Any] = {}
    exec(blocks("own-reward", "python")[0], names)
    shown = re.findall(r"^\{'score': .+\}$", text("own-reward"), re.MULTILINE)
    assert shown == [str(names["compute_score"]("", f"#### {answer}", "85", {})) for answer in (75, 85)]


def test_the_reward_tutorial_says_how_many_job_files_are_written(tmp_path: Path) -> None:
    num_written, kept = write_job_files(tmp_path / "configs")
    assert f"\nconfigs: {num_written} files written\n" in text("own-reward")
    assert kept == []


def test_the_job_of_the_reward_tutorial_loads_on_the_demos(tmp_path: Path) -> None:
    over = tmp_path / "my-reward.yaml"
    over.write_text(blocks("own-reward", "yaml")[0])
    job = load_job(ROOT / "configs/tiny.yaml", [str(over)])
    assert job.reward.custom_reward_function.path == "my_reward.py"
    assert job.run_dir.name == "my-reward"


def test_the_job_of_the_verl_tutorial_loads_without_a_warning() -> None:
    job = make_job(yaml.safe_load(blocks("from-verl", "yaml")[0]))
    assert [unused.key for unused in job.unused_keys() if unused.is_set] == []


def test_the_verl_tutorials_job_has_the_values_of_verls_command() -> None:
    command = blocks("from-verl", "")[0]
    ours = yaml.safe_load(blocks("from-verl", "yaml")[0])
    moves = {old.strip("`"): new.strip("`") for old, new in table_rows("from-verl", "| verl | here |")}
    elsewhere = ("n_gpus_per_node", "nnodes", "fsdp_config", "rollout.log_prob_micro_batch_size_per_gpu")
    for key, value in re.findall(r"^    (\S+)=(\S+)", command, re.MULTILINE):
        if any(name in key for name in elsewhere):
            continue
        section = next((old for old in moves if key.startswith(f"{old}.")), "")
        here = moves[section] + key.removeprefix(section) if section else key
        found = ours
        for part in here.split("."):
            found = found[part]
        assert yaml.safe_load(value) == found, key


def test_the_sections_and_keys_that_moved_are_there() -> None:
    for row in table_rows("from-verl", "These have another name,\nor a value to change:\n\n| verl | here |"):
        named = re.findall(r"`([a-z_]+\.[a-z_.]+)", row[1])
        assert named, row
        assert set(named) <= KEYS | SECTIONS, row


def test_the_defaults_that_differ_are_ours() -> None:
    rows = table_rows("from-verl", "These defaults differ from those of verl 0.9.1:\n\n| key | verl | here |")
    job = make_job({}).model_dump(mode="json")
    for keys, verl, here in rows:
        said = re.match("`(.+?)`", here)
        assert said, here
        for key in re.findall("`(.+?)`", keys):
            default = job
            for part in key.split("."):
                default = default[part]
            assert default == yaml.safe_load(said[1]) != yaml.safe_load(verl.strip("`")), key
    assert len(rows) > 10


@pytest.mark.parametrize("row", table_rows("from-verl", "| section | keys | |"), ids=lambda row: row[0])
def test_the_keys_that_are_not_here_are_refused(row: list[str]) -> None:
    for section in re.findall(r"`([a-z.]+)`", row[0]):
        for key in re.findall(r"`([a-z_]+)`", row[1]):
            with pytest.raises(InvalidConfig, match=key):
                make_job(nested(f"{section}.{key}", {"enable": True}))


@pytest.mark.skipif(helm() is None, reason="needs helm: make .venv/bin/helm")
def test_the_cluster_tutorials_values_render_to_its_kinds() -> None:
    values = yaml.safe_load(blocks("laptop-to-cluster", "yaml")[0])
    values["rewardFunction"] = {"code": blocks("own-reward", "python")[0]}
    example = ROOT / "charts/rlhf-job/examples/tiny-standalone.yaml"
    things = objects(values, apis=(), files=(example,))
    shown = re.findall(r"^ +(\d+) kind: (\w+)$", text("laptop-to-cluster"), re.MULTILINE)
    assert Counter(thing["kind"] for thing in things) == {kind: int(number) for number, kind in shown}


def test_the_many_gpus_tutorials_job_has_the_ranks_of_each_step() -> None:
    job, *steps = (yaml.safe_load(block) for block in blocks("many-gpus", "yaml"))
    jobs = [make_job(merge(job, step)) for step in steps]
    spread = [{group: n for group in one.plan.grouping if (n := one.plan[group].ranks) > 1} for one in jobs]
    assert spread == [{}, {"all": 8}, {"policy": 20}]
    assert [one.rollout.tensor_model_parallel_size for one in jobs] == [1, 1, 4]


def test_the_algorithm_tutorials_parts_make_the_steps_it_shows(tmp_path: Path) -> None:
    parts = tmp_path / "my_parts.py"
    parts.write_text("\n\n".join(blocks("own-algorithm", "python")))
    job, loss = (yaml.safe_load(block) for block in blocks("own-algorithm", "yaml"))
    own = parse_overrides([f"plugins=[{parts}]", "algorithm.page=half", "actor.ppo_mini_batch_size=32"])
    assert make_job(merge(job, {"plugins": [str(parts)]})).estimator.name == "signs"
    made = make_job(merge(merge(job, loss), own))
    assert (made.actor.loss.name, made.actor.policy_loss.options) == ("capped", {"cap": 1.02})
    shown = record_step(made).to_text()
    assert shown.index("controller.compute_advantages") < shown.index("actor.update")
    with pytest.raises(InvalidConfig, match="capped: 'cap' is 'high': Input should be a valid number"):
        make_job(
            merge(
                merge(job, loss), parse_overrides([f"plugins=[{parts}]", "actor.policy_loss.options.cap=high"])
            )
        )
    forget(str(parts))


def test_the_estimator_of_the_algorithm_tutorial_gives_signs() -> None:
    names: dict[str, Any] = {}
    exec(blocks("own-algorithm", "python")[0].replace('@estimator("signs"', '@estimator("signs_again"'), names)
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), torch.ones(3, 2, dtype=torch.bool)
    advantages, _ = names["compute_signs"](rewards, mask, ["a", "a", "b"])
    assert advantages.tolist() == [[1, 1], [-1, -1], [0, 0]]
    for origin in {part.origin for part in ESTIMATORS.values()} - {BUILT_IN}:
        forget(origin)


@pytest.fixture(scope="module")
def agents_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of the agent tutorial."""
    folder = tmp_path_factory.mktemp("agents")
    for kind in ("python", "yaml"):
        for block in blocks("own-agent", kind):
            (folder / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    return folder


async def test_the_docs_games_go_on_after_a_number_of_many_digits() -> None:
    """int() refuses more than 4300, and a policy may repeat a digit."""
    environments = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    for source in (environments, text("own-agent")):
        [game] = re.findall(r"^class Game:\n.*?(?=^```)", source, re.MULTILINE | re.DOTALL)
        names: dict[str, Any] = {"Observation": Observation, "Outcome": Outcome}
        exec(game, names)
        assert not (await names["Game"](7).act({"content": "9" * 5000})).done


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_agents_of_the_agent_tutorial_say_what_is_shown(agents_folder: Path, number: int) -> None:
    commands = re.findall(r"`python (talk\.py .+?)`", text("own-agent"))
    turns, shown = blocks("own-agent", "text")[2 * number : 2 * number + 2]
    command = [sys.executable, *shlex.split(commands[number])]
    ran = subprocess.run(
        command, input=turns, capture_output=True, text=True, timeout=120, cwd=agents_folder, check=False
    )
    assert ran.stdout == shown, ran.stderr
