"""The engine vllm on a CPU: its log-probabilities are the trainer's, its weights the actor's, bit for bit.

A start takes half a minute or more, so one engine serves all tests: a tied Qwen2."""

import asyncio
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from full_disk import files_of_at_most
from prometheus_client import REGISTRY, generate_latest
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_rollouts import (
    EOS,
    GREEDY,
    PAD,
    PLAIN,
    T,
    assert_log_probs_agree,
    generated,
    installed,
    job_of,
    model_with_ends,
    prompts_of,
    reference,
    weights_of,
    with_weights,
)

from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed, RoleUnavailable, WeightsUnavailable
from rolemesh.models.loading import named_weights
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.vllm import engine_args
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.published import PublishedWeights

pytestmark = pytest.mark.timeout(900)  # three processes import vLLM, on cores that other tests use too
on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_ends(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture
def model(model_directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_directory)


@pytest.fixture(scope="module", autouse=True)
def _questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_args, "EXTENSION", "asked_vllm.AskedExtension")
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other spin, on cores that others use
        yield


@pytest.fixture(scope="module")
def running() -> Iterator[list[Any]]:
    """The engine that the tests share, once one has started it. One that ends it takes it out."""
    engines: list[Any] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running: list[Any], model_directory: Path, model: Any) -> Any:
    """With the weights of the model directory. Eight rows at a time, so that requests of more have rows that
    wait."""
    if not running:
        sampling = {"top_k": 20, "top_p": 0.9, "temperature": 0.8}
        job = job_of(model_directory, **sampling, max_num_seqs=8, disable_log_stats=False)
        before = dict(os.environ)
        running.append(load_engine(job, None))
        assert os.environ == before, "no process that starts later inherits what vLLM's processes need"
    [started] = running
    if started.version:
        await started.load_weights(0, named_weights(model))
    return started


# ----------------------------------------------------------------------------------- rows


@installed
@on_the_modules_loop
@pytest.mark.parametrize(
    "sampling",
    [PLAIN, GREEDY, SamplingConfig(temperature=0.6, top_k=9), SamplingConfig(top_p=0.7, temperature=1.3)],
    ids=["plain", "greedy", "top_k", "top_p"],
)
async def test_log_probs_are_those_of_a_full_forward(engine: Any, model: Any, sampling: SamplingConfig):
    prompts = prompts_of(12)
    answer = await generated(engine, prompts, sampling)
    assert_log_probs_agree(model, prompts, answer, sampling)


@installed
@on_the_modules_loop
async def test_what_vllm_counts_is_among_the_metrics_of_this_process(engine: Any):
    """Once an answer has come, what came before it has been counted."""
    first = await generated(engine, prompts_of(4), PLAIN)
    await generated(engine, prompts_of(1), PLAIN)
    shown = generate_latest(REGISTRY).decode()
    (counted,) = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", shown, re.MULTILINE)
    assert float(counted) >= first["response_mask"].sum()


@installed
@on_the_modules_loop
async def test_kept_ids_are_the_tokens_that_could_be_drawn(engine: Any, model: Any):
    prompts, sampling = prompts_of(12), engine._job.rollout
    answer = await generated(engine, prompts, sampling)
    assert_log_probs_agree(model, prompts, answer, sampling)
    assert answer["kept_ids"].shape == (12, T, 20)
    assert answer["kept_ids"].dtype == torch.int32
    could = reference(model, prompts, answer, sampling).isfinite()
    for row, t in answer["response_mask"].nonzero().tolist():
        kept = [token for token in answer["kept_ids"][row, t].tolist() if token >= 0]
        assert sorted(kept) == could[row, t].nonzero()[:, 0].tolist()
        assert answer["responses"][row, t] in kept
    assert (answer["kept_ids"][~answer["response_mask"]] == -1).all()


@installed
@on_the_modules_loop
async def test_greedy_answers_are_the_hf_engines(engine: Any, model_directory: Path):
    prompts = prompts_of(12)
    answer = await generated(engine, prompts, GREEDY)
    hf = RolloutWorker(job_of(model_directory, name="hf"))
    expected = await generated(hf._engine, prompts, GREEDY)
    hf.close()
    for name in ("responses", "response_mask", "weight_versions"):
        assert torch.equal(answer[name], expected[name]), name


@installed
@on_the_modules_loop
async def test_the_end_token_is_in_the_response_and_padding_follows(engine: Any):
    answer = await generated(engine, prompts_of(40), PLAIN)
    ends = {*range(0, 256, 25), EOS}
    lengths = answer["response_mask"].sum(1).tolist()
    assert len(set(lengths)) > 4, "uneven lengths, or the test shows nothing"
    for ids, versions, log_probs, length in zip(
        *(answer[name].tolist() for name in ("responses", "weight_versions", "rollout_log_probs")),
        lengths,
        strict=True,
    ):
        assert length == T or ids[length - 1] in ends
        assert not ends & set(ids[: length - 1])
        assert ids[length:] == [PAD] * (T - length)
        assert versions == [0] * length + [-1] * (T - length)
        assert log_probs[length:] == [0.0] * (T - length)


@installed
@on_the_modules_loop
async def test_a_rows_tokens_are_its_seeds(engine: Any):
    prompts = prompts_of(12)
    together = await generated(engine, prompts, PLAIN)
    alone = await generated(engine, prompts[4:5], PLAIN)
    assert torch.equal(alone["responses"][0], together["responses"][4])
    # The first row's seed is -1, which vLLM would take for none.
    assert torch.equal((await generated(engine, prompts[:1], PLAIN))["responses"][0], together["responses"][0])
    other = DataProto({**prompts.tensors, "seeds": prompts["seeds"] + 1})
    assert not torch.equal((await generated(engine, other, PLAIN))["responses"], together["responses"])


@installed
@on_the_modules_loop
async def test_a_consumer_that_leaves_frees_the_engine(engine: Any):
    async with aclosing(engine.generate(prompts_of(200), PLAIN)) as stream:
        assert len(await anext(stream)) < 200
    assert engine._llm.get_num_unfinished_requests() == 0
    assert len(await generated(engine, prompts_of(3), PLAIN)) == 3


@installed
@on_the_modules_loop
async def test_no_rows_give_no_rows_and_the_vocabulary_is_the_models(engine: Any):
    """The worker's validator refuses ids beyond it."""
    assert [rows async for rows in engine.generate(prompts_of(3)[:0], PLAIN)] == []
    assert engine.vocabulary == 259


# -------------------------------------------------------------------------------- weights


@installed
@on_the_modules_loop
async def test_after_each_of_ten_updates_it_is_the_actors_model(engine: Any, model: Any):
    prompts = prompts_of(6)
    for version in range(1, 11):
        weights = weights_of(model, version)
        published = await PublishedWeights(version, weights).fetch()
        with no_file_of(published.region.num_bytes):  # vLLM reads the version where it lies
            await engine.load_weights(version, published)
        read = await engine.read_weights()
        assert read.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(read[name], weight), name
        answer = await generated(engine, prompts, engine._job.rollout)
        assert (answer["weight_versions"][answer["response_mask"]] == version).all()
        with_weights(model, weights)  # the head is tied: a stale copy of it would show here
        assert_log_probs_agree(model, prompts, answer, engine._job.rollout)
        assert engine.version == version


@contextmanager
def no_file_of(num_bytes: int) -> Iterator[None]:
    """This process can make no file of so many bytes, an anonymous one included."""
    with files_of_at_most(num_bytes - 1):
        with pytest.raises(OSError, match="File too large"), tempfile.TemporaryFile() as file:
            file.truncate(num_bytes)
        yield


@installed
@on_the_modules_loop
async def test_rows_that_live_through_a_swap_say_so_token_by_token(engine: Any, model: Any):
    """The first rows come before most others have begun. The test ends when a row of both versions has come."""
    prompts, weights = prompts_of(400), weights_of(model, 1)
    async with aclosing(engine.generate(prompts, PLAIN)) as stream:
        answers = [await anext(stream)]
        await engine.load_weights(1, weights)
        async for rows in stream:
            answers.append(rows)
            if of_both(rows["weight_versions"]).any():
                break
    assert (answers[0]["weight_versions"] <= 0).all()
    answer = DataProto.concat(answers)
    prompts = prompts[answer["row"]]
    assert len(set(answer["row"].tolist())) == len(answer)
    made, versions = answer["response_mask"], answer["weight_versions"]
    assert ((versions >= 0) == made).all()
    assert (versions.diff(dim=1)[made[:, 1:]] >= 0).all()
    assert 0 < of_both(versions).sum() <= 8
    # Keys and values are computed anew, so each token is exactly of the version that it names.
    for version, of_version in enumerate(
        (model, with_weights(AutoModelForCausalLM.from_config(model.config), weights))
    ):
        mine = DataProto({**answer.tensors, "response_mask": made})
        expected = reference(of_version.eval(), prompts, mine, PLAIN).gather(2, answer["responses"][..., None])
        difference = (answer["rollout_log_probs"] - expected[..., 0].float())[versions == version]
        assert difference.abs().max() < 1e-4


def of_both(versions: Tensor) -> Tensor:
    """[rows] Whether a row has tokens of version 0 and of version 1."""
    return (versions == 0).any(1) & (versions == 1).any(1)


@installed
@on_the_modules_loop
async def test_where_vllm_names_no_versions_a_swap_waits_for_the_rows(
    engine: Any, model: Any, monkeypatch: Any
):
    monkeypatch.setattr(engine, "_names_versions", False)
    prompts = prompts_of(64)
    async with aclosing(engine.generate(prompts, PLAIN)) as stream:
        answers = [await anext(stream)]
        swap = asyncio.create_task(engine.load_weights(1, weights_of(model, 1)))
        answers += [rows async for rows in stream]
    await swap
    assert all((rows["weight_versions"] <= 0).all() for rows in answers)
    assert engine.version == 1
    assert len(await generated(engine, prompts[:3], PLAIN)) == 3


@installed
@on_the_modules_loop
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(2)}), "lm_head.weight is unknown"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"is \[3\] torch.float32, not \[64\]"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64).half()}), "float16"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(engine: Any, model: Any, spoil: Any, message: str):
    weights = weights_of(model, 1)
    spoil(weights)
    with pytest.raises(WeightsUnavailable, match=message):
        await engine.load_weights(1, weights)
    assert engine.version == 0
    read = await engine.read_weights()
    for name, weight in named_weights(model).items():
        assert torch.equal(read[name], weight), name


# ---------------------------------------------------------------------------------- sleep


@installed
@on_the_modules_loop
async def test_sleep_frees_the_memory_and_waking_restores_the_engine(engine: Any):
    prompts = prompts_of(12)
    embedding = 4 * 259 * 64
    before = await generated(engine, prompts, PLAIN)
    assert (await engine._on_all_ranks("resident_bytes"))[0] > embedding - 2 * mmap.PAGESIZE
    assert (await engine._on_all_ranks("watch_packed"))[0] > 0
    moved = await engine.sleep()
    assert moved > embedding
    assert await engine._on_all_ranks("resident_bytes") == await engine._on_all_ranks("num_packed") == [0]
    waiting = asyncio.create_task(generated(engine, prompts, PLAIN))
    assert await engine.wake() == moved
    again = await waiting
    assert torch.equal(again["responses"], before["responses"])
    # Rows that waited share other forwards than rows that came one by one: last bits may differ.
    assert (again["rollout_log_probs"] - before["rollout_log_probs"]).abs().max() < 1e-5
    await engine.load_weights(
        0, named_weights(AutoModelForCausalLM.from_pretrained(engine._job.actor.model.path))
    )
    assert torch.equal((await generated(engine, prompts, PLAIN))["responses"], before["responses"])


# ------------------------------------------------------------------------------- its end


@installed
@on_the_modules_loop
async def test_an_engine_that_half_fell_asleep_ends_and_never_computes(engine: Any, running: list[Any]):
    running.remove(engine)
    await engine._on_all_ranks("limit_files", 100_000)
    waiting = asyncio.create_task(generated(engine, prompts_of(100), PLAIN))
    with pytest.raises(RoleFailed, match="131072 requested"):
        await engine.sleep()
    for lost in (waiting, generated(engine, prompts_of(3), PLAIN), engine.sleep(), engine.read_weights()):
        with pytest.raises(RoleUnavailable):
            await lost
