"""Whether a GPU computes what a CPU does, packed and padded, in both precisions; and twice the same."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.workload import (
    CORRECT,
    DTYPES,
    check,
    job_of,
    make_model,
    prompts_of,
    rows_of,
    synchronized,
)
from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.workers.numerics import prepare_device

# Against float32 on the CPU, of numbers around 7: largest difference allowed.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.3}
MEAN_TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}


def log_probs(device: str, directory: Path) -> dict[str, Any]:
    """Log-probabilities, entropies and values of uneven rows, against float32 and padding on the CPU."""
    model = make_model(directory / "model", CORRECT[device])
    rows = rows_of(CORRECT[device], uneven=True)

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
            figures[f"{dtype} probe"] = probed(device, dtype, model)
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


def probed(device: str, dtype: str, model: Path) -> dict[str, Any]:
    """Try a model without padding, as roles do when they load, twice.

    Returns:
        Seconds of each time, of which the first loads the kernels; and how often the second ran the kernel for
        uneven lengths: in each layer, in bfloat16 on a GPU.
    """
    body = load_causal_lm(ModelConfig(path=str(model)), "actor").to(device).get_decoder()
    seconds = []
    began = synchronized(device)
    remove_padding(body, "actor", dtype)
    seconds.append(synchronized(device) - began)
    body.set_attn_implementation("sdpa")
    began = synchronized(device)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        remove_padding(body, "actor", dtype)
        seconds.append(synchronized(device) - began)
    num_kernels = sum(event.name == "torch_attn::_varlen_attn" for event in profiled.events() or ())
    expected = CORRECT[device].layers if (device, dtype) == ("cuda", "bfloat16") else 0
    check(num_kernels == expected, f"{dtype}: varlen attention ran {num_kernels} times, not {expected}")
    return {"seconds": seconds, "varlen_attention": num_kernels}


def twice(device: str, directory: Path) -> dict[str, Any]:
    """The same pass, the same update and the same generation twice: are the bits equal?

    The forward pass must have the same bits. Some kernels of the backward pass add in any order (attention's,
    and index_add). With trainer.deterministic all bits must be equal.
    """
    # As it runs first, in a process that could compute deterministically: cuBLAS reads this at its first use.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    scale = CORRECT[device]
    model = make_model(directory / "model", scale)
    rows = rows_of(scale, uneven=True)

    async def computed(job: JobConfig) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        actor = ActorWorker(job)
        found = {"log_probs": (await actor.compute_log_probs(rows))["old_log_probs"]}
        metrics = await actor.update(rows)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in named_weights(actor.model).items()}
        actor.close()
        rollout = RolloutWorker(job)
        parts = [part async for part in rollout.generate(prompts_of(scale))]
        rollout.close()
        answers = DataProto.concat(parts)
        order = answers["row"].argsort()
        found |= {f"generated {name}": column[order] for name, column in answers.tensors.items()}
        return found, weights, metrics["actor/grad_norm"]

    figures: dict[str, Any] = {}
    for deterministic in (False, True):
        job = job_of(directory, model, scale, device, {"trainer": {"deterministic": deterministic}})
        prepare_device(["actor", "rollout"], job)
        (one, weights, norm), (other, again, norm_again) = (asyncio.run(computed(job)) for _ in range(2))
        name = "trainer.deterministic" if deterministic else "as it runs"
        differing = [key for key in weights if not torch.equal(weights[key], again[key])]
        answers = [key for key in one if not torch.equal(one[key], other[key])]
        figures[name] = {
            "log_probs_equal": "log_probs" not in answers,
            "generated_equal": not answers,
            "weights_equal": not differing,
            "weights_that_differ": len(differing),
            "grad_norm_relative": abs(norm - norm_again) / norm,
        }
        check("log_probs" not in answers, f"{name}: two passes over the same rows differ in their bits")
        check(abs(norm - norm_again) <= 1e-3 * norm, f"{name}: grad_norm {norm} and {norm_again}")
        must = deterministic or device == "cpu"
        check(not (must and differing), f"{name}: two updates differ in {len(differing)} weights")
        check(not (must and answers), f"{name}: two generations differ in {answers}")
    return figures
