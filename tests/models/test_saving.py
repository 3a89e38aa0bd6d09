"""Directories that are written: settings stay, and an export is the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from rolemesh.config.model import ModelConfig, PolicyModelConfig
from rolemesh.errors import CheckpointFailed, InvalidConfig, ModelNotFound
from rolemesh.models import saving
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.lora import Adapter
from rolemesh.models.saving import export, save_model
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.ranks.ranks import Ranks

IDS = torch.arange(3, 40)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
        return found


@pytest.fixture
def sampling_model(two_layers: Path, tmp_path: Path) -> Path:
    """As many published models: a temperature, but not do_sample."""
    directory = shutil.copytree(two_layers, tmp_path / "sampling")
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6, "top_p": 0.9}))
    return directory


def adapter_of(model: Path, directory: Path, **keys: object) -> Path:
    """An adapter as peft writes it, of numbers that matter."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **keys)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    policy.save_pretrained(directory)
    return directory


def tokens_of(directory: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(directory)("What is 2 + 3?").input_ids
    return ids


def check_merged(model: Path, tmp_path: Path) -> None:
    """Compare an export with what peft makes of an adapter of the model."""
    adapter = adapter_of(model, tmp_path / "adapter")
    done = export(adapter, tmp_path / "out")
    assert done.num_files == 1
    mine = AutoModelForCausalLM.from_pretrained(done.directory)
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    whole = policy.merge_and_unload()
    assert mine.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in mine.state_dict().items())
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert (logits(mine) - logits(plain)).abs().max() > 0.01
    assert 0 < done.difference < 1e-4  # W + B·A rounds otherwise than two products
    assert tokens_of(done.directory) == tokens_of(model)


def test_settings_that_save_pretrained_refuses_are_kept(sampling_model: Path, tmp_path: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(sampling_model)), "actor")
    with pytest.raises(ValueError, match="do_sample"):
        model.save_pretrained(tmp_path / "refused")
    save_model(model, tmp_path / "out")
    kept = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (kept.temperature, kept.top_p, kept.eos_token_id) == (0.6, 0.9, model.generation_config.eos_token_id)
    assert model.generation_config.temperature == 0.6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_model_in_its_type(any_model: Path, tmp_path: Path, dtype: str) -> None:
    """Bit for bit in float32; else as the source that is read in that type."""
    done = export(any_model, tmp_path / "deep" / "out", dtype=dtype, max_shard_size="100KB")
    theirs = AutoModelForCausalLM.from_pretrained(any_model, dtype=getattr(torch, dtype))
    mine = AutoModelForCausalLM.from_pretrained(done.directory)
    assert mine.dtype == theirs.dtype
    assert torch.equal(logits(mine), logits(theirs))
    assert done.num_files == len(list(done.directory.glob("*.safetensors"))) > 1
    assert done.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert done.num_bytes == done.num_parameters * (4 if dtype == "float32" else 2)
    assert (done.difference == 0) == (dtype == "float32")
    assert tokens_of(done.directory) == tokens_of(any_model)


def test_an_adapter_of_peft_is_merged_as_peft_does(any_model: Path, tmp_path: Path) -> None:
    check_merged(any_model, tmp_path)


def test_an_adapter_of_transposed_matrices_is_merged_too(tmp_path: Path) -> None:
    """Those of GPT-2 (Conv1D), of which peft writes so into the adapter's configuration, and ours does, too."""
    model = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4)).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    check_merged(model, tmp_path)
    config = PolicyModelConfig(path=str(model), lora_rank=4)
    trained, ours = Adapter(load_causal_lm(config, "actor"), config, seed=0), tmp_path / "ours"
    ours.mkdir()
    trained.copy()(ours, Ranks.alone())
    assert json.loads((ours / "adapter_config.json").read_text())["fan_in_fan_out"]
    export(ours, tmp_path / "ours_out")
    again = config.model_copy(update={"lora_adapter_path": str(ours)})
    begun = Adapter(load_causal_lm(again, "actor"), again, seed=1)
    assert all(torch.equal(tensor, begun.weights[name]) for name, tensor in trained.weights.items())


def test_an_adapters_own_tokenizer_is_exported(two_layers: Path, tmp_path: Path) -> None:
    adapter = adapter_of(two_layers, tmp_path / "adapter")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "own"
    tokenizer.save_pretrained(adapter)
    export(adapter, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "own"


def test_a_tokenizer_of_two_files_is_exported(two_layers: Path, tmp_path: Path) -> None:
    source = shutil.copytree(two_layers, tmp_path / "source")
    for file in source.glob("tokenizer*"):
        file.unlink()
    byte_tokenizer().backend_tokenizer.model.save(str(source))  # vocab.json and merges.txt
    export(source, tmp_path / "out")
    assert tokens_of(tmp_path / "out") == tokens_of(source)


def test_a_base_model_that_moved_is_named(two_layers: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(two_layers, tmp_path / "moved")
    adapter = adapter_of(moved, tmp_path / "adapter")
    moved = moved.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelNotFound, match="no such model directory"):
        export(adapter, tmp_path / "out")
    export(adapter, tmp_path / "out", base=ModelConfig(path=str(moved)))
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).isfinite().all()


def test_a_critic_is_a_model_too(two_layers: Path, tmp_path: Path) -> None:
    critic = ScoreModel.load(ModelConfig(path=str(two_layers)), "critic", seed=5)
    (tmp_path / "critic").mkdir()
    critic.copy(Ranks.alone())(tmp_path / "critic", Ranks.alone())
    done = export(tmp_path / "critic", tmp_path / "out")
    again = ScoreModel.load(ModelConfig(path=str(done.directory)), "critic")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in critic.state_dict().items())


def test_a_reward_model_is_a_model_too(two_layers: Path, tmp_path: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(two_layers, num_labels=1, pad_token_id=0)
    theirs.save_pretrained(tmp_path / "reward")
    done = export(tmp_path / "reward", tmp_path / "out", max_shard_size="100KB")
    mine = AutoModelForSequenceClassification.from_pretrained(done.directory)
    assert torch.equal(logits(mine), logits(theirs))


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"dtype": "int8"}, InvalidConfig, "dtype is 'int8'; expected one of float32, bfloat16, float16"),
        ({"max_shard_size": "five"}, InvalidConfig, "max_shard_size is 'five'"),
    ],
)
def test_what_has_no_meaning_is_refused(
    two_layers: Path, tmp_path: Path, keys: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        export(two_layers, tmp_path / "out", **keys)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_overwritten(two_layers: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="exists; name a new directory"):
        export(two_layers, tmp_path)


def test_weights_beyond_the_type_are_refused(two_layers: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(two_layers)
    model.model.embed_tokens.weight.data *= 1e6
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(InvalidConfig, match="not finite in float16"):
        export(tmp_path / "large", tmp_path / "out", dtype="float16")
    export(tmp_path / "large", tmp_path / "out", dtype="bfloat16")


def test_another_base_than_the_adapter_was_trained_on_is_refused(two_layers: Path, tmp_path: Path) -> None:
    adapter = adapter_of(two_layers, tmp_path / "adapter")
    (adapter / "base_model.xxh3").write_text("0123456789abcdef\n")
    with pytest.raises(InvalidConfig, match="the base model's weights were not those of"):
        export(adapter, tmp_path / "out")


def test_an_error_of_the_write_is_not_one_of_the_size(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(model: torch.nn.Module, directory: Path, **how: str) -> None:
        raise ValueError("tensors share memory")

    monkeypatch.setattr(saving, "save_model", refusing)
    with pytest.raises(CheckpointFailed, match="out could not be written: tensors share memory"):
        export(two_layers, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_write_is_noticed_and_deleted(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaging(model: torch.nn.Module, directory: Path, **how: str) -> None:
        save_model(model, directory, **how)
        file = directory / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-4096:] = bytes(4096)
        file.write_bytes(data)

    monkeypatch.setattr(saving, "save_model", damaging)
    with pytest.raises(CheckpointFailed, match="gives other logits than the one read"):
        export(two_layers, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
