"""A model on several ranks learns what one process learns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import in_float64
from many_ranks import on_ranks
from sequences import sequence_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from rolemesh.config.model import FsdpConfig, ModelConfig, OptimConfig, TrainedModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.models.heads import VocabularyHead
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import DTYPES, token_stats
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import Root, blocks, gradient_norm, reshard, shard, whole
from rolemesh.ranks.ulysses import check_heads
from rolemesh.training.optimizer import Optimizer
from rolemesh.training.update_loop import checkpoint_activations

ROWS = 8
OPTIM = OptimConfig(lr=1e-3)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models: qwen2 has a tied head, llama has not, gpt2 has LayerNorms with biases."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "llama"):
        make_tiny_model(directory / name, name, hidden_size=32, num_layers=3)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        directory / "gpt2"
    )
    return directory


def load(directory: Path, *, double: bool, packed: bool, checkpointed: bool) -> Any:
    model = load_causal_lm(ModelConfig(path=str(directory)), "actor")
    if double:
        in_float64(model)
    if packed:
        remove_padding(model.get_decoder(), "actor")
    checkpoint_activations(
        model, TrainedModelConfig(enable_gradient_checkpointing=checkpointed), torch.device("cpu")
    )
    return model.train()


def policy_loss(model: Any, rows: DataProto, num_tokens: int) -> Tensor:
    stats = token_stats(model, rows, temperature=1.0, entropy_gradient=True)
    assert stats.entropys is not None
    cells = (stats.log_probs * rows["advantages"] + 0.01 * stats.entropys) * rows["response_mask"]
    loss: Tensor = -cells.sum() / num_tokens
    return loss


def train(root: Root, optimizer: Optimizer, parts: Sequence[slice]) -> list[float]:
    """Two steps, the second with moments; a micro-batch is a part of the rows. Returns the gradient's norms."""
    norms = []
    for step in range(2):
        batch = sequence_batch(ROWS, seed=step)
        for part in parts:
            loss = root(policy_loss, batch[part], int(batch["response_mask"].sum()))
            torch.autograd.backward(loss)
        norms.append(optimizer.step())
    return norms


def optimizer_of(model: nn.Module, ranks: Ranks) -> Optimizer:
    return Optimizer(model, OPTIM, grad_clip=0.5, role="actor", ranks=ranks)


def learns_the_same(ranks: Ranks, models: Path, cases: Sequence[tuple[str, FsdpConfig, bool]]) -> None:
    """Each case is a model, how it is sharded, and whether it is float64."""
    share = ROWS // ranks.size
    mine = [
        slice(row, row + share // 2) for row in range(ranks.rank * share, (ranks.rank + 1) * share, share // 2)
    ]
    for name, config, double in cases:
        bound = 1e-10 if double else 1e-5
        options = {"double": double, "packed": double == (name == "qwen2"), "checkpointed": double}
        many = Root(load(models / name, **options))
        shard(many, ranks, config)
        found = train(many, optimizer_of(many.model, ranks), mine)
        batch = sequence_batch(ROWS, seed=9)
        with torch.no_grad():
            log_probs = many(token_stats, batch, temperature=1.0).log_probs
        reshard(many)
        trained = [whole(p) for p in many.model.parameters()]
        if ranks.rank == 0:
            one = Root(load(models / name, **options))
            assert found == pytest.approx(
                train(one, optimizer_of(one.model, Ranks.alone()), [slice(ROWS)]), rel=1e-5
            )
            for (parameter, p), q in zip(one.model.named_parameters(), trained, strict=True):
                assert (p - q).abs().max() <= bound, (parameter, config, double)
            with torch.no_grad():
                assert (
                    one(token_stats, batch, temperature=1.0).log_probs - log_probs
                ).abs().max() <= 10 * bound
        ranks.wait()


PLAIN, HYBRID = FsdpConfig(), FsdpConfig(fsdp_size=2)
ON_TWO = [
    ("qwen2", PLAIN, True),
    ("llama", PLAIN, False),
    ("qwen2", FsdpConfig(reshard_after_forward=False, forward_prefetch=True), False),
    ("llama", FsdpConfig(fsdp_size=1, param_offload=True), True),
]
ON_FOUR = [("qwen2", PLAIN, True), ("llama", HYBRID, True)]


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_several_ranks_learn_what_one_process_learns(
    models: Path, num_ranks: int, cases: list[tuple[str, FsdpConfig, bool]]
) -> None:
    on_ranks(num_ranks, learns_the_same, models, cases)


def gradient(root: Root, batch: DataProto, num_tokens: int, dtype: str) -> dict[str, Tensor]:
    """The gradient of the sum of log-probs, with matrix products in this type; and the log-probs."""
    vocabulary_head = VocabularyHead.of(root.model, DTYPES[dtype], "float32", "actor")
    stats = root(token_stats, batch, temperature=1.0, dtype=dtype, vocabulary_head=vocabulary_head)
    torch.autograd.backward(stats.log_probs.sum() / num_tokens)
    found = {n: whole(p.grad) for n, p in root.model.named_parameters() if p.grad is not None}
    return found | {"log_probs": stats.log_probs.detach()}


def computes_in_bfloat16(ranks: Ranks, models: Path, cases: Sequence[tuple[str, bool]]) -> None:
    """Each case is a model and whether its rows are packed."""
    batch, half = sequence_batch(ROWS, seed=1), ROWS // 2
    mine = slice(ranks.rank * half, (ranks.rank + 1) * half)
    num_tokens = int(batch["response_mask"].sum())
    for name, packed in cases:
        options = {"double": False, "packed": packed, "checkpointed": packed}
        many = Root(load(models / name, **options | {"packed": False}))
        shard(many, ranks, PLAIN, torch.bfloat16)
        if packed:  # tried on the shards, as roles do, and nothing stays gathered
            many(lambda model: remove_padding(model.get_decoder(), "actor", "bfloat16"))
            assert all(isinstance(p, DTensor) for p in many.model.parameters())
        found = gradient(many, batch[mine], num_tokens, "bfloat16")
        assert {p.grad.dtype for p in many.model.parameters()} == {torch.float32}
        exact = gradient(Root(load(models / name, **options)), batch, num_tokens, "float32")
        alone = gradient(Root(load(models / name, **options)), batch, num_tokens, "bfloat16")
        one = gradient(Root(load(models / name, **options)), batch[mine], num_tokens, "bfloat16")
        assert torch.equal(found.pop("log_probs"), one["log_probs"]), name  # to the bit

        def distance(part: str, got: dict[str, Tensor], want: dict[str, Tensor] = exact) -> float:
            return float((got[part] - want[part]).norm() / want[part].norm())

        for part in found:
            assert distance(part, found) <= 2 * distance(part, alone) + 2**-8, (name, part)
        assert max(distance(part, found) for part in found) > 1e-4  # it was another type


def test_two_ranks_in_bfloat16_are_as_close_to_float32_as_one(models: Path, tmp_path: Path) -> None:
    on_ranks(2, computes_in_bfloat16, models, [("llama", True), ("qwen2", False), ("gpt2", False)])


def keeps_no_block(ranks: Ranks, models: Path) -> None:
    root = Root(load(models / "llama", double=False, packed=True, checkpointed=False))
    shapes = {tuple(p.shape) for p in blocks(root.model)[0].parameters() if p.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    shard(root, ranks, PLAIN, torch.bfloat16)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stats = root(token_stats, sequence_batch(ROWS, seed=1), temperature=1.0, dtype="bfloat16")
    weights = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
    assert len(weights) >= 7 * 3  # of three blocks
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
    last = [tensor for tensor in weights if tensor.untyped_storage().size()]
    assert len(last) <= 2 * 7  # the last block stays gathered, since its backward is next
    torch.autograd.backward(stats.log_probs.sum())


def test_a_gathered_bfloat16_block_is_freed_until_its_backward(models: Path, tmp_path: Path) -> None:
    on_ranks(2, keeps_no_block, models)


def adds_in_a_tree(ranks: Ranks, models: Path) -> None:
    batch, half = sequence_batch(ROWS, seed=1), ROWS // 2
    num_tokens = int(batch["response_mask"].sum())
    sums: list[list[Tensor]] = []
    options = {"double": False, "packed": True, "checkpointed": False}
    for row in range(half):  # each micro-batch of one row, added over the ranks, then over the micro-batches
        of_ranks = []
        for rank in range(2):
            one = Root(load(models / "qwen2", **options))
            at = rank * half + row
            torch.autograd.backward(one(policy_loss, batch[at : at + 1], num_tokens))
            of_ranks.append([p.grad for p in one.model.parameters()])
        both = [a + b for a, b in zip(*of_ranks, strict=True)]
        sums = [[a + b for a, b in zip(sums[0], both, strict=True)]] if sums else [both]
    many = Root(load(models / "qwen2", **options))
    shard(many, ranks, PLAIN)
    for row in range(half):
        at = ranks.rank * half + row
        torch.autograd.backward(many(policy_loss, batch[at : at + 1], num_tokens))
    gradients = [p.grad for p in many.model.parameters() if p.grad is not None]
    assert [torch.equal(a, whole(b)) for a, b in zip(sums[0], gradients, strict=True)] == [True] * len(
        gradients
    )
    assert torch.equal(gradient_norm(gradients, ranks), gradient_norm(sums[0], Ranks.alone()))
    optimizer = optimizer_of(many.model, ranks)
    assert optimizer.step() == gradient_norm(sums[0], Ranks.alone())


def test_two_ranks_add_as_one_process_in_the_same_order(models: Path) -> None:
    on_ranks(2, adds_in_a_tree, models)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    four: Any = DeviceMesh.__new__(DeviceMesh)  # refused before anything is done with it
    with pytest.raises(InvalidConfig, match="fsdp_size is 3, which does not divide the role's 4 ranks"):
        shard(Root(nn.Linear(2, 2)), Ranks(0, 4, four), FsdpConfig(fsdp_size=3))


@pytest.mark.parametrize(
    ("heads", "of_values", "size", "fits"),
    [
        (8, 8, 4, True),
        (8, 2, 4, True),  # each head of keys and values is repeated on two ranks
        (8, 4, 2, True),
        (7, 7, 2, False),
        (12, 3, 2, False),
        (12, 3, 4, False),
    ],
)
def test_ulysses_needs_heads_that_divide_among_the_ranks(
    heads: int, of_values: int, size: int, fits: bool
) -> None:
    config = LlamaConfig(hidden_size=heads, num_attention_heads=heads, num_key_value_heads=of_values)
    words = f"actor.size is {size}, but the model has {heads} attention heads and {of_values} heads of keys"
    with nullcontext() if fits else pytest.raises(InvalidConfig, match=words):
        check_heads(config, size, "actor.size")


def test_model_blocks_are_found_by_name_or_as_its_longest_list(models: Path) -> None:
    assert [
        type(block).__name__ for block in blocks(load_causal_lm(ModelConfig(path=str(models / "llama")), ""))
    ]
    longest = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    assert blocks(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]), longest)) == list(longest)
    with pytest.raises(InvalidConfig, match="Linear cannot be sharded over several ranks: it has no list"):
        blocks(nn.Linear(1, 1))


def test_one_rank_has_the_model_as_it_is(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = Root(load_causal_lm(ModelConfig(path=str(models / "qwen2")), "actor"))
    before = {name: id(tensor) for name, tensor in root.named_parameters()}
    shard(root, Ranks.alone(), FsdpConfig(param_offload=True))
    reshard(root)
    assert {name: id(tensor) for name, tensor in root.named_parameters()} == before
    assert [whole(tensor) is tensor for tensor in root.parameters()] == [True] * len(before)
    assert caplog.messages == ["fsdp_config has no effect: the role has one rank"]
