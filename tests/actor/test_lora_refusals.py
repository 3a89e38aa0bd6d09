"""Which modules an adapter may have; and adapters, directories and keys that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from actors import lora_job
from saving import saved
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig, ModelNotFound
from rolemesh.models.loading import load_body, load_causal_lm, load_outline, named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.actor.worker import ActorWorker


@pytest.fixture(autouse=True)
def _in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles write checkpoints there alone."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["query"], r"\['query'\] matches no module; expected some of .*'q_proj'"),
        (["q_proj", "query"], r"\['query'\] matches no module"),
        ("q_proj", "'q_proj' matches no module.*Write names as a list"),
        (["input_layernorm"], "layers.0.input_layernorm, which is not a separate matrix"),
        (["embed_tokens"], "embed_tokens, which is not a separate matrix"),
        (["lm_head"], "lm_head, which is not a separate matrix"),  # the embedding's
        (".*", "'.*' matches the model itself, which is not a separate matrix"),
    ],
)
def test_a_target_that_is_no_matrix_of_the_model_is_refused(tiny_model: Path, targets: Any, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said) as error:
        ActorWorker(lora_job(tiny_model, target_modules=targets))
    assert "actor.model.target_modules" in str(error.value)


def test_target_modules_may_be_a_pattern_or_an_untied_head(tmp_path: Path) -> None:
    llama = make_tiny_model(tmp_path, "llama")
    pattern = ActorWorker(lora_job(llama, target_modules=r".*layers\.1\.self_attn\.[qk]_proj"))
    assert {name.partition(".lora_")[0] for name in pattern.optimizer.parameters} == {
        f"model.layers.1.self_attn.{x}_proj" for x in "qk"
    }
    assert len(ActorWorker(lora_job(llama, target_modules=["lm_head"])).optimizer.parameters) == 2


def experts_in(directory: Path) -> Path:
    """Save a tiny mixture of experts, with a tokenizer."""
    tiny = make_tiny_model(directory, "qwen3")
    sizes = json.loads((tiny / "config.json").read_text()) | {"num_experts": 4, "moe_intermediate_size": 32}
    chosen = {key: sizes[key] for key in sizes if key not in {"model_type", "architectures"}}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**chosen, num_experts_per_tok=2)).save_pretrained(tiny)
    return tiny


async def test_fused_experts_have_no_adapter_but_other_matrices_may(
    tmp_path: Path,
) -> None:
    model = experts_in(tmp_path / "model")
    with pytest.raises(InvalidConfig) as error:
        ActorWorker(lora_job(model))
    assert "target_modules includes model.layers.0.mlp.experts" in str(error.value)
    others = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert str(error.value).endswith(f"set actor.model.target_modules to {others}")
    actor = ActorWorker(lora_job(model, target_modules=others))
    plain = named_weights(load_causal_lm(actor.config, "actor"))
    assert actor.adapter is not None
    assert actor.adapter.deltas().keys() <= actor.adapter.base_weights().keys() == plain.keys()
    (saved_at := tmp_path / "saved").mkdir()
    await saved(actor, saved_at)
    again = ActorWorker(lora_job(model, target_modules=others, lora_adapter_path=str(saved_at)))
    assert again.adapter is not None
    assert again.adapter.weights.keys() == actor.adapter.weights.keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "has rank 8 and alpha 16, but actor.model.lora_rank is 4"),
        ({"lora_alpha": 32}, "alpha 32"),
        ({"lora_alpha": "16"}, "r 4 and lora_alpha '16'; expected numbers"),
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"target_modules": ["q_proj"]}, "does not fit actor.model.path"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    await saved(ActorWorker(lora_job(tiny_model)), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidConfig, match=said):
        ActorWorker(lora_job(tiny_model, lora_adapter_path=str(tmp_path)))


def test_a_directory_that_is_not_an_adapter_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"is not an adapter: it needs adapter_config.json"):
        ActorWorker(lora_job(tiny_model, lora_adapter_path=str(tiny_model)))


@pytest.mark.parametrize("load", [load_causal_lm, load_body, load_outline])
def test_an_adapter_beside_a_model_is_refused(tmp_path: Path, load: Any) -> None:
    directory = make_tiny_model(tmp_path, "qwen2")
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ModelNotFound, match=r"has both a model and an adapter .* actor\.model\.lora_adapter_path"
    ):
        load(ModelConfig(path=str(directory)), "actor")


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"actor": {"model": {"lora_adapter_path": "a"}}}, ("actor.model.lora_adapter_path", "lora_rank is 0")),
        (
            {
                "actor": {"use_kl_loss": True, "model": {"path": "a", "lora_rank": 4}},
                "reference": {"model": {"path": "b"}},
            },
            ("reference.model.path is b", "actor.model.lora_rank 4"),
        ),
        (
            {
                "actor": {"use_kl_loss": True, "model": {"lora_rank": 4}},
                "reference": {"model": {"dtype": "bfloat16"}},
            },
            ("reference.model.dtype is bfloat16", "actor.model.lora_rank 4"),
        ),
        ({"actor": {"model": {"target_modules": []}}}, ("actor.model", "target_modules names nothing")),
        ({"actor": {"model": {"target_modules": [""]}}}, ("actor.model", "target_modules names nothing")),
        (
            {"actor": {"model": {"target_modules": "(q"}}},
            ("actor.model", "target_modules '(q' is not a regular expression"),
        ),
        (
            {"critic": {"model": {"lora_rank": 4}}},
            ("critic.model.lora_rank is 4", "only the actor can train an adapter"),
        ),
        ({"reference": {"model": {"lora_rank": 4}}}, ("reference.model.lora_rank", "actor.model.lora_rank")),
    ],
)
def test_keys_that_contradict_an_adapter_are_refused(sections: dict[str, Any], keys: tuple[str, str]) -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job(sections)
    assert all(key in str(error.value) for key in keys)
