"""Rows of several turns at two replicas: a turn goes where the one before was, and has the same bits
elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rollouts import P, T, prompts_of
from serving import served
from turns import assert_same, continued, first_turn, with_added, with_answer

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.rpc.calling import affinity
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.rpc.calling.replica import Replica
from rolemesh.telemetry import metrics

ROWS, ADDED = 24, 2
NEW = ("responses", "response_mask", "rollout_log_probs")


def job_of(model: Path) -> JobConfig:
    return make_job(
        {
            "data": {"max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu"},
            "actor": {"model": {"path": str(model)}},
            "rollout": {"max_num_seqs": ROWS},
        }
    )


def client_of(job: JobConfig, addresses: Sequence[str]) -> RolloutClient:
    return RolloutClient(addresses, methods(job), rows_at_once=job.rollout.rows_at_once)


async def one_by_one(client: RolloutClient, request: DataProto, order: list[int]) -> DataProto:
    """Ask for each row in a call of its own, all at once."""

    async def one(row: int) -> DataProto:
        return DataProto.concat([rows async for rows in client.generate(request[[row]])])

    answers = dict(zip(order, await asyncio.gather(*(one(row) for row in order)), strict=True))
    together = DataProto.concat([answers[row] for row in range(len(order))])
    return DataProto({**together.tensors, "row": torch.arange(len(order))})


def computed_tokens() -> float:
    value: float = metrics.ROLLOUT_CONTEXT_TOKENS.labels("computed")._value.get()
    return value


async def test_a_turn_goes_where_the_one_before_was(tiny_ending_model: Path) -> None:
    job = job_of(tiny_ending_model)
    first = first_turn(prompts_of(ROWS), T)
    async with served("rollout", job, job) as addresses:
        async with client_of(job, addresses) as client:
            answer = await one_by_one(client, first, list(range(ROWS)))
            assert all(replica.last_turn for replica in client.pool.replicas), "both had rows"
            second, going_on = with_added(with_answer(first, answer, 1), [ADDED] * ROWS, 1)
            assert len(going_on) > 8
            shuffled = torch.randperm(len(going_on), generator=torch.Generator().manual_seed(1)).tolist()
            before = computed_tokens()
            answer = await one_by_one(client, second, shuffled)
            assert computed_tokens() - before == (1 + ADDED) * len(going_on)
        for address in addresses:  # whatever it has kept
            async with client_of(job, [address]) as client:
                assert_same(await one_by_one(client, second, shuffled), answer, NEW)


async def test_without_the_replica_that_has_them_rows_go_on_at_another(tiny_ending_model: Path) -> None:
    job = job_of(tiny_ending_model)
    first = first_turn(prompts_of(ROWS), T)
    async with served("rollout", job, job) as addresses, client_of(job, addresses) as client:
        answer = await one_by_one(client, first, list(range(ROWS)))
        second, going_on = with_added(with_answer(first, answer, 1), [ADDED] * ROWS, 1)
        rows = list(range(len(going_on)))
        expected = await one_by_one(client, second, rows)
        client.pool.replicas[0].live = False
        assert_same(await one_by_one(client, second, rows), expected, NEW)


def test_the_replica_of_most_rows_is_named_and_old_rows_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_ROWS", 4)
    known, request = affinity.ReplicaAffinity(), first_turn(prompts_of(8), T)
    one, other = (Replica(f"127.0.0.1:{port}", "rollout") for port in (1, 2))
    assert known.of(request) == ""
    known.note(request, [0, 1, 2], one)
    known.note(request, [3], other)
    longer = continued(request, request["responses"], torch.ones(8, T).long())
    assert known.of(longer) == one.address
    assert known.of(longer[[3, 4]]) == other.address
    known.note(request, [4, 5, 6], other)  # 0, 1 and 2 are forgotten
    assert known.of(request[[0, 1, 2]]) == ""
    assert known.of(prompts_of(8)) == "", "rows of one turn may go anywhere"
