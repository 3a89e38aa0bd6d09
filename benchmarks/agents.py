"""What conversations cost: how busy the rollout is beside slow tools, and what a turn costs the controller.

    python -m benchmarks.agents

Rollout and environment are processes of their own, as `rolemesh run` starts them; the tools are waits of random
length. Busy is the rollout's processor time over wall time, beside the same of rows that talk to nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.planner.plan import RESULTS, _status
from rolemesh.catalog.agents import ONE_TURN
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.data.dataset import Agents, PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.command_line.arithmetic import write_arithmetic
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.services.processes.role_processes import role_processes

PLUGIN = Path(__file__).with_name("waiting_agent.py")
READY_S = 300


def make_model(directory: Path, hidden: int, layers: int, tokens_of_a_turn: int) -> Path:
    """Make a model of random weights that ends a turn after some tokens, on average."""
    make_tiny_model(directory, "qwen2", hidden_size=hidden, num_layers=layers)
    model = AutoModelForCausalLM.from_pretrained(directory)
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*range(0, 256, tokens_of_a_turn), own]
    model.generation_config.save_pretrained(directory)
    return directory


def job_of(directory: Path, model: Path, rows_at_once: int, response: int, who: str) -> JobConfig:
    return make_job(
        {
            "plugins": [str(PLUGIN)],
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},
            "data": {
                "train_files": [str(directory / "data" / "train.parquet")],
                "train_batch_size": 64,
                "max_prompt_length": 32,
                "max_response_length": response,
            },
            "actor": {"model": {"path": str(model)}, "ppo_mini_batch_size": 64},
            "rollout": {
                "max_num_seqs": rows_at_once,
                "n": 1,
                "multi_turn": {"enable": True, "max_episodes": 20_000},
                "agent": {"default_agent_loop": who},
            },
            "trainer": {
                "device": "cpu",
                "experiment_name": "agents",
                "default_local_dir": str(directory / "run"),
            },
        }
    )


@asynccontextmanager
async def serving(job: JobConfig) -> AsyncIterator[tuple[Any, Any, int]]:
    """Start the job's roles; yield clients of rollout and environment, and the rollout's pid."""
    async with role_processes(job) as processes, AsyncExitStack() as stack:
        addresses = await processes.addresses(READY_S)
        clients = {role: new_client(role, addresses[role], job) for role in job.roles}
        for client in clients.values():
            await stack.enter_async_context(client)
        await until_ready(clients.values(), READY_S)
        source = await clients["actor"].publish_weights(0)  # type: ignore[attr-defined]
        await clients["rollout"].update_weights(source)  # type: ignore[attr-defined]
        [rollout] = [member for member in processes.members if member.roles == ("rollout",)]
        yield clients["rollout"], clients["environment"], rollout.process.pid


async def talk(job: JobConfig, num_rows: int, rounds: int) -> list[dict[str, float]]:
    """Hold conversations with running roles. Return what each round took."""
    tokenizer = load_tokenizer(job.actor.model)
    who = job.rollout.agent.default_agent_loop
    data = PromptDataset(job.data.train_files, job.data, tokenizer, agents=Agents(who))
    taken = []
    async with serving(job) as (rollout, environment, process):
        talking = ConversationRollout(rollout, environment, job, tokenizer)
        for number in range(1, rounds + 1):
            rows = fan_out(data.batch(range(num_rows)), 1, number, number)
            before = _cpu(process)
            began = time.perf_counter()
            own = time.process_time()
            parts = [part async for part in talking.generate(rows)]
            wall = time.perf_counter() - began
            own = time.process_time() - own
            batch = DataProto.concat(parts)
            turns = float(batch["turns"].amax(1).sum())
            taken.append(
                {
                    "wall_s": wall,
                    "turns": turns,
                    "tokens": float(batch["response_mask"].sum()),
                    "busy": (_cpu(process) - before) / wall,
                    "controller_ms_a_turn": 1e3 * own / turns,
                    "controller_mib": _status("VmRSS") / 2**20,
                }
            )
    return taken


def _cpu(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def measure(directory: Path, rounds: int, episodes: int, crowd: int) -> list[dict[str, Any]]:
    write_arithmetic(directory / "data")
    slow = make_model(directory / "slow", 256, 4, 64)
    quick = make_model(directory / "quick", 64, 2, 8)
    cases = []
    for name, who, wait_s, model, num_rows, response in (
        ("no tools", ONE_TURN, 0.0, slow, episodes, 512),
        ("tools of 0 to 200 ms", "waits", 0.2, slow, episodes, 512),
        (f"{crowd:,} open episodes, tools of 0 to 2 s", "waits", 2.0, quick, crowd, 128),
    ):
        os.environ["WAIT_S"] = str(wait_s)
        job = job_of(directory, model, min(num_rows, 256), response, who)
        taken = asyncio.run(talk(job, num_rows, rounds + 1))[1:]  # the first warms everything up
        medians = {key: median(each[key] for each in taken) for key in taken[0]}
        cases.append({"case": name, "episodes": num_rows} | medians)
    return cases


def show(cases: list[dict[str, Any]]) -> None:
    table = Table(title="conversations: medians of the rounds")
    for heading in ("", "episodes", "wall s", "turns", "tokens/s", "rollout busy", "controller ms/turn", "MiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for case in cases:
        table.add_row(
            case["case"],
            str(case["episodes"]),
            f"{case['wall_s']:.1f}",
            f"{case['turns']:.0f}",
            f"{case['tokens'] / case['wall_s']:.0f}",
            f"{case['busy']:.2f}",
            f"{case['controller_ms_a_turn']:.2f}",
            f"{case['controller_mib']:.0f}",
        )
    Console().print(table)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds after a first one.")] = 3,
    episodes: Annotated[int, typer.Option(help="Conversations at once beside slow tools.")] = 256,
    crowd: Annotated[int, typer.Option(help="Open conversations in the last case.")] = 5000,
) -> None:
    """Print a table, and write benchmarks/results/agents.json."""
    torch.manual_seed(0)
    with TemporaryDirectory() as temporary:
        cases = measure(Path(temporary), rounds, episodes, crowd)
    show(cases)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "agents.json").write_text(json.dumps(cases, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
