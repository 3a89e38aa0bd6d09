"""Which modules an adapter may have; and adapters, directories and keys that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from actors import lora_job
from saving import saved

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
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


def test_a_pattern_chooses_modules_and_a_head_of_its_own_may_be_one(tmp_path: Path) -> None:
    llama = make_tiny_model(tmp_path, "llama")
    pattern = ActorWorker(lora_job(llama, target_modules=r".*layers\.1\.self_attn\.[qk]_proj"))
    assert {name.partition(".lora_")[0] for name in pattern.optimizer.parameters} == {
        f"model.layers.1.self_attn.{x}_proj" for x in "qk"
    }
    assert len(ActorWorker(lora_job(llama, target_modules=["lm_head"])).optimizer.parameters) == 2


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
