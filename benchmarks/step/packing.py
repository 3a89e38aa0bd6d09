"""Packed against padded training, and the memory of log-probabilities over a large vocabulary.

python -m benchmarks.step.packing WORKLOAD ROUNDS
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.step import turns
from benchmarks.step.ours import job_of, on_one_thread
from benchmarks.step.setting import MICRO_BATCH, PROMPT_TOKENS, RESPONSE_TOKENS, SEQUENCES
from benchmarks.step.workload import end_probability
from rolemesh.dataproto import DataProto
from rolemesh.models.chunks import CHUNK_LOGITS, MIN_MATRIX_ROWS
from rolemesh.models.tiny import CLASSES
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.controller.stages.experience import join
from rolemesh.wire.allocator import give_back_free_memory

# of the rows as a whole; tokens of an answer: with the prompt's, rows of 128
FILL = 0.4
ROOM = 104
VOCABULARY = 152_064  # Qwen2.5's


def some_batch(rows: int, room: int, fill: float) -> DataProto:
    """Judged rows whose tokens are `fill` of the cells; answers are geometrically long."""
    generator = torch.Generator().manual_seed(0)
    answer_fill = (fill * (PROMPT_TOKENS + room) - PROMPT_TOKENS) / room
    log_survival = torch.log1p(torch.tensor(-end_probability(answer_fill, room)))
    drawn = torch.rand(rows, generator=generator)
    lengths = (1 + (drawn.log() / log_survival).floor()).clamp(max=room)
    mask = torch.arange(room) < lengths[:, None]
    cells = torch.randn(rows, room, generator=generator) * mask
    batch = DataProto.from_dict(
        {
            "row": torch.arange(rows),
            "prompts": torch.randint(200, (rows, PROMPT_TOKENS), generator=generator),
            "prompt_mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.bool),
            "responses": torch.randint(200, (rows, room), generator=generator) * mask,
            "response_mask": mask,
            "old_log_probs": -5.5 * mask,
            "ref_log_probs": -5.5 * mask,
            "advantages": cells,
        }
    )
    return join(batch)


async def training(workload: Path, rounds: int, directory: str) -> dict[str, Any]:
    """Seconds of an update with and without padding, in turns."""
    max_tokens = MICRO_BATCH * (PROMPT_TOKENS + ROOM)
    of_both = [f"data.max_response_length={ROOM}", f"actor.ppo_max_token_len_per_gpu={max_tokens}"]
    jobs = {
        name: job_of(workload, "grpo", directory, [*of_both, f"actor.model.use_remove_padding={packed}"])
        for name, packed in (("packed", "true"), ("padded", "false"))
    }
    contestants = await on_one_thread({name: partial(ActorWorker, job) for name, job in jobs.items()})
    batch = some_batch(SEQUENCES, ROOM, FILL)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round in range(rounds + 1):
        for name, actor in list(contestants.items())[:: -1 if round % 2 else 1]:
            began = time.perf_counter()
            cpu_began = time.process_time()
            await actor.update(batch)
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)
    return {
        "fill": float(batch["attention_mask"].float().mean()),
        "seconds": {name: values[1:] for name, values in seconds.items()},  # the first warms up
        "cpu_seconds": {name: values[1:] for name, values in cpu_seconds.items()},
    }


def memory(of: str) -> int:
    """Resident bytes: VmRSS now, VmHWM the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(of))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def peak_memory(workload: Path, directory: str) -> dict[str, Any]:
    """Bytes that actor.compute_log_probs takes at most beyond what it began with, over a large vocabulary,
    beside the logits of one chunk of a micro-batch. What is freed goes back to the system at once, so that the
    pass is counted and not what an allocator keeps (which in a role process is up to two chunks more:
    rolemesh/wire/allocator.py)."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)
    config_class, model_class = CLASSES["qwen2"]
    config = config_class.from_pretrained(workload / "model")
    config.vocab_size = VOCABULARY
    large = Path(directory) / "large"
    (large / "model").mkdir(parents=True)
    for file in (workload / "model").iterdir():
        if "token" in file.name or "template" in file.name:
            (large / "model" / file.name).write_bytes(file.read_bytes())
    model_class(config).save_pretrained(large / "model")
    job = job_of(large, "grpo", directory, [])
    actor = (await on_one_thread({"actor": partial(ActorWorker, job)}))["actor"]
    batch = some_batch(MICRO_BATCH, RESPONSE_TOKENS, 1.0)
    peaks = []
    for _ in range(5):
        give_back_free_memory()
        forget_peak()
        before = memory("VmRSS")
        await actor.compute_log_probs(batch)
        peaks.append(memory("VmHWM") - before)
    chunk_tokens = max(MIN_MATRIX_ROWS, CHUNK_LOGITS // VOCABULARY)
    return {
        "vocabulary": VOCABULARY,
        "peak_bytes": peaks[2:],  # by then libraries have taken what they keep for themselves
        "chunk_bytes": chunk_tokens * VOCABULARY * 4,
        "micro_batch_bytes": MICRO_BATCH * RESPONSE_TOKENS * VOCABULARY * 4,
    }


async def main(workload: Path, rounds: int) -> None:
    with TemporaryDirectory() as directory:
        turns.answer({"training": await training(workload, rounds, directory)})
        turns.answer({"memory": await peak_memory(workload, directory)})


if __name__ == "__main__":
    turns.begin()
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
