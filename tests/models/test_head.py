"""The head of a policy: how many kernels its log-probabilities take on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rolemesh.models import distribution
from rolemesh.models.chunks import tokens_in_block
from rolemesh.models.distribution import TokenStats, Wanted, distribution_stats

GIB = 2**30
VOCABULARY, HIDDEN, TOKENS = 4096, 64, 1200
LOG_PROBS = Wanted(0.7, entropy=True, entropy_gradient=False, sum_pi_squared=False)


class Kernels(TorchDispatchMode):
    """Notes operations that launch a kernel on a GPU, all but views, with type and shape of their operand."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and not func.is_view:
            of = f"{args[0].dtype} {list(args[0].shape)}" if args and isinstance(args[0], Tensor) else ""
            self.names.append(f"{func} {of}")
        return result


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.375, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


def output_of(hidden: Tensor) -> Any:
    return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden)


def hidden_states() -> tuple[Tensor, Tensor]:
    """Normal hidden states, with which the model's logits have a standard deviation of 3; and sampled ids."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@torch.no_grad()
def stats_of(model: Any, hidden: Tensor, drawn: Tensor) -> TokenStats:
    with torch.autocast("cpu", torch.bfloat16):
        return distribution_stats(model, output_of(hidden), hidden, drawn, None, LOG_PROBS)


def test_a_block_without_gradients_takes_at_most_12_kernels_and_gives_the_numbers_of_a_cpu(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a GPU is said to be here. Two columns of several blocks are joined."""
    hidden, drawn = hidden_states()
    expected = stats_of(model, hidden, drawn)
    assert expected.entropys is not None
    for num_blocks, tokens in ((1, 2048), (3, 512)):
        memory = tokens * VOCABULARY * 8 * 16
        assert tokens_in_block(VOCABULARY, memory) == tokens
        monkeypatch.setattr(distribution, "device_memory", lambda device, memory=memory: memory)
        with Kernels() as kernels:
            found = stats_of(model, hidden, drawn)
        assert len(kernels.names) <= 12 * num_blocks + 2 * (num_blocks > 1), "\n".join(kernels.names)
        assert found.entropys is not None
        assert_close(found.log_probs, expected.log_probs)
        assert_close(found.entropys, expected.entropys)


def test_a_block_is_as_large_as_the_gpu_allows_and_the_same_on_gpus_of_a_kind() -> None:
    """8 bytes a logit, a sixteenth of the memory: of 80 GiB 2**29 logits, 3,533 tokens of Qwen's vocabulary."""
    assert tokens_in_block(151_936, 80 * GIB) == tokens_in_block(151_936, 85_000_000_000) == 3533
    assert tokens_in_block(151_936, 24 * GIB) == 2**27 // 151_936
    assert tokens_in_block(151_936, GIB) == 256
