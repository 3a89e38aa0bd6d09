"""One law guards codec, servicers, clients and placement: the same seeded steps, in process and over gRPC,
with one replica of the stateless roles and with two, give the same bits."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from in_process import course, small_job, train
from serving import served

from rolemesh.config import JobConfig
from rolemesh.models.loading import load_tokenizer
from services.control import drive
from services.controller.loop import Run

STATELESS = ("rollout", "reference", "reward")
LOCAL = "127.0.0.1:0"
SAVED = ("trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.test_freq=3")
ALGORITHMS = {
    "ppo": SAVED,  # GAE, critic, adaptive KL in the reward
    "grpo": (
        *SAVED,
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "actor.use_kl_loss=true",
        "rollout.n=4",
        "rollout.top_p=0.9",
        "rollout.top_k=50",
        "algorithm.rollout_correction.rollout_is=sequence",
    ),
}


async def train_over_grpc(job: JobConfig, replicas: int) -> None:
    """The whole run with every role behind a port."""
    async with AsyncExitStack() as stack:
        addresses = {}
        for role in job.roles:
            count = replicas if role in STATELESS else 1
            addresses[role] = await stack.enter_async_context(served(role, *[job] * count))
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None)


def checkpoint(job: JobConfig) -> dict[str, bytes]:
    """Weights, optimizer states, counters and KL coefficient, byte for byte."""
    last = job.run_dir / "global_step_3"
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", params=ALGORITHMS)
async def in_process(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobConfig, tuple[str, ...]]:
    overrides = ALGORITHMS[request.param]
    job = small_job(tmp_path_factory.mktemp(request.param), tiny_model, "run", *overrides)
    await train(job)
    return job, overrides


@pytest.mark.parametrize(("replicas", "mode"), [(1, "sync"), (2, "sync"), (2, "async")])
async def test_steps_over_grpc_equal_steps_in_process_bit_for_bit(
    in_process: tuple[JobConfig, tuple[str, ...]], replicas: int, mode: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Also where rollouts may run 0 steps ahead."""
    expected, overrides = in_process
    overrides = (*overrides, f"rollout.mode={mode}", "trainer.max_staleness=0")
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    await train_over_grpc(job, replicas)
    assert course(job) == course(expected)
    assert len(course(job)) == 4  # the validation before training, and three steps
    written, wanted = checkpoint(job), checkpoint(expected)
    assert written.keys() == wanted.keys()
    assert {"actor/model.safetensors", "actor/optimizer.safetensors"} <= wanted.keys()
    assert [name for name in wanted if written[name] != wanted[name]] == []
