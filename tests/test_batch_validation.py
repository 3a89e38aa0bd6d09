"""Whatever content comes over an rpc, a role answers with a status of the table, names what is wrong, and goes
on as if nothing had come. Real servicers, real channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from batches import LIMITS, VOCABULARY, P, T, correct, of_shape, with_column, wrong_columns, wrong_wholes
from serving import served

from rolemesh.columns import COLUMNS
from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.rpc.contract import Rpc, deserializer, rpcs, serializer
from rolemesh.rpc.status_codes import ENDED_WHILE_WRITING, ERROR_KEY
from rolemesh.services.processes.serve import services_of
from rolemesh.wire.streams import receive_batches, send

ROWS = 4
METHODS = [
    "rollout.generate",
    "actor.compute_log_probs",
    "actor.update",
    "actor.compute_ref_log_probs",
    "reference.compute_log_probs",
    "critic.compute_values",
    "critic.update",
    "reward.compute_scores",
]


def job_of(model: Path, directory: Path, **actor_model: Any) -> JobConfig:
    """Every column that a method may read is read."""
    rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    trained = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 2, "optim": {"lr": 1e-3}}
    return make_job(
        {
            "data": {"train_batch_size": ROWS, "max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu", "default_local_dir": str(directory)},
            "actor": {"model": {"path": str(model), **actor_model}, "use_kl_loss": True, **trained},
            "critic": trained,
            "rollout": {"top_k": 4},
            "algorithm": {"rollout_correction": {"rollout_is": "token", **rejecting}},
        }
    )


@dataclass
class Role:
    """A role's method behind a real channel."""

    channel: grpc.aio.Channel
    rpc: Rpc

    async def ask(self, batch: DataProto | list[bytes]) -> Any:
        """The answer: a batch in the order of the request, or metrics. Raises AioRpcError."""
        frames = send(batch) if isinstance(batch, DataProto) else batch
        kind = "stream_stream" if self.rpc.streams[1] else "stream_unary"
        start = getattr(self.channel, kind)
        call = start(self.rpc.path, serializer(self.rpc.request), deserializer(self.rpc.response))(frames)
        if not self.rpc.streams[1]:
            return dict((await call).metrics)
        answer = DataProto.concat([part async for part in receive_batches(call)])
        answer = answer[answer["row"].argsort()] if "row" in answer else answer
        return {name: tensor.tolist() for name, tensor in answer.tensors.items()}

    async def refusal(self, batch: DataProto | list[bytes]) -> tuple[str, str, str]:
        """Status, class and words of how a call ends that should not end well. Where grpc.aio lost them, as the
        call ended while its request was being written, the call is made again."""
        try:
            await self.ask(batch)
        except grpc.aio.AioRpcError as error:
            if error.details() == ENDED_WHILE_WRITING:
                return await self.refusal(batch)
            trailing: Any = error.trailing_metadata() or ()
            return error.code().name, dict(trailing).get(ERROR_KEY, ""), error.details() or ""
        return "OK", "", ""


@asynccontextmanager
async def role_of(method: str, job: JobConfig) -> AsyncIterator[Role]:
    role, declared = method.split(".")[0], methods(job)[method]
    [rpc] = [rpc for service in services_of(role) for rpc in rpcs(service) if rpc.name == declared.rpc]
    async with served(role, job) as [address], grpc.aio.insecure_channel(address) as channel:
        yield Role(channel, rpc)


def job_for(method: str, tiny_model: Path, tmp_path: Path) -> JobConfig:
    with_adapter = {"lora_rank": 4} if method == "actor.compute_ref_log_probs" else {}
    return job_of(tiny_model, tmp_path, **with_adapter)


def test_every_method_that_takes_a_batch_is_asked_here(tiny_model: Path, tmp_path: Path) -> None:
    assert sorted(METHODS) == sorted(methods(job_of(tiny_model, tmp_path)))


def test_integers_have_limits_that_were_thought_of(tiny_model: Path, tmp_path: Path) -> None:
    """All but seeds, of which any will do. Whoever declares another column says in LIMITS what it may hold."""
    read = {name for method in methods(job_of(tiny_model, tmp_path)).values() for name in method.reads}
    integers = {name for name in read if COLUMNS[name].dtype in (torch.int32, torch.int64)}
    assert integers == {*LIMITS, "seeds"}


@pytest.mark.parametrize("method", METHODS)
async def test_a_batch_of_wrong_content_is_refused_and_changes_nothing(
    method: str, tiny_model: Path, tmp_path: Path
) -> None:
    """After all that is wrong with a column a correct batch has the answer that it had before; an update, which
    has another one each time, that of a role to which nothing else came."""
    job = job_for(method, tiny_model, tmp_path)
    batch, is_update = correct(methods(job)[method], ROWS), method.endswith(".update")
    unlike_expected: dict[str, Any] = {}
    async with role_of(method, job) as untouched, role_of(method, job) as role:
        expected = await untouched.ask(batch)
        wholes = [("", how, wrong) for how, wrong in wrong_wholes(methods(job)[method], batch)]
        shapes = [(0, 2**62), (0, 2**62, 2**62), (0, 2**63 - 1)]
        wholes += [("", f"zero rows of {shape}", of_shape(batch, shape)) for shape in shapes]
        last = ""
        for column, how, wrong in [*wrong_columns(methods(job)[method], batch), *wholes]:
            status, error, words = await role.refusal(wrong)
            named = f"{method}" in words and column in words
            if (status, error) != ("INVALID_ARGUMENT", "InvalidBatch") or not named:
                unlike_expected[f"{column} {how}"] = (status, error, words)
            if column != last and not is_update and await role.ask(batch) != expected:
                unlike_expected[f"after {column} {how}"] = "another answer"
            last = column
        assert unlike_expected == {}
        assert await role.ask(batch) == expected


@pytest.mark.parametrize("method", ["actor.update", "critic.update", "reward.compute_scores"])
async def test_padding_may_hold_any_float(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """No method reads it: the answer has the same bits."""
    job = job_for(method, tiny_model, tmp_path)
    batch = correct(methods(job)[method], ROWS)
    strange = batch
    for name, tensor in batch.tensors.items():
        if tensor.is_floating_point():
            strange = with_column(strange, name, tensor.where(batch["response_mask"], torch.nan))
    async with role_of(method, job) as one, role_of(method, job) as other:
        assert await one.ask(strange) == await other.ask(batch)


# Columns that are each what they should be, and do not fit together: a column, how, and what it holds.
MISFITS: list[tuple[str, str, Callable[[DataProto], Any]]] = [
    ("prompt_mask", "padding on the right", lambda batch: batch["prompt_mask"].flip(1)),
    ("prompt_mask", "no token", lambda batch: batch["prompt_mask"] & False),
    ("attention_mask", "a hole", lambda batch: batch["attention_mask"] * (torch.arange(P + T) != P + 1)),
    ("attention_mask", "no token", lambda batch: batch["attention_mask"] * 0),
    ("response_mask", "True on padding", lambda batch: batch["response_mask"] | True),
    ("kept_ids", "without the drawn token", lambda batch: (batch["kept_ids"] + 9) % VOCABULARY),
    ("kept_ids", "no token", lambda batch: batch["kept_ids"] * 0 - 1),
    ("loss_mask", "True on padding", lambda batch: ~batch["response_mask"]),
]


@pytest.mark.parametrize("method", [method for method in METHODS if method != "reward.compute_scores"])
async def test_columns_that_do_not_fit_together_are_refused_too(
    method: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = job_for(method, tiny_model, tmp_path)
    batch = correct(methods(job)[method], ROWS)
    unlike_expected = {}
    async with role_of(method, job) as role:
        for column, how, change in MISFITS:
            if column in batch:
                status, error, words = await role.refusal(with_column(batch, column, change(batch)))
                named = method in words and column in words
                if (status, error) != ("INVALID_ARGUMENT", "InvalidBatch") or not named:
                    unlike_expected[f"{column} {how}"] = (status, error, words)
        if method.endswith(".update"):
            status, _, words = await role.refusal(batch[: ROWS - 1])
            assert (status, method in words) == ("INVALID_ARGUMENT", True)
    assert unlike_expected == {}


@pytest.mark.parametrize(("method", "column"), [("actor.update", "advantages"), ("critic.update", "returns")])
async def test_numbers_too_large_to_train_on_have_their_own_status(
    method: str, column: str, tiny_model: Path, tmp_path: Path
) -> None:
    """And the weights stay what they were."""
    job = job_for(method, tiny_model, tmp_path)
    batch = correct(methods(job)[method], ROWS)
    large = with_column(batch, column, torch.full_like(batch[column], 3e38))
    async with role_of(method, job) as untouched, role_of(method, job) as role:
        assert (await role.refusal(large))[:2] == ("FAILED_PRECONDITION", "UpdateFailed")
        assert await role.ask(batch) == await untouched.ask(batch)


async def test_text_that_is_not_utf_8_is_named_in_the_refusal(tiny_model: Path, tmp_path: Path) -> None:
    """A lone surrogate, which JSON has and UTF-8 has not, in what an error's text names."""
    job = job_for("reward.compute_scores", tiny_model, tmp_path)
    batch = correct(methods(job)["reward.compute_scores"], ROWS)
    wrong = with_column(with_column(batch, "uid", ["\ud800"] * ROWS), "data_source", ["\udfff"] * ROWS)
    async with role_of("reward.compute_scores", job) as role:
        status, error, words = await role.refusal(wrong)
        assert (status, error) == ("FAILED_PRECONDITION", "RewardFailed")
        assert words.startswith("row \\ud800: no rule for data_source '\\udfff'")
        await role.ask(batch)
