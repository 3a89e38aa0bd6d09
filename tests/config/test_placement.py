"""Strategies are tables: what they say, and what a job may ask of them."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.placement import GROUP_NAME, ROLES, strategies
from rolemesh.errors import InvalidConfig
from rolemesh.services.processes.local import gpus_by_process

TABLES = {name: groups for name, groups in strategies().items() if groups}


def job(placement: dict[str, Any], *, reference: bool = True, **sections: Any) -> JobConfig:
    return make_job({"placement": placement, "algorithm": {"use_kl_in_reward": reference}} | sections)


@pytest.mark.parametrize("strategy", TABLES)
def test_a_table_has_every_role_once(strategy: str) -> None:
    assert sorted(role for roles in TABLES[strategy].values() for role in roles) == sorted(ROLES)
    assert all(GROUP_NAME.fullmatch(name) for name in TABLES[strategy])
    assert {role for roles in job({"strategy": strategy}).groups.values() for role in roles} == set(ROLES)


def test_the_tables_are_the_layouts_of_those_they_name() -> None:
    layouts = {name: {frozenset(roles) for roles in groups.values()} for name, groups in TABLES.items()}
    assert layouts == {
        "collocate": {frozenset(ROLES)},
        "hybrid": {frozenset({"actor", "rollout", "reference"}), frozenset({"critic", "reward"})},
        "split-collocate": {
            frozenset({"actor", "reference"}),
            frozenset({"critic", "reward"}),
            frozenset({"rollout"}),
        },
        "standalone": {frozenset({role}) for role in ROLES},
    }


def test_each_role_is_alone_unless_the_job_says_otherwise() -> None:
    assert job({}).groups == {role: (role,) for role in ROLES}


def test_roles_that_a_job_lacks_drop_out_and_empty_groups_vanish() -> None:
    grpo = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}
    assert make_job({"placement": {"strategy": "standalone"}} | grpo).groups == {
        role: (role,) for role in ("actor", "rollout", "reward")
    }
    split = make_job({"placement": {"strategy": "split-collocate"}} | grpo)
    assert split.groups == {"policy": ("actor",), "judges": ("reward",), "rollout": ("rollout",)}


def test_a_jobs_own_groups() -> None:
    groups = {"one": ["rollout", "critic"], "two": ["reward", "reference"], "three": ["actor"]}
    assert job({"strategy": "custom", "groups": groups}).groups == {k: tuple(v) for k, v in groups.items()}


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"strategy": "hibrid"}, "'hibrid'; there are collocate, .*standalone; did you mean 'hybrid'"),
        ({"strategy": "../tables/x"}, "there are collocate"),
        ({"strategy": "custom"}, "no group has actor, which this job needs"),
        ({"strategy": "hybrid", "groups": {"a": ["actor"]}}, "hybrid has groups of its own; set it to custom"),
        (
            {"strategy": "custom", "groups": {"a": list(ROLES), "b": ["critic"]}},
            r"critic is listed 2 times \(a, b\)",
        ),
        ({"strategy": "custom", "groups": {"a": [*ROLES, "actor"]}}, r"actor is listed 2 times \(a, a\)"),
        ({"strategy": "custom", "groups": {"a": list(ROLES[1:])}}, "no group has actor"),
        (
            {"strategy": "custom", "groups": {"a": [*ROLES, "judge"]}},
            r"no such role: 'judge' \(in a\); roles are",
        ),
        ({"strategy": "custom", "groups": {"A group": list(ROLES)}}, "small letters.*'A group'"),
        ({"strategy": "custom", "groups": {"": list(ROLES)}}, "small letters"),
        (
            {"strategy": "hybrid", "replicas": {"rollout": 2}},
            r"rollout is 2, .*group policy .*actor 1, reference 1",
        ),
        ({"strategy": "hybrid", "replicas": {"reward": 3}}, r"reward is 3, .*group judges .*critic 1"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_with_the_way_out(placement: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        job(placement)


def test_replicas_of_a_group_are_those_of_all_its_roles() -> None:
    groups = {"train": ["actor", "critic"], "free": ["reference", "reward"], "rollout": ["rollout"]}
    placed = job(
        {"strategy": "custom", "groups": groups, "replicas": {"reference": 2, "reward": 2, "rollout": 3}}
    )
    assert [placed.num_replicas(group) for group in groups] == [1, 2, 3]


def test_rollouts_cannot_run_ahead_on_a_device_that_they_share() -> None:
    ahead = {"rollout": {"mode": "async"}}
    with pytest.raises(
        InvalidConfig, match=r"shares the device of group policy with actor, reference: a stream"
    ):
        job({"strategy": "hybrid"}, **ahead)
    job({"strategy": "hybrid"}, **ahead, trainer={"max_staleness": 0})  # which is not ahead
    job({"strategy": "split-collocate"}, **ahead)
    servers = {"urls": ["http://127.0.0.1:8000"], "weights_dir": "/shared"}
    other_servers = {"mode": "async", "name": "openai", "openai": servers}
    assert not job({"strategy": "hybrid"}, rollout=other_servers).on_device("rollout")


def test_a_reward_shares_a_device_only_if_it_has_a_model() -> None:
    groups = {"a": ["rollout", "reward"], "b": ["actor", "critic", "reference"]}
    placement, ahead = {"strategy": "custom", "groups": groups}, {"rollout": {"mode": "async"}}
    job(placement, **ahead)
    with pytest.raises(InvalidConfig, match="shares the device of group a with reward"):
        job(placement, **ahead, reward={"reward_model": {"enable": True}})


def test_processes_take_the_next_gpu_and_begin_again_when_all_are_given() -> None:
    standalone = job({"strategy": "standalone", "replicas": {"rollout": 2}})
    assert gpus_by_process(standalone, ["4", "6", "7"]) == {
        "actor-0": ["4"],
        "rollout-0": ["6"],
        "rollout-1": ["7"],
        "reference-0": ["4"],
        "critic-0": ["6"],
        "reward-0": [],  # rules have nothing there
    }
    assert gpus_by_process(job({"strategy": "hybrid"}), ["0", "1"]) == {"policy-0": ["0"], "judges-0": ["1"]}
    assert set(map(tuple, gpus_by_process(standalone, []).values())) == {()}


def test_an_engine_of_several_ranks_gets_as_many_gpus() -> None:
    two_ranks = job({"strategy": "split-collocate"}, rollout={"name": "vllm", "tensor_model_parallel_size": 2})
    given = gpus_by_process(two_ranks, ["0", "1", "2", "3"])
    assert given == {"policy-0": ["0"], "judges-0": ["1"], "rollout-0": ["2", "3"]}
