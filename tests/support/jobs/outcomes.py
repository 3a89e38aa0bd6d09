"""The results of a run, byte for byte, and a reward function with arguments from the test."""

from __future__ import annotations

import json
from typing import Any

from in_process import recorded

from rolemesh.config import JobConfig
from rolemesh.services.controller.run.resume_compat import UNUSED


def outcome(job: JobConfig) -> tuple[list[dict[str, float | None]], dict[str, bytes]]:
    """Return every metric of every step, and the last checkpoint byte for byte.

    Without the settings of the reward function: its arguments may name files of one run, and it may wait for
    the test.
    """
    last = job.run_dir / f"global_step_{job.trainer.total_training_steps}"
    files = {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*") if path.is_file()}
    state = json.loads(files["controller.json"])
    kept = state["kept_settings"]
    for key in [key for key in kept if "reward.custom_reward_function" in key or key == UNUSED]:
        del kept[key]
    files["controller.json"] = json.dumps(state).encode()
    assert {"actor/model.safetensors", "critic/model.safetensors"} <= files.keys()
    return recorded(job), files


def with_reward(job: JobConfig, **kwargs: Any) -> JobConfig:
    """Return the job with these arguments for its reward function, which one process calls for all rows."""
    custom = job.reward.custom_reward_function.model_copy(update={"reward_kwargs": kwargs})
    changed = {"custom_reward_function": custom, "num_workers": 1}
    return job.model_copy(update={"reward": job.reward.model_copy(update=changed)})
