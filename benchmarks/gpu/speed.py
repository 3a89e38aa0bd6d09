"""How fast an update is, beside plain torch that does the same, and how fast new weights reach a rollout."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.gpu.workload import SPEED, Missed, Scale, check, job_of, make_model, rows_of, synchronized
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import named_weights
from rolemesh.planner.memory import role_shapes
from rolemesh.ranks.sharding import memory_of
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.training.usage import update_flops
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.staging import BUFFER_BYTES

ROUNDS = 5
REPEATS = 4
WANTED = 0.9  # of plain torch's tokens per second


def update(device: str, directory: Path) -> dict[str, Any]:
    """Seconds of an actor's update, ours and by hand, interleaved; tokens per second; and MFU.

    Rows have their full length, and no two share a prompt, so packing saves nothing. MFU counts 6 operations
    for each weight of a matrix and each token, and attention's; what is recomputed does not count. It is given
    of the rate that a large product of bfloat16 matrices reaches on this device in this run.
    """
    scale = SPEED[device]
    model = make_model(directory / "model", scale)
    job = job_of(directory, model, scale, device)
    rows = rows_of(scale, uneven=False)
    rows["input_ids"] = torch.randint(
        200, rows["input_ids"].shape, generator=torch.Generator().manual_seed(1)
    )  # no two rows begin alike
    actor = ActorWorker(job)
    plain = PlainUpdate(model, scale, device)
    rows["old_log_probs"] = asyncio.run(actor.compute_log_probs(rows))[
        "old_log_probs"
    ]  # so that no ratio is clipped at the first step
    contestants: dict[str, Callable[[], float]] = {
        "ours": lambda: float(asyncio.run(actor.update(rows))["actor/grad_norm"]),
        "plain torch": lambda: plain.step(rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    norms: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 2):
        for name, contestant in contestants.items():
            began = synchronized(device)
            norms[name].append(contestant())
            seconds[name].append(synchronized(device) - began)
    actor.close()
    check(
        abs(norms["ours"][0] - norms["plain torch"][0]) <= 3e-2 * norms["plain torch"][0],
        f"the two do not compute the same gradient: norms {norms}",
    )
    seconds = {name: values[2:] for name, values in seconds.items()}  # the first two warm up
    tokens = rows["input_ids"].numel()
    flops = update_flops(job_shape := role_shapes(job)["actor"], rows)
    ceiling = matrix_rate(device)
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    achieved = {name: flops / statistics.median(values) for name, values in seconds.items()}
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    figures: dict[str, Any] = {
        "parameters": job_shape.policy_parameters,
        "tokens": tokens,
        "seconds": seconds,
        "ratio_of_minima": (least := min(seconds["ours"]) / min(seconds["plain torch"])),
        "median_ratio": statistics.median(ratios),
        "tokens_per_second": rates,
        "tflops": {name: rate / 1e12 for name, rate in achieved.items()},
        "matrix_tflops": ceiling / 1e12,
        "mfu_of_matrix_rate": {name: rate / ceiling for name, rate in achieved.items()},
    }
    if device == "cuda" and 1 / least < WANTED:
        raise Missed(f"an update has {1 / least:.2f} of plain torch's speed; wanted {WANTED}", figures)
    return figures


class PlainUpdate:
    """The same mini-batch by hand: a PPO loss over the response tokens, one optimizer step."""

    def __init__(self, model: Path, scale: Scale, device: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
        self._scale = scale
        self._device = device

    def step(self, batch: DataProto) -> float:
        """Make one optimizer step; return the gradient's norm."""
        scale = self._scale
        total = int(batch["response_mask"].sum())
        for first in range(0, scale.rows, scale.micro):
            rows = batch[first : first + scale.micro].to(torch.device(self._device))
            with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
                new = self._log_probs(rows["input_ids"])
            ratio = (new - rows["old_log_probs"]).exp()
            advantages = rows["advantages"]
            mask = rows["response_mask"]
            losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            torch.autograd.backward((losses * mask).sum() / total)
        norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _log_probs(self, ids: Tensor) -> Tensor:
        keep = self._scale.response + 1
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        drawn = ids[:, -self._scale.response :, None]
        return logits.float().log_softmax(-1).gather(-1, drawn)[..., 0]  # type: ignore[no-any-return]


def matrix_rate(device: str) -> float:
    """FLOP/s of a large product of random matrices, the best of five."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(8):
        began = synchronized(device)
        one @ other
        seconds.append(synchronized(device) - began)
    return 2.0 * size**3 / min(seconds[3:])


def handover(device: str, directory: Path) -> dict[str, Any]:
    """GB/s of new weights: the actor copies them into the region, hashes them, and a rollout takes them.

    `copies` has the rates of the single copies of a bfloat16 version.
    """
    scale = SPEED[device]
    job = job_of(directory, make_model(directory / "model", scale), scale, device)
    actor = ActorWorker(job)
    rollout = RolloutWorker(job)
    num_bytes = 0
    seconds = {"publish": [0.0], "hash": [0.0], "receive": [0.0]}

    async def one(version: int) -> None:
        nonlocal num_bytes
        times = [synchronized(device)]
        held: Any = await actor.publish_weights(version)
        times.append(synchronized(device))
        num_bytes = held.holding.num_bytes
        times.append(synchronized(device))
        await rollout.update_weights(held)
        times.append(synchronized(device))
        for name, begin, end in zip(seconds, times, times[1:], strict=False):
            seconds[name].append(end - begin)

    async def all_of_them() -> None:
        for version in range(1, REPEATS + 1):
            await actor.update(rows_of(scale, uneven=False, seed=version))
            await one(version)

    asyncio.run(all_of_them())
    theirs: dict[str, Tensor] = named_weights(rollout._engine.model)  # type: ignore[attr-defined]
    for name, tensor in named_weights(actor.model).items():
        check(torch.equal(tensor.cpu(), theirs[name].cpu()), f"{name} of the rollout is not the actor's")
    copies = copy_rates(named_weights(actor.model), device)
    actor.close()
    rollout.close()
    best = {name: min(values[2:]) for name, values in seconds.items()}  # the first turn makes the pages
    return {
        "bytes": num_bytes,
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "gb_per_second": {name: num_bytes / value / 1e9 for name, value in best.items()},
        "copies": copies,
    }


def copy_rates(weights: dict[str, Tensor], device: str) -> dict[str, float]:
    """Return GB/s of a bfloat16 version, the best of some turns.

    `pageable` casts and copies each tensor to new host memory; `pinned` casts and copies all to one pinned
    buffer; `write` writes the pages of a region by one thread; `publish` is PublishedWeights, which does the
    last two at the same time, with several threads.
    """
    num_bytes = sum(2 * tensor.numel() for tensor in weights.values())
    buffer = torch.empty(BUFFER_BYTES // 2, dtype=torch.bfloat16, pin_memory=device == "cuda")
    data = memory_of(buffer)
    seconds = dict[str, list[float]]()

    def pinned() -> None:
        for tensor in weights.values():
            cast = tensor.bfloat16().flatten()
            for at in range(0, len(cast), len(buffer)):
                part = cast[at : at + len(buffer)]
                buffer[: len(part)].copy_(part, non_blocking=True)

    def write() -> None:
        region = WeightRegion(num_bytes)
        for at in range(0, num_bytes, len(data)):
            region.write(at, data[: num_bytes - at])

    turns: dict[str, Callable[[], object]] = {
        "pageable": lambda: [tensor.bfloat16().cpu() for tensor in weights.values()],
        "pinned": pinned,
        "write": write,
        "publish": lambda: PublishedWeights(1, weights, dtype=torch.bfloat16),
    }
    for _ in range(REPEATS):
        for name, turn in turns.items():
            began = synchronized(device)
            turn()
            seconds.setdefault(name, []).append(synchronized(device) - began)
    return {name: num_bytes / min(values) / 1e9 for name, values in seconds.items()}
