"""Shards on the device: NCCL with one rank or with two, against the same steps without shards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.workload import CORRECT, DTYPES, check, make_model, rows_of
from rolemesh.algos.aggregation import BatchCounts
from rolemesh.config.model import FsdpConfig, ModelConfig, OptimConfig, TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import token_stats
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous, local_store, own_gpu
from rolemesh.ranks.sharding import Root, shard, whole
from rolemesh.ranks.ulysses import Ulysses, exchanged
from rolemesh.training.optimizer import Optimizer
from rolemesh.training.update_loop import checkpoint_activations
from rolemesh.weights.published import PublishedWeights
from rolemesh.wire.allocator import tune

STEPS = 3
PROCESSES = multiprocessing.get_context("spawn")
WAIT_S = 80.0
SETTINGS = {
    "sharded": FsdpConfig(),
    "kept gathered": FsdpConfig(reshard_after_forward=False),
    "prefetched": FsdpConfig(forward_prefetch=True),
    "param_offload": FsdpConfig(param_offload=True),
}
LEARNING_RATE = 1e-4
# Of the first gradient's norm; the mean difference of weights after the steps is bounded in float32.
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
MEAN_TOLERANCE = 0.01 * LEARNING_RATE


def sharded(device: str, directory: Path) -> dict[str, Any]:
    """FSDP2, mixed precision, checkpointing, offload, Ulysses' exchange, and publishing from shards.

    One rank for each GPU, two at most; on a CPU two.
    """
    make_model(directory / "model", CORRECT[device])
    size = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    store = local_store(size)
    answers = PROCESSES.Queue()
    ranks = [
        PROCESSES.Process(target=_rank, args=(rank, size, store.port, device, directory, answers))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        found = [answers.get(timeout=WAIT_S) for _ in ranks]
    except queue.Empty:
        raise AssertionError(f"a rank did not answer within {WAIT_S:.0f} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for figures in found:
        check("error" not in figures, str(figures.get("error")))
    return next(figures for figures in found if figures["rank"] == 0)


def _rank(rank: int, size: int, port: int, device: str, directory: Path, answers: Any) -> None:
    tune()
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device == "cuda":
        os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(own_gpu(os.environ))  # before CUDA is asked for anything
    try:
        rendezvous = Rendezvous(rank, size, "127.0.0.1", port, "0")
        rendezvous.join()
        if size == 1:  # a group of one, which a role would not make
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=rendezvous.store, rank=0, world_size=1)
        answers.put({"rank": rank, "ranks": size, **_figures(Ranks.of_process(device), device, directory)})
    except BaseException:
        answers.put({"rank": rank, "error": f"rank {rank}: {traceback.format_exc()}"})
    answers.close()
    answers.join_thread()
    os._exit(0)


def _figures(ranks: Ranks, device: str, directory: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "backend": str(dist.get_backend(ranks.group)),
        "collectives": _collectives(ranks, device),
    }
    for dtype in DTYPES[device]:
        expected, norm, _ = _trained(Ranks.alone(), None, device, dtype, directory)
        for name, config in SETTINGS.items():
            label = f"{dtype} {name}"
            weights, sharded_norm, memory = _trained(ranks, config, device, dtype, directory)
            far = torch.cat([(weights[key] - expected[key]).abs().flatten() for key in expected])
            apart = abs(sharded_norm - norm) / norm
            differences = {"largest": float(far.max()), "mean": float(far.mean()), "norm": apart}
            figures[label] = {"difference": differences, **memory}
            check(apart <= NORM_TOLERANCE[dtype], f"{label}: grad_norm {sharded_norm}, without shards {norm}")
            in_bounds = dtype != "float32" or far.mean() <= MEAN_TOLERANCE
            check(bool(in_bounds), f"{label}: weights differ by {far.mean():.2g} on average")
    if device == "cuda":
        resident = {name: figures[f"float32 {name}"]["allocated_bytes"] for name in SETTINGS}
        check(resident["param_offload"] < 0.2 * resident["sharded"], f"param_offload frees nothing: {resident}")
    return figures


def _trained(
    ranks: Ranks, config: FsdpConfig | None, device: str, dtype: str, directory: Path
) -> tuple[dict[str, Tensor], float, dict[str, int]]:
    """Train some steps on uneven rows.

    Returns:
        The whole weights on the CPU, the first gradient's norm, and memory between steps.
    """
    gc.collect()
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = load_causal_lm(ModelConfig(path=str(directory / "model")), "actor")
    root = Root(model if config else model.to(device))
    if config:
        shard(root, ranks, config, None if dtype == "float32" else torch.bfloat16)  # as a role does
    root(lambda model: remove_padding(model.get_decoder(), "actor", dtype))
    where = torch.device(device)
    checkpointing = TrainedModelConfig(enable_gradient_checkpointing=True, enable_activation_offload=True)
    checkpoint_activations(root.model, checkpointing, where)
    root.train()
    optim = OptimConfig(lr=LEARNING_RATE, weight_decay=0.0)
    optimizer = Optimizer(root.model, optim, grad_clip=1.0, role="actor", ranks=ranks if config else None)
    norms: list[float] = []
    for step in range(STEPS):
        rows = rows_of(CORRECT[device], uneven=True, seed=step)
        counts = BatchCounts.of(rows["response_mask"])
        own = rows[ranks.rank :: ranks.size] if config else rows
        for first in range(0, len(own), 3):
            _backward(root, own[first : first + 3], counts, dtype, where)
        norms.append(optimizer.step())
    memory = {"allocated_bytes": torch.cuda.memory_allocated() - base} if device == "cuda" else {}
    weights = named_weights(root.model)
    held = PublishedWeights(1, weights, ranks=ranks if config else None)
    gathered = {name: whole(tensor).detach().cpu().clone() for name, tensor in weights.items()}
    if ranks.rank == 0:
        _check_published(held, gathered)
    return gathered, norms[0], memory


def _backward(root: Root, rows: DataProto, counts: BatchCounts, dtype: str, device: torch.device) -> None:
    stats = root(token_stats, rows, temperature=1.0, device=device, dtype=dtype, entropy=False)
    rows = rows.to(device)
    mask = rows["response_mask"]
    loss = -torch.where(mask, stats.log_probs * rows["advantages"], 0).sum() / counts.num_tokens
    torch.autograd.backward(loss)


def _check_published(held: PublishedWeights, gathered: dict[str, Tensor]) -> None:
    published = held.holding.tensors()
    for name, tensor in gathered.items():
        check(torch.equal(published[name], tensor), f"{name} was not published as it is")


def _collectives(ranks: Ranks, device: str) -> dict[str, Any]:
    """The collectives that the roles use, on the device, with their gradients."""
    where = torch.device(device)
    together = Ulysses(ranks.rank, ranks.size, ranks.group)
    x = torch.arange(8.0 * ranks.size, device=where).view(4, 2 * ranks.size, 1).requires_grad_()
    back = exchanged(exchanged(x, together, 1, 0), together, 0, 1)
    check(torch.equal(back, x), "an exchange and its reverse change the tensor")
    torch.autograd.backward(back.square().sum())
    check(x.grad is not None and torch.equal(x.grad, 2 * x.detach()), "the gradient of an exchange is wrong")
    mine = torch.arange(ranks.rank, 6, ranks.size, device=where)
    cells = together.whole(mine.float(), mine, 6)
    check(cells.tolist() == list(range(6)), f"the ranks' numbers are not joined: {cells.tolist()}")
    check(ranks.most(ranks.rank) == ranks.size - 1, "the largest of the ranks' numbers is wrong")
    total = ranks.total(torch.ones(2, device=where))
    check(total.tolist() == [ranks.size] * 2 and total.device.type == "cpu", f"the ranks' sum is {total}")
    return {"exchange": True, "join": True, "most": True, "total": True}
