"""Roles on several ranks compute and train as on one: whole workers, whose rank 0 gives real orders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from float64 import loaded_in_float64
from many_ranks import on_ranks
from reward_rows import TOKENIZER, batch
from sequences import sequence_batch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.executor import Command
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.ranks.sharding import whole
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.workers.commands import command_of
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

WORKERS: dict[str, Callable[[JobConfig, WorkerContext], Any]] = {
    "actor": ActorWorker, "critic": CriticWorker, "reference": ReferenceWorker, "reward": RewardWorker,
}  # fmt: skip
# a role, its ranks that compute the same rows, its steps, sections of its job
Case = tuple[str, int, int, dict[str, Any]]
# of each way to spread a model: without common prefixes, then with these and with moments; of a loss
STEPS, ONCE = 2, 1
ROWS = 12

# Settings that need more of a mini-batch than its rows one by one.
DYNAMIC = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 24}
CLIP_COV = {
    "policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
}
BYPASS = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
LORA = {"model": {"lora_rank": 2}}
ENTROPY = {"entropy_coeff": 0.01, "use_kl_loss": True, "shuffle": True, "ppo_epochs": 2}
ONE_EPOCH = ENTROPY | {"ppo_epochs": 1}
PADDED = {"model": {"use_remove_padding": False}}
ONE_ROW = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}  # fewer rows than ranks
GSPO = {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}
KL_COV, SAPO, GEO_MEAN, CISPO, DRO, GPG, DPPO_TV, DPPO_KL, DPO, DPO_NORM, IPO = (
    {"policy_loss": {"loss_mode": mode, "kl_cov_ratio": 0.3, "dro_beta": 0.1, "dpo_beta": 0.1}}
    for mode in (
        *("kl_cov", "sapo", "geo_mean", "cispo", "dro"),
        *("gpg", "dppo_tv", "dppo_kl", "dpo", "dpo_norm", "ipo"),
    )
)
SUPERVISED, PREFERENCES = ({"algorithm": {"page": page}} for page in ("sft", "dpo"))

ON_TWO: list[Case] = [
    ("actor", 1, STEPS, {"actor": ENTROPY}),
    ("actor", 1, STEPS, {"actor": DYNAMIC | KL_COV}),
    ("actor", 1, STEPS, {"actor": PADDED} | BYPASS),
    ("actor", 1, ONCE, {"actor": ONE_ROW | SAPO}),
    ("critic", 1, STEPS, {"critic": DYNAMIC}),
    ("actor", 2, STEPS, {"actor": ONE_EPOCH | GSPO}),
    ("critic", 2, STEPS, {}),
    ("actor", 1, ONCE, {"actor": DYNAMIC | GPG}),
    ("actor", 2, ONCE, {"actor": DPPO_TV}),
    ("actor", 1, ONCE, {"actor": DYNAMIC | DPO} | PREFERENCES),
    ("actor", 2, ONCE, SUPERVISED),
]
ON_FOUR: list[Case] = [
    ("actor", 1, STEPS, {"actor": ONE_EPOCH | GEO_MEAN | {"fsdp_config": {"fsdp_size": 2}}}),
    ("critic", 1, STEPS, {"critic": {"ppo_mini_batch_size": 3, "ppo_micro_batch_size_per_gpu": 1}}),
    ("actor", 2, STEPS, {"actor": CLIP_COV}),
    ("actor", 2, ONCE, {"actor": DPO_NORM} | PREFERENCES),
]
# Each way to spread a model over four ranks.
ON_FOUR_IN_FLOAT32: list[Case] = [
    ("actor", 1, STEPS, {"actor": ONE_EPOCH}),
    ("critic", 1, STEPS, {"critic": {"model": {"fsdp_config": {"fsdp_size": 2}}}}),
    ("actor", 2, STEPS, {"actor": ONE_EPOCH}),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks") / "model"
    make_tiny_model(directory, "qwen2", hidden_size=32, num_layers=2)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    scorer.save_pretrained(directory / "scorer")
    TOKENIZER.save_pretrained(directory / "scorer")
    return directory


def job_of(model: Path, directory: Path, sections: Mapping[str, Any]) -> JobConfig:
    base = {
        "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
        "ppo_mini_batch_size": 6,
        "ppo_micro_batch_size_per_gpu": 2,
        "optim": {"lr": 1e-3},
    }
    given = {
        "data": {"train_batch_size": ROWS, "max_prompt_length": 6, "max_response_length": 10},
        "trainer": {"device": "cpu", "default_local_dir": str(directory / "run")},
        "actor": base,
        "critic": base,
        "algorithm": {"use_kl_in_reward": True},
        "reward": {"reward_model": {"enable": True, "model": {"path": str(model / "scorer")}}},
    }
    return make_job(merge(given, dict(sections)))


def batch_of(step: int) -> DataProto:
    """Rows of very uneven length, one of which has no token that the policy sampled.

    In every other step each prompt has two answers, whose equal beginning is computed once.
    """
    batch = sequence_batch(ROWS, seed=step, answers=1 + step % 2)
    batch["response_mask"][1] = False
    batch["rollout_log_probs"] = batch["old_log_probs"] + 0.1
    return batch


def as_pairs(batch: DataProto) -> DataProto:
    """Begin another context in the middle of each response, as the rejected answer of a pair does (0023)."""
    width, begin = batch["input_ids"].shape[1], batch["input_ids"].shape[1] - 5
    second = (torch.arange(width) >= begin) & batch["attention_mask"].bool()
    batch["contexts"] = second[:, -batch["response_mask"].shape[1] :].long()
    batch["position_ids"] = torch.where(second, torch.arange(width) - begin, batch["position_ids"])
    batch["response_mask"][:, -5] = False  # nothing predicts the first token of a context
    return batch


async def worked(worker: Any, steps: int) -> list[Any]:
    """Train this number of steps. Return the metrics of each, and the answers by row before each."""
    answers: list[Any] = []
    if isinstance(worker, RewardWorker):
        for num_rows in (7, 1):  # one row is fewer than the ranks
            rows = batch(*(("chat", "!" * row, None) for row in range(num_rows)), style="model")
            answers.append((await worker.compute_scores(rows))["acc"])
        return answers
    for step in range(steps):
        rows = batch_of(step)
        if "contexts" in worker.job.policy_loss.reads:
            rows = as_pairs(rows)
        if isinstance(worker, ActorWorker):
            answers.append((await worker.compute_log_probs(rows))["old_log_probs"])
        elif isinstance(worker, CriticWorker):
            answers.append((await worker.compute_values(rows))["values"])
        else:
            answers.append((await worker.compute_log_probs(rows))["ref_log_probs"])
            continue
        metrics = await worker.update(rows)
        several = worker.worker_context.ranks.size > 1  # what the ranks took is not what one took
        assert ("perf/imbalance/" + worker.role in metrics) == several
        assert not several or metrics["timing_s/collectives/" + worker.role] > 0
        answers.append({name: metrics[name] for name in metrics if not name.startswith(("perf/", "timing_s/"))})
    return answers


def weights_of(worker: Any) -> dict[str, Tensor]:
    """The whole trained weights. Every rank calls it."""
    trained = isinstance(worker, ActorWorker | CriticWorker)
    return {name: whole(p).detach() for name, p in worker.model.named_parameters()} if trained else {}


def agrees(found: Sequence[Any], expected: Sequence[Any], bound: float) -> None:
    for mine, other in zip(found, expected, strict=True):
        if isinstance(mine, Tensor):
            assert (mine - other).abs().max() <= 10 * bound
        else:
            assert mine == pytest.approx(other, rel=1e3 * bound, abs=1e3 * bound)


def train_as_one(
    ranks: Ranks, directory: Path, model: Path, in_float64: Sequence[Case], in_float32: Sequence[Case]
) -> None:
    """Train every case on all ranks, and on rank 0 also alone."""
    rendezvous = Rendezvous.of(os.environ)
    cases = [(*case, True) for case in in_float64] + [(*case, False) for case in in_float32]
    names = [f"case-{number}" for number in range(len(cases))]
    threads = {name: ComputingThread(name) for name in names}
    workers: dict[str, Any] = {}
    worker_contexts = {}
    for name, (role, sharing, _, sections, double) in zip(names, cases, strict=True):
        key: dict[str, Any] = {"ulysses_sequence_parallel_size": sharing}
        shared = {role: {"reward_model": key} if role == "reward" else key}
        # A job with fewer rows in a mini-batch than ranks is refused, but would be computed.
        placed = {"placement": {"ranks": {role: ranks.size}}} | shared if sharing > 1 else {}
        job = job_of(model, directory, merge(placed, sections))
        worker_contexts[name] = WorkerContext(threads[name], ranks=Ranks.of_process("cpu", sharing))
        with loaded_in_float64() if double else nullcontext():
            workers[name] = threads[name].submit(WORKERS[role], job, worker_contexts[name]).result()

    def command(name: str, method: str) -> Command:
        return command_of(workers[name], method)

    async def lead() -> dict[str, list[Any]]:
        leader = Leader(names, rendezvous)
        await leader.start()
        await leader.gather()
        answers = {}
        for name, (_, _, steps, _, _) in zip(names, cases, strict=True):
            object.__setattr__(worker_contexts[name], "executor", leader.executor(name))
            answers[name] = await worked(workers[name], steps)
        await leader.close()
        return answers

    if ranks.rank == 0:
        found = asyncio.run(lead())
    else:
        asyncio.run(follow(names, rendezvous, threads, command))
    for name, (role, _, steps, sections, double) in zip(names, cases, strict=True):
        of_ranks, bound = weights_of(workers[name]), 1e-10 if double else 1e-5
        if ranks.rank == 0:
            with loaded_in_float64() if double else nullcontext():
                one = WORKERS[role](job_of(model, directory, sections), WorkerContext(ComputingThread("one")))
            agrees(found[name], asyncio.run(worked(one, steps)), bound)
            for parameter, weight in weights_of(one).items():
                assert (of_ranks[parameter] - weight).abs().max() <= bound, (name, parameter)
        ranks.wait()


def test_two_ranks_train_as_one_in_float64(model: Path, tmp_path: Path) -> None:
    on_ranks(2, train_as_one, tmp_path, model, ON_TWO, [])


def test_four_ranks_train_as_one_in_float64_and_in_float32(model: Path, tmp_path: Path) -> None:
    on_ranks(4, train_as_one, tmp_path, model, ON_FOUR, ON_FOUR_IN_FLOAT32)


def test_two_ranks_train_as_one_in_float32(model: Path, tmp_path: Path) -> None:
    cases: list[Case] = [("actor", 1, STEPS, {"actor": ONE_EPOCH | CISPO}), ("critic", 1, STEPS, {})]
    cases += [("actor", 1, STEPS, {"actor": LORA | DRO})]
    cases += [("actor", 1, ONCE, {"actor": DPPO_KL}), ("actor", 1, ONCE, {"actor": PADDED | IPO} | PREFERENCES)]
    cases += [(role, sharing, STEPS, {}) for role in ("reference", "reward") for sharing in (1, 2)]
    on_ranks(2, train_as_one, tmp_path, model, [], cases)
