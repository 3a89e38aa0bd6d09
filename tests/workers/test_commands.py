"""A batch is divided among the ranks of a role, and their answers are put together by row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from prometheus_client import REGISTRY

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.models.micro_batches import IS_FILLER, MicroBatches
from rolemesh.ranks.executor import Command
from rolemesh.ranks.ranks import Ranks
from rolemesh.telemetry.logs import shown
from rolemesh.workers.commands import ShardedBatch, command_of, on_all_ranks
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import ComputingThread, WorkerContext


def test_a_batch_that_is_sharded_and_gathered_is_the_same_batch() -> None:
    draw = random.Random(0)
    for _ in range(100):
        count, num_ranks = draw.randint(1, 20), draw.randint(1, 6)
        lengths = torch.tensor([draw.randint(2, 10) for _ in range(count)])
        mask = (torch.arange(10) < lengths[:, None]).long()
        batch = DataProto(
            {
                "input_ids": torch.arange(count)[:, None].expand(count, 10),
                "attention_mask": mask,
                "response_mask": mask[:, 1:].bool(),
            }
        )
        sharded = ShardedBatch.of(batch, MicroBatches(2, None, True, True), Ranks(0, num_ranks), entropy=True)
        assert len(sharded.parts) == len(sharded.rows) == num_ranks
        for part, rows in zip(sharded.parts, sharded.rows, strict=True):
            assert part.meta_info["entropy"]
            assert bool(part.meta_info.get(IS_FILLER)) == (len(rows) == 0)
            assert len(part) == max(1, len(rows))
        answers = [DataProto({"first": part["input_ids"][:, 0]}) for part in sharded.parts]
        assert sharded.gather(answers)["first"].tolist() == list(range(count))


class Doubling(LocalWorker):
    """A worker with a command and a method that is none."""

    @on_all_ranks
    def doubled(self, part: DataProto) -> DataProto:
        return DataProto({"twice": 2 * part["x"]})

    def undeclared(self, part: DataProto) -> DataProto:
        return part


class InTurn:
    """Orders to two ranks whose parts are computed one after another."""

    size = 2

    def run(self, name: str, command: Command, parts: Sequence[DataProto]) -> list[DataProto]:
        return [command(part) for part in parts]


class Counting(LocalWorker):
    @on_all_ranks
    def count(self, part: DataProto) -> DataProto:
        with self.worker_context.ranks.clock.running(part["attention_mask"]):
            return DataProto({"tokens": part["attention_mask"].sum(1)}, meta_info={"own": 1})


def sample(name: str, rank: int) -> float:
    return (
        REGISTRY.get_sample_value(f"rolemesh_rank_{name}_total", {"role": "counting", "rank": str(rank)}) or 0
    )


def test_all_ranks_tokens_are_the_batchs_without_filler() -> None:
    """30 and 10 tokens: the busiest rank has 1.5 times the mean."""
    worker = Counting(
        "counting", WorkerContext(ComputingThread("counting"), ranks=Ranks(0, 2), executor=InTurn())
    )
    mask = torch.zeros(2, 40, dtype=torch.long)
    mask[0, :30], mask[1, :10] = 1, 1
    sharded = ShardedBatch.evenly(DataProto({"attention_mask": mask}), Ranks(0, 2))
    answers = worker.count(sharded.parts)
    assert [answer.meta_info for answer in answers] == [{"own": 1}] * 2
    assert sharded.gather(answers)["tokens"].tolist() == [30, 10]
    assert [sample("tokens", rank) for rank in (0, 1)] == [30, 10]
    for rank in (0, 1):
        assert 0 < sample("collective_seconds", rank) <= sample("seconds", rank)
    metrics = worker.loads.take()
    assert metrics["perf/imbalance/counting"] == 1.5
    assert metrics["timing_s/collectives/counting"] > 0
    assert worker.loads.take() == {}
    worker.count(ShardedBatch.evenly(DataProto({"attention_mask": mask[:1]}), Ranks(0, 2)).parts)
    assert [sample("tokens", rank) for rank in (0, 1)] == [60, 10]
    assert worker.loads.take()["perf/imbalance/counting"] == 2
    worker.close()


def test_a_failed_commands_log_has_a_line_for_each_of_its_calls() -> None:
    worker = Counting(
        "failing", WorkerContext(ComputingThread("failing"), ranks=Ranks(0, 2), executor=InTurn())
    )
    with pytest.raises(InvalidBatch) as failure:
        worker.count([DataProto()])
    lines = shown(failure.value).split("\n")
    assert any(line.endswith(", in count") for line in lines)
    assert all(len(line) < 500 and "\\n" not in line for line in lines)
    worker.close()


def test_a_role_of_one_rank_counts_nothing() -> None:
    worker = Counting("alone")
    [answer] = worker.count([DataProto({"attention_mask": torch.ones(1, 3)})])
    assert answer.meta_info == {"own": 1}
    assert worker.loads.take() == {}
    assert REGISTRY.get_sample_value("rolemesh_rank_tokens_total", {"role": "alone", "rank": "0"}) is None
    worker.close()


def test_a_lone_command_is_a_call_and_ranks_run_only_commands() -> None:
    worker = Doubling("actor")
    part = DataProto({"x": torch.tensor([1, 2])})
    [answer] = worker.doubled([part])
    assert answer["twice"].tolist() == [2, 4]
    assert command_of(worker, "doubled")(part)["twice"].tolist() == [2, 4]
    for name in ("undeclared", "close", "__init__", "absent"):
        with pytest.raises(LookupError, match="has no command"):
            command_of(worker, name)
    worker.close()
