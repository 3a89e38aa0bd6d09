"""The answer that a reward finds in a response, on its way to validation's vote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reward_rows import batch, custom, job

from rolemesh.config.actor import ActorConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.controller.stages.batch_metrics import batch_metrics
from rolemesh.services.reward.worker import RewardWorker


async def test_the_found_answer_is_returned_as_text_and_is_no_metric(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(extra_info, **row):\n"
        "    return {'score': 1, 'form': 2} | [{'pred': 7.5}, {'pred': '\\ud800x'}, {}][extra_info['index']]\n"
    )
    worker = RewardWorker(job(tiny_model, **custom(tmp_path, source)))
    answered = await worker.compute_scores(batch(*[("mine", "x", None)] * 3))
    worker.close()
    expected = [{"form": 2.0, "pred": "7.5"}, {"form": 2.0, "pred": "?x"}, {"form": 2.0}]
    assert list(answered["reward_extra_info"]) == expected
    mask = answered["token_level_scores"] != 0
    learnt = answered.union(
        DataProto.from_dict(
            {"response_mask": mask, "prompt_mask": mask, "attention_mask": mask}
            | dict.fromkeys(("token_level_rewards", "advantages", "returns"), torch.zeros(mask.shape))
        )
    )
    names = {name for name in batch_metrics(learnt, ActorConfig()) if name.startswith("reward/")}
    assert names == {"reward/form/mean"}


@pytest.mark.parametrize(("n", "kept"), [(1, False), (2, True)])
async def test_a_rule_returns_found_answers_if_validation_counts_votes(
    tiny_model: Path, n: int, kept: bool
) -> None:
    config = make_job(
        merge(job(tiny_model).model_dump(), {"rollout": {"val_kwargs": {"n": n, "do_sample": True}}})
    )
    worker = RewardWorker(config)
    answered = await worker.compute_scores(batch(("math_dapo", "Answer: 07 ", "7"), ("math_dapo", "no", "7")))
    worker.close()
    assert ("reward_extra_info" in answered) is kept
    if kept:
        assert list(answered["reward_extra_info"]) == [{"pred": "7"}, {"pred": ""}]
