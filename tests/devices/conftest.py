"""A GPU that is pretended, for the tests of one file; and a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pretended_gpu import PretendedGpu, pretended_gpu
from transformers import Qwen2Config, Qwen2ForSequenceClassification


@pytest.fixture(scope="module")
def gpu() -> Iterator[PretendedGpu]:
    if torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("a GPU can be pretended where there is none, with torch built for CUDA")
    with pretended_gpu() as gpu:
        yield gpu


@pytest.fixture
def here(gpu: PretendedGpu) -> Iterator[None]:
    """The thread of the event loop computes on the GPU, too: it makes the tensors of a new batch."""
    with gpu.here():
        yield


@pytest.fixture(scope="session")
def tiny_reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 32, and a head with one output."""
    path = tmp_path_factory.mktemp("reward")
    config = Qwen2Config(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=256, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(path)
    return path
