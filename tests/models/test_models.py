"""Model directories: whole or refused. Reward models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3Config,
)

from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound
from rolemesh.models.loading import (
    load_causal_lm,
    load_outline,
    load_tokenizer,
    named_weights,
    vocabulary_in,
    vocabulary_of,
)
from rolemesh.models.reward_model import RewardModel

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def at(directory: Path) -> ModelConfig:
    return ModelConfig(path=str(directory))


def test_weights_are_float32_and_those_of_the_directory(any_model: Path) -> None:
    mine = load_causal_lm(at(any_model), "actor")
    theirs = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor)
    assert {weight.dtype for weight in mine.parameters()} == {torch.float32}
    assert not mine.training


def test_a_vocabulary_is_what_table_and_head_both_have(any_model: Path) -> None:
    model = load_causal_lm(at(any_model), "actor")
    assert vocabulary_of(model) == vocabulary_in(at(any_model), "actor") == 259
    model.set_input_embeddings(torch.nn.Embedding(300, 64))
    model.set_output_embeddings(torch.nn.Linear(64, 280, bias=False))
    assert (vocabulary_of(model), vocabulary_of(model.get_decoder())) == (280, 300)
    model.set_output_embeddings(torch.nn.Linear(64, 310, bias=False))
    assert vocabulary_of(model) == 300


def test_loading_draws_nothing_from_the_random_state(two_layers: Path) -> None:
    before = torch.random.get_rng_state()
    load_causal_lm(at(two_layers), "actor")
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_is_off(two_layers: Path, tmp_path: Path) -> None:
    directory = copy_of(two_layers, tmp_path)
    settings = json.loads((directory / "config.json").read_text()) | {"attention_dropout": 0.5}
    (directory / "config.json").write_text(json.dumps(settings))
    model = load_causal_lm(at(directory), "actor").train()
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_is_off_in_the_parts_of_a_configuration(tmp_path: Path) -> None:
    text = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "attention_dropout": 0.5}
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    model = load_outline(at(tmp_path), "actor")
    assert {getattr(module, "attention_dropout", 0.0) for module in model.modules()} == {0.0}
    assert model.config.get_text_config().attention_dropout == 0


def test_tied_weights_are_named_once(any_model: Path) -> None:
    model = load_causal_lm(at(any_model), "actor")
    names = named_weights(model).keys()
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) == (not model.config.tie_word_embeddings)


def copy_of(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no weights")],
)
def test_a_directory_that_lacks_a_file_is_named(
    two_layers: Path, tmp_path: Path, missing: str, words: str
) -> None:
    directory = copy_of(two_layers, tmp_path)
    (directory / missing).unlink()
    with pytest.raises(ModelNotFound, match=f"actor: {directory} .*{words}"):
        load_causal_lm(at(directory), "actor")


def test_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"actor: no such model directory: {tmp_path}/absent"):
        load_causal_lm(at(tmp_path / "absent"), "actor")
    with pytest.raises(ModelNotFound, match=r"set actor\.model\.path"):
        load_causal_lm(ModelConfig(), "actor")


@pytest.mark.parametrize("kept_bytes", [0, 4, 1000, 100_000])
def test_damaged_weights_are_refused(two_layers: Path, tmp_path: Path, kept_bytes: int) -> None:
    directory = copy_of(two_layers, tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelNotFound, match=f"the model in {directory} cannot be read"):
        load_causal_lm(at(directory), "actor")


def test_a_damaged_configuration_is_refused(two_layers: Path, tmp_path: Path) -> None:
    directory = copy_of(two_layers, tmp_path)
    for content in ("{", "[]", '{"model_type": "nonsense"}'):
        (directory / "config.json").write_text(content)
        with pytest.raises(ModelNotFound, match=f"the model in {directory} cannot be read"):
            load_causal_lm(at(directory), "actor")


def test_weights_that_would_be_random_are_refused(two_layers: Path, tmp_path: Path) -> None:
    """A configuration with one layer more than the file."""
    directory = copy_of(two_layers, tmp_path)
    settings = json.loads((directory / "config.json").read_text())
    settings["num_hidden_layers"] += 1
    settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelNotFound, match=r"lacks 12 of the model's weights, e\.g\. 'model\.layers\.2"):
        load_causal_lm(at(directory), "actor")


def test_a_pickle_is_never_read(two_layers: Path, tmp_path: Path) -> None:
    directory = copy_of(two_layers, tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin is a pickle"):
        load_causal_lm(at(directory), "actor")


def test_a_tokenizer_is_needed(two_layers: Path, tmp_path: Path) -> None:
    assert load_tokenizer(at(two_layers)).encode("ab") == [
        load_tokenizer(at(two_layers)).encode(letter)[0] for letter in "ab"
    ]
    directory = copy_of(two_layers, tmp_path)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFound, match=f"the tokenizer in {directory} cannot be read"):
        load_tokenizer(at(directory))
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFound, match=f"{directory} has no tokenizer"):
        load_tokenizer(at(directory))


# ------------------------------------------------------------------------------ reward models


def padded_rows() -> dict[str, torch.Tensor]:
    """Rows of 6, 4, 1 and 5 tokens; padding left, right or on both sides."""
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    )
    ids = torch.randint(0, 250, mask.shape, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": torch.where(mask.bool(), ids, 256),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_score_is_the_heads_at_the_last_token(any_model: Path, tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(1)
    theirs = kind.from_pretrained(any_model, num_labels=1, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    rows = padded_rows()
    scores = RewardModel.load(at(tmp_path)).score(**rows)
    for row in range(4):
        ids = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
        with torch.no_grad():
            expected = theirs(ids).logits.reshape(-1)[-1]
        assert_close(scores[row], expected, rtol=1e-4, atol=1e-5)
    again = RewardModel.load(at(tmp_path))
    alone = torch.cat([again.score(**{name: t[row : row + 1] for name, t in rows.items()}) for row in range(4)])
    assert torch.equal(alone, scores)


def test_a_causal_lm_is_no_reward_model(two_layers: Path) -> None:
    with pytest.raises(ModelNotFound, match="is not a reward model"):
        RewardModel.load(at(two_layers))


def test_a_classifier_with_several_labels_is_no_reward_model(two_layers: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(two_layers, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelNotFound, match=r"\[1, 64\]"):
        RewardModel.load(at(tmp_path))


@pytest.mark.skipif("GenuineIntel" not in CPU, reason="MKL has its strict mode on Intel's processors")
def test_matmul_rows_do_not_depend_on_row_count_or_threads() -> None:
    """What the laws on bits rest on. 896 inputs: without MKL's strict mode two threads cut the sum."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(128, 896, generator=generator), torch.randn(300, 896, generator=generator)
    whole = rows @ weight.T
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in (16, 40, 130, 300):
                assert torch.equal(rows[:num_rows] @ weight.T, whole[:num_rows])
    finally:
        torch.set_num_threads(before)
