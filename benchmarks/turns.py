"""Turns of rows in engine hf: with the keys and values that it has kept of earlier turns, beside the same turns
without. Interleaved, in one process, with the same bits.

    python -m benchmarks.turns
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.wire.allocator import tune

RESULTS = Path(__file__).parent / "results"
# in a turn
PROMPT_TOKENS = 128
SAMPLED = 16
ADDED = 48
KEPT = "kept"
AGAIN = "computed again"


def some_job(directory: Path, turns: int, hidden_size: int, num_layers: int) -> JobConfig:
    model = make_tiny_model(directory / "model", hidden_size=hidden_size, num_layers=num_layers, seed=0)
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": turns * (SAMPLED + ADDED) + SAMPLED,
            },
            "rollout": {"max_num_seqs": 64},
            "trainer": {"device": "cpu", "default_local_dir": str(directory)},
        }
    )


def some_rows(rows: int, num_tokens: int, seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    none = torch.zeros(rows, num_tokens, dtype=torch.int64)
    columns = {
        "prompts": torch.randint(0, 200, (rows, PROMPT_TOKENS), generator=generator),
        "prompt_mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.bool),
        "seeds": torch.randint(0, 2**62, (rows,), generator=generator),
        "responses": none,
        "turns": none.clone(),
    }
    return DataProto(columns, {}, {"sampling": "train"})


async def turn_of(worker: RolloutWorker, request: DataProto) -> tuple[float, DataProto]:
    """Return the seconds of a turn, and its answer."""
    began = time.perf_counter()
    answer = DataProto.concat([rows async for rows in worker.generate(request)])
    return time.perf_counter() - began, answer[answer["row"].argsort()]


def after(request: DataProto, answer: DataProto, turn: int) -> DataProto:
    """The next turn's request: the sampled tokens, and ADDED others."""
    turns = request["turns"].clone()
    mask = answer["response_mask"]
    begun = int((turns[0] != 0).sum()) + SAMPLED
    assert bool((mask.sum(1) == SAMPLED).all())
    responses = torch.where(mask, answer["responses"], request["responses"])
    generator = torch.Generator().manual_seed(turn)
    responses[:, begun : begun + ADDED] = torch.randint(0, 200, (len(turns), ADDED), generator=generator)
    turns[mask], turns[:, begun : begun + ADDED] = turn, -(turn + 1)
    return DataProto({**request.tensors, "responses": responses, "turns": turns}, {}, dict(request.meta_info))


def ending_after_sampled(worker: RolloutWorker) -> None:
    """End every turn at its last token: the engine's ends are those that no turn samples but there."""
    engine: Any = worker._engine
    sample = engine.sample
    engine.ends = torch.tensor([0])
    steps = [0]

    def counted(logits: torch.Tensor, *others: Any) -> Any:
        steps[0] += 1
        is_last = steps[0] % SAMPLED == 0
        banned = torch.full_like(logits, -torch.inf)
        banned[:, 0] = 0
        return sample(banned if is_last else logits.index_fill(1, torch.tensor([0]), -torch.inf), *others)

    engine.sample = counted


async def measure(
    rounds: int, rows: int, turns: int, hidden_size: int, num_layers: int
) -> dict[str, list[list[float]]]:
    """Seconds of each turn, in each round, with and without."""
    seconds: dict[str, list[list[float]]] = {KEPT: [], AGAIN: []}
    with TemporaryDirectory() as directory:
        job = some_job(Path(directory), turns, hidden_size, num_layers)
        with closing(RolloutWorker(job)) as kept, closing(RolloutWorker(job)) as again:
            workers = {KEPT: kept, AGAIN: again}
            for worker in workers.values():
                ending_after_sampled(worker)
            forgetful: Any = again._engine
            forgetful.kept.max_bytes = 0
            for round in range(-1, rounds):
                request = some_rows(rows, job.data.max_response_length, round + 1)
                taken: dict[str, list[float]] = {KEPT: [], AGAIN: []}
                for turn in range(1, turns + 1):
                    answers = []
                    for name in sorted(workers, reverse=turn % 2 == 0):
                        took, answer = await turn_of(workers[name], request)
                        taken[name].append(took)
                        answers.append(answer)
                    one, other = answers
                    assert all(torch.equal(one[name], other[name]) for name in one.columns), "other bits"
                    request = after(request, one, turn)
                if round >= 0:  # the first one warms up
                    for name, values in taken.items():
                        seconds[name].append(values)
    return seconds


def main(
    rounds: Annotated[int, typer.Option(help="Conversations that are measured.")] = 5,
    rows: Annotated[int, typer.Option(help="Rows of a conversation.")] = 16,
    turns: Annotated[int, typer.Option(help="Turns of a row.")] = 6,
    hidden_size: Annotated[int, typer.Option(help="Of the model.")] = 256,
    num_layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
) -> None:
    """Prints seconds and ratio of each turn, and writes benchmarks/results/turns.json."""
    tune()
    seconds = asyncio.run(measure(rounds, rows, turns, hidden_size, num_layers))
    found = {
        name: [statistics.median(each) for each in zip(*taken, strict=True)] for name, taken in seconds.items()
    }
    ratios = [
        statistics.median(again[turn] / kept[turn] for kept, again in zip(*seconds.values(), strict=True))
        for turn in range(turns)
    ]
    table = Table("turn", "tokens before it", KEPT, AGAIN, "times faster")
    for turn, ratio in enumerate(ratios):
        before = PROMPT_TOKENS + turn * (SAMPLED + ADDED)
        table.add_row(
            str(turn + 1), str(before), *(f"{found[name][turn]:.3f} s" for name in found), f"{ratio:.2f}"
        )
    Console().print(table)
    result = {
        "rows": rows,
        "sampled_in_a_turn": SAMPLED,
        "added_in_a_turn": ADDED,
        "prompt_tokens": PROMPT_TOKENS,
        "seconds": found,
        "ratios": ratios,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "turns.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
