"""`rolemesh check`: a job file, or values of the chart, without Helm and without a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process_commands import Answer, rolemesh

from rolemesh.config import load_job
from rolemesh.errors import InvalidConfig

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
EXAMPLES = sorted((ROOT / "charts" / "rlhf-job" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", [TINY, *EXAMPLES], ids=lambda path: path.stem)
def test_nothing_is_wrong_with_the_jobs_and_values_that_we_ship(path: Path) -> None:
    said = rolemesh("check", path)
    assert (said.returncode, said.stdout, said.stderr) == (0, f"{path}: nothing is wrong\n", "")


def test_each_wrong_key_of_a_job_file_has_a_line() -> None:
    said = rolemesh("check", TINY, "trainer.sav_freq=1", "actor.clip_ratio=0")
    assert said.returncode == 2
    assert [line.removeprefix(f"{TINY}: ") for line in said.stdout.splitlines()] == [
        "'actor.clip_ratio' is 0: Input should be greater than 0",
        "unknown key 'trainer.sav_freq'; did you mean 'trainer.save_freq'?",
    ]


def piped(content: str, *overrides: object) -> Answer:
    """Check what comes from a pipe, which can be read once."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"):
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(content)
        return rolemesh("check", f"/dev/fd/{reading}", *overrides)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("data: {train_batch_size: 100}", "data.train_batch_size"),
        ("job: {data: {train_batch_size: 100}}", "data.train_batch_size"),
        ("gang: {queue: lab}", "gang.queue"),
    ],
)
def test_a_pipe_is_checked_as_a_file_is(content: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "checked.yaml"
    path.write_text(content, encoding="utf-8")
    of_pipe, of_file = piped(content), rolemesh("check", path)
    assert (of_pipe.returncode, of_file.returncode) == (2, 2)
    assert key in of_file.stdout
    assert of_pipe.stdout.partition(": ")[2] == of_file.stdout.partition(": ")[2]


def test_a_recipe_before_the_job_file_is_refused_as_in_a_run() -> None:
    recipe = ROOT / "configs" / "recipes" / "grpo.yaml"
    with pytest.raises(InvalidConfig) as refused:
        load_job(recipe, [str(TINY)])
    said = rolemesh("check", recipe, TINY)
    assert (said.returncode, said.stdout) == (2, f"{refused.value}\n")
    assert "comes before" in piped(recipe.read_text(encoding="utf-8"), TINY).stdout
    assert piped(TINY.read_text(encoding="utf-8"), recipe).returncode == 0


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = rolemesh("check", tmp_path / "none.yaml")
    assert (said.returncode, said.stdout) == (2, f"no such job file: {tmp_path / 'none.yaml'}\n")


PLUGIN = """
from rolemesh.plugins import estimator

@estimator("centred_here", reads=("token_level_rewards", "response_mask"))
def centred_here(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards
"""
OWN = {"algorithm": {"adv_estimator": "centred_here"}, "critic": {"enable": False}}


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"plugins": {"code": PLUGIN}, "job": OWN}, []),
        (
            {"gang": {"queue": "lab", "sched": 1}, "tls": {"mode": "none", "secret": "keys"}},
            [
                "gang.queue is set, but gang.scheduler has no queues: set it to volcano or kueue, or leave the",
                "tls.secret or tls.secrets is set, but tls.mode is not secret",
                "gang: Additional properties are not allowed ('sched' was unexpected)",
            ],
        ),
        (
            {"storage": {"workspace": {"size": None}}},
            ["storage.workspace has neither a size nor an existingClaim: set one"],
        ),
        (
            {"job": {"trainer": {"sav_freq": 1}}, "gang": {"scheduler": "kueue"}},
            ["job: unknown key 'trainer.sav_freq'", "gang.scheduler is kueue, but gang.queue is empty"],
        ),
        (
            {"job": {}, "placement": {"strategy": "hybrid", "replicas": {"rollout": 2}}},
            ["job: placement.replicas.rollout is 2, but its group policy has roles with fewer replicas"],
        ),
        (
            {
                "job": {},
                "placement": {
                    "strategy": "custom",
                    "groups": {"A": ["actor"], "b": ["critic", "rollout", "reward"]},
                },
            },
            ["job: placement.groups: expected a group's name of at most 24 lower-case letters"],
        ),
        (
            {"autoscaling": {"reward": {"scaler": "hpa", "maxReplicas": 3, "pendingPerReplica": 4}}},
            ["autoscaling.reward: pendingPerReplica is set, but the scaler is hpa"],
        ),
        (
            {"job": {"actor": {"model": {"path": "~/a"}}}},
            ["job.actor.model.path is '~/a'; expected a path without ~, which in a pod is /tmp"],
        ),
        (
            {"job": {"trainer": {"sav_freq": 1}, "actor": {"model": {"path": "~/a"}}}},
            ["job: unknown key 'trainer.sav_freq'", "job.actor.model.path is '~/a'; expected a path without ~"],
        ),
        (  # the schema refuses this and the next, too
            {"job": {"algorithm": {"adv_estimator": "centred_nowhere"}}},
            ["job: 'algorithm.adv_estimator' is 'centred_nowhere', which is none of gae"],
        ),
        (
            {"job": {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 1}}},
            ["job: algorithm.adv_estimator grpo compares the responses to one prompt, but rollout.n is 1"],
        ),
        (
            {"storage": {"models": {"size": "1Gb"}}},
            ["storage.models.size: '1Gb' does not match '^[0-9]+"],
        ),
        ({"groups": {"polcy": {"gpus": 1}}}, ["groups"]),
        ({"groups": {"reference": {"gpus": 1}}}, []),  # of the placement, though this job has no reference
        (
            {
                "placement": {
                    "strategy": "custom",
                    "groups": {"policy": ["actor", "rollout"], "scoring": ["reference", "critic", "reward"]},
                },
                "groups": {"polcy": {"gpus": 1}, "scoring": {"gpus": 1}},
            },
            [
                "groups.polcy is set, but placement.strategy custom has the groups policy, scoring: use one of "
                "these names"
            ],
        ),
        (
            {"tls": {"mode": "secret", "secret": "all", "secrets": {"rewards": "a", "reward": "b"}}},
            [
                "tls.secrets.rewards is set, but the components are actor, controller, critic, reward, "
                "rollout: use one of these names"
            ],
        ),
        ({"placement": {"launcher": "ray"}}, ["placement.launcher is ray, but the chart decides this"]),
        ({"plugins": {"code": "x = 1"}}, []),
        ({"plugins": {"code": "x = 1"}, "job": {"plugins": None}, "gang": {}}, []),
        ({"plugins": {"code": 5}}, ["plugins.code: 5 is not of type 'string'"]),
        ({"plugins": {"code": "x = 1"}, "job": {"plugins": 5}}, ["job: 'plugins' is 5"]),
        (
            {"job": 5, "gpu": {"perNode": 0}},
            ["gpu.perNode: 0 is less than or equal to", "job: 5 is not of type"],
        ),
    ],
)
def test_each_thing_that_is_wrong_with_values_has_a_line(
    values: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    said = rolemesh("check", path)
    assert said.returncode == (2 if lines else 0)
    if lines:
        found = said.stdout.splitlines()
        assert [line.startswith(words) for line, words in zip(found, lines, strict=True)] == [True] * len(
            lines
        ), found


@pytest.mark.parametrize(
    ("plugins", "of_chart"),
    [
        (["/etc/rolemesh-plugins/mine.py"], {"configMap": "mine"}),
        ("/workspace/mine.py", {}),
        (["package_of_the_image.parts"], {"code": "x = 1"}),
    ],
)
def test_plugins_that_only_pods_have_are_said_not_to_be_checked(
    plugins: Any, of_chart: dict[str, str], tmp_path: Path
) -> None:
    job = {"plugins": plugins, "algorithm": {"adv_estimator": "mine"}, "critic": {"enable": False}}
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"job": job, "plugins": of_chart}), encoding="utf-8")
    said = rolemesh("check", path)
    assert (said.returncode, said.stdout) == (0, f"{path}: nothing is wrong\n")
    name = plugins if isinstance(plugins, str) else plugins[0]
    assert said.stderr == (
        f"{path}: plug-ins not found here: {name}; the job is not checked beyond the chart's schema\n"
    )
    said = rolemesh("check", path, "job.trainer.sav_freq=1")
    assert (said.returncode, "sav_freq" in said.stdout, name in said.stderr) == (2, True, True)


def test_a_job_file_without_its_plugin_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("plugins: [nowhere.py]\nplacement: {strategy: hybrid}\n", encoding="utf-8")
    said = rolemesh("check", path)
    assert (said.returncode, "plugins: no such file" in said.stdout) == (2, True)


def test_code_that_helm_gets_from_a_file_is_named_as_a_plugin_of_the_job(tmp_path: Path) -> None:
    values, code = tmp_path / "values.yaml", tmp_path / "my_parts.py"
    code.write_text(PLUGIN.replace("centred_here", "centred_there"), encoding="utf-8")
    job = OWN | {"algorithm": {"adv_estimator": "centred_there"}}
    values.write_text(yaml.safe_dump({"job": job}), encoding="utf-8")
    assert rolemesh("check", values).returncode == 2
    said = rolemesh("check", values, f"job.plugins={code}")
    assert (said.returncode, said.stderr) == (0, "")
