"""A small job for engine vllm, its prompts, models and weights, and the log-probabilities that are right."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.command_line import app
from rolemesh.services.rollout.engines.sampling import log_distribution

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: there is no build for this platform",
)
P, T, EOS, PAD = 12, 48, 258, 256
PLAIN = SamplingConfig()
GREEDY = SamplingConfig(do_sample=False)


def job_of(model: Path, **rollout: Any) -> JobConfig:
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            "rollout": {"name": "vllm", **rollout},
            "trainer": {"device": "cpu"},
        }
    )


def prompts_of(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, P + 1, (rows,), generator=generator)
    mask = torch.arange(P) >= P - lengths[:, None]
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, PAD)
    return DataProto({"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919 - 1})


def model_with_ends(directory: Path, architecture: Any, seed: int = 0) -> Path:
    """Make the model of `rolemesh model`, with larger weights, in which one token in 25 ends a response."""
    app.model(directory, app.Architecture(architecture), seed=seed)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(5)  # a deviation of 0.1, so that tokens differ in probability
    model.generation_config.eos_token_id = [*range(0, 256, 25), EOS]
    model.save_pretrained(directory)
    return directory


def make_plain_model(directory: Path, config_class: Any, *, is_tied: bool) -> Path:
    """Write a model of one layer, with random weights; a mixture of experts has four of them."""
    config = config_class(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=is_tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def weights_of(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in named_weights(model).items()
    }


def with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


async def generated(engine: Any, prompts: DataProto, sampling: SamplingConfig) -> DataProto:
    """All rows, in the order of the request."""
    answer = DataProto.concat([rows async for rows in engine.generate(prompts, sampling)])
    assert sorted(answer["row"].tolist()) == list(range(len(prompts)))
    return answer[answer["row"].argsort()]


def reference(model: Any, prompts: DataProto, answer: DataProto, sampling: SamplingConfig) -> Tensor:
    """[B, T, V] log-probabilities of the filtered distribution, by one full forward of transformers."""
    ids = torch.cat([prompts["prompts"], answer["responses"]], 1)
    mask = torch.cat([prompts["prompt_mask"], answer["response_mask"]], 1).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    return log_distribution(logits[:, P - 1 : -1].flatten(0, 1), sampling).view(len(ids), T, -1)


def assert_log_probs_agree(model: Any, prompts: DataProto, answer: DataProto, sampling: SamplingConfig) -> None:
    expected = reference(model, prompts, answer, sampling).gather(2, answer["responses"][..., None])[..., 0]
    difference = (answer["rollout_log_probs"] - expected.float()).where(answer["response_mask"], 0)
    assert difference.abs().max() < 1e-4
