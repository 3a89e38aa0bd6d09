"""A small job for engine vllm, and models for it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.rollout import SamplingConfig
from rolemesh.models.tiny import make_tiny_model

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


def model_with_ends(directory: Path, architecture: Any, seed: int = 0) -> Path:
    """Make a model with heads 32 wide, as vLLM requires, in which one token in 25 ends a response."""
    make_tiny_model(directory, architecture, num_heads=2, initializer_range=0.1, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.generation_config.eos_token_id = [*range(0, 256, 25), EOS]
    model.generation_config.save_pretrained(directory)
    return directory
