"""Whatever a role answers, its client gives on what the method is declared to write, or raises RoleFailed. Real
servicers over real channels, whose worker is the real one and then spoils its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import VOCABULARY, P, T, correct, with_column, without, wrong_answers
from google.protobuf.descriptor import ServiceDescriptor

from rolemesh.columns import COLUMNS
from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.dataproto.equality import same_tensor
from rolemesh.errors import RoleFailed
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import (
    ActorClient,
    CriticClient,
    ReferenceClient,
    RewardClient,
    RoleClient,
    RolloutClient,
)
from rolemesh.rpc.contract import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.servicer import ActorServicer, ReferenceServicer
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.controller.stages.batch_metrics import batch_metrics
from rolemesh.services.critic.servicer import CriticServicer
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.reward.servicer import RewardServicer
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.wire.codec import encode
from rolemesh.wire.frame import join_frame
from rolemesh.workers.local import LocalWorker

ROWS = 4
LARGE_CELLS = [{"pred": "x" * (2 << 20)}] * ROWS
Made = tuple[type[LocalWorker], Any, ServiceDescriptor, type[RoleClient]]
ROLES: dict[str, Made] = {
    "actor": (ActorWorker, ActorServicer, ACTOR, ActorClient),
    "reference": (ReferenceWorker, ReferenceServicer, REFERENCE, ReferenceClient),
    "critic": (CriticWorker, CriticServicer, CRITIC, CriticClient),
    "reward": (RewardWorker, RewardServicer, REWARD, RewardClient),
    "rollout": (RolloutWorker, RolloutServicer, ROLLOUT, RolloutClient),
}
METHODS = [
    "rollout.generate",
    "actor.compute_log_probs",
    "actor.compute_ref_log_probs",
    "reference.compute_log_probs",
    "critic.compute_values",
    "reward.compute_scores",
]
# An estimator by which methods answer with more columns.
OTHERS = [
    ("actor.compute_log_probs", "optimal_token_baseline"),
    ("reward.compute_scores", "egpo"),
    ("reward.compute_scores", "gdpo"),
]
# Scores a row as the rules do, and tells two numbers more.
REWARD_FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "fluency": 0.25, "brevity": 0.125}
"""


def job_of(method: str, model: Path, directory: Path, estimator: str = "grpo") -> JobConfig:
    """Every column that a method may answer with comes."""
    function = directory / "reward.py"
    function.write_text(REWARD_FUNCTION)
    adapter = {"lora_rank": 4} if method == "actor.compute_ref_log_probs" else {}
    keys = {"gdpo_reward_keys": ["fluency", "brevity"]} if estimator == "gdpo" else {}
    return make_job(
        {
            "data": {"train_batch_size": ROWS, "max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu", "default_local_dir": str(directory)},
            "actor": {"model": {"path": str(model), **adapter}, "ppo_mini_batch_size": ROWS},
            "rollout": {"top_k": 4, "n": 2, "val_kwargs": {"n": 2, "do_sample": True}},
            "reward": {"custom_reward_function": {"path": str(function)}},
            "algorithm": {"adv_estimator": estimator, **keys},
        }
    )


class Spoiler:
    """What becomes of a worker's answers; they are computed once."""

    def __init__(self) -> None:
        self.spoil: Callable[[DataProto], DataProto] = lambda answer: answer
        self.answers: list[DataProto] = []


def spoiling(worker: type[Any], name: str, spoiler: Spoiler) -> type[Any]:
    """The worker, whose method `name` spoils its answers."""

    async def whole(self: Any, batch: DataProto) -> DataProto:
        spoiler.answers = spoiler.answers or [await getattr(worker, name)(self, batch)]
        return spoiler.spoil(spoiler.answers[0])

    async def parts(self: Any, batch: DataProto) -> AsyncIterator[DataProto]:
        if not spoiler.answers:
            spoiler.answers = [part async for part in getattr(worker, name)(self, batch)]
        for part in spoiler.answers:
            yield spoiler.spoil(part)

    return type("Spoiling", (worker,), {name: parts if name == "generate" else whole})


@asynccontextmanager
async def spoilt(method: str, job: JobConfig) -> AsyncIterator[tuple[Spoiler, Callable[..., Any], str]]:
    """A role whose answers can be spoilt, a client's method that asks it, and its address."""
    role, name = method.split(".")
    worker_class, servicer, service, client_class = ROLES[role]
    spoiler = Spoiler()
    worker = spoiling(worker_class, name, spoiler)(job)
    server = RoleServer({role: [service]})
    address = await server.start("127.0.0.1:0")
    await server.ready({service: servicer(worker)})
    try:
        async with client_class([address], methods(job), vocabulary=VOCABULARY) as client:
            yield spoiler, getattr(client, name), address
    finally:
        await server.drain(0)
        worker.close()


async def answer_to(ask: Callable[..., Any], request: DataProto) -> DataProto:
    """The whole answer, whether it comes at once or in parts."""
    asked = ask(request)
    if not hasattr(asked, "__aiter__"):
        return await asked
    answer = DataProto.concat([part async for part in asked])
    return answer[answer["row"].argsort()]


def test_every_method_that_answers_with_a_batch_is_spoilt_here(tiny_model: Path, tmp_path: Path) -> None:
    declared = methods(job_of("", tiny_model, tmp_path))
    assert sorted(METHODS) == sorted(name for name, method in declared.items() if method.writes)


def test_every_column_that_a_method_may_write_is_spoilt_here(tiny_model: Path, tmp_path: Path) -> None:
    asked = [*((method, "grpo") for method in METHODS), *OTHERS]
    jobs = {estimator: job_of("", tiny_model, tmp_path, estimator) for _, estimator in asked}
    spoilt_here = {name for method, estimator in asked for name in methods(jobs[estimator])[method].writes}
    never = {"prompts", "prompt_mask", "uid", "seeds", "data_source", "reward_model", "extra_info", "input_ids",
             "attention_mask", "position_ids", "reward_baselines", "token_level_rewards", "rollout_is_weights",
             "loss_mask", "advantages", "returns", "agent_name", "messages", "turns", "contexts",
             "environment_rewards", "conversation", "response_texts"}  # fmt: skip
    assert spoilt_here == set(COLUMNS) - never


@pytest.mark.parametrize(("method", "estimator"), [*((method, "grpo") for method in METHODS), *OTHERS])
async def test_a_wrong_answer_fails_by_name_and_a_right_one_arrives(
    method: str, estimator: str, tiny_model: Path, tmp_path: Path
) -> None:
    """A wrong answer is the role's failure; a right one arrives bit for bit."""
    job = job_of(method, tiny_model, tmp_path, estimator)
    declared = methods(job)[method]
    request = correct(declared, ROWS)
    unlike_expected: dict[str, Any] = {}
    async with spoilt(method, job) as (spoiler, ask, address):
        right = await answer_to(ask, request)
        assert right.columns and sorted(right.columns) == sorted(declared.writes)  # noqa: PT018
        whole = DataProto.concat(spoiler.answers)
        whole = whole[whole["row"].argsort()] if "row" in whole else whole
        spoiler.answers = [whole]
        for column, how, wrong in wrong_answers(whole, request):
            spoiler.spoil = lambda _, wrong=wrong: wrong
            try:
                unlike_expected[f"{column} {how}"] = (await answer_to(ask, request)).columns
            except RoleFailed as error:
                named = f"{declared.role}.{declared.rpc} at {address}" in str(error) and method in str(error)
                if not named or column not in str(error):
                    unlike_expected[f"{column} {how}"] = str(error)
        assert unlike_expected == {}
        spoiler.spoil = lambda answer: answer
        again = await answer_to(ask, request)
    assert again.columns == right.columns
    assert all(same_tensor(tensor, whole[name]) for name, tensor in again.tensors.items())
    assert all(cells.tolist() == whole[name].tolist() for name, cells in again.non_tensors.items())


async def test_an_answer_may_hold_any_float_in_padding(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of("critic.compute_values", tiny_model, tmp_path)
    request = correct(methods(job)["critic.compute_values"], ROWS)
    async with spoilt("critic.compute_values", job) as (spoiler, ask, _):
        spoiler.spoil = lambda answer: with_column(
            answer, "values", answer["values"].where(request["response_mask"], torch.nan)
        )
        values = (await answer_to(ask, request))["values"]
    assert torch.equal(values.isfinite(), request["response_mask"])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -1.0])
async def test_a_score_may_stand_on_sampled_tokens_alone(
    number: float, tiny_model: Path, tmp_path: Path
) -> None:
    """Outcomes sum all cells of a row, and gae those of its tokens: they would learn from other rewards."""
    job = job_of("reward.compute_scores", tiny_model, tmp_path)
    request = correct(methods(job)["reward.compute_scores"], ROWS)
    row, position = (~request["response_mask"]).nonzero()[0].tolist()
    async with spoilt("reward.compute_scores", job) as (spoiler, ask, _):

        def spoil(answer: DataProto) -> DataProto:
            scores = answer["token_level_scores"].clone()
            scores[row, position] = number
            return with_column(answer, "token_level_scores", scores)

        spoiler.spoil = spoil
        where = f"'token_level_scores', row {row}, position {position}, is "
        with pytest.raises(RoleFailed, match=f"{where}.*0 expected where response_mask is False"):
            await answer_to(ask, request)


async def test_extra_numbers_of_a_reward_have_finite_means(tiny_model: Path, tmp_path: Path) -> None:
    """However large its numbers are: the controller logs the mean of each, and votes with the texts."""
    job = job_of("reward.compute_scores", tiny_model, tmp_path)
    request = correct(methods(job)["reward.compute_scores"], ROWS)
    largest = torch.finfo(torch.float32).max
    said = [{"n": 10**38, "m": largest, "pred": "x"}, {"n": -3, "m": largest}, {"m": -0.5, "pred": ""}, {}]
    async with spoilt("reward.compute_scores", job) as (spoiler, ask, _):
        spoiler.spoil = lambda answer: with_column(answer, "reward_extra_info", said)
        answered = await answer_to(ask, request)
    assert list(answered["reward_extra_info"]) == said
    zeros = torch.zeros(ROWS, T)
    learnt = dict.fromkeys(("token_level_rewards", "advantages", "returns"), zeros)
    masks = {name: request[name] for name in ("prompt_mask", "response_mask")}
    masks["attention_mask"] = torch.cat(tuple(masks.values()), 1).long()
    metrics = batch_metrics(answered.union(DataProto.from_dict(learnt | masks)), job.actor)
    means = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert means == {
        "reward/n/mean": pytest.approx(0.5 * 10**38),
        "reward/m/mean": pytest.approx(2 / 3 * largest),
    }


@pytest.mark.parametrize("sampling", ["validation", "greedy"])
async def test_kept_ids_come_for_training_alone(sampling: str, tiny_model: Path, tmp_path: Path) -> None:
    job = job_of("rollout.generate", tiny_model, tmp_path)
    request = correct(methods(job)["rollout.generate"], ROWS)
    request.meta_info["sampling"] = sampling
    async with spoilt("rollout.generate", job) as (spoiler, ask, _):
        assert "kept_ids" not in await answer_to(ask, request)
        kept = torch.zeros(ROWS, T, 4, dtype=torch.int32)
        spoiler.spoil = lambda answer: with_column(answer, "kept_ids", kept[: len(answer)])
        with pytest.raises(RoleFailed, match=r"has columns \['kept_ids'\] besides"):
            await answer_to(ask, request)


async def test_bytes_that_are_no_batch_are_the_roles_failure(tiny_model: Path, tmp_path: Path) -> None:
    class Babbling(RewardServicer):
        async def ComputeScores(self, batch: DataProto, context: Any) -> AsyncIterator[Any]:
            yield b"\xff" * 40

    job = job_of("reward.compute_scores", tiny_model, tmp_path)
    server = RoleServer({"reward": [REWARD]})
    address = await server.start("127.0.0.1:0")
    worker = RewardWorker(job)
    await server.ready({REWARD: Babbling(worker)})
    async with RewardClient([address], methods(job)) as client:
        with pytest.raises(RoleFailed, match=f"reward.ComputeScores at {address}.*not a"):
            await client.compute_scores(correct(methods(job)["reward.compute_scores"], ROWS))
    await server.drain(0)
    worker.close()


def wider(answer: DataProto, name: str) -> DataProto:
    return with_column(answer, name, torch.cat([answer[name]] * 2, 1))


@pytest.mark.parametrize(
    ("method", "spoil", "words"),
    [
        ("reward.compute_scores", lambda a: with_column(a, "more", torch.rand(ROWS, T)), r"\['more'\] besides"),
        ("reward.compute_scores", lambda a: without(a, "acc"), r"lacks tensors \['acc'\]"),
        (
            "reward.compute_scores",
            lambda a: wider(a, "token_level_scores"),
            "'token_level_scores' is torch.float32",
        ),
        ("reward.compute_scores", lambda a: DataProto.concat([a, a]), "4 rows were asked for, 8 came"),
        (
            "reward.compute_scores",
            lambda a: with_column(a, "reward_extra_info", LARGE_CELLS),
            "may take 1048576",
        ),
        ("rollout.generate", lambda a: with_column(a, "acc", torch.rand(len(a))), r"\['acc'\] besides"),
        ("rollout.generate", lambda a: wider(a, "responses"), "'responses' is torch.int64"),
        ("rollout.generate", lambda a: DataProto.concat([a] * 5), "4 rows were asked for, "),
    ],
)
async def test_an_answer_is_refused_from_its_header(
    method: str, spoil: Callable[[DataProto], DataProto], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The server sends the header alone, and then nothing: a client that waited for the region would hang."""
    job = job_of(method, tiny_model, tmp_path)
    role, name = method.split(".")
    worker_class, servicer, service, client_class = ROLES[role]
    worker = worker_class(job)
    request = correct(methods(job)[method], ROWS)

    async def header_of(self: Any, batch: DataProto, context: Any) -> AsyncIterator[bytes]:
        made = getattr(worker, name)(batch)
        right = DataProto.concat([part async for part in made]) if name == "generate" else await made
        encoded = encode(spoil(right))
        assert encoded.region_bytes
        yield join_frame(encoded.header, (), 0)
        await asyncio.Event().wait()

    server = RoleServer({role: [service]})
    address = await server.start("127.0.0.1:0")
    await server.ready({service: type("Silent", (servicer,), {methods(job)[method].rpc: header_of})(worker)})
    try:
        async with client_class([address], methods(job)) as client, asyncio.timeout(120):
            with pytest.raises(RoleFailed, match=words):
                await answer_to(getattr(client, name), request)
    finally:
        await server.drain(0)
        worker.close()
