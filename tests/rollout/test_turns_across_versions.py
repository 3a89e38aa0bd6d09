"""Engine hf continues rows across new weights: each token has the distribution of its own version."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import P, generated, prompts_of, trained
from hf_turns import ADDED, LONG, job_of, three_turns, worker_of
from transformers import AutoModelForCausalLM
from turns import assert_same, conversation, lengths_of, with_added, with_answer

from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import named_weights
from rolemesh.services.rollout.engines.hf import batch
from rolemesh.services.rollout.engines.sampling import log_distribution
from rolemesh.services.rollout.worker import RolloutWorker


async def test_a_token_follows_its_version_given_all_earlier_tokens(
    ending_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Versions come within turns and between them."""
    models = {0: AutoModelForCausalLM.from_pretrained(ending_model), 1: trained(ending_model)}
    models[2] = trained(ending_model, seed=5)
    prompts = prompts_of(13)
    job = job_of(ending_model)
    step = batch.Batch._step
    steps = 0

    def stepping(running: Any) -> None:
        nonlocal steps
        step(running)
        steps += 1
        if steps == 4:
            running._engine._load(1, named_weights(models[1]))

    monkeypatch.setattr(batch.Batch, "_step", stepping)
    with closing(RolloutWorker(job)) as worker:

        async def then_other_weights(request: DataProto) -> DataProto:
            answer = await generated(worker, request)
            worker._engine._load(2, named_weights(models[2]))
            assert not len(worker._engine.kept)
            return answer

        ask = partial(generated, worker)
        exchanged = await conversation(prompts, LONG, ADDED, [ask, then_other_weights, ask])
    versions = exchanged[0][1]["weight_versions"].unique().tolist()
    assert versions == [-1, 0, 1], "the swap came within the turn"
    which, seen = list(range(13)), prompts
    for turn, (request, answer) in enumerate(exchanged):
        if turn:
            kept = with_added(with_answer(*exchanged[turn - 1], 1), [ADDED[turn - 1][row] for row in which], 1)[
                1
            ]
            which, seen = [which[at] for at in kept], seen[kept]
        after = with_answer(request, answer, 1)
        for version, model in models.items():
            mine = answer["weight_versions"] == version
            expected = log_probs_of(model, after)
            assert torch.where(mine, answer["rollout_log_probs"] - expected, 0).abs().max() < 1e-5
    assert set(exchanged[2][1]["weight_versions"].unique().tolist()) == {-1, 2}


def log_probs_of(model: Any, rows: DataProto) -> torch.Tensor:
    """[B, T] by one full forward over prompts and responses, added tokens included."""
    ids = torch.cat([rows["prompts"], rows["responses"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["turns"] != 0], 1).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    log_probs = log_distribution(logits[:, P - 1 : -1].flatten(0, 1), SamplingConfig())
    log_probs = log_probs.view(len(ids), LONG, -1)
    return log_probs.gather(2, rows["responses"][..., None])[..., 0].float()


async def test_weights_before_a_continued_rows_sampling_change_no_bit(
    ending_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """They come after its keys and values were read in part."""
    monkeypatch.setattr(batch, "READ_TOKENS", 8)
    weights = named_weights(trained(ending_model))
    with worker_of(ending_model) as worker:
        request = (await three_turns(worker))[1][0]
    request = request[(lengths_of(request["turns"]) > 20).nonzero()[:, 0]]
    assert len(request) > 1
    with worker_of(ending_model) as worker:
        worker._engine._load(1, weights)
        expected = await generated(worker, request)
    step, steps = batch.Batch._step, 0

    def stepping(running: Any) -> None:
        nonlocal steps
        step(running)
        steps += 1
        if steps == 2:
            assert all(group.t == group.begin for group in running._groups)
            running._engine._load(1, weights)

    monkeypatch.setattr(batch.Batch, "_step", stepping)
    with worker_of(ending_model) as worker:
        assert_same(await generated(worker, request), expected)
