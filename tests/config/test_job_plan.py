"""The plan of a job's deployment: devices, some of its roles alone, and the paths and claims of its pods."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.config.job import make_job
from rolemesh.config.plan import RUN_DIR, WEIGHTS_DIR, Plan

GRPO: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}
MOUNTS = {"models": "/models", "data": "/data", "checkpoints": "/work/ckpt/"}


def plan_of(strategy: str, **sections: Any) -> Plan:
    return make_job(sections | {"placement": {"strategy": strategy}}).plan


def test_devices_are_those_of_ranks_or_of_the_only_engine() -> None:
    engine = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 4}}
    plan = plan_of("standalone", **engine)
    assert {group.name: group.devices for group in plan.groups} == {
        "actor": 1,
        "rollout": 4,
        "critic": 1,
        "reward": 0,
    }
    plan = make_job({"placement": {"strategy": "hybrid", "ranks": {"policy": 2}}}).plan
    assert (plan["policy"].devices, plan["scoring"].devices, plan.num_devices) == (2, 1, 3)


def test_some_roles_alone_have_their_places_and_devices() -> None:
    engine = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 4}}
    plan = plan_of("hybrid", **engine)
    assert plan["policy"].devices == 4
    assert plan.only(["actor", "reward"]).grouping == {"policy": ("actor",), "scoring": ("reward",)}
    assert [group.devices for group in plan.only(["actor", "reward"]).groups] == [1, 0]
    assert plan.only([]) == plan
    ranked = make_job({"placement": {"strategy": "split-collocate", "ranks": {"scoring": 2}}}).plan
    assert [group.ranks for group in ranked.only(["reward"]).groups] == [1]


def test_replicas_have_names_in_the_order_of_the_placement() -> None:
    job = make_job(GRPO | {"placement": {"replicas": {"rollout": 2}}})
    assert list(job.plan.replicas) == ["actor-0", "rollout-0", "rollout-1", "reward-0"]
    assert job.plan.replicas["rollout-1"] == job.plan.of_role("rollout")


@pytest.mark.parametrize(
    ("sections", "claims"),
    [
        ({}, {}),
        (
            {"actor": {"model": {"path": "/models/policy"}}},
            {role: {"models"} for role in ("actor", "rollout", "reward")},
        ),
        ({"plugins": ["math"], "trainer": {"default_local_dir": "ckpt/run"}}, {"actor": {"checkpoints"}}),
        (
            {"trainer": {"resume_mode": "resume_path", "resume_from_path": "../data/global_step_3"}},
            {"actor": {"data"}},
        ),
        (
            {"trainer": {"profile_steps": [1], "default_local_dir": "./ckpt"}},
            {role: {"checkpoints"} for role in ("actor", "rollout", "reward")},
        ),
        (
            {
                "reward": {
                    "custom_reward_function": {"path": "r.py", "reward_kwargs": {"table": "file:/data/t"}}
                }
            },
            {"reward": {"data"}},
        ),
        ({"reward": {"custom_reward_function": {"path": "/data-2/r.py"}}}, {}),
    ],
)
def test_a_pod_has_the_claims_that_its_paths_lead_to(
    sections: dict[str, Any], claims: dict[str, set[str]]
) -> None:
    plan = make_job(GRPO | sections).plan
    found = {group.name: group.claims(MOUNTS, "/work") for group in plan.groups}
    assert {name: each for name, each in found.items() if each} == claims


def test_trained_roles_write_to_the_run_and_engines_elsewhere_their_weights() -> None:
    servers = {"name": "openai", "openai": {"urls": ["http://a:1"], "weights_dir": "/w"}, "n": 2}
    plan = make_job(GRPO | {"rollout": servers}).plan
    assert {group.name: group.writes for group in plan.groups} == {
        "actor": (RUN_DIR,),
        "rollout": (WEIGHTS_DIR,),
        "reward": (),
    }
    assert plan["rollout"].models == ()
