"""The head of a policy: how many kernels its log-probabilities take on a GPU, and its exactness in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sequences import sequence_batch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
from rolemesh.models import chunks, distribution
from rolemesh.models.chunks import tokens_in_block
from rolemesh.models.distribution import TokenStats, WantedStatistics, distribution_stats, head, with_head
from rolemesh.models.heads import VocabularyHead
from rolemesh.services.actor.worker import ActorWorker

GIB = 2**30
VOCABULARY, HIDDEN, TOKENS = 4096, 64, 1200
LOG_PROBS = WantedStatistics(0.7, entropy=True, entropy_gradient=False, sum_pi_squared=False)


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


def narrow_head(model: Any, head_dtype: str) -> VocabularyHead:
    found = VocabularyHead.of(model, torch.bfloat16, head_dtype, "actor")
    assert found is not None
    return found


def output_of(hidden: Tensor) -> Any:
    return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden)


def hidden_states() -> tuple[Tensor, Tensor]:
    """Normal hidden states, with which the model's logits have a standard deviation of 3; and sampled ids."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@torch.no_grad()
def stats_of(model: Any, hidden: Tensor, drawn: Tensor, wanted: WantedStatistics = LOG_PROBS) -> TokenStats:
    with torch.autocast("cpu", torch.bfloat16):
        vocabulary_head = narrow_head(model, "model")
        return distribution_stats(model, output_of(hidden), hidden, drawn, None, wanted, vocabulary_head)


def test_no_grad_blocks_take_at_most_12_kernels_and_match_a_cpu(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a GPU is said to be here. Two columns of several blocks are joined; squares are a third."""
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
        with Kernels() as kernels:
            stats_of(model, hidden, drawn, LOG_PROBS._replace(sum_pi_squared=True))
        assert len(kernels.names) <= 15 * num_blocks + 3 * (num_blocks > 1), "\n".join(kernels.names)


def test_a_block_is_as_large_as_the_kind_of_gpu_allows() -> None:
    """8 bytes a logit, a sixteenth of the memory: of 80 GiB 2**29 logits, 3,533 tokens of Qwen's vocabulary."""
    assert tokens_in_block(151_936, 80 * GIB) == tokens_in_block(151_936, 85_000_000_000) == 3533
    assert tokens_in_block(151_936, 24 * GIB) == 2**27 // 151_936
    assert tokens_in_block(151_936, GIB) == 256


# ---------------------------------------------------------------------------- against float64


def test_float32_logits_of_rounded_operands_add_no_error(model: Any) -> None:
    """Those in bfloat16 are off by 0.012 on average at a standard deviation of 3."""
    hidden, drawn = hidden_states()
    with torch.no_grad():
        weight = model.lm_head.weight.bfloat16().double()
        logits = hidden.bfloat16().double() @ weight.T
        exact = logits.log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        off = {}
        for head_dtype in ("model", "float32"):
            with torch.autocast("cpu", torch.bfloat16):
                found = head(model, output_of(hidden), hidden, narrow_head(model, head_dtype)).float()
            off[head_dtype] = (found.log_softmax(-1).gather(-1, drawn[:, None])[:, 0] - exact).abs()
    assert 2.8 < logits.std() < 3.2
    assert 0.005 < off["model"].mean() < 0.02
    assert off["float32"].max() < 1e-4


def of_weight(model: Any, vocabulary_head: VocabularyHead | None) -> Tensor:
    """The gradient of the head's weight, of a weighted sum of log-probabilities."""
    hidden, drawn = hidden_states()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype is torch.float32):
        hidden = hidden.to(model.dtype)
        stats = distribution_stats(model, output_of(hidden), hidden, drawn, None, LOG_PROBS, vocabulary_head)
    torch.autograd.backward((stats.log_probs * torch.linspace(0.5, 1.5, TOKENS)).sum())
    assert model.lm_head.weight.grad is not None
    return model.lm_head.weight.grad.double()


def test_the_gradient_over_many_chunks_is_as_exact_as_over_one(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast alone adds the chunks' gradients in bfloat16, and its error grows."""
    exact = of_weight(model.double(), None)
    model.float()
    off: dict[tuple[str, int], float] = {}
    for tokens in (TOKENS, 8):
        monkeypatch.setattr(chunks, "CHUNK_LOGITS", 1)
        monkeypatch.setattr(chunks, "MIN_MATRIX_ROWS", tokens)
        heads = {"autocast": None} | {name: narrow_head(model, name) for name in ("model", "float32")}
        for name, vocabulary_head in heads.items():
            off[name, tokens] = float((of_weight(model, vocabulary_head) - exact).norm() / exact.norm())
    for name in ("model", "float32"):
        assert off[name, 8] <= 1.2 * off[name, TOKENS], off
    assert off["autocast", 8] > 1.2 * off["autocast", TOKENS], off
    assert off["float32", 8] < 0.6 * off["model", 8], off


# --------------------------------------------------------------------- in actor, reference and rollout


def test_an_update_and_a_log_probs_call_each_cast_the_head_once(two_layers: Path) -> None:
    """16 rows are 4 micro-batches; an update makes 2 optimizer steps, after which the weight is another."""
    half = {"dtype": "bfloat16"}
    job = make_job(
        {
            "data": {"train_batch_size": 16},
            "actor": {"model": {"path": str(two_layers), **half}, "head_dtype": "float32",
                      "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4},
            "critic": {"ppo_micro_batch_size_per_gpu": 4},
            "trainer": {"device": "cpu"},
        }
    )  # fmt: skip
    worker, batch = ActorWorker(job), sequence_batch(16)
    shape = list(worker.model.get_output_embeddings().weight.shape)
    for method, casts in ((ActorWorker.compute_log_probs, 1), (ActorWorker.update, 2)):
        with Kernels() as kernels:  # of this thread
            method.__wrapped__(worker, batch)  # type: ignore[attr-defined]
        assert kernels.names.count(f"aten._to_copy.default torch.float32 {shape}") == casts
    worker.close()


def test_a_model_with_a_float32_head_gives_the_trainers_logits(model: Any) -> None:
    """Engine hf calls it so. The model's own weights are used, with the names that they had."""
    ids, names = torch.arange(3, 12)[None], [name for name, _ in model.named_parameters()]
    vocabulary_head = narrow_head(model, "float32")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model.get_decoder()(input_ids=ids, use_cache=False)
        expected = head(model, output, output.last_hidden_state[0], vocabulary_head)
        found = with_head(model, vocabulary_head)(input_ids=ids, logits_to_keep=2).logits[0]
    assert (found.dtype, expected.dtype) == (torch.float32, torch.float32)
    assert_close(found, expected[-2:])
    assert [name for name, _ in model.named_parameters()] == names
    assert VocabularyHead.of(model, torch.float32, "float32", "actor") is None  # its logits are already


def test_a_head_with_a_bias_has_it(model: Any) -> None:
    linear = nn.Linear(HIDDEN, 8)
    found = VocabularyHead(linear, torch.bfloat16, wide=True)(torch.ones(2, 3, HIDDEN))
    expected = linear.weight.bfloat16().double().sum(1) + linear.bias.bfloat16()
    assert_close(found, expected.float().expand(2, 3, 8))


def test_float32_logits_are_refused_where_the_head_is_no_matrix(model: Any) -> None:
    strange = distribution.with_module(model, model.lm_head, nn.Sequential(model.lm_head))
    assert VocabularyHead.of(strange, torch.bfloat16, "model", "actor") is None
    message = "reference: actor.head_dtype is float32, but the head of Qwen2ForCausalLM.*Sequential.*to model"
    with pytest.raises(InvalidConfig, match=message):
        VocabularyHead.of(strange, torch.bfloat16, "float32", "reference")
