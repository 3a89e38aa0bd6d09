"""reward.skip_special_tokens: do reward functions and dumps show special tokens? They never show the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reward_rows import TOKENIZER, batch, custom, working

from rolemesh.config.model import ModelConfig
from rolemesh.data.texts import ResponseTexts
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.run.run_dir import answers

SPECIAL = "<|im_start|>"  # as <think> is one for some models
FUNCTION = "def compute_score(solution_str, **row):\n    return {'score': 1, 'pred': solution_str}\n"


@pytest.mark.parametrize("skip", [True, False])
async def test_functions_and_dumps_see_special_tokens_if_configured(
    skip: bool, tiny_model: Path, tmp_path: Path
) -> None:
    function = custom(tmp_path, FUNCTION)
    rows = batch(("mine", f"{SPECIAL}a b", None), ("mine", f"c{SPECIAL}", None))
    async with working(tiny_model, skip_special_tokens=skip, **function) as worker:
        scored = await worker.compute_scores(rows)
    seen = ["a b", "c"] if skip else [f"{SPECIAL}a b", f"c{SPECIAL}"]
    assert [info["pred"] for info in scored["reward_extra_info"]] == seen
    texts = ResponseTexts(TOKENIZER, skip_special_tokens=skip)
    dumped = answers(rows.union(scored), 1, texts)
    assert [row["output"] for row in dumped] == seen
    assert [row["input"] for row in dumped] == ["ask 0", "ask 1"]


def test_every_declared_end_goes_and_a_prompt_keeps_its_own(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end, pad = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, ord("!")]}))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    start, letter = tokenizer.convert_tokens_to_ids([SPECIAL, "a"])
    ids = [[start, letter, end], [letter, ord("!"), pad, pad], []]
    shown = ResponseTexts(tokenizer, skip_special_tokens=False)
    assert shown(ids) == [f"{SPECIAL}a", "a", ""]
    assert shown.whole([[start, letter, end]]) == [f"{SPECIAL}a{tokenizer.eos_token}"]
