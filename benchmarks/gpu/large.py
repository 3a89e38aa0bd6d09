"""A role of 3e9 parameters sleeps, wakes and hands its weights over: a real model's bytes without the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from benchmarks.gpu.workload import Missed, check, synchronized
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.staging import load
from rolemesh.workers.offloading import Offloader

# Matrices of Qwen2.5-3B: 36 layers of width 2048; smaller ones where there is no GPU.
SHAPES = {"cuda": (36, 2048, 11008, 151936), "cpu": (2, 64, 128, 512)}
COPIES = 3  # of a parameter while it is trained: itself and two moments
REPEATS = 3
# of a hand-over; of sleeping and waking
WANTED_S = 2.0
WANTED_GB_S = 40.0


def offloaded(device: str, directory: Path) -> dict[str, Any]:
    """Offload and reload weights and moments: GB/s once memory is pinned, and whether the bits are the same."""
    tensors = [made(index, shape, device) for index, shape in enumerate(shapes(device) * COPIES)]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    offloader = Offloader(lambda: tensors, torch.device(device), directory)
    seconds: dict[str, list[float]] = {"to_host": [], "to_device": []}
    for _ in range(REPEATS):
        for tensor in tensors:
            tensor.mul_(1)  # written, so that it has to be copied again
        for name, move in (("to_host", offloader.offload), ("to_device", offloader.reload)):
            began = synchronized(device)
            moved = move()
            seconds[name].append(synchronized(device) - began)
            check(moved == num_bytes, f"{moved} of {num_bytes} bytes moved")
    for index, tensor in enumerate(tensors):
        check(torch.equal(tensor, made(index, tensor.shape, device)), f"tensor {index} came back otherwise")
    rates = {f"{name}_gb_s": num_bytes / min(values) / 1e9 for name, values in seconds.items()}
    first = {f"first_{name}_gb_s": num_bytes / values[0] / 1e9 for name, values in seconds.items()}
    figures = {"bytes": num_bytes, **rates, **first}
    if device == "cuda" and min(rates.values()) < WANTED_GB_S:
        raise Missed(f"{min(rates.values()):.0f} GB/s; wanted {WANTED_GB_S}", figures)
    return figures


def handed_over(device: str, directory: Path) -> dict[str, Any]:
    """Hand a version over in bfloat16, each part timed; beside it, the same bytes by CUDA's own sharing."""
    weights = {f"w{index}": made(index, shape, device) for index, shape in enumerate(shapes(device))}
    engine = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("publish", "digest", "receive", "whole")}
    held: PublishedWeights | None = None
    for version in range(1, REPEATS + 1):
        times = [synchronized(device)]
        held = PublishedWeights(version, weights, dtype=torch.bfloat16)
        times.append(synchronized(device))
        num_bytes = held.holding.num_bytes  # the manifest, with a checksum of each piece
        times.append(synchronized(device))
        received = asyncio.run(held.fetch())
        load(received, engine, torch.device(device))  # as the engine hf does on a GPU
        times.append(synchronized(device))
        parts = [end - begin for begin, end in pairwise(times)]
        for name, value in zip(seconds, [*parts, sum(parts)], strict=True):
            seconds[name].append(value)
    for name, tensor in weights.items():
        check(torch.equal(engine[name], tensor.to(torch.bfloat16)), f"{name} is not the version's")
    figures: dict[str, Any] = {"bytes": num_bytes, "seconds": seconds}
    if device == "cuda":
        figures["ipc_seconds"] = shared({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    if device == "cuda" and min(seconds["whole"]) > WANTED_S:
        raise Missed(f"a hand-over takes {min(seconds['whole']):.1f} s; wanted {WANTED_S} s", figures)
    return figures


def shared(weights: Mapping[str, Tensor]) -> list[float]:
    """Seconds in which another process maps the GPU's memory of these weights, and copies them there."""
    context = get_context("spawn")
    sent = context.SimpleQueue()
    answers = context.SimpleQueue()
    process = context.Process(target=_copy, args=(sent, answers))
    process.start()
    answers.get()  # it is ready
    seconds = []
    for _ in range(REPEATS):
        began = synchronized("cuda")
        sent.put(dict(weights))
        answers.get()
        seconds.append(time.perf_counter() - began)
    sent.put({})
    process.join()
    return seconds


def _copy(sent: Any, answers: Any) -> None:
    own: dict[str, Tensor] = {}
    torch.zeros(1, device="cuda")
    answers.put(True)
    while theirs := sent.get():
        own = own or {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
        for name, tensor in theirs.items():
            own[name].copy_(tensor)
        torch.cuda.synchronize()
        del theirs
        answers.put(True)


def shapes(device: str) -> list[tuple[int, ...]]:
    """The shapes of a model's matrices."""
    layers, width, inner, vocabulary = SHAPES[device]
    of_layer = [(width, width), (width // 8, width), (width // 8, width), (width, width)]
    of_layer += [(inner, width), (inner, width), (width, inner)]
    return [(vocabulary, width), *of_layer * layers]


def made(index: int, shape: tuple[int, ...], device: str) -> Tensor:
    """Random numbers, the same for the same index."""
    generator = torch.Generator(device).manual_seed(index)
    return torch.randn(shape, generator=generator, device=device)
