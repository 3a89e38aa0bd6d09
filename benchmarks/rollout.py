"""Generation through the rollout service, beside the same vLLM engine called in process: tokens per second, and
when the first and the last row arrive. Interleaved, the same prompts, seeds and settings.

    python -m benchmarks.rollout

`make bench-rollout` runs benchmarks.weights and benchmarks.placements before; their numbers join the table and
the picture. Needs vLLM. Writes benchmarks/results/rollout.json and rollout.png.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.table import Table

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.models.loading import load_outline
from rolemesh.models.tiny import make_tiny_model
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.services.processes.environments import role_environment
from rolemesh.services.rollout.engines.eos import end_tokens
from rolemesh.services.rollout.engines.vllm.engine_args import (
    engine_arguments,
    prepare_environment,
    sampling_arguments,
)
from rolemesh.wire.allocator import tune
from rolemesh.workers.devices import resolve_device

RESULTS = Path(__file__).parent / "results"
PROMPT_TOKENS = 32
RESPONSE_TOKENS = 256
IN_PROCESS = "vLLM in process"
SERVICE = "rollout service"


@dataclass
class Turn:
    """One batch of responses."""

    num_tokens: int
    seconds: float
    first_row_s: float


Contestant = Callable[[DataProto], Awaitable[Turn]]


def some_job(directory: Path, hidden_size: int, num_layers: int) -> JobConfig:
    """A model with random weights ends a row at about one token in 260: lengths are uneven, as in life."""
    model = make_tiny_model(directory / "model", hidden_size=hidden_size, num_layers=num_layers, seed=0)
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": PROMPT_TOKENS, "max_response_length": RESPONSE_TOKENS},
            "rollout": {"name": "vllm"},
            "trainer": {"device": "auto", "default_local_dir": str(directory)},
        }
    )


def some_prompts(rows: int, turn: int) -> DataProto:
    generator = torch.Generator().manual_seed(turn)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(0, 200, (rows, PROMPT_TOKENS), generator=generator),
            "prompt_mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.bool),
            "seeds": torch.randint(0, 2**62, (rows,), generator=generator),
        },
        meta_info={"sampling": "train"},
    )


@asynccontextmanager
async def in_process(job: JobConfig) -> AsyncIterator[Contestant]:
    """vLLM's AsyncLLM with the service's own settings, its outputs counted and thrown away."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    outline = load_outline(job.actor.model, "rollout")
    decided = job.with_dtypes(resolve_device(job.trainer.device).type)
    llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(decided, outline)))
    arguments = sampling_arguments(job, job.rollout, end_tokens(job)[0])

    async def generate(prompts: DataProto) -> Turn:
        began = time.perf_counter()
        ends: list[float] = []

        async def row(ids: list[int], seed: int) -> int:
            params = SamplingParams(**arguments, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY)
            request = llm.generate({"type": "token", "prompt_token_ids": ids}, params, f"{began}-{seed}")
            outputs = [output async for output in request]
            ends.append(time.perf_counter() - began)
            return len(outputs[-1].outputs[0].token_ids)

        pairs = zip(prompts["prompts"].tolist(), prompts["seeds"].tolist(), strict=True)
        counts = await asyncio.gather(*(row(ids, seed) for ids, seed in pairs))
        return Turn(sum(counts), time.perf_counter() - began, min(ends))

    try:
        yield generate
    finally:
        llm.shutdown()


@asynccontextmanager
async def service(job: JobConfig, directory: Path) -> AsyncIterator[Contestant]:
    """`rolemesh serve rollout` in a process of its own, asked through the controller's client."""
    config = directory / "job.yaml"
    address_file = directory / "address.json"
    config.write_text(job.to_yaml(), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rolemesh",
        "serve",
        "rollout",
        "--config",
        str(config),
        "--address-file",
        str(address_file),
        "--exit-with-parent",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=role_environment(),
    )
    try:
        while not address_file.exists():  # noqa: ASYNC110  # another process's file
            await asyncio.sleep(0.05)
        address = json.loads(address_file.read_text())["address"]
        async with RolloutClient([address], methods(job)) as client:
            await client.wait_until_ready(600)

            async def generate(prompts: DataProto) -> Turn:
                began = time.perf_counter()
                first = 0.0
                num_tokens = 0
                async for rows in client.generate(prompts):
                    first = first or time.perf_counter() - began
                    num_tokens += int(rows["response_mask"].sum())
                return Turn(num_tokens, time.perf_counter() - began, first)

            yield generate
    finally:
        process.terminate()
        await process.wait()


async def measure(rounds: int, rows: int, hidden_size: int, num_layers: int) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {IN_PROCESS: [], SERVICE: []}
    with TemporaryDirectory() as directory:
        job = some_job(Path(directory), hidden_size, num_layers)
        prepare_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        async with in_process(job) as local, service(job, Path(directory)) as remote:
            contestants = {IN_PROCESS: local, SERVICE: remote}
            for round in range(-2, rounds):
                for name in sorted(contestants, reverse=round % 2 == 0):
                    turn = await contestants[name](some_prompts(rows, round + 2))
                    if round >= 0:  # the first ones warm up
                        turns[name].append(turn)
    return turns


def summary(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    rates = {name: [turn.num_tokens / turn.seconds for turn in taken] for name, taken in turns.items()}
    ratios = [there / here for here, there in zip(rates[IN_PROCESS], rates[SERVICE], strict=True)]
    return {
        "cores": os.cpu_count(),
        "tokens_per_second": rates,
        "ratio_of_best": max(rates[SERVICE]) / max(rates[IN_PROCESS]),
        "median_ratio": statistics.median(ratios),
        "first_row_of_whole": {
            name: statistics.median(turn.first_row_s / turn.seconds for turn in taken)
            for name, taken in turns.items()
        },
    }


def others() -> dict[str, Any]:
    """What the benchmarks that `make bench-rollout` ran before have found: the numbers that have an aim."""
    weights, placements = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("weights", "placements")
    )
    return {
        "weight_sync_seconds": {count: row["sync_median_s"] for count, row in weights["memory"].items()},
        "weight_sync_bytes": weights["bytes"],
        "switch_over_plain_copy": placements["switch"]["ratio"],
        "seconds_per_step": {
            name: statistics.median(found["seconds_per_step"])
            for name, found in placements["placements"].items()
        },
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "best tokens/s", "median tokens/s", "first row after, share of the whole")
    for name, rates in result["tokens_per_second"].items():
        share = f"{result['first_row_of_whole'][name]:.3f}"
        table.add_row(name, f"{max(rates):,.0f}", f"{statistics.median(rates):,.0f}", share)
    ratios = (f"{result['ratio_of_best']:.3f}", f"{result['median_ratio']:.3f}")
    table.add_row("ratio", *ratios, "")
    console.print(table)
    sync = result["weight_sync_seconds"]
    aims = Table("", "measured", "aim")
    aims.add_row("service over in process, tokens/s", f"{result['median_ratio']:.2f}", "≥ 0.95")
    aims.add_row("new weights for 8 local replicas over for 1", f"{sync['8'] / sync['1']:.2f}", "≤ 1.3")
    aims.add_row("a switch over a plain copy of its bytes", f"{result['switch_over_plain_copy']:.2f}", "≤ 1.1")
    for name, seconds in result["seconds_per_step"].items():
        aims.add_row(f"step of the demo, {name}", f"{seconds:.2f} s", "")
    console.print(aims)


def draw(result: dict[str, Any], path: Path) -> None:
    """Generation, new weights, and steps by placement."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (generation, weights, steps) = pyplot.subplots(1, 3, figsize=(14, 4))
    for at, (name, rates) in enumerate(result["tokens_per_second"].items()):
        generation.bar(name, statistics.median(rates), color=f"C{at}")
        generation.scatter([name] * len(rates), rates, color="black", s=8, zorder=3)
    generation.set(title="generation with vLLM", ylabel="tokens per second (bar: median)")
    sync = result["weight_sync_seconds"]
    weights.plot(list(sync), list(sync.values()), marker="o")
    size = result["weight_sync_bytes"] / 2**20
    weights.set(
        title=f"{size:.0f} MiB of new weights, one machine", xlabel="replicas", ylabel="seconds (median)"
    )
    weights.set_ylim(0, 1.2 * max(sync.values()))
    seconds = result["seconds_per_step"]
    steps.barh(list(seconds), list(seconds.values()), color="C2")
    steps.set(title="a step of the demo", xlabel="seconds (median)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    rounds: Annotated[int, typer.Option(help="How often each contestant has its turn.")] = 9,
    rows: Annotated[int, typer.Option(help="Prompts in a turn.")] = 128,
    hidden_size: Annotated[int, typer.Option(help="Of the model.")] = 256,
    num_layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
) -> None:
    """Prints a table, and writes benchmarks/results/rollout.json and rollout.png."""
    tune()
    os.environ.update(role_environment())  # vLLM's own processes have it too, on both sides
    beside = others()
    result = summary(asyncio.run(measure(rounds, rows, hidden_size, num_layers))) | beside
    show(result, Console())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rollout.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, RESULTS / "rollout.png")


if __name__ == "__main__":
    typer.run(main)
