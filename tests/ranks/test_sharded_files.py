"""What several ranks load, save, offload and publish is what one process would have."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import loaded_in_float64
from many_ranks import on_ranks
from safetensors.torch import load_file, save_file
from sequences import sequence_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolemesh.config.model import FsdpConfig, ModelConfig, OptimConfig, PolicyModelConfig
from rolemesh.errors import CheckpointFailed, ModelNotFound
from rolemesh.home import Home
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.lora import Adapter
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.sequence import token_stats, token_values
from rolemesh.models.sharded import copy_policy, load_policy, load_score_model, read_policy, read_score_model
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.collective_errors import broadcast_text, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import Root, local, own_rows, reshard, whole
from rolemesh.training.checkpoint import CheckpointWriter, load_checkpoint
from rolemesh.training.optimizer import Optimizer
from rolemesh.weights import region
from rolemesh.weights.published import PublishedWeights
from rolemesh.workers.offloading import HostBuffer, Offloader, model_tensors

CPU, SHARDS = torch.device("cpu"), FsdpConfig()
TARGETS = ("q_proj", "down_proj")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of tiny models: tied, untied, in bfloat16 and several files, a reward model, experts."""
    home = tmp_path_factory.mktemp("models")
    make_tiny_model(home / "qwen2", "qwen2", hidden_size=32, num_layers=3)
    make_tiny_model(home / "llama", "llama", hidden_size=32, num_layers=3)
    model = AutoModelForCausalLM.from_pretrained(home / "llama", dtype=torch.bfloat16)
    model.save_pretrained(home / "files", max_shard_size="20KB")
    assert len(list((home / "files").glob("*.safetensors"))) > 2
    model.get_decoder().save_pretrained(home / "body")
    tensors = load_file(home / "qwen2" / "model.safetensors")
    for name, head in [("copied", tensors["model.embed_tokens.weight"]), ("untied", torch.ones(259, 32))]:
        make_tiny_model(home / name, "qwen2", hidden_size=32, num_layers=3)
        both = tensors | {"lm_head.weight": head.clone()}
        save_file(both, home / name / "model.safetensors", metadata={"format": "pt"})
    (home / "scores").mkdir()
    alone = Ranks.alone()
    ScoreModel.load(ModelConfig(path=str(home / "llama")), "critic", seed=3).copy(alone)(home / "scores", alone)
    few = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2}
    experts = Qwen3MoeConfig(**few, **routed, vocab_size=64, num_key_value_heads=2, head_dim=16)
    Qwen3MoeForCausalLM(experts).save_pretrained(home / "experts")
    return home


def config_of(directory: Path, **keys: Any) -> PolicyModelConfig:
    return PolicyModelConfig(path=str(directory), **{"dtype": "float32"} | keys)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in a bit. Every rank calls it."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(whole(one[name]), whole(other[name]))]


def state_of(model: Any) -> dict[str, Tensor]:
    return {**named_weights(model), **dict(model.named_buffers())}


# ---------------------------------------------------------------------------------------- loading


def loads_the_same(ranks: Ranks, models: Path) -> None:
    for name in ("qwen2", "llama", "files", "copied", "untied", "experts"):
        root, _ = load_policy(config_of(models / name), "actor", ranks, SHARDS, CPU)
        expected = load_causal_lm(config_of(models / name), "actor")
        assert differing(state_of(root.model), state_of(expected)) == [], name
        assert not root.model.training
        assert root.model.generation_config == expected.generation_config
        largest = max(root.model.parameters(), key=lambda parameter: parameter.numel())
        assert local(largest).numel() < largest.numel()
        rows = read_policy(root.model, config_of(models / name), "actor")
        assert [n for n, t in named_weights(root.model).items() if not torch.equal(rows[n], local(t))] == []
    for name in ("qwen2", "scores", "body"):
        config = ModelConfig(path=str(models / name), dtype="float32")
        root = load_score_model(config, "critic", ranks, SHARDS, CPU, seed=7)
        scorer = ScoreModel.load(config, "critic", seed=7)
        assert differing(state_of(root.model), state_of(scorer)) == [], name
        assert root.model.has_trained_head == (name == "scores")
        rows = read_score_model(root.model, config, "critic", 7)
        assert [n for n, t in named_weights(root.model).items() if not torch.equal(rows[n], local(t))] == []
    with pytest.raises(
        ModelNotFound, match=r"actor: .*scores lacks 1 of the model's weights, e.g. 'lm_head.weight'"
    ):
        load_policy(config_of(models / "scores"), "actor", ranks, SHARDS, CPU)

    rows = sequence_batch(4)
    rows["input_ids"] = rows["input_ids"] % 64
    for name in ("llama", "experts"):  # one is filled, the other loaded whole
        config = config_of(models / name, dtype="bfloat16")
        found = []
        for frozen in (False, True):
            root, _ = load_policy(config, "reference", ranks, SHARDS, CPU, frozen=frozen)
            query = next(p for n, p in root.model.named_parameters() if n.endswith("q_proj.weight"))
            assert query.dtype == local(query).dtype == (torch.bfloat16 if frozen else torch.float32)
            with torch.no_grad():
                stats = root(token_stats, rows, temperature=1.0, dtype="bfloat16")
            found.append(stats.log_probs)
        assert torch.equal(*found), name


def test_two_ranks_load_what_one_process_loads(models: Path) -> None:
    on_ranks(2, loads_the_same, models)


# --------------------------------------------------------------------------- saving and offloading


def loss_of(model: Any, rows: Any, dtype: str = "float32") -> Tensor:
    log_probs = token_stats(model, rows, temperature=1.0, dtype=dtype).log_probs
    loss: Tensor = (log_probs * rows["advantages"] * rows["response_mask"]).sum() / 40
    return loss


def value_loss_of(model: Any, rows: Any) -> Tensor:
    return token_values(model, rows).square().sum() / 40


class Trained:
    """A policy or a critic with its optimizer, as a worker has them."""

    def __init__(self, ranks: Ranks, role: str, directory: Path, rank: int = 0, dtype: str = "float32") -> None:
        self.ranks, self.role, self.adapter = ranks, role, None
        loaded, dtype = (loaded_in_float64(), "float32") if dtype == "float64" else (nullcontext(), dtype)
        self.loss = partial(loss_of, dtype=dtype) if role == "actor" else value_loss_of
        shards = FsdpConfig() if ranks.size < 4 else FsdpConfig(fsdp_size=2, param_offload=True)
        self.config = config_of(directory, lora_rank=rank, target_modules=TARGETS, dtype=dtype)
        if role == "actor":
            adapt = partial(Adapter, config=self.config, seed=5, ranks=ranks) if rank else None
            with loaded:
                self.root, self.adapter = load_policy(self.config, role, ranks, shards, CPU, adapt)
            self.root(lambda model: remove_padding(model.get_decoder(), role, dtype))
        else:
            self.root = load_score_model(self.config, role, ranks, shards, CPU, seed=7)
        self.model = self.root.model
        offload_dir = directory.parent / f"moments-{ranks.size}-{ranks.rank}"
        self.optimizer = Optimizer(
            self.model,
            OptimConfig(lr=1e-3),
            grad_clip=1.0,
            role=role,
            ranks=ranks,
            offloader_of=partial(Offloader, device=CPU, directory=offload_dir),
            offload=ranks.size == 2,
        )

    def step(self, seed: int) -> None:
        share = 8 // self.ranks.size
        rows = sequence_batch(8, seed=seed)[self.ranks.rank * share : (self.ranks.rank + 1) * share]
        torch.autograd.backward(self.root(self.loss, rows))
        self.optimizer.step()
        with torch.no_grad():  # what is gathered for it is freed again
            self.root(self.loss, rows)

    def trained(self) -> dict[str, Tensor]:
        return self.adapter.weights if self.adapter else named_weights(self.model)

    def tensors(self) -> list[Tensor]:
        return [*model_tensors(self.root), *self.optimizer.tensors()]

    def state(self) -> dict[str, Tensor]:
        """Copies, which are not offloaded with the originals."""
        reshard(self.root)
        with self.optimizer.on_device():
            tensors = {**named_weights(self.model), **self.optimizer.state_tensors()}
            return {name: tensor.clone() for name, tensor in tensors.items()}

    def copy_model(self) -> Callable[[Path, Ranks], None]:
        if self.adapter:
            return self.adapter.copy()
        return copy_policy(self.model, self.ranks) if self.role == "actor" else self.model.copy(self.ranks)

    def save(self, directory: Path, writer: CheckpointWriter | None = None) -> None:
        writer = writer or CheckpointWriter(Home(directory.parent), self.role, self.ranks)
        writer.begin(directory, self.copy_model, self.optimizer)
        self.step(9)  # while the copy is written
        asyncio.run(writer.finish(directory))

    def load(self, directory: Path | None) -> None:
        def read(path: Path | None) -> dict[str, Tensor]:
            config = self.config.model_copy(update={"path": str(path)}) if path else self.config
            if self.adapter:
                return self.adapter.read(path)
            if self.role == "actor" and self.ranks.size == 1 and self.model.dtype == torch.float64:
                return load_file(f"{config.path}/model.safetensors")  # a whole model would be rounded
            if self.role == "actor":
                return read_policy(self.model, config, self.role)
            return read_score_model(self.model, config, self.role, 7)

        home = Home(directory.parent if directory else Path("."))
        load_checkpoint(home, directory, self.trained(), read, self.optimizer, self.ranks)


# A role, its model, the rank of its adapter, and its dtype.
KINDS = [("actor", "qwen2", 0, "float64"), ("critic", "llama", 0, "float32"), ("actor", "files", 2, "bfloat16")]
CLOSE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-3}  # numbers of ranks, after steps of 1e-3


def far(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> list[tuple[str, float]]:
    """Names whose tensors differ by more, the most first. Every rank calls it."""
    assert found.keys() == expected.keys()
    gaps = {n: float((whole(t) - whole(expected[n])).abs().max()) for n, t in found.items()}
    return sorted((gap for gap in gaps.items() if gap[1] > bound), key=lambda gap: -gap[1])


def saves(ranks: Ranks, directory: Path, models: Path) -> None:
    """Train, offload in between, save; then load, and train on as if nothing had happened."""
    for role, name, rank, dtype in KINDS:
        first = Trained(ranks, role, models / name, rank, dtype)
        initial = {n: whole(t).clone() for n, t in first.state().items()}
        if first.adapter:  # its first pass is without the adapter, and its next learns
            with first.adapter.off(), torch.no_grad():
                first.root(first.loss, sequence_batch(2))
        first.step(1)
        expected = {n: whole(t).clone() for n, t in first.state().items()}
        offloader = Offloader(first.tensors, CPU, directory, buffer=HostBuffer(pinned=False))
        with torch.no_grad():
            first.root(first.loss, sequence_batch(2))
        assert offloader.offload() > 0
        assert sum(local(p).untyped_storage().nbytes() for p in first.model.parameters()) == 0
        assert offloader.reload() > 0
        assert offloader.offload() == 0
        offloader.reload()
        assert differing(first.state(), expected) == []
        first.step(2)
        trained = sum(local(p).untyped_storage().nbytes() for p in first.optimizer.parameters.values())
        assert offloader.offload() == trained  # and not the base below an adapter
        offloader.reload()
        learned = {n: whole(t) for n, t in first.state().items()}
        if ranks.rank == 0:
            one = Trained(Ranks.alone(), role, models / name, rank, dtype)
            one.step(1)
            one.step(2)
            assert far(learned, one.state(), CLOSE[dtype]) == []
        saved = directory / f"{role}-{name}"
        first.save(saved)

        second = Trained(ranks, role, models / name, rank, dtype)
        second.load(saved)
        assert differing(second.state(), learned) == []
        second.step(9)
        assert differing(second.state(), first.state()) == []
        later = {n: whole(t).contiguous() for n, t in second.state().items()}
        if ranks.rank == 0:
            save_file(later, directory / f"{role}-{name}.safetensors")
        second.load(None)
        assert differing(second.state(), initial) == []


def resumes(ranks: Ranks, directory: Path, models: Path) -> None:
    """Another number of ranks loads the checkpoints, saves the same bytes, and learns what two ranks learn."""
    for role, name, rank, dtype in KINDS:
        saved, again = directory / f"{role}-{name}", directory / f"{role}-{name}-{ranks.size}"
        resumed = Trained(ranks, role, models / name, rank, dtype)
        resumed.load(saved)
        resumed.save(again)
        ranks.wait()
        files = {file.name: file.read_bytes() for file in saved.iterdir()}
        assert {file.name: file.read_bytes() for file in again.iterdir()} == files
        assert {"optimizer.safetensors", "training_state.json"} < files.keys()
        assert far(resumed.state(), load_file(f"{saved}.safetensors"), CLOSE[dtype]) == []


def fails_together(ranks: Ranks, directory: Path, models: Path) -> None:
    """One rank's disk is full, or one file is damaged: all ranks say the same, and none waits."""
    trained = Trained(ranks, "actor", models / "qwen2")
    trained.step(1)
    pwrite = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.pwrite = full if ranks.rank == 1 else pwrite
    with pytest.raises(CheckpointFailed, match=r"full could not be written: .*No space left") as failed:
        trained.save(directory / "full")
    os.pwrite = pwrite
    assert broadcast_text(ranks, str(failed.value)) == str(failed.value)
    assert list((directory / "full").iterdir()) == []
    with pytest.raises(CheckpointFailed, match="the checkpoint was not written"):
        trained.save(Path("/elsewhere"), CheckpointWriter(Home(directory), "actor", ranks))
    with pytest.raises(CheckpointFailed, match="nowhere cannot be loaded: FileNotFoundError"):
        trained.load(directory / "nowhere")
    with pytest.raises(ValueError, match="of rank 1"), raise_on_all_ranks(ranks):
        int(["0", "of rank 1"][ranks.rank])


def test_a_checkpoint_is_the_same_for_every_number_of_ranks(models: Path, tmp_path: Path) -> None:
    on_ranks(2, saves, tmp_path, models)
    on_ranks(4, resumes, tmp_path, models)
    resumes(Ranks.alone(), tmp_path, models)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "actor-qwen2", dtype=torch.float64)
    saved = load_file(tmp_path / "actor-qwen2" / "model.safetensors")
    assert differing(dict(named_weights(theirs)), saved) == []
    assert theirs.config.architectures == ["Qwen2ForCausalLM"]


def test_ranks_fail_together(models: Path, tmp_path: Path) -> None:
    on_ranks(2, fails_together, tmp_path, models, timeout_s=60.0)


# ------------------------------------------------------------------------------------- publishing


def publishes(ranks: Ranks, models: Path) -> None:
    for fsdp in (SHARDS, FsdpConfig(fsdp_size=max(1, ranks.size // 2))):
        root, _ = load_policy(config_of(models / "qwen2"), "actor", ranks, fsdp, CPU)
        with torch.no_grad():
            root(loss_of, sequence_batch(2))
        reshard(root)
        expected = PublishedWeights(3, named_weights(load_causal_lm(config_of(models / "qwen2"), "actor")))
        for can_share in (True, False):
            region.CAN_SHARE = can_share
            held = PublishedWeights(3, named_weights(root.model), ranks=ranks)
            if ranks.rank == 0:
                assert held.holding.digest == expected.holding.digest
                assert held.holding.region.is_sealed == can_share
        cast = PublishedWeights(3, named_weights(root.model), ranks=ranks, dtype=torch.bfloat16)
        if ranks.rank == 0:
            alone = PublishedWeights(3, expected.holding.tensors(), dtype=torch.bfloat16)
            assert cast.holding.digest == alone.holding.digest
    region.CAN_SHARE = True

    config = config_of(models / "llama", lora_rank=2, target_modules=TARGETS)
    adapt = partial(Adapter, config=config, seed=5, ranks=ranks)
    root, adapter = load_policy(config, "actor", ranks, SHARDS, CPU, adapt)
    alone = Adapter(load_causal_lm(config, "actor"), config, 5)
    assert adapter is not None
    assert differing(adapter.weights, alone.weights) == []
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(adapter.weights.values(), alone.weights.values(), strict=True):
        theirs.normal_(generator=generator)
        local(ours).copy_(own_rows(theirs, ours))
    held = PublishedWeights(4, adapter.base_weights(), adapter.deltas(), ranks)
    expected = PublishedWeights(4, alone.base_weights(), alone.deltas())
    if ranks.rank == 0:
        assert held.holding.digest == expected.holding.digest


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_ranks_publish_the_bytes_of_one_process(models: Path, num_ranks: int) -> None:
    on_ranks(num_ranks, publishes, models)


def keeps_experts(ranks: Ranks, directory: Path, models: Path) -> None:
    root, _ = load_policy(config_of(models / "experts"), "actor", ranks, SHARDS, CPU)
    copy_policy(root.model, ranks)(directory, ranks)


def test_a_model_of_converted_files_is_saved_in_their_form(models: Path, tmp_path: Path) -> None:
    on_ranks(2, keeps_experts, tmp_path, models)
    saved, original = (load_file(home / "model.safetensors") for home in (tmp_path, models / "experts"))
    assert differing(saved, original) == []
    assert Root(load_causal_lm(config_of(tmp_path), "actor")).model is not None
