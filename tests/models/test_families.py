"""Architectures compute as transformers has them, or they are refused when they load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, Gemma3Config, Gemma3ForConditionalGeneration

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, ModelNotFound
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import load_body, load_causal_lm, load_outline
from rolemesh.models.packed.load_probe import prepare_body
from rolemesh.models.reward_model import RewardModel
from rolemesh.models.sequence import token_stats
from rolemesh.models.sharded import read_score_model
from rolemesh.models.supported import check_positions
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.services.rollout.engines.fitting import load_served_outline

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 1e4,
}


def made(directory: Path, kind: str, **settings: Any) -> ModelConfig:
    """Save a small random model of a kind."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)
    return ModelConfig(path=str(directory))


def rows_of(*lengths: int) -> DataProto:
    """Rows of four prompt tokens and these numbers of response tokens, all of one text."""
    width = 4 + max(lengths)
    mask = torch.arange(width) < 4 + torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 60, (1, 100), generator=torch.Generator().manual_seed(1))[:, :width]
    columns = {"input_ids": ids.expand(len(lengths), -1), "attention_mask": mask.long()}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return DataProto({**columns, "position_ids": positions, "response_mask": mask[:, 4:]})


@torch.no_grad()
def log_probs(model: Any, rows: DataProto) -> torch.Tensor:
    return token_stats(model, rows, temperature=1.0).log_probs


# ------------------------------------------------------------------------------- attention


def test_a_soft_cap_of_attention_is_kept(tmp_path: Path) -> None:
    config = made(tmp_path, "Gemma2", head_dim=8, attn_logit_softcapping=0.5)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        theirs = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        expected = theirs(ids).logits
        without = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path, attn_logit_softcapping=None).eval()
        assert (without(ids).logits - expected).abs().max() > 0.5, "or the test shows nothing"
        assert_close(load_causal_lm(config, "actor")(ids).logits, expected)
        hidden = theirs.model(ids).last_hidden_state
        assert_close(load_body(config, "critic")(ids).last_hidden_state, hidden)
    assert load_outline(config, "actor").config._attn_implementation == "eager"


def test_attention_sdpa_refuses_a_soft_cap_that_it_would_ignore(tmp_path: Path) -> None:
    config = made(tmp_path, "Gemma2", head_dim=8)
    model = load_causal_lm(config, "actor")
    model.set_attn_implementation("sdpa")
    with pytest.raises(InvalidConfig, match="Gemma2Attention has a soft cap or sinks"):
        model(torch.arange(4)[None])


@pytest.mark.parametrize("without_padding", [True, False])
def test_a_reward_model_that_is_not_causal_is_refused(tmp_path: Path, without_padding: bool) -> None:
    """Its own score is of the first token's hidden state, after another layer."""
    sizes = {key: SMALL[key] for key in list(SMALL)[:5]}
    BertForSequenceClassification(BertConfig(**sizes, num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=r"reward_model\.model\.path: BertModel is not a causal model"):
        RewardModel.load(ModelConfig(path=str(tmp_path), use_remove_padding=without_padding))


def test_padded_models_that_are_causal_are_taken(tmp_path: Path) -> None:
    for kind, settings in (("Qwen2", {}), ("Gemma2", {"head_dim": 8}), ("Falcon", {}), ("Mistral", {})):
        config = made(tmp_path / kind, kind, **settings)
        body = load_body(config, "critic")
        for dtype in ("float32", "bfloat16"):
            prepare_body(
                body, "critic", config.model_copy(update={"use_remove_padding": False, "dtype": dtype})
            )


# -------------------------------------------------------------------------------- positions


def job_of(tokens: int) -> JobConfig:
    return make_job({"data": {"max_prompt_length": 4, "max_response_length": tokens - 4}})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                   "max_position_embeddings": 16}),
    ],
)  # fmt: skip
def test_lengths_where_rows_depend_on_neighbours_are_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model = load_causal_lm(made(tmp_path, kind, **{"max_position_embeddings": 256} | settings), "actor")
    alone = log_probs(model, rows_of(6))[0]
    assert_close(log_probs(model, rows_of(6, 12))[0, :6], alone)
    check_positions(model.config, job_of(16), "actor")
    assert (log_probs(model, rows_of(6, 40))[0, :6] - alone).abs().max() > 0.1
    rope = settings["rope_parameters"]["rope_type"]
    with pytest.raises(
        InvalidConfig, match=f"is 17; the model of actor has rope type {rope}, .* beyond 16 tok"
    ):
        check_positions(model.config, job_of(17), "actor")


def test_positions_of_other_kinds_have_no_such_length(tmp_path: Path) -> None:
    for kind, rope in (
        ("Llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        ("Gemma3Text", None),
    ):
        settings = getattr(transformers, f"{kind}Config")(**SMALL, rope_parameters=rope)
        check_positions(settings, job_of(5000), "actor")


# ------------------------------------------------------------------------------- multimodal


def test_multimodal_models_have_log_probs_and_values_of_texts(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = Gemma3Config(
        text_config=SMALL | {"head_dim": 8, "max_position_embeddings": 64},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=63, boi_token_index=62, eoi_token_index=61,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Gemma3ForConditionalGeneration(settings).eval()
    theirs.save_pretrained(tmp_path)
    config, rows = ModelConfig(path=str(tmp_path), dtype="float32"), rows_of(8)
    with torch.no_grad():
        logits = theirs(input_ids=rows["input_ids"]).logits[0, 3:-1]
    expected = logits.log_softmax(-1).gather(-1, rows["input_ids"][0, 4:, None])[:, 0]
    for without_padding in (False, True):
        config = config.model_copy(update={"use_remove_padding": without_padding})
        model = load_causal_lm(config, "actor")
        prepare_body(model.get_decoder(), "actor", config)
        assert_close(log_probs(model, rows)[0], expected, rtol=1e-4, atol=1e-5)
    critic = ScoreModel.load(config, "critic")
    assert critic.score(critic(input_ids=rows["input_ids"])).shape == (1, 12)


# ------------------------------------------------------------------------------------ files


def test_a_critic_of_remote_code_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = make_tiny_model(tmp_path / "mine", "qwen2")
    (directory / "modeling_mine.py").write_text(
        "from transformers import Qwen2Config, Qwen2Model\n"
        "class MineConfig(Qwen2Config):\n    model_type = 'mine'\n"
        "class MineModel(Qwen2Model):\n    config_class = MineConfig\n"
    )
    settings = json.loads((directory / "config.json").read_text()) | {"model_type": "mine"}
    settings["auto_map"] = {name: f"modeling_mine.Mine{name[4:]}" for name in ("AutoConfig", "AutoModel")}
    (directory / "config.json").write_text(json.dumps(settings))
    config = ModelConfig(path=str(directory), trust_remote_code=True)
    critic = ScoreModel.load(config, "critic")
    assert type(critic.body).__name__ == "MineModel"
    (saved := tmp_path / "saved").mkdir()
    critic.copy(Ranks.alone())(saved, Ranks.alone())
    again = read_score_model(critic, config.model_copy(update={"path": str(saved)}), "critic", 0)
    for name, tensor in critic.state_dict().items():
        assert torch.equal(again[name], tensor)


def with_tensors(directory: Path, **tensors: torch.Tensor) -> ModelConfig:
    file = directory / "model.safetensors"
    both = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(both, file, metadata={"format": "pt"})
    return ModelConfig(path=str(directory))


def test_quantized_weights_that_would_be_read_plain_are_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    narrow = (load_file(directory / "model.safetensors")[name] * 100).to(torch.float8_e4m3fn)
    config = with_tensors(directory, **{name: narrow, f"{name}_scale": torch.tensor(0.01)})
    with pytest.raises(ModelNotFound, match=r"has quantized weights \(.*up_proj\.weight_scale\)"):
        load_causal_lm(config, "actor")


@pytest.mark.parametrize("load", [load_causal_lm, load_body])
def test_a_nonzero_bias_that_the_model_would_ignore_is_refused(
    tmp_path: Path, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    name = "model.layers.1.self_attn.q_proj.bias"
    config = with_tensors(
        directory, **{name: torch.zeros(64), "model.layers.7.mlp.up_proj.weight": torch.ones(2)}
    )
    with caplog.at_level(logging.WARNING, "rolemesh"):
        load(config, "actor")
    assert "has 2 tensors that are not read, e.g. model.layers.1.self_attn.q_proj.bias" in caplog.text
    with_tensors(directory, **{name: torch.ones(64)})
    with pytest.raises(ModelNotFound, match=rf"has {name}, which Llama\w* does not have"):
        load(config, "actor")


def test_heads_that_a_body_does_not_have_are_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    with caplog.at_level(logging.WARNING, "rolemesh"):
        load_body(with_tensors(directory, score__weight=torch.ones(1, 64)), "critic")
        load_causal_lm(ModelConfig(path=str(directory)), "actor")
    assert caplog.text == ""


def test_a_served_tie_that_the_files_contradict_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen2")
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    load_served_outline(with_tensors(directory, lm_head__weight=table.clone()))
    config = with_tensors(directory, lm_head__weight=table + 1)
    with pytest.raises(ModelNotFound, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        load_served_outline(config)
