"""Whether memory is what the planner says, and is free where a role sleeps."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.workload import SPEED, Scale, check, job_of, make_model, prompts_of, rows_of, synchronized
from rolemesh.config import JobConfig
from rolemesh.planner.device_specs import GPUS
from rolemesh.planner.memory import Memory, role_memory, role_shapes
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.workers.numerics import prepare_device

ROLES = {"actor": ActorWorker, "critic": CriticWorker, "reference": ReferenceWorker, "rollout": RolloutWorker}
# A model's smallest tensors and the allocator's rounding are not counted by the planner.
MOVED = (0.98, 1.05)
PEAK = (0.95, 1.2)  # estimate over measurement


def offloading(device: str, directory: Path) -> dict[str, Any]:
    """A role that sleeps leaves the device, as many bytes as the planner says, and trains on alike.

    For a forward pass it comes back without its optimizer. On a GPU what has not changed is not copied again.
    """
    scale = SPEED[device]
    job = job_of(directory, make_model(directory / "model", scale), scale, device)
    rows = rows_of(scale, uneven=False)
    figures = {}
    for role in ("actor", "critic", "reference"):
        worker: Any = ROLES[role](job)
        memory = planned(job, role)
        state = memory.weights + memory.optimizer
        is_frozen = role == "reference"
        forward = worker.compute_values if role == "critic" else worker.compute_log_probs
        use = forward if is_frozen else worker.update
        asyncio.run(use(rows))
        before = allocated(device)
        first, first_s = _moved(worker.sleep, device)
        left = allocated(device)
        check(device == "cpu" or left <= before - 0.98 * first, f"{role}: {left} of {before} bytes stay")
        check(MOVED[0] <= first / state <= MOVED[1], f"{role} moved {first} bytes; the planner says {state}")
        _moved(worker.wake, device)
        asyncio.run(use(rows))
        _, warm_s = _moved(worker.sleep, device)  # the second time memory is pinned
        woken, woken_s = _moved(worker.wake, device)
        awake = allocated(device)
        asyncio.run(forward(rows))
        unchanged, unchanged_s = _moved(worker.sleep, device)
        _moved(worker.wake, device)
        asyncio.run(use(rows))
        check(
            MOVED[0] <= woken / memory.weights <= MOVED[1],
            f"{role}: {woken} bytes came back for a forward pass",
        )
        check(unchanged == (0 if device == "cuda" else woken), f"{role}: {unchanged} bytes copied in vain")
        figures[role] = {
            "moved_bytes": first,
            "planned_bytes": state,
            "allocated_before": before,
            "allocated_asleep": left,
            "allocated_to_judge": awake,
            "back_to_judge_bytes": woken,
            "unchanged_copied_bytes": unchanged,
            "unchanged_to_sleep_s": unchanged_s,
            "to_host_gb_s": 0.0 if is_frozen else first / warm_s / 1e9,
            "first_to_host_gb_s": first / first_s / 1e9,
            "to_device_gb_s": woken / woken_s / 1e9,
        }
        worker.close()
        del worker, forward, use
    return figures


def _moved(move: Any, device: str) -> tuple[int, float]:
    """Bytes that a move copied, and its seconds."""
    began = synchronized(device)
    num_bytes = asyncio.run(move())
    return num_bytes, synchronized(device) - began


def peaks(device: str, directory: Path) -> dict[str, Any]:
    """Peak bytes of each role against the planner's, and what checkpointing and offloading save."""
    scale = SPEED[device]
    model = make_model(directory / "model", scale)
    prepare_device(["actor"], job_of(directory, model, scale, device))  # segments that grow, as in a run
    checkpointed = {"enable_gradient_checkpointing": True}
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpointing": checkpointed,
        "checkpointing and activation offload": checkpointed | {"enable_activation_offload": True},
    }
    figures: dict[str, Any] = {}
    norms = []
    for name, setting in variants.items():
        job = job_of(directory, model, scale, device, {"actor": {"model": setting}})
        figures[f"actor, {name}"], norm = asyncio.run(_at_work("actor", job, scale, device))
        norms.append(norm)
    offloaded = job_of(directory, model, scale, device, {"actor": {"fsdp_config": {"optimizer_offload": True}}})
    figures["actor, optimizer_offload"], norm = asyncio.run(_at_work("actor", offloaded, scale, device))
    norms.append(norm)
    job = job_of(directory, model, scale, device)
    for role in ("critic", "reference", "rollout"):
        figures[role], _ = asyncio.run(_at_work(role, job, scale, device))
    whole = job_of(directory, model, scale, device, {"reference": {"model": {"dtype": "float32"}}})
    figures["reference, float32"], _ = asyncio.run(_at_work("reference", whole, scale, device))
    figures["reference_equals_actor"] = asyncio.run(_judges_alike(job, scale))
    check(
        max(norms) - min(norms) <= 2e-2 * max(norms), f"checkpointing or offload changes the gradient: {norms}"
    )
    if device == "cuda":
        measured = [figures[f"actor, {name}"]["measured_bytes"] for name in variants]
        check(measured[0] > measured[1] > measured[2], f"neither saves memory: {measured}")
        between = [figures[f"actor, {name}"]["between_steps_bytes"] for name in ("plain", "optimizer_offload")]
        check(between[1] < 0.5 * between[0], f"optimizer_offload frees too little between steps: {between}")
        held = [figures[name]["between_steps_bytes"] for name in ("reference", "reference, float32")]
        check(held[0] < 0.6 * held[1], f"the reference holds {held[0]} bytes, in float32 {held[1]}")
        for name in [name for name in figures if name != "reference_equals_actor"]:
            ratio = figures[name]["ratio"]
            check(PEAK[0] <= ratio <= PEAK[1], f"{name}: the planner says {ratio:.2f} of the peak")
    return figures


async def _judges_alike(job: JobConfig, scale: Scale) -> bool:
    """Whether actor and reference compute the same bits before the first update, as their KL of 0 needs."""
    rows = rows_of(scale, uneven=True)
    found = []
    for role in ("actor", "reference"):
        worker: Any = ROLES[role](job)
        found.append(next(iter((await worker.compute_log_probs(rows)).tensors.values())))
        worker.close()
        del worker
    check(torch.equal(*found), "the reference's log-probs are not the actor's before the first update")
    return True


async def _at_work(role: str, job: JobConfig, scale: Scale, device: str) -> tuple[dict[str, Any], float]:
    gc.collect()
    base = allocated(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    worker: Any = ROLES[role](job)
    rows = rows_of(scale, uneven=False)
    norm = 0.0
    if role in ("actor", "critic"):
        for _ in range(2):  # the second update finds moments
            norm = (await worker.update(rows))[f"{role}/grad_norm"]
    elif role == "reference":
        await worker.compute_log_probs(rows)
    else:
        async for _ in worker.generate(prompts_of(scale)):
            pass
    memory = planned(job, role)
    figures: dict[str, Any] = {"planned_bytes": memory.total, "planned": memory.parts()}
    if device == "cuda":
        measured = torch.cuda.max_memory_allocated() - base
        figures |= {
            "measured_bytes": measured,
            "between_steps_bytes": allocated(device) - base,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "segments_grow": any(
                each["is_expandable"]
                for each in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            ),
            "ratio": memory.total / measured,
        }
    worker.close()
    return figures, norm


def planned(job: JobConfig, role: str) -> Memory:
    """The planner's figure for a role on a device of its own, as large as this GPU."""
    own = GPUS["h100"]
    if torch.cuda.is_available():  # by whose memory blocks of logits are cut
        own = replace(own, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
    return role_memory(job, role, role_shapes(job), own)


def allocated(device: str) -> int:
    """Bytes of tensors on the device."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0
