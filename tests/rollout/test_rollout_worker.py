"""The hf engine in its worker: a row's bits are its own, its log-probabilities are the model's, rows stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import COLUMNS, EOS, PAD, P, T, generated, job_of, prompts_of, trained
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rolemesh.catalog.engines import ENGINES, EngineSpec
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig, RoleFailed
from rolemesh.models.heads import VocabularyHead
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.rollout.engines.hf import HfEngine, batch
from rolemesh.services.rollout.engines.hf.batch_invariance import MIN_ROWS, batch_invariant_rows
from rolemesh.services.rollout.engines.hf.cached_attention import Decoding
from rolemesh.services.rollout.engines.sampling import log_distribution
from rolemesh.services.rollout.worker import RolloutWorker


async def test_a_rows_bits_depend_on_nothing_but_the_row(ending_model: Path):
    prompts = prompts_of(13)
    worker = RolloutWorker(job_of(ending_model, top_k=200, top_p=0.99))
    together = await generated(worker, prompts)
    lengths = together["response_mask"].sum(1)
    assert lengths.unique().numel() > 4, "uneven lengths, or the test shows nothing"

    async def same(rows: Sequence[int], other: DataProto) -> None:
        for name in (*COLUMNS, "kept_ids"):
            assert torch.equal(together[list(rows)][name], other[name]), name

    for row in range(13):
        await same([row], await generated(worker, prompts[row]))
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0)).tolist()
    await same(order, await generated(worker, prompts[order]))
    await same(range(5), await generated(worker, prompts[:5]))
    worker.close()
    for max_num_seqs in (4, 8):
        restarted = RolloutWorker(job_of(ending_model, top_k=200, top_p=0.99, max_num_seqs=max_num_seqs))
        await same(range(13), await generated(restarted, prompts))
        restarted.close()


async def test_bits_do_not_depend_on_compaction_or_new_weights(
    ending_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Five answers to each of twelve prompts; versions come at fixed tokens, twice between two compactions."""
    prompts = prompts_of(12).repeat(5)
    prompts["seeds"] = torch.arange(60) * 7919 - 5
    job = job_of(ending_model, top_k=200, top_p=0.99)
    weights = {7: named_weights(trained(ending_model)), 8: named_weights(trained(ending_model, seed=5))}
    weights[9] = weights[7]
    swaps = {3: 7, 5: 8, 6: 9}  # tokens made before: version
    sizes: list[int] = []  # tokens of each decode step
    step = batch.Batch._step

    def stepping(running: Any) -> None:
        step(running)
        [group] = running._groups
        if version := swaps.get(group.t):
            running._engine._load(version, weights[version])

    monkeypatch.setattr(batch.Batch, "_step", stepping)

    async def answers(some: DataProto) -> DataProto:
        worker = RolloutWorker(job)

        def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
            if isinstance(inputs["reading"], Decoding):
                sizes.append(inputs["input_ids"].numel())

        worker._engine.model.register_forward_pre_hook(count, with_kwargs=True)
        answer = await generated(worker, some)
        worker.close()
        return answer

    together = await answers(prompts)
    thinned = set(sizes)
    assert len(thinned) > 3
    versions, mask = together["weight_versions"], together["response_mask"]
    expected = torch.tensor([0] * 3 + [7] * 2 + [8] + [9] * (T - 6)).expand(60, T)
    assert torch.equal(versions, torch.where(mask, expected, -1))
    few = torch.arange(0, 60, 5)
    sizes.clear()
    alone = await answers(prompts[few])
    assert set(sizes) == {MIN_ROWS}
    for name in (*COLUMNS, "kept_ids", "weight_versions"):
        assert torch.equal(together[few][name], alone[name]), name


async def test_steps_are_made_one_after_another_until_something_waits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch, "STEPS_S", 1000.0)
    worker = RolloutWorker(job_of(tiny_model, ignore_eos=True))
    order: list[str] = []
    step, steps = batch.Batch._step, batch.Batch.steps

    def stepping(running: Any) -> None:
        step(running)
        order.append("step")
        if order.count("step") == 5:
            worker.worker_context.thread.submit(order.append, "another")

    def handing_over(running: Any) -> Any:
        order.append("job")
        return steps(running)

    monkeypatch.setattr(batch.Batch, "_step", stepping)
    monkeypatch.setattr(batch.Batch, "steps", handing_over)
    await generated(worker, prompts_of(3))
    assert order == ["job", *["step"] * 5, "another", "job", *["step"] * (T - 5)]
    worker.close()


def test_batches_above_the_neutral_size_do_not_change_row_bits():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(512, 128))
    few = batch_invariant_rows(model, 256)
    assert MIN_ROWS <= few <= 256
    for linear in model:
        inputs = torch.randn(300, linear.in_features, generator=torch.Generator().manual_seed(2))
        expected = linear(inputs)
        for rows in range(few, 300, 7):
            assert torch.equal(linear(inputs[5 : 5 + rows]), expected[5 : 5 + rows]), rows


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.6, "top_k": 9}, {"top_p": 0.7, "top_k": 256, "temperature": 1.3}]
)
async def test_log_probs_are_those_of_a_full_forward(any_model: Path, filters: dict[str, Any]):
    prompts = prompts_of(6)
    worker = RolloutWorker(job_of(any_model, **filters))
    answer = await generated(worker, prompts)
    ids = torch.cat([prompts["prompts"], answer["responses"]], 1)
    mask = torch.cat([prompts["prompt_mask"], answer["response_mask"]], 1).long()
    model = AutoModelForCausalLM.from_pretrained(any_model)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    expected = log_distribution(logits[:, P - 1 : -1].flatten(0, 1), SamplingConfig(**filters)).view(6, T, -1)
    expected = (
        expected.gather(2, answer["responses"][..., None])[..., 0].float().where(answer["response_mask"], 0)
    )
    assert (answer["rollout_log_probs"] - expected).abs().max() < 1e-5
    worker.close()


@pytest.mark.parametrize("use", ["validation", "greedy"])
async def test_greedy_answers_are_transformers_greedy_search(any_model: Path, use: str):
    """Those to training prompts too, however these are sampled."""
    prompts = prompts_of(9, use)
    worker = RolloutWorker(job_of(any_model, temperature=0.5, top_k=7))
    answer = await generated(worker, prompts)
    model = AutoModelForCausalLM.from_pretrained(any_model)
    expected = model.generate(
        prompts["prompts"], attention_mask=prompts["prompt_mask"].long(), do_sample=False, max_new_tokens=T
    )[:, P:]
    assert torch.equal(answer["responses"][:, : expected.shape[1]], expected)
    worker.close()


async def test_the_end_token_is_in_the_response_and_padding_follows(ending_model: Path):
    worker = RolloutWorker(job_of(ending_model))
    answer = await generated(worker, prompts_of(13))
    ends = {*range(0, 256, 8), EOS}
    for ids, mask, log_probs in zip(*(answer[name].tolist() for name in COLUMNS), strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (T - length)
        assert length == T or ids[length - 1] in ends
        assert not ends & set(ids[: length - 1])
        assert ids[length:] == [PAD] * (T - length)
        assert log_probs[length:] == [0.0] * (T - length)
        assert all(value < 0 for value in log_probs[:length])
    worker.close()


async def test_ignore_eos_uses_the_whole_length(ending_model: Path):
    worker = RolloutWorker(job_of(ending_model, ignore_eos=True))
    assert (await generated(worker, prompts_of(5)))["response_mask"].all()
    worker.close()


@pytest.mark.usefixtures("step_by_step")
async def test_rows_come_as_they_finish_while_others_go_on(ending_model: Path):
    worker = RolloutWorker(job_of(ending_model))
    answers = [rows async for rows in worker.generate(prompts_of(13))]
    lengths = [rows["response_mask"].sum(1).tolist() for rows in answers]
    assert len(answers) > 3
    assert all(max(earlier) < min(later) for earlier, later in pairwise(lengths))
    worker.close()


async def test_a_consumer_that_leaves_stops_the_decoding(tiny_model: Path):
    worker = RolloutWorker(job_of(tiny_model, max_num_seqs=4))
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    worker._engine.model.register_forward_hook(count)
    async with aclosing(worker.generate(prompts_of(400))) as stream:
        await anext(stream)
    await worker.run(lambda: None)  # the worker's thread is free again
    assert T <= forwards < 50 * T
    worker.close()


async def test_overlapping_calls_complete_in_any_read_order(ending_model: Path):
    worker = RolloutWorker(job_of(ending_model))
    prompts = prompts_of(13)
    alone = await generated(worker, prompts)
    async with aclosing(worker.generate(prompts)) as unread:
        await anext(unread)
        others = await asyncio.gather(generated(worker, prompts), generated(worker, prompts))
    for other in others:
        assert torch.equal(other["responses"], alone["responses"])
    worker.close()


async def test_no_rows_give_no_rows(tiny_model: Path):
    worker = RolloutWorker(job_of(tiny_model))
    assert [rows async for rows in worker.generate(prompts_of(5)[:0])] == []
    worker.close()


async def test_answers_may_take_part_in_training(tiny_model: Path):
    worker = RolloutWorker(job_of(tiny_model))
    answer = await generated(worker, prompts_of(5))
    assert not any(column.is_inference() for column in answer.tensors.values())
    worker.close()


async def test_lower_precision_generates_close_log_probs(tiny_model: Path):
    answers = []
    for precision in ("float32", "bfloat16"):
        worker = RolloutWorker(job_of(tiny_model, dtype=precision))
        answers.append(await generated(worker, prompts_of(5)))
        worker.close()
    exact, rounded = (answer["rollout_log_probs"][:, 0] for answer in answers)
    assert 0 < (rounded - exact).abs().max() < 0.05


async def test_float32_logits_give_exact_log_probs_of_hidden_states(tiny_model: Path):
    """Each token's, against float64. Between models the rounding of hidden states would hide that of logits."""
    off = {}
    for head_dtype in ("model", "float32"):
        job = job_of(tiny_model, dtype="bfloat16")
        actor = job.actor.model_copy(update={"head_dtype": head_dtype})
        worker = RolloutWorker(job.model_copy(update={"actor": actor}))
        heads = [each for each in worker._engine.called.modules() if isinstance(each, VocabularyHead)]
        [head] = heads or [worker._engine.model.get_output_embeddings()]
        steps: list[Tensor] = []  # for each token the log-probs [rows, V] that it was drawn from

        def keep(
            head: VocabularyHead | nn.Linear, args: tuple[Tensor], _: Tensor, steps: list[Tensor] = steps
        ) -> None:
            logits = args[0].bfloat16().double() @ head.weight.bfloat16().double().T
            steps.append(logits.flatten(0, -2).log_softmax(-1))

        head.register_forward_hook(keep)
        answer = await generated(worker, prompts_of(1))
        worker.close()
        drawn = zip(answer["responses"][0], answer["rollout_log_probs"][0], steps, strict=True)
        each = [(exact[:, token] - log_prob).abs().min() for token, log_prob, exact in drawn]
        off[head_dtype] = torch.stack(each)
    assert off["float32"].max() < 1e-5 < off["model"].mean()


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(3, P, dtype=torch.bool), torch.arange(P).expand(3, P) < 3],
    ids=["none", "on the right"],
)
async def test_prompts_that_are_not_left_padded_are_refused(tiny_model: Path, mask: torch.Tensor):
    worker = RolloutWorker(job_of(tiny_model))
    prompts = prompts_of(3)
    prompts["prompt_mask"] = mask
    with pytest.raises(InvalidBatch, match="left-padded"):
        await generated(worker, prompts)
    worker.close()


def test_an_unknown_engine_is_refused_with_those_there_are(tiny_model: Path):
    with pytest.raises(InvalidConfig, match=r"'rollout\.name' is 'sglang', which is none of hf, vllm, openai"):
        job_of(tiny_model, name="sglang")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows.pop(["weight_versions"]), r"lacks columns \['weight_versions'\]"),
        (lambda rows: rows.tensors.update(row=rows["row"].int()), "column 'row' is torch.int32"),
        (
            lambda rows: rows.tensors.update(responses=rows["responses"][:, 1:]),
            r"column 'responses' is torch.int64 \[1, 15\]",
        ),
        (lambda rows: rows.tensors.update(logits=torch.zeros(len(rows), 3)), r"columns \['logits'\] besides"),
        (
            lambda rows: rows["rollout_log_probs"].fill_(torch.nan),
            "'rollout_log_probs', row 0, position 0, is nan",
        ),
    ],
)
async def test_an_engine_that_breaks_the_contract_is_found_out_at_once(
    tiny_model: Path, spoil: Any, message: str
):
    class Careless(HfEngine):
        async def generate(
            self, prompts: DataProto, sampling: SamplingConfig
        ) -> AsyncGenerator[DataProto, None]:
            async with aclosing(super().generate(prompts, sampling)) as finished:
                async for rows in finished:
                    spoil(rows)
                    yield rows

    with ENGINES.adding(EngineSpec(name="careless", code=Careless)):
        worker = RolloutWorker(job_of(tiny_model, name="careless"))
    with pytest.raises(RoleFailed, match=f"the answer of rollout.generate.*{message}"):
        await generated(worker, prompts_of(1))
    worker.close()


def test_lengths_beyond_the_models_are_refused_at_start(tmp_path: Path):
    make_tiny_model(tmp_path, max_position_embeddings=P + T - 1)
    with pytest.raises(InvalidConfig, match="27"):
        RolloutWorker(job_of(tmp_path))


# ------------------------------------------------------------------------------- kept tokens


async def test_kept_ids_are_the_tokens_that_could_be_drawn(ending_model: Path):
    worker, prompts = RolloutWorker(job_of(ending_model, top_k=9, top_p=0.5)), prompts_of(13)
    answer = await generated(worker, prompts)
    kept, mask = answer["kept_ids"], answer["response_mask"]
    assert kept.shape == (13, T, 9)
    assert kept.dtype == torch.int32
    drawn = (kept == answer["responses"][..., None]).sum(-1)
    assert torch.equal(drawn == 1, mask)
    assert (kept[~mask] == -1).all()
    counts = (kept >= 0).sum(-1)[mask]
    assert ((counts >= 1) & (counts < 9)).all()
    worker.close()


@pytest.mark.parametrize("sampling", [{"top_k": 9, "temperature": 0}, {}])
async def test_where_nothing_is_cut_off_there_are_no_kept_ids(tiny_model: Path, sampling: dict[str, Any]):
    worker = RolloutWorker(job_of(tiny_model, **sampling))
    assert "kept_ids" not in await generated(worker, prompts_of(2))
    worker.close()


async def test_rows_of_a_validation_have_no_kept_ids(tiny_model: Path):
    worker = RolloutWorker(job_of(tiny_model, top_k=9, val_kwargs={"do_sample": True, "top_p": 0.5}))
    assert "kept_ids" in await generated(worker, prompts_of(2))
    assert "kept_ids" not in await generated(worker, prompts_of(2, "validation"))
    worker.close()


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9}])
async def test_logits_that_are_not_finite_are_named(tiny_model: Path, filters: dict[str, Any]) -> None:
    worker = RolloutWorker(job_of(tiny_model, **filters))
    worker._engine.model.lm_head.weight.data[7] = torch.nan
    with pytest.raises(RoleFailed, match="the model's logits are not finite"):
        await generated(worker, prompts_of(3))
    worker.close()
