"""`rolemesh check`: a job file, or values of the chart, without Helm and without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process_commands import rolemesh

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
