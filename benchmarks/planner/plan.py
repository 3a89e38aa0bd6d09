"""How good the planner's estimates are: its memory against what roles really take, its seconds against steps
that are really made. On this machine's CPU, with small random models; every response uses its whole length.

    python -m benchmarks.planner.plan
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.planner.calibration import calibrated
from benchmarks.steps import stepper
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.planner.device_specs import available_memory, cpu, human_size
from rolemesh.planner.estimate import Cluster, Planner
from rolemesh.planner.memory import role_memory, role_shapes
from rolemesh.planner.search import as_grouping
from rolemesh.roles import Roles
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.command_line.arithmetic import write_arithmetic
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.wire.allocator import give_back_free_memory

RESULTS = Path(__file__).parents[1] / "results"

# hidden size, layers, vocabulary
MEMORY_MODELS = {"5 M": (256, 4, 2048), "10 M": (384, 4, 4096)}
MEMORY_ROWS = (4, 8)  # a micro-batch
STEP_MODELS = {"0.1 M": (64, 2, 259), "0.5 M": (128, 2, 512), "2 M": (256, 2, 512)}


def make_model(directory: Path, hidden: int, layers: int, vocabulary: int) -> Path:
    """A random Llama with the byte-level tokenizer, whose ids are the first of its vocabulary."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_ppo(directory: Path, model: Path, *, prompts: int, micro: int, lengths: tuple[int, int]) -> JobConfig:
    """PPO with a reference on additions; two mini-batches a step."""
    trained = {"ppo_mini_batch_size": prompts // 2, "ppo_micro_batch_size_per_gpu": micro}
    plain = {"enable_gradient_checkpointing": False}
    return make_job(
        {
            "algorithm": {"use_kl_in_reward": True},
            "data": {
                "train_files": str(directory / "data" / "train.parquet"),
                "train_batch_size": prompts,
                "max_prompt_length": lengths[0],
                "max_response_length": lengths[1],
            },
            "actor": {"model": {"path": str(model), **plain}, **trained},
            "critic": {"model": plain, **trained},
            "reference": {"model": plain, "log_prob_micro_batch_size_per_gpu": micro},
            "rollout": {"ignore_eos": True, "max_num_seqs": prompts},
            "trainer": {"device": "cpu", "default_local_dir": str(directory / "run")},
        }
    )


# -------------------------------------------------------------------------------------- memory


def peaks_of(directory: Path) -> list[dict[str, Any]]:
    """Estimate and measured peak in bytes of each role with each model and micro-batch, one after another, each
    beyond what the process has before it. For a process of its own."""
    torch.set_num_threads(1)
    device = cpu(available_memory())
    cases: list[dict[str, Any]] = []
    for name, model in MEMORY_MODELS.items():
        path = make_model(directory / f"model {name}", *model)
        for rows, role in product(MEMORY_ROWS, ("actor", "critic", "rollout")):
            job = make_ppo(directory, path, prompts=4 * rows, micro=rows, lengths=(64, 64))
            memory = role_memory(job, role, role_shapes(job), device)
            if not cases:  # what libraries take at their first use is no role's
                asyncio.run(_at_work(role, job))
            gc.collect()
            give_back_free_memory()
            before = _status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
            asyncio.run(_at_work(role, job))
            measured = _status("VmHWM") - before
            case = {"role": role, "model": name, "micro_batch": rows, "parts": memory.parts()}
            cases.append(
                case | {"estimate": memory.total, "measured": measured, "ratio": memory.total / measured}
            )
    return cases


async def _at_work(role: str, job: JobConfig) -> None:
    worker: Any
    if role == "rollout":
        worker = RolloutWorker(job)
        async for _ in worker.generate(_prompts(job)):
            pass
    else:
        worker = ActorWorker(job) if role == "actor" else CriticWorker(job)
        held = await worker.publish_weights(1) if role == "actor" else None
        await worker.update(_experience(job))  # two optimizer steps: the second finds moments
        del held
    worker.close()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _prompts(job: JobConfig) -> DataProto:
    shape = job.data.train_batch_size, job.data.max_prompt_length
    columns = {
        "prompts": torch.randint(256, shape),
        "prompt_mask": torch.ones(shape, dtype=torch.bool),
        "seeds": torch.arange(shape[0]),
    }
    return DataProto(columns, {}, {"sampling": "train"})


def _experience(job: JobConfig) -> DataProto:
    rows = job.data.train_batch_size
    prompt = job.data.max_prompt_length
    response = job.data.max_response_length
    width = prompt + response
    columns = {
        "input_ids": torch.randint(256, (rows, width)),
        "attention_mask": torch.ones(rows, width, dtype=torch.int64),
        "position_ids": torch.arange(width).repeat(rows, 1),
        "response_mask": torch.ones(rows, response, dtype=torch.bool),
    }
    floats = ("old_log_probs", "advantages", "values", "returns")
    return DataProto(columns | {name: torch.zeros(rows, response) for name in floats})


# --------------------------------------------------------------------------------------- steps


@contextmanager
def closing(roles: Roles) -> Iterator[Roles]:
    try:
        yield roles
    finally:
        for worker in (roles.actor, roles.rollout, roles.reward, roles.critic, roles.reference):
            worker.close()  # type: ignore[union-attr]


async def measure_steps(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Estimate and median of the measured CPU seconds, of the whole step and of the generation. The roles are
    in this process, each on one thread: what they take together does not depend on who else computes."""
    torch.set_num_threads(1)
    cases = []
    for name, model in STEP_MODELS.items():
        path = make_model(directory / f"model {name}", *model)
        job = make_ppo(directory, path, prompts=32, micro=8, lengths=(32, 32))
        device = calibrated(cpu(available_memory()), hidden=model[0])
        planner = Planner(job, role_shapes(job), Cluster(device, 1))
        plan = planner.plan("standalone", as_grouping([[role] for role in job.roles]))
        workers = Roles(
            ActorWorker(job), RolloutWorker(job), RewardWorker(job), CriticWorker(job), ReferenceWorker(job)
        )
        with closing(workers):
            one_step = stepper(job, workers)
            measured: dict[str, list[float]] = {"generate": [], "step": []}
            for number in range(1, steps + 2):
                began = time.process_time()
                async for _ in workers.rollout.generate(_prompts(job)):
                    pass
                measured["generate"].append(time.process_time() - began)
                began = time.process_time()
                await one_step(number)
                measured["step"].append(time.process_time() - began)
        for part, estimate in {"step": plan.seconds, "generate": plan.phases["generate"]}.items():
            seconds = statistics.median(measured[part][1:])
            times = {"estimate": estimate, "measured": seconds, "ratio": estimate / seconds}
            cases.append({"part": part, "model": name, **times, "phases": plan.phases})
    return cases


# -------------------------------------------------------------------------------------- output


def show(title: str, columns: tuple[str, ...], cases: list[dict[str, Any]], unit: Any) -> None:
    """A table of estimate, measurement and ratio."""
    table = Table(title=title)
    for heading in (*columns, "estimate", "measured", "ratio"):
        table.add_column(heading.replace("_", "-"), justify="right" if heading not in columns else "left")
    for case in cases:
        numbers = unit(case["estimate"]), unit(case["measured"]), f"{case['ratio']:.2f}"
        table.add_row(*(str(case[column]) for column in columns), *numbers)
    Console().print(table)


def draw(memory: list[dict[str, Any]], steps: list[dict[str, Any]], path: Path) -> None:
    """Estimate over measurement; on the line they agree."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(1, 2, figsize=(10, 4.5))
    for axes, cases, key, scale, unit in (
        (panes[0], memory, "role", 2**20, "MiB"),
        (panes[1], steps, "part", 1, "s"),
    ):
        for kind in dict.fromkeys(case[key] for case in cases):
            of_kind = [case for case in cases if case[key] == kind]
            measured, estimates = ([case[n] / scale for case in of_kind] for n in ("measured", "estimate"))
            axes.plot(measured, estimates, "o", label=kind)
        ends = [f(case[n] for case in cases for n in ("measured", "estimate")) / scale for f in (min, max)]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"estimate, {unit}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panes[0].set_title("memory of a role at its peak")
    panes[1].set_title("CPU seconds of a step")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(
    steps: Annotated[int, typer.Option(help="Steps of each model, after a first one.")] = 5,
) -> None:
    """Prints two tables, and writes benchmarks/results/plan.json and plan.png."""
    torch.manual_seed(0)
    with TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_arithmetic(directory / "data")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            memory = processes.submit(peaks_of, directory).result()
        show("memory at its peak", ("role", "model", "micro_batch"), memory, human_size)
        seconds = asyncio.run(measure_steps(directory, steps))
        show("CPU seconds of one thread", ("part", "model"), seconds, lambda value: f"{value:.2f} s")
    (RESULTS / "plan.json").write_text(json.dumps({"memory": memory, "steps": seconds}, indent=2) + "\n")
    draw(memory, seconds, RESULTS / "plan.png")


if __name__ == "__main__":
    typer.run(main)
