"""Whether a GPU computes what a CPU does, packed and padded, in both precisions; and twice the same."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.workload import CORRECT, DTYPES, check, job_of, make_model, rows_of
from rolemesh.models.loading import named_weights
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker

# Against float32 on the CPU, of numbers around 7: largest difference allowed.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.3}
MEAN_TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}


def log_probs(device: str, directory: Path) -> dict[str, Any]:
    """Log-probabilities, entropies and values of uneven rows, against float32 and padding on the CPU."""
    model, rows = make_model(directory / "model", CORRECT[device]), rows_of(CORRECT[device], uneven=True)

    async def computed(on: str, dtype: str, packed: bool) -> dict[str, Tensor]:
        setting = {"dtype": dtype, "use_remove_padding": packed}
        job = job_of(
            directory, model, CORRECT[device], on, {"actor": {"model": setting}, "critic": {"model": setting}}
        )
        actor = ActorWorker(job)
        found = dict((await actor.compute_log_probs(rows)).tensors)
        actor.close()
        critic = CriticWorker(job)
        found |= (await critic.compute_values(rows)).tensors
        critic.close()
        return found

    async def measured() -> dict[str, Any]:
        expected = await computed("cpu", "float32", packed=False)
        figures: dict[str, Any] = {}
        for dtype in DTYPES[device]:
            for packed in (False, True):
                found = await computed(device, dtype, packed)
                for name, column in expected.items():
                    far = (found[name] - column).abs()[rows["response_mask"]]
                    label = f"{dtype} {'packed' if packed else 'padded'} {name}"
                    figures[label] = {"max": float(far.max()), "mean": float(far.mean())}
                    in_bounds = far.max() <= TOLERANCE[dtype] and far.mean() <= MEAN_TOLERANCE[dtype]
                    check(
                        bool(in_bounds), f"{label} differ by up to {far.max():.2g}, {far.mean():.2g} on average"
                    )
        return figures

    return asyncio.run(measured())


def twice(device: str, directory: Path) -> dict[str, Any]:
    """The same pass and the same update twice: are the bits equal?

    The forward pass must have the same bits. Some kernels of the backward pass add in any order (attention's,
    and index_add); with torch's deterministic algorithms they should not.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at cuBLAS' first use
    model, rows = make_model(directory / "model", CORRECT[device]), rows_of(CORRECT[device], uneven=True)
    job = job_of(directory, model, CORRECT[device], device)

    async def updated() -> tuple[Tensor, dict[str, Tensor], float]:
        actor = ActorWorker(job)
        before = (await actor.compute_log_probs(rows))["old_log_probs"]
        metrics = await actor.update(rows)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in named_weights(actor.model).items()}
        actor.close()
        return before, weights, metrics["actor/grad_norm"]

    figures: dict[str, Any] = {}
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        (one, weights, norm), (other, again, norm_again) = (asyncio.run(updated()) for _ in range(2))
        name = "deterministic algorithms" if deterministic else "as it runs"
        differing = [key for key in weights if not torch.equal(weights[key], again[key])]
        figures[name] = {
            "log_probs_equal": torch.equal(one, other),
            "weights_equal": not differing,
            "weights_that_differ": len(differing),
            "grad_norm_relative": abs(norm - norm_again) / norm,
        }
        check(torch.equal(one, other), f"{name}: two passes over the same rows differ in their bits")
        check(abs(norm - norm_again) <= 1e-3 * norm, f"{name}: grad_norm {norm} and {norm_again}")
    check(
        device == "cuda" or figures["as it runs"]["weights_equal"], "two updates on a CPU differ in their bits"
    )
    return figures
