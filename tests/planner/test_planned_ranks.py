"""What the planner says of ranks: collectives and memory by hand, and the job file's own numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned import COLLOCATE, H100, HYBRID, LLAMA_7B, MODELLED, STANDALONE, planner, ppo

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
from rolemesh.planner.collectives import Spread, exchange_seconds, gather_seconds, sum_seconds
from rolemesh.planner.compare import given_counts
from rolemesh.planner.cost import elapsed, handover_seconds, role_parts
from rolemesh.planner.device_specs import GIB, Device
from rolemesh.planner.estimate import Counts, Estimate
from rolemesh.planner.memory import role_memory
from rolemesh.planner.search import search

# 100 GB/s between devices, 40 GB/s between machines of 4; 8 µs a call, 2 µs and 10 µs a turn.
LINKS = Device("links", 80 * GIB, {"bfloat16": 1e15, "float32": 1e15}, 1e12, 1e11, 4e10, 1e12, per_node=4,
               call_latency=8e-6, link_latency=2e-6, network_latency=1e-5)  # fmt: skip
SHAPES, STANDALONE_JOB = dict.fromkeys(MODELLED, LLAMA_7B), ppo()


def ranks_of(plan: Estimate) -> dict[str, tuple[int, int]]:
    return {group.name: (group.devices, group.ranks) for group in plan.groups}


def test_a_ring_moves_the_parts_of_other_ranks_one_turn_each() -> None:
    """A rank has its own part already."""
    assert gather_seconds(LINKS, 1e9, 1) == 0
    assert gather_seconds(LINKS, 1e9, 4) == pytest.approx(8e-6 + 3 * 2e-6 + 0.75e9 / 1e11)
    # Two machines: each receives half over its network cards, which takes longer than inside.
    assert gather_seconds(LINKS, 1e9, 8) == pytest.approx(8e-6 + 6 * 2e-6 + 1e-5 + 0.5e9 / 4e10)
    assert sum_seconds(LINKS, 1e9, 4) == 2 * gather_seconds(LINKS, 1e9, 4)
    assert exchange_seconds(LINKS, 1e9, 4) == gather_seconds(LINKS, 1e9, 4)


def test_machines_that_send_weights_in_parallel_are_faster() -> None:
    """By a wire of 1 GB/s, on which a process receives from several at 1.5 GB/s."""
    one = 4 * LLAMA_7B.policy_parameters / 1e9
    num_bytes = 4 * LLAMA_7B.policy_parameters
    copies = ppo(actor={"fsdp_config": {"fsdp_size": 4}}, placement={"ranks": {"actor": 16}})

    def apart(ranks: int, job: JobConfig = STANDALONE_JOB, together: bool = False) -> float:
        writing = 1 if together else -(-ranks // 4)  # machines write their parts at once
        copied = num_bytes * (1 / 3e9 / writing + 1 / 34e9 + 1 / 13e9)
        return (handover_seconds(job, SHAPES, LINKS, ranks, together=together) - copied) / one

    assert [apart(ranks) for ranks in (1, 4)] == pytest.approx([1, 1])
    # Of two machines each needs half of its part from the other one; of four each three quarters.
    assert [apart(ranks) for ranks in (8, 16)] == pytest.approx([1 / 4 + 2 / 3, 3 / 16 + 2 / 3])
    assert apart(16, copies) == pytest.approx(2 / 3)
    assert [apart(ranks, together=True) for ranks in (4, 8, 16)] == pytest.approx([0, 1 / 2, 3 / 4])


def test_the_job_says_how_a_role_is_spread() -> None:
    keys = {
        "ulysses_sequence_parallel_size": 2,
        "fsdp_config": {"fsdp_size": 4, "reshard_after_forward": False},
    }
    job = ppo(actor=keys, placement={"ranks": {"actor": 8}})
    spread = Spread.of(job, "actor", 8)
    assert spread == Spread(8, shards=4, together=2, is_gathered_twice=False)
    assert (spread.streams, spread.copies) == (4, 2)
    assert Spread.of(job, "critic", 8) == Spread(8, shards=8)
    assert Spread.of(ppo(), "critic", 1) == Spread()
    assert Spread.of(job, "actor", 2).shards == 2  # fewer than fsdp_size
    assert Spread.of(job, "rollout", 8).shards == 1


def test_copy_ranks_share_state_and_row_ranks_activations() -> None:
    """The ranks of one copy share the state, and those of one row its activations."""
    whole = role_memory(ppo(), "actor", SHAPES, H100)
    hybrid = ppo(actor={"fsdp_config": {"fsdp_size": 4}}, placement={"ranks": {"actor": 8}})
    shared = role_memory(hybrid, "actor", SHAPES, H100, 8)
    assert (shared.weights, shared.gradients, shared.optimizer) == (
        whole.weights // 4,
        whole.gradients // 4,
        whole.optimizer // 4,
    )
    long = {"ulysses_sequence_parallel_size": 4}
    parts = ppo(actor=long, placement={"ranks": {"actor": 8}})
    eighth = ppo(placement={"ranks": {"actor": 8}})
    saved = (role_memory(job, "actor", SHAPES, H100, 8).activations for job in (eighth, parts))
    block_inputs = 32 * 8192 * 4096 * 4
    assert next(saved) - next(saved) > 0.75 * block_inputs
    offloaded = ppo(actor={"fsdp_config": {"param_offload": True}}, placement={"ranks": {"actor": 8}})
    memory = role_memory(offloaded, "actor", SHAPES, H100, 8)
    assert (memory.weights, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.activations == role_memory(eighth, "actor", SHAPES, H100, 8).activations


def test_host_moments_need_room_only_after_the_activations() -> None:
    there = role_memory(ppo(), "actor", SHAPES, H100)
    keys = {"fsdp_config": {"optimizer_offload": True}}
    fetched = role_memory(ppo(actor=keys), "actor", SHAPES, H100)
    assert fetched.total == there.weights + there.gradients + max(there.optimizer, there.activations)
    parts = [role_parts(ppo(actor=actor), "actor", LLAMA_7B, H100, 1, 256)["update"] for actor in ({}, keys)]
    moved = 2 * 8 * 6_738_415_616 / H100.host_bandwidth  # there and back, in each of two updates
    assert parts[1]["optimizer"] - parts[0]["optimizer"] == pytest.approx(2 * moved)


def test_sharded_blocks_are_gathered_in_compute_dtype() -> None:
    """The rest is gathered in float32."""
    # Without activations to speak of: the gathered weights and gradients of the middle of a backward pass.
    one_token = ppo(
        data={"max_prompt_length": 1, "max_response_length": 1},
        actor={"ppo_micro_batch_size_per_gpu": 1},
        placement={"ranks": {"actor": 8}},
    )
    block = 6_476_005_376 // 32
    outside = 4 * (6_738_415_616 - 6_476_005_376)
    # Two blocks' weights in two bytes; one's gradients in two bytes, and in four before and after their sum.
    gathered = 2 * 2 * block + outside + (2 + 2 * 4) * block
    memory = role_memory(one_token, "actor", SHAPES, H100, 8)
    assert memory.activations == pytest.approx(max(gathered, 3 * outside) + 2 * 131_072_000, rel=0.01)


def test_a_pass_gathers_twice_and_adds_once_behind_its_products() -> None:
    job = ppo(placement={"ranks": {"actor": 4}})
    parts = role_parts(job, "actor", LLAMA_7B, LINKS, 4, 256)["update"]
    calls = 256 / 4 / 8  # passes of 8 rows on each rank
    blocks, outside = 2 * 6_476_005_376, 4 * (6_738_415_616 - 6_476_005_376)
    latency = 33 * (8e-6 + 3 * 2e-6)
    assert parts["gathers"] == pytest.approx(2 * calls * (latency + 0.75 * (blocks + outside) / 1e11))
    assert parts["sums"] == pytest.approx(
        calls * (latency - (8e-6 + 3 * 2e-6) + 0.75 * 4 * 6_738_415_616 / 1e11)
    )
    assert parts["exchanges"] == 0
    assert elapsed(parts, LINKS) == pytest.approx(
        max(parts["compute"], parts["gathers"] + parts["sums"]) + parts["optimizer"] + parts["orders"]
    )
    one = role_parts(ppo(), "actor", LLAMA_7B, LINKS, 1, 256)["update"]
    assert {name for name, seconds in one.items() if seconds} == {"compute", "optimizer"}
    assert one["compute"] == pytest.approx(4 * parts["compute"])


def test_a_standalone_job_has_the_ranks_and_replicas_it_sets() -> None:
    plans = planner(placement={"ranks": {"actor": 3}, "replicas": {"reference": 2}})
    given = given_counts(plans.job)
    assert given == {"actor": Counts(1, 3), "reference": Counts(2, 1)}
    found = ranks_of(plans.plan("standalone", STANDALONE, given))
    assert (found["actor"], found["reference"]) == ((3, 3), (2, 1))
    assert found["critic"][0] == found["critic"][1] >= 2  # as many as it needs and helps
    assert sum(devices for devices, _ in found.values()) <= 8


def test_ranks_come_in_what_the_keys_can_divide() -> None:
    keys = {"ulysses_sequence_parallel_size": 2, "fsdp_config": {"fsdp_size": 3}}
    plan = planner(gpus=20, actor=keys, placement={"ranks": {"actor": 6}}).plan("standalone", STANDALONE)
    assert ranks_of(plan)["actor"][1] % 6 == 0


def test_each_rank_has_a_row_of_a_mini_batch_or_shares_one() -> None:
    actor = {"ppo_mini_batch_size": 4, "ulysses_sequence_parallel_size": 2}
    keys: dict[str, Any] = {"data": {"train_batch_size": 8}, "rollout": {"n": 2}, "actor": actor}
    of_8_rows = planner(gpus=64, **keys, placement={"ranks": {"actor": 2}})
    found = ranks_of(of_8_rows.plan("standalone", STANDALONE))
    assert found["critic"][1] == 8
    assert ppo(**keys, placement={"ranks": {role: found[role][1] for role in ("actor", "critic")}})

    def blocked(actors: int) -> str:
        devices = dict.fromkeys(MODELLED, 1) | {"actor": actors, "reward": 0}
        return of_8_rows.divided("standalone", STANDALONE, devices).blocked

    assert blocked(16) == ""
    assert blocked(18) == "a mini-batch of actor has 8 rows, fewer than the 9 parts that 18 ranks compute"
    with pytest.raises(InvalidConfig, match="fewer than the 9 parts that the 18 ranks"):
        ppo(**keys, placement={"ranks": {"actor": 18}})


def test_ranks_that_do_not_divide_attention_heads_are_refused() -> None:
    actor, placement = {"ulysses_sequence_parallel_size": 4}, {"ranks": {"actor": 4}}
    shapes = [replace(LLAMA_7B, heads=heads, kv_heads=heads) for heads in (32, 30)]
    plans = [planner(shape, actor=actor, placement=placement) for shape in shapes]
    assert [each.plan("standalone", STANDALONE).blocked for each in plans] == [
        "",
        "actor has 30 attention heads and 30 heads of keys and values, "
        "which do not divide among the 4 ranks that compute a row",
    ]


def test_a_scoring_role_is_sharded_no_more_than_it_must_be() -> None:
    small = replace(H100, memory_bytes=13 * GIB)  # the reference needs 13.9 GiB
    plan = planner(gpus=64, device=small).plan("standalone", STANDALONE)
    devices, ranks = ranks_of(plan)["reference"]
    assert (ranks, devices % 2) == (2, 0)
    assert ranks_of(planner().plan("standalone", STANDALONE))["reference"][1] == 1


def test_all_ranks_on_one_cpu_take_memory_of_the_same_machine() -> None:
    plans = planner(device=replace(H100, shared=True), gpus=1, placement={"ranks": {"actor": 4}})
    one, four = (plans.plan("standalone", STANDALONE, given) for given in ({}, given_counts(plans.job)))
    peaks = [next(g.peak_bytes for g in plan.groups if g.name == "actor") for plan in (one, four)]
    assert four.missing_bytes - one.missing_bytes == 4 * peaks[1] - peaks[0]
    assert ranks_of(planner(device=replace(H100, shared=True), gpus=1).plan("all", COLLOCATE)) == {
        "all": (1, 1)
    }


def test_verls_numbers_of_gpus_are_the_job_files_ranks() -> None:
    assert given_counts(make_job({"trainer": {"n_gpus_per_node": 2}})) == {
        "actor": Counts(1, 2),
        "critic": Counts(1, 2),
    }
    assert given_counts(make_job({})) == {}


def test_verls_numbers_of_gpus_hold_in_every_placement() -> None:
    plans = planner(gpus=32, trainer={"n_gpus_per_node": 4, "nnodes": 2})
    found = ranks_of(plans.plan("standalone", STANDALONE))
    assert {role: found[role] for role in ("actor", "critic", "reference")} == dict.fromkeys(
        ("actor", "critic", "reference"), (8, 8)
    )
    assert found["rollout"][1] == 1
    for plan in (plans.plan("hybrid", HYBRID), search(plans)):
        placed = {"strategy": "custom", "groups": {group.name: group.roles for group in plan.groups}}
        job = ppo(trainer={"n_gpus_per_node": 4, "nnodes": 2}, placement=placed)
        assert {g.name: g.ranks for g in plan.groups} == {
            group: job.plan[group].ranks for group in job.plan.grouping
        }
    few = planner(gpus=8, trainer={"n_gpus_per_node": 8}).plan("standalone", STANDALONE)
    assert (few.verdict, few.missing_devices) == ("does not fit", 3 * 8 + 1 - 8)
