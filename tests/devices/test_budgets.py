"""What one call of a role may ask of a GPU: kernels, copies with their bytes, waits and casts.

The calls are of 16 rows of up to 16 tokens in four micro-batches, with a model of two layers in bfloat16,
packed. An update makes two optimizer steps. A change that does less passes; then lower its row. A failure says
what was measured. To see every row as it is now, set one limit of each to 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from generation import generated, prompts_of
from generation import job_of as rollout_job
from gpu_jobs import ROWS, gpu_job
from pretended_gpu import Budget, PretendedGpu
from sequences import sequence_batch

from rolemesh.config.model import ModelConfig
from rolemesh.models.reward_model import RewardModel
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.rollout.worker import RolloutWorker

# fmt: off
BUDGETS: dict[str, Budget] = {
    "actor.compute_log_probs": Budget(
        kernels=575, to_device=4, to_device_bytes=69_760, to_host=2,
        to_host_bytes=1280, waits=0, casts=69, weight_casts=80,
    ),
    "actor.update": Budget(
        kernels=1938, to_device=8, to_device_bytes=71264, to_host=2,
        to_host_bytes=112, waits=2, casts=280, weight_casts=80,
    ),
    "actor.publish_weights": Budget(
        kernels=0, to_device=0, to_device_bytes=0, to_host=26,
        to_host_bytes=560_128, waits=2, casts=0, weight_casts=0,
    ),
    "critic.compute_values": Budget(
        kernels=521, to_device=4, to_device_bytes=69_072, to_host=1,
        to_host_bytes=640, waits=0, casts=60, weight_casts=80,
    ),
    "critic.update": Budget(
        kernels=1752, to_device=8, to_device_bytes=70560, to_host=2,
        to_host_bytes=80, waits=2, casts=258, weight_casts=80,
    ),
    "reference.compute_log_probs": Budget(
        kernels=469, to_device=4, to_device_bytes=69_760, to_host=1,
        to_host_bytes=640, waits=0, casts=68, weight_casts=0,
    ),
    # One pass of 16 rows.
    "reward_model.score": Budget(
        kernels=108, to_device=1, to_device_bytes=17_712, to_host=1,
        to_host_bytes=64, waits=0, casts=15, weight_casts=0,
    ),
    # 4 rows of 16 tokens, all at once. How often the engine tidies up, for 16 kernels, depends on time.
    "rollout.generate": Budget(
        kernels=2452, to_device=9, to_device_bytes=1232, to_host=4,
        to_host_bytes=1344, waits=2, casts=288, weight_casts=336,
    ),
}
# fmt: on


@pytest.fixture(scope="module")
def calls(
    gpu: PretendedGpu, two_layers: Path, tiny_reward_model: Path
) -> Iterator[dict[str, Callable[[], Any]]]:
    """Each call, on workers that this file shares."""
    job, batch = gpu_job(two_layers), sequence_batch(ROWS)
    columns = [batch[name] for name in ("input_ids", "attention_mask", "position_ids")]
    with gpu.here():
        reward_model = RewardModel.load(ModelConfig(path=str(tiny_reward_model), dtype="bfloat16"), "cuda")
    engine = rollout_job(two_layers, dtype="bfloat16", ignore_eos=True)
    with (
        gpu.worker(ActorWorker, job) as actor,
        gpu.worker(CriticWorker, job) as critic,
        gpu.worker(ReferenceWorker, job) as reference,
        gpu.worker(RolloutWorker, engine) as rollout,
    ):
        yield {
            "actor.compute_log_probs": lambda: actor.compute_log_probs(batch),
            "actor.update": lambda: actor.update(batch),
            "actor.publish_weights": lambda: actor.publish_weights(1),
            "critic.compute_values": lambda: critic.compute_values(batch),
            "critic.update": lambda: critic.update(batch),
            "reference.compute_log_probs": lambda: reference.compute_log_probs(batch),
            "reward_model.score": lambda: reward_model.score(*columns),
            "rollout.generate": lambda: generated(rollout, prompts_of(4)),
        }


@pytest.mark.usefixtures("here", "step_by_step")  # else how often the engine tidies up depends on time
@pytest.mark.parametrize("name", BUDGETS)
async def test_a_call_keeps_its_budget(
    gpu: PretendedGpu, calls: dict[str, Callable[[], Any]], name: str
) -> None:
    if name.endswith("update"):
        await calls[name]()  # the first one allocates the optimizer's state
    gpu.record.clear()
    answer = calls[name]()
    if isawaitable(answer):
        await answer
    if over := gpu.record.over(BUDGETS[name]):
        pytest.fail(f"{name} is over its budget\n{over}", pytrace=False)


def test_no_call_may_do_more_than_the_documentation_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu-measured.md").read_text(encoding="utf-8")
    table = page.partition("## What a call asks of a GPU")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 6
    for name, numbers in rows:
        said = [int(number.replace(",", "")) for number in numbers.split(" | ")]
        budget = BUDGETS[name]
        asked = [budget.kernels, budget.to_device + budget.to_host + budget.waits, budget.weight_casts]
        assert all(most <= now for most, now in zip(asked, said, strict=True)), name
