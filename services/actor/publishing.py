"""In which dtype the actor publishes its weights."""

from __future__ import annotations

import torch

from rolemesh.config import JobConfig
from rolemesh.models.loading import resolve_dtype


def published_dtype(job: JobConfig, device: torch.device, dtype: str) -> torch.dtype | None:
    """Return the dtype of published weights; None: the dtype of the model's weights.

    It is rollout.dtype if the engine holds its weights in it. The engine would cast them anyway; cast here they
    are fewer bytes to copy and to send. `auto` is decided for this role's device. A rollout on a device of
    another kind may need float32; then it refuses them.

    For other engines weights are float32, also if those below an adapter are held in `dtype`.

    Args:
        job: the job.
        device: of the actor.
        dtype: in which the actor computes, decided for its device.
    """
    if not job.engine.reserves_memory:
        return torch.float32 if job.actor.model.lora_rank and dtype != "float32" else None
    wanted = job.rollout.dtype
    chosen = resolve_dtype(wanted, "rollout.dtype", device) if wanted == "auto" else wanted
    found: torch.dtype = getattr(torch, chosen)
    return found
