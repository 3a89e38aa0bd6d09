"""Models that are never trained: held in the type of their products, with the bits of float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import sequence_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.model import FsdpConfig, ModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.models import sharded
from rolemesh.models.loading import hold_frozen, load_causal_lm
from rolemesh.models.reward_model import RewardModel
from rolemesh.models.sequence import token_stats
from rolemesh.models.sharded import load_score_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.services.actor.worker import ActorWorker, PolicyWorker, ReferenceWorker

HALF = torch.bfloat16
# Two layers of width 64, two of four heads for keys and values, an MLP of 256; a vocabulary of 259.
MATRICES = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)
TABLE = 259 * 64


class Casts(TorchDispatchMode):
    """Counts the casts of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights, self.number = {weight.data_ptr() for weight in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights:
            self.number += 1
        return func(*args, **(kwargs or {}))


def stored_in(dtype: torch.dtype, model: Path, into: Path) -> Path:
    """The directory of the same model, with weights in a dtype."""
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(into)
    for file in model.glob("token*"):
        (into / file.name).write_bytes(file.read_bytes())
    return into


def job_of(model: Path, dtype: str, packed: bool, **keys: Any) -> JobConfig:
    setting = {"dtype": dtype, "use_remove_padding": packed}
    return make_job(
        {
            "algorithm": {"use_kl_in_reward": True},
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "default_local_dir": str(model / "run")},
            "actor": {"ppo_mini_batch_size": 8, "model": {"path": str(model), **setting, **keys}},
            "reference": {} if keys else {"model": setting},
        }
    )


def scored(worker: Any, column: str) -> tuple[Tensor, int]:
    """Log-probabilities, and the number of weights that were cast for them."""
    with Casts(worker.model) as casts:
        answer: DataProto = type(worker).compute_log_probs.__wrapped__(worker, sequence_batch(8))
    return answer[column], casts.number


@pytest.mark.parametrize("stored", [torch.float32, HALF])
def test_the_reference_equals_the_actor_before_its_first_step(
    any_model: Path, tmp_path: Path, stored: torch.dtype
) -> None:
    """So the KL divergence is exactly 0 there."""
    model = stored_in(stored, any_model, tmp_path / "model")
    for packed in (True, False):
        job = job_of(model, "bfloat16", packed)
        workers: tuple[PolicyWorker, ...] = ActorWorker(job), ReferenceWorker(job)
        (mine, casts), (theirs, none) = map(scored, workers, ("old_log_probs", "ref_log_probs"))
        assert torch.equal(mine, theirs)
        assert mine.count_nonzero() > 20
        assert (none, casts >= 14) == (0, True)  # seven matrices a layer
        reference = workers[1].model
        tied = reference.config.tie_word_embeddings
        num_bytes = {id(p): p.nbytes for p in reference.parameters()}
        small = sum(p.numel() for p in reference.parameters() if p.dim() < 2 and p.dtype == torch.float32)
        # A table with float32's digits stays, and the head that was tied to it is a copy.
        tables = 2 * TABLE * (1 if tied else 2) if stored == HALF else (4 + 2) * TABLE
        biases = 2 * 2 * (64 + 2 * 32) if reference.config.model_type == "qwen2" else 0
        assert sum(num_bytes.values()) == 2 * MATRICES + tables + biases + 4 * small
        for worker in workers:
            worker.close()


def test_in_float32_a_frozen_model_keeps_its_weights(two_layers: Path) -> None:
    plain, frozen = (load_causal_lm(ModelConfig(path=str(two_layers)), "reference") for _ in range(2))
    hold_frozen(frozen, "float32")
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in frozen.parameters())
    assert all(map(torch.equal, plain.parameters(), frozen.parameters()))
    assert frozen.lm_head.weight is frozen.model.embed_tokens.weight


SIZES = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
OTHERS: dict[str, Any] = {
    # Experts that are one tensor; an embedding that scales its rows; matrices that are no `Linear`, and biases.
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **ROUTED, num_key_value_heads=2, head_dim=16, intermediate_size=64)
    ),
    "gemma": lambda: GemmaForCausalLM(
        GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16, intermediate_size=128)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_compute_the_same_bits_too(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OTHERS[name]()
    nn.init.normal_(model.get_input_embeddings().weight, std=0.5)
    model.to(HALF).save_pretrained(tmp_path)
    plain, frozen = (load_causal_lm(ModelConfig(path=str(tmp_path)), "reference") for _ in range(2))
    hold_frozen(frozen, "bfloat16")
    assert sum(p.dtype == HALF for p in frozen.parameters()) >= 2 * 4
    rows = sequence_batch(8)
    with torch.no_grad():
        mine, theirs = (
            token_stats(m, rows, temperature=1.0, dtype="bfloat16").log_probs for m in (plain, frozen)
        )
    assert torch.equal(mine, theirs)


def test_a_reward_model_gives_the_same_scores(two_layers: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    scorer = AutoModelForTokenClassification.from_pretrained(two_layers, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", use_remove_padding=False)
    root = load_score_model(config, "critic", Ranks.alone(), FsdpConfig(), torch.device("cpu"), seed=0)
    plain, frozen = RewardModel(root, config, torch.device("cpu")), RewardModel.load(config)
    rows = sequence_batch(8)
    columns = [rows[name] for name in ("input_ids", "attention_mask", "position_ids")]
    with Casts(frozen.model) as casts:
        scores = frozen.score(*columns)
    assert casts.number == 0
    assert frozen.model.score.weight.dtype == torch.float32
    assert torch.equal(plain.score(*columns), scores)


@pytest.mark.parametrize("stored", [torch.float32, HALF])
async def test_an_adapters_base_is_held_where_no_number_changes(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    """Training, published weights and the base's checksum have the bits of float32 weights."""
    model = stored_in(stored, two_layers, tmp_path / "model")
    job = job_of(model, "bfloat16", True, lora_rank=4)
    held, batch = ActorWorker(job), sequence_batch(8)
    with monkeypatch.context() as as_before:
        as_before.setattr(sharded, "hold_base", lambda root, dtype: None)
        plain = ActorWorker(job)
    kinds = {p.dtype for p in held.model.parameters() if p.dim() > 1 and not p.requires_grad}
    assert kinds == {stored}
    assert all(p.dtype == torch.float32 for p in held.model.parameters() if p.requires_grad)
    for _ in range(2):
        (mine, casts), (theirs, more) = (scored(each, "old_log_probs") for each in (held, plain))
        assert torch.equal(mine, theirs)
        # Seven matrices and three biases a layer; biases of 0 have no more digits in any type.
        assert (more - casts >= 2 * 10) == (stored == HALF)
        assert await held.update(batch) == await plain.update(batch)
    weights, others = [await (await each.publish_weights(1)).fetch() for each in (held, plain)]
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert held.adapter is not None
    assert plain.adapter is not None
    assert held.adapter._base_checksum == plain.adapter._base_checksum
    for each in (held, plain):
        each.close()
