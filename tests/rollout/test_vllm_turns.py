"""The engine vllm continues rows: what it was fed and what it sampled are the row's ids, its log-probabilities
are the model's given all tokens before, and earlier turns come from its prefix cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from turns import continued, conversation, first_turn, lengths_of, with_answer
from vllm_rollouts import GREEDY, PAD, PLAIN, P, installed, model_with_ends, prompts_of

from rolemesh.config.job import make_job
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.sampling import log_distribution

pytestmark = pytest.mark.timeout(900)  # two processes import vLLM, on cores that other tests use too
T, ROWS, BLOCK = 420, 6, 128  # tokens in a block of vLLM's cache on a CPU


async def generated(engine: Any, sampling: SamplingConfig, request: DataProto) -> DataProto:
    answer = DataProto.concat([rows async for rows in engine.generate(request, sampling)])
    assert sorted(answer["row"].tolist()) == list(range(len(request)))
    return answer[answer["row"].argsort()]


def log_probs_of(model: Any, rows: DataProto, sampling: SamplingConfig) -> torch.Tensor:
    ids = torch.cat([rows["prompts"], rows["responses"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["turns"] != 0], 1).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    log_probs = log_distribution(logits[:, P - 1 : -1].flatten(0, 1), sampling).view(len(ids), T, -1)
    return log_probs.gather(2, rows["responses"][..., None])[..., 0].float()


@installed
async def test_turns_are_the_models_and_come_from_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other spin
    directory = model_with_ends(tmp_path / "model", "qwen2")
    job = make_job(
        {
            "actor": {"model": {"path": str(directory)}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            "rollout": {"name": "vllm", "max_num_seqs": 8},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
        }
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    engine: Any = load_engine(job, None)  # type: ignore[arg-type]
    with closing(engine):
        outputs = recording(engine)
        for sampling in (PLAIN, GREEDY):
            outputs.clear()
            ask = partial(generated, engine, sampling)
            exchanged = await conversation(prompts_of(ROWS), T, [[260] * ROWS, [5] * ROWS], [ask] * 3)
            assert len(exchanged) == 3
            for turn, (request, answer) in enumerate(exchanged, 1):
                assert_are_the_models(model, request, answer, turn, sampling)
            fed = {tuple(output.prompt_token_ids): output for output in outputs}
            for request, answer in exchanged:
                for row, ids in enumerate(ids_of(request)):
                    mine = answer["responses"][row][answer["response_mask"][row]].tolist()
                    assert list(fed[ids].outputs[0].token_ids) == mine
            for ids in ids_of(exchanged[2][0]):
                assert fed[ids].num_cached_tokens >= (len(ids) - 1) // BLOCK * BLOCK - BLOCK >= BLOCK
        # As without turns where there is nothing yet, and whatever was asked before where there is.
        first, without = await ask(first_turn(prompts_of(ROWS), T)), await ask(prompts_of(ROWS))
        assert torch.equal(first["responses"], without["responses"])
        request, answer = exchanged[2]
        assert torch.equal((await ask(request[[1]]))["responses"][0], answer["responses"][1])
        other = continued(request, request["responses"], request["turns"])
        other["seeds"] = request["seeds"] + 1
        sampled = [await generated(engine, PLAIN, rows) for rows in (request, other)]
        assert not torch.equal(sampled[0]["responses"], sampled[1]["responses"])


def recording(engine: Any) -> list[Any]:
    """Record vLLM's own account of each request: what it was fed, and what it sampled."""
    outputs, generate = [], engine._llm.generate

    async def recorded(*arguments: Any) -> AsyncIterator[Any]:
        async for output in generate(*arguments):
            outputs.append(output)
            yield output

    engine._llm.generate = recorded
    return outputs


def ids_of(request: DataProto) -> list[tuple[int, ...]]:
    """The ids of each row so far, without padding."""
    rows = []
    for row, begun in enumerate(lengths_of(request["turns"]).tolist()):
        prompt = request["prompts"][row][request["prompt_mask"][row]].tolist()
        rows.append((*prompt, *request["responses"][row, :begun].tolist()))
    return rows


def assert_are_the_models(
    model: Any, request: DataProto, answer: DataProto, turn: int, sampling: SamplingConfig
) -> None:
    mask, t = answer["response_mask"], torch.arange(T)
    begun = lengths_of(request["turns"])[:, None]
    assert torch.equal(mask, (t >= begun) & (t < begun + mask.sum(1, keepdim=True)))
    assert mask.any(1).all()
    assert (answer["responses"][~mask] == PAD).all()
    assert torch.equal(answer["weight_versions"], torch.where(mask, 0, -1))
    expected = log_probs_of(model, with_answer(request, answer, turn), sampling)
    difference = torch.where(mask, answer["rollout_log_probs"] - expected, answer["rollout_log_probs"])
    assert difference.abs().max() < 1e-4
