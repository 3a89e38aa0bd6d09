"""Engine hf generates from the model's own distribution, or refuses its architecture when it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig, Unsupported
from rolemesh.models.loading import load_causal_lm
from rolemesh.services.rollout.engines.hf.cached_attention import GROUPED_ATTENTION
from rolemesh.services.rollout.engines.hf.engine_probe import group_attention

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}


def loaded(directory: Path, kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)
    return load_causal_lm(ModelConfig(path=str(directory)), "rollout")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Qwen3Moe", EXPERTS), ("Cohere2", {}), ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}), ("Phi3", {})],
)
def test_models_whose_rows_share_keys_and_values_alone_are_taken(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model = loaded(tmp_path, kind, settings)
    group_attention(model)
    assert model.config._attn_implementation == GROUPED_ATTENTION


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("Gemma2", {"head_dim": 8}, "its attention has a soft cap, sinks or a bias"),
        ("Falcon", {}, "rows that are decoded together change each other's numbers"),
        ("RecurrentGemma", {"lru_width": 32}, "rows that are decoded together change each other's numbers"),
        ("StableLm", {}, "missing 1 required keyword-only argument: 'reading'"),
    ],
    ids=["soft cap", "no attention interface", "recurrent layers", "no further arguments"],
)
def test_other_models_are_refused(tmp_path: Path, kind: str, settings: dict[str, Any], said: str) -> None:
    message = rf"rollout engine hf cannot run {kind}ForCausalLM \(.*{said}\); set rollout\.name to vllm"
    with pytest.raises(Unsupported, match=message):
        group_attention(loaded(tmp_path, kind, settings))


def test_damaged_weights_are_not_said_to_suit_another_engine(tmp_path: Path) -> None:
    model = loaded(tmp_path, "Qwen2", {})
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(InvalidConfig, match="logits are not finite, so its weights are damaged"):
        group_attention(model)
