"""Strategies are tables: what they say, and what a job may ask of them."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.catalog.role_specs import ROLES as DECLARED
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.placement import GROUP_NAME, strategies
from rolemesh.errors import InvalidConfig
from rolemesh.services.processes.role_processes import gpus_by_process

ROLES = tuple(DECLARED)

TABLES = {name: groups for name, groups in strategies().items() if groups}


CONVERSES = {"multi_turn": {"enable": True}}


def job(placement: dict[str, Any], *, reference: bool = True, **sections: Any) -> JobConfig:
    return make_job({"placement": placement, "algorithm": {"use_kl_in_reward": reference}} | sections)


@pytest.mark.parametrize("strategy", TABLES)
def test_a_table_has_every_role_once(strategy: str) -> None:
    assert sorted(role for roles in TABLES[strategy].values() for role in roles) == sorted(ROLES)
    assert all(GROUP_NAME.fullmatch(name) for name in TABLES[strategy])
    placed = job({"strategy": strategy}, rollout=CONVERSES).plan.grouping
    assert {role for roles in placed.values() for role in roles} == set(ROLES)


def test_the_tables_are_the_layouts_of_those_they_name() -> None:
    layouts = {name: {frozenset(roles) for roles in groups.values()} for name, groups in TABLES.items()}
    alone = frozenset({"environment"})
    assert layouts == {
        "collocate": {frozenset(ROLES) - {"environment"}, alone},
        "hybrid": {frozenset({"actor", "rollout", "reference"}), frozenset({"critic", "reward"}), alone},
        "split-collocate": {
            frozenset({"actor", "reference"}),
            frozenset({"critic", "reward"}),
            frozenset({"rollout"}),
            alone,
        },
        "standalone": {frozenset({role}) for role in ROLES},
    }


def test_each_role_is_alone_unless_the_job_says_otherwise() -> None:
    assert job({}, rollout=CONVERSES).plan.grouping == {role: (role,) for role in ROLES}


def test_roles_that_a_job_lacks_drop_out_and_empty_groups_vanish() -> None:
    grpo = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}
    assert make_job({"placement": {"strategy": "standalone"}} | grpo).plan.grouping == {
        role: (role,) for role in ("actor", "rollout", "reward")
    }
    split = make_job({"placement": {"strategy": "split-collocate"}} | grpo)
    assert split.plan.grouping == {"policy": ("actor",), "scoring": ("reward",), "rollout": ("rollout",)}


def test_groups_of_strategy_custom_are_the_jobs() -> None:
    groups = {"one": ["rollout", "critic"], "two": ["reward", "reference"], "three": ["actor"]}
    assert job({"strategy": "custom", "groups": groups}).plan.grouping == {
        k: tuple(v) for k, v in groups.items()
    }


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"strategy": "hibrid"}, "'hibrid'; expected one of collocate, .*standalone; did you mean 'hybrid'"),
        ({"strategy": "../tables/x"}, "expected one of collocate"),
        ({"strategy": "custom"}, "no group has actor, which this job needs"),
        (
            {"strategy": "hybrid", "groups": {"a": ["actor"]}},
            "hybrid has its own groups; set placement.strategy to custom",
        ),
        (
            {"strategy": "custom", "groups": {"a": list(ROLES), "b": ["critic"]}},
            r"critic is listed 2 times \(a, b\)",
        ),
        ({"strategy": "custom", "groups": {"a": [*ROLES, "actor"]}}, r"actor is listed 2 times \(a, a\)"),
        ({"strategy": "custom", "groups": {"a": list(ROLES[1:])}}, "no group has actor"),
        (
            {"strategy": "custom", "groups": {"a": [*ROLES, "judge"]}},
            r"unknown role 'judge' \(in a\); roles are",
        ),
        ({"strategy": "custom", "groups": {"A group": list(ROLES)}}, "lower-case letters.*'A group'"),
        ({"strategy": "custom", "groups": {"": list(ROLES)}}, "lower-case letters"),
        (
            {"strategy": "hybrid", "replicas": {"rollout": 2}},
            r"rollout is 2, .*group policy .*actor 1, reference 1",
        ),
        ({"strategy": "hybrid", "replicas": {"reward": 3}}, r"reward is 3, .*group scoring .*critic 1"),
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
    assert [placed.plan[group].replicas for group in groups] == [1, 2, 3]


def test_rollouts_cannot_run_ahead_on_a_device_that_they_share() -> None:
    ahead = {"rollout": {"mode": "async"}}
    with pytest.raises(
        InvalidConfig,
        match=r"shares the device of group policy with actor, reference: generation keeps its turn",
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


def test_processes_take_the_next_gpu_until_none_is_left() -> None:
    """Then they are refused."""
    placement = {"strategy": "standalone", "replicas": {"rollout": 2}}
    standalone = job(placement)
    assert gpus_by_process(standalone, ["4", "6", "7", "0", "1"]) == {
        "actor-0": ["4"],
        "rollout-0": ["6"],
        "rollout-1": ["7"],
        "reference-0": ["0"],
        "critic-0": ["1"],
        "reward-0": [],  # rules have nothing there
    }
    assert standalone.plan.num_devices == 5
    assert gpus_by_process(job({"strategy": "hybrid"}), ["0", "1"]) == {"policy-0": ["0"], "scoring-0": ["1"]}
    assert gpus_by_process(job({"strategy": "collocate"}), ["4"]) == {"all-0": ["4"]}
    assert set(map(tuple, gpus_by_process(standalone, []).values())) == {()}
    sharing = "actor-0 and reference-0 would share GPU 4, .* needs 5 GPUs, and may use 3 of this machine; "
    with pytest.raises(InvalidConfig, match=f"{sharing}set placement.strategy=collocate, so that all"):
        gpus_by_process(standalone, ["4", "6", "7"])
    with pytest.raises(InvalidConfig, match=r"set placement\.strategy=collocate and rollout\.mode=sync, so"):
        gpus_by_process(job(placement, rollout={"mode": "async"}), ["4", "6", "7"])
    assert gpus_by_process(standalone, ["4", "6"], ("rollout",)) == {"rollout-0": ["4"], "rollout-1": ["6"]}
    with pytest.raises(
        InvalidConfig, match=r"rollout-0 and rollout-1 would share GPU 4, .*fewer placement\.replicas"
    ):
        gpus_by_process(standalone, ["4"], ("rollout",))


def test_an_engine_of_several_ranks_gets_as_many_gpus() -> None:
    two_ranks = job({"strategy": "split-collocate"}, rollout={"name": "vllm", "tensor_model_parallel_size": 2})
    given = gpus_by_process(two_ranks, ["0", "1", "2", "3"])
    assert given == {"policy-0": ["0"], "scoring-0": ["1"], "rollout-0": ["2", "3"]}
    assert two_ranks.plan.num_devices == 4
    with pytest.raises(InvalidConfig, match=r"tensor_model_parallel_size is 2 .* use 1 GPUs"):
        gpus_by_process(two_ranks, ["0"], ("rollout",))


def test_several_ranks_get_a_gpu_each() -> None:
    ranked = job({"ranks": {"actor": 2, "reference": 2}, "replicas": {"reference": 2}})
    assert gpus_by_process(ranked, list("01234567")) == {
        "actor-0": ["0", "1"],
        "rollout-0": ["2"],
        "reference-0": ["3", "4"],
        "reference-1": ["5", "6"],
        "critic-0": ["7"],
        "reward-0": [],
    }
    assert ranked.plan.num_devices == 8
    hybrid = job({"strategy": "hybrid", "ranks": {"policy": 2}})
    assert gpus_by_process(hybrid, ["0", "1", "2"]) == {"policy-0": ["0", "1"], "scoring-0": ["2"]}
    with pytest.raises(InvalidConfig, match=r"ranks is 2 for actor, but the job may use 1 GPUs"):
        gpus_by_process(ranked, ["0"])
    assert gpus_by_process(ranked, [])["actor-0"] == []


def test_ranks_of_a_group_or_of_all_its_roles() -> None:
    assert [group.ranks for group in job({}).plan.groups] == [1] * 5
    split = {"strategy": "split-collocate"}
    for ranks in ({"policy": 4}, {"actor": 4, "reference": 4}, {"policy": 4, "actor": 4}):
        placed = job(split | {"ranks": ranks})
        assert {group: placed.plan[group].ranks for group in placed.plan.grouping} == {
            "policy": 4,
            "scoring": 1,
            "rollout": 1,
        }
    # A reward by rules has nothing on the device; rank 0 alone has it.
    for ranks in ({"scoring": 2}, {"critic": 2}):
        assert job(split | {"ranks": ranks}).plan["scoring"].ranks == 2
    scored = {"reward": {"reward_model": {"enable": True}}}
    both = job({"ranks": {"reward": 2}, "replicas": {"reward": 3}}, **scored)
    assert (both.plan["reward"].ranks, both.plan["reward"].replicas) == (2, 3)
    assert job({"ranks": {"rollout": 1, "reward": 1}}).plan["rollout"].ranks == 1


def test_every_rank_of_a_rollout_group_has_an_engine_of_its_own() -> None:
    limit = {"max_num_seqs": 64}
    assert job({"strategy": "hybrid"}, rollout=limit).rows_at_once == 64
    assert job({"strategy": "hybrid", "ranks": {"policy": 2}}, rollout=limit).rows_at_once == 128
    assert job({"strategy": "collocate", "ranks": {"all": 4}}).plan["all"].ranks == 4
    split = {"name": "vllm", "tensor_model_parallel_size": 2}
    with pytest.raises(
        InvalidConfig,
        match=r"tensor_model_parallel_size is 2, but group policy has 4 ranks \(placement.ranks\)",
    ):
        job({"strategy": "hybrid", "ranks": {"policy": 4}}, rollout=split)
    job({"strategy": "split-collocate", "ranks": {"policy": 4}}, rollout=split)
    # Other servers generate: rank 0 alone has the rollout.
    servers = {"name": "openai", "openai": {"urls": ["http://127.0.0.1:8000"], "weights_dir": "/shared"}}
    asking = job({"strategy": "hybrid", "ranks": {"actor": 2, "reference": 2}}, rollout=servers | limit)
    assert (asking.plan["policy"].ranks, asking.rows_at_once) == (2, 64)


def test_an_engine_with_its_own_gpu_gets_all_rows_it_can_decode() -> None:
    """It gets as many rows at once as it may decode."""
    for strategy, rows in (("standalone", 1024), ("split-collocate", 1024), ("hybrid", 256)):
        found = job({"strategy": strategy}, rollout={"name": "vllm"})
        assert (found.has_own_device, found.rows_at_once) == (rows == 1024, rows)
    on_cpu = {"rollout": {"name": "vllm"}, "trainer": {"device": "cpu"}}
    assert job({}, **on_cpu).rows_at_once == 256
    assert job({}).rows_at_once == 256  # engine hf takes as much memory as its rows need
    assert job({}, rollout={"name": "vllm", "max_num_batched_tokens": 512}).rows_at_once == 512
    # A reward by rules computes on no device.
    by_rules = {
        "strategy": "custom",
        "groups": {"a": ["rollout", "reward"], "b": ["actor", "critic", "reference"]},
    }
    assert job(by_rules).has_own_device


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"ranks": {"actr": 2}}, "'actr', which is no group and no role; .*did you mean 'actor'"),
        ({"ranks": {"policy": 2}}, "'policy', which is no group"),
        ({"ranks": {"actor": 0}}, "greater than 0"),
        ({"ranks": {"actor": 1.5}}, "placement.ranks.actor"),
        ({"ranks": {"reward": 2}}, r"ranks.reward is 2, but reward has no model on a device"),
        ({"ranks": {"rollout": 2}}, r"the rollout alone; set placement.replicas.rollout for more engines"),
        (
            {"strategy": "split-collocate", "ranks": {"actor": 2}},
            r"differ in group policy \(actor 2, reference 1\), .*set placement.ranks.policy alone",
        ),
        (
            {"strategy": "split-collocate", "ranks": {"policy": 2, "actor": 3, "reference": 3}},
            r"differ in group policy \(policy 2, actor 3, reference 3\)",
        ),
        (
            {"strategy": "split-collocate", "ranks": {"critic": 2, "reward": 2}},
            "reward has no model on a device",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused(placement: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        job(placement)


def test_verls_gpu_counts_are_the_ranks_of_groups_with_a_model() -> None:
    split = {"strategy": "split-collocate"}
    for given, ranks in (({"n_gpus_per_node": 4}, 4), ({"n_gpus_per_node": 2, "nnodes": 2}, 4), ({}, 1)):
        spread = job(split, trainer=given)
        assert {group: spread.plan[group].ranks for group in spread.plan.grouping} == {
            "policy": ranks,
            "scoring": ranks,
            "rollout": 1,
        }
    alone = job({}, trainer={"n_gpus_per_node": 2})  # a reward by rules has no model
    assert {group: alone.plan[group].ranks for group in alone.plan.grouping} == {
        **{"actor": 2, "reference": 2, "critic": 2},
        **{"rollout": 1, "reward": 1},
    }
    assert job({"strategy": "collocate"}, trainer={"n_gpus_per_node": 1}).plan["all"].ranks == 1
    both = job({"ranks": {"actor": 2}}, trainer={"n_gpus_per_node": 2})
    assert both.plan["actor"].ranks == 2


@pytest.mark.parametrize(
    ("placement", "trainer", "words"),
    [
        (
            {"ranks": {"actor": 4}},
            {"n_gpus_per_node": 2},
            r"actor is 4, but trainer.n_gpus_per_node .* is 2",
        ),
        ({}, {"nnodes": 2}, "nnodes is 2, but n_gpus_per_node is not set"),
        ({}, {"n_gpus_per_node": 0}, "trainer.n_gpus_per_node"),
    ],
)
def test_numbers_of_gpus_that_contradict_are_refused(
    placement: dict[str, Any], trainer: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        job(placement, trainer=trainer)


def test_a_mini_batch_of_fewer_rows_than_ranks_is_refused() -> None:
    one = {"ppo_micro_batch_size_per_gpu": 1}
    few: dict[str, Any] = {"actor": {"ppo_mini_batch_size": 2, **one}, "critic": one}
    with pytest.raises(InvalidConfig, match=r"actor.* is 2, so a mini-batch has 2 rows .* than the 4 parts"):
        job({"ranks": {"actor": 4}}, **few)
    with pytest.raises(InvalidConfig, match=r"critic.ppo_mini_batch_size is 2.*4 ranks of group critic"):
        job({"ranks": {"critic": 4}}, **few)
    job({"ranks": {"actor": 4}}, **few, rollout={"n": 2})
    few["actor"] |= {"ulysses_sequence_parallel_size": 2}
    job({"ranks": {"actor": 4}}, **few)


@pytest.mark.parametrize(
    ("actor", "ranks", "words"),
    [
        ({}, 1, "is 2, which does not divide the 1 rank of group actor"),
        ({}, 3, "is 2, which does not divide the 3 ranks of group actor"),
        ({"model": {"use_remove_padding": False}}, 2, "use_remove_padding is false"),
    ],
)
def test_ranks_that_cannot_share_rows_are_refused(actor: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        job({"ranks": {"actor": ranks}}, actor=actor | {"ulysses_sequence_parallel_size": 2})
    assert job({"ranks": {"actor": 4}}, actor={"ulysses_sequence_parallel_size": 2}).ulysses_size("actor") == 2
