"""The comparison with TRL: its model says what the benchmark counts on, and the page what it found."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.agents_beside_trl import workload
from benchmarks.agents_beside_trl.__main__ import ratio
from benchmarks.agents_beside_trl.setting import CALLS, TOOL, TURN_TOKENS
from rolemesh.agents.call_formats import hermes
from rolemesh.config.model import ModelConfig
from rolemesh.models.loading import load_tokenizer

ROOT = Path(__file__).parents[2]


def test_the_model_makes_as_many_valid_calls_as_configured(tmp_path: Path) -> None:
    workload.write_model(tmp_path / "model")
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "model")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    opens, closes, end = tokenizer.convert_tokens_to_ids([workload.OPENS, workload.CLOSES, tokenizer.eos_token])

    def after(said: str) -> Tensor:
        ids = torch.tensor([tokenizer(said, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            probabilities: Tensor = model(input_ids=ids).logits[0, -1].softmax(-1)
        return probabilities

    spoken = after("<|im_start|>assistant\nsome words")
    assert float(spoken[opens]) == pytest.approx(CALLS / TURN_TOKENS, rel=1e-3)
    assert float(spoken[opens] + spoken[end]) == pytest.approx(1 / TURN_TOKENS, rel=1e-3)
    assert float(after(workload.OPENS)[closes]) < 1e-6  # a key has a digit
    assert float(after(workload.OPENS + "12" + workload.CLOSES)[end]) == pytest.approx(1, abs=1e-6)
    content, [call] = hermes("so" + workload.OPENS + "12" + workload.CLOSES)
    assert (content, call.name, json.loads(call.arguments)) == ("so", TOOL, {"key": "12"})


def test_the_page_has_the_numbers_of_the_results() -> None:
    """Medians of the rounds; the ratios are medians of the rounds' ratios."""
    cases = json.loads((ROOT / "benchmarks/results/agents-trl.json").read_text())["cases"]
    text = (ROOT / "docs/agents.md").read_text()
    for case, of in cases.items():
        for name, found in of.items():
            turns, tokens = (median(found[f"{what}_per_second"]) for what in ("turns", "tokens"))
            more = ratio(of["ours"], found, "turns_per_second")
            seconds = f"{min(found['seconds']):.1f} | {median(found['seconds']):.1f}"
            assert f"| {case} | {name} | {seconds} | {turns:.1f} | {tokens:.0f} | {more:.1f} |" in text
