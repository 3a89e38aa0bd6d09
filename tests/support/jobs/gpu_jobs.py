"""Jobs for the roles on a pretended GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job

ROWS = 16  # of a batch: two mini-batches of two micro-batches


def gpu_job(
    model: Path,
    *,
    packed: bool = True,
    dtype: str = "bfloat16",
    checkpointing: bool = False,
    by_tokens: bool = False,
    device: str = "cuda",
    actor: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> JobConfig:
    """Make a job whose actor, critic and reference have one kind of model.

    Args:
        model: its directory.
        packed: without padding.
        dtype: of matrix products.
        checkpointing: recompute activations in the backward pass.
        by_tokens: micro-batches of up to 60 tokens (packed) or 64 (padded), not of 4 rows.
        device: cuda or cpu.
        actor: further keys of the section.
        sections: further sections.
    """
    judging = {"use_remove_padding": packed, "dtype": dtype}
    trained = {"path": str(model), "enable_gradient_checkpointing": checkpointing, **judging}
    cut = {"use_dynamic_bsz": by_tokens, "ppo_max_token_len_per_gpu": 60 if packed else 64}
    optim = {"lr": 1e-3}
    own = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4, "model": trained, "optim": optim, **cut}
    base: dict[str, Any] = {
        "data": {"train_batch_size": ROWS, "max_prompt_length": 6, "max_response_length": 10},
        "trainer": {"device": device, "default_local_dir": str(model / "runs")},
        "actor": merge(own, actor or {}),
        "critic": {"ppo_micro_batch_size_per_gpu": 4, "model": trained, "optim": optim, **cut},
        "reference": {"model": judging, "log_prob_micro_batch_size_per_gpu": 4},
    }
    return make_job(merge(base, sections))
