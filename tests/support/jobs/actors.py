"""Small jobs whose actor trains, with and without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job

# To compute each layer twice is a third more work, and the bits are the same ones
# (test_gradient_checkpointing_changes_no_bit).
WITHOUT_CHECKPOINTING = {"enable_gradient_checkpointing": False}


def actor_job(model: Path, actor: dict[str, Any] | None = None, **sections: dict[str, Any]) -> JobConfig:
    base = {
        "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 4,
        "optim": {"lr": 1e-3},
    }
    return make_job(
        {
            "data": {"train_batch_size": 16},
            "trainer": {"device": "cpu", "default_local_dir": "."},
            "critic": {"ppo_micro_batch_size_per_gpu": 4},
            "actor": base | (actor or {}),
            **sections,
        }
    )


def lora_job(model: Path, seed: int = 42, **keys: Any) -> JobConfig:
    return make_job(
        {
            "data": {"train_batch_size": 16, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "default_local_dir": "."},
            "actor": {
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
                "shuffle": True,
                "seed": seed,
                "optim": {"lr": 1e-2},
                "use_kl_loss": True,
                "model": {"path": str(model), "lora_rank": 4} | WITHOUT_CHECKPOINTING | keys,
            },
        }
    )
