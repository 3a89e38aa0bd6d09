"""One law guards codec, servicers, clients and placement: the same seeded steps, in process and over gRPC, with
one replica of the stateless roles and with two, each role alone or several taking turns, give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import recorded, small_job, train
from serving import num_switches, train_over_grpc

from rolemesh.config import JobConfig
from rolemesh.config.placement import strategies

# The second step begins with what the first left: weights, moments of the optimizers, the KL coefficient.
SAVED = ("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2")
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


TWO_REPLICAS = [f"placement.replicas.{role}=2" for role in ("rollout", "reference", "reward")]
# Nobody's layout: roles beside each other that no table puts there, one of them with another that never sleeps.
OWN_GROUPS = "placement.groups={odd: [critic, rollout], pair: [reference, reward], actor: [actor]}"
PLACEMENTS = {name: [f"placement.strategy={name}"] for name, groups in strategies().items() if groups} | {
    "replicas": TWO_REPLICAS,
    "0 steps ahead": [*TWO_REPLICAS, "rollout.mode=async", "trainer.max_staleness=0"],
    "custom": ["placement.strategy=custom", OWN_GROUPS],
}


# PPO has every role, and goes everywhere; `standalone` is in "replicas". GRPO has several answers to a prompt.
CASES = [("ppo", placement) for placement in PLACEMENTS if placement != "standalone"]
CASES += [("grpo", placement) for placement in ("collocate", "replicas")]


def checkpoint(job: JobConfig) -> dict[str, bytes]:
    """Weights, optimizer states, counters and KL coefficient, byte for byte."""
    last = job.run_dir / "global_step_2"
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made() -> dict[str, JobConfig]:
    """The runs in process that others are compared with, by algorithm. (pytest makes a fixture that gets its
    parameter from a test anew for each case.)"""
    return {}


async def in_process(
    algorithm: str, made: dict[str, JobConfig], model: Path, folders: pytest.TempPathFactory
) -> JobConfig:
    if algorithm not in made:
        job = small_job(folders.mktemp(algorithm), model, "run", *ALGORITHMS[algorithm])
        await train(job)
        made[algorithm] = job
    return made[algorithm]


@pytest.mark.parametrize(("algorithm", "placement"), CASES)
async def test_steps_over_grpc_equal_steps_in_process_bit_for_bit(
    algorithm: str, placement: str, made: dict[str, JobConfig], tiny_model: Path, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    expected = await in_process(algorithm, made, tiny_model, tmp_path_factory)
    job = small_job(tmp_path, tiny_model, "run", *ALGORITHMS[algorithm], *PLACEMENTS[placement])
    before = num_switches()
    await train_over_grpc(job)
    shares = any(sum(map(job.on_device, roles)) > 1 for roles in job.plan.grouping.values())
    assert (num_switches() > before) == shares
    assert_same_bits(job, expected)


def assert_same_bits(job: JobConfig, expected: JobConfig) -> None:
    assert recorded(job) == recorded(expected)
    assert len(recorded(job)) == 3  # the validation before training, and two steps
    written, wanted = checkpoint(job), checkpoint(expected)
    assert written.keys() == wanted.keys()
    assert {"actor/model.safetensors", "actor/optimizer.safetensors"} <= wanted.keys()
    assert [name for name in wanted if written[name] != wanted[name]] == []


async def test_dynamic_sampling_over_grpc_equals_in_process_bits(tiny_model: Path, tmp_path: Path) -> None:
    overrides = (
        *SAVED, "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "data.gen_batch_size=6",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward", "rollout.seed=3",
    )  # fmt: skip
    expected = small_job(tmp_path, tiny_model, "in-process", *overrides)
    await train(expected)
    assert max(record.get("train/num_gen_batches") or 0 for record in recorded(expected)) > 1
    assert max(record.get("sampling/groups_from_before") or 0 for record in recorded(expected)) > 0
    job = small_job(tmp_path, tiny_model, "grpc", *overrides, *TWO_REPLICAS)
    await train_over_grpc(job)
    assert_same_bits(job, expected)
