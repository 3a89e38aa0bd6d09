"""Ranks on several machines publish the version that one process would, each machine a part of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from in_process import small_job
from many_ranks import on_ranks
from namespaces import needs_namespaces
from outcomes import outcome
from ranked import Group, serving
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rolemesh.config import JobConfig
from rolemesh.config.model import FsdpConfig, PolicyModelConfig
from rolemesh.errors import WeightsUnavailable
from rolemesh.models.loading import load_tokenizer, named_weights
from rolemesh.models.lora import Adapter
from rolemesh.models.sharded import load_policy
from rolemesh.models.tiny import make_tiny_model
from rolemesh.ranks.collective_errors import gather_texts
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import local, own_rows
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.weights import manifest
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.stripes import STRIPE_PIECES, Stripes

pytestmark = needs_namespaces

CPU, KIB, MIB = torch.device("cpu"), 1 << 10, 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def test_stripes_go_to_holders_in_turns() -> None:
    stripes = Stripes(10, 3)
    assert [stripes.holder_of(at) for at in (0, 9, 10, 29, 30)] == [0, 0, 1, 2, 0]
    assert [*stripes.parts(1, 15, 45)] == [(15, 20), (40, 45)]
    assert [*stripes.parts(2, 0, 20)] == []
    assert [stripes.next_of(2, at) for at in (0, 20, 25, 30)] == [20, 20, 25, 50]
    assert [*Stripes(10, 1).parts(0, 3, 25)] == [(3, 10), (10, 20), (20, 25)]


# ----------------------------------------------------------------------- the same version, divided


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for architecture in ("qwen2", "llama"):
        make_tiny_model(home / architecture, architecture, hidden_size=128, num_layers=3)
    return home


def versions(models: Path, ranks: Ranks) -> Iterator[Callable[..., PublishedWeights]]:
    """Yield what makes a version of weights; of two copies of them, if there are four ranks; of LoRA."""
    for size in (-1, ranks.size // 2) if ranks.size > 2 else (-1,):
        config = PolicyModelConfig(path=str(models / "qwen2"), dtype="float32")
        root, _ = load_policy(config, "actor", ranks, FsdpConfig(fsdp_size=size), CPU)
        yield partial(PublishedWeights, 3, named_weights(root.model), {}, ranks)
    config = PolicyModelConfig(
        path=str(models / "llama"), dtype="float32", lora_rank=2, target_modules=("q_proj", "down_proj")
    )
    adapt = partial(Adapter, config=config, seed=5, ranks=ranks)
    _, adapter = load_policy(config, "actor", ranks, FsdpConfig(), CPU, adapt)
    assert adapter is not None
    generator = torch.Generator().manual_seed(0)
    for weight in adapter.weights.values():
        local(weight).copy_(own_rows(torch.randn(weight.shape, generator=generator), weight))
    yield partial(PublishedWeights, 4, adapter.base_weights(), adapter.deltas(), ranks)


def allocated(held: PublishedWeights) -> int:
    """Bytes of memory that a region takes."""
    fd = held.holding.region._fd
    assert fd is not None
    return os.fstat(fd).st_blocks * 512


def publishes(ranks: Ranks, directory: Path, models: Path, num_machines: int) -> None:
    manifest.PIECE_BYTES, stripe_bytes = 64 * KIB, STRIPE_PIECES * 64 * KIB
    size, stripes = ranks.size // num_machines, Stripes(stripe_bytes, num_machines)
    number, is_first = ranks.rank // size, ranks.rank % size == 0
    serve = (lambda: f"127.0.0.1:{7000 + number}") if ranks.rank else None
    exchange, received = Ranks.exchange, list[int]()

    def counted(ranks: Ranks, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
        received.append(sum(sizes))
        return exchange(ranks, sent, sizes)

    Ranks.exchange = counted  # type: ignore[method-assign]
    for case, make in enumerate(versions(models, ranks)):
        whole = (directory / f"{case}.region").read_bytes()
        digest = (directory / f"{case}.digest").read_text()
        received.clear()
        striped = make(serve=serve)
        has_a_copy = num_machines == 1 or (case == 1 and size == 2)  # of all rows on each machine
        assert (sum(received) == 0) == (has_a_copy or not is_first)
        at_rank_0, everywhere = make(), make(is_for_all=True)
        assert striped.has_part == is_first
        if is_first:
            holding = striped.holding
            assert (holding.digest, holding.region.is_sealed) == (digest, True)
            assert len(whole) > num_machines * stripe_bytes
            own = [*stripes.parts(number, 0, len(whole))]
            assert all(holding.region.read(start, end) == whole[start:end] for start, end in own)
            assert allocated(striped) <= sum(end - start for start, end in own) + PAGE
            if num_machines > 1:
                assert holding.striped is not None
                assert holding.striped.addresses == [f"127.0.0.1:{7000 + n}" for n in range(1, num_machines)]
                assert not holding.is_whole
            assert (everywhere.holding.digest, everywhere.holding.region.read(0, len(whole))) == (digest, whole)
        assert at_rank_0.has_part == (ranks.rank == 0)
        if ranks.rank == 0:
            assert (at_rank_0.holding.digest, at_rank_0.holding.is_whole) == (digest, True)
            assert len(everywhere.holding.copies) == num_machines - 1
        ranks.wait()


@pytest.mark.parametrize(("num_ranks", "num_machines"), [(4, 2), (4, 4)])
def test_any_number_of_machines_publishes_the_same_bytes(
    models: Path, tmp_path: Path, num_ranks: int, num_machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and divided, from shards, from copies of them (HSDP), and of an adapter (LoRA).

    No row crosses machines that have a copy each.
    """
    monkeypatch.setattr(manifest, "PIECE_BYTES", 64 * KIB)
    weights, *_, adapter = [make() for make in versions(models, Ranks.alone())]
    alone = [weights, weights, adapter] if num_ranks > 2 else [weights, adapter]
    for case, held in enumerate(alone):
        (tmp_path / f"{case}.digest").write_text(held.holding.digest)
        (tmp_path / f"{case}.region").write_bytes(held.holding.region.read(0, held.holding.num_bytes))
    on_ranks(num_ranks, publishes, tmp_path, models, num_machines, machines=num_machines)


# ------------------------------------------------------------------------------------ memory, errors


def peak_bytes(since: bool = False) -> int:
    """The most resident memory of this process so far; `since`: start to count anew."""
    if since:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * KIB


def stays_small(ranks: Ranks, directory: Path) -> None:
    largest, own = 64 * MIB, torch.Generator().manual_seed(ranks.rank)

    def rows(num_bytes: int, axis: int) -> Tensor:
        shape = [num_bytes // 4 // 1024, 1024]
        shape[axis] //= ranks.size
        assert ranks.mesh is not None
        return DTensor.from_local(torch.randn(shape, generator=own), ranks.mesh, [Shard(axis)])

    sizes = [largest, *[4 * MIB] * 16, largest, largest, *[4 * MIB] * 16]
    tensors = {f"{at}": rows(size, 0) for at, size in enumerate(sizes)} | {"columns": rows(largest, 1)}
    PublishedWeights(0, {"a": rows(MIB, 0)}, ranks=ranks, serve=lambda: "127.0.0.1:1")  # threads, buffers
    ranks.wait()
    before = peak_bytes(since=True)
    held = PublishedWeights(1, tensors, ranks=ranks, serve=lambda: "127.0.0.1:1")
    of_region = held.holding.num_bytes // ranks.size  # read for its checksums
    assert peak_bytes() - before <= of_region + 2 * largest + 8 * MIB
    assert allocated(held) <= of_region + 16 * MIB


def test_a_rank_needs_its_shard_and_two_largest_tensors_at_most(tmp_path: Path) -> None:
    """And its machine's share of the region. One of the tensors is split by columns, and gathered whole."""
    on_ranks(2, stays_small, tmp_path, machines=2)


def sends_little(ranks: Ranks, directory: Path) -> None:
    """Two rows on the first two ranks, which every other machine wants: rank 0 has half, for all but itself."""
    sent: list[int] = []
    plain = Ranks.exchange

    def counted(self: Ranks, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
        sent.append(sum(part.numel() for of_rank in parts for part in of_rank))
        return plain(self, parts, sizes)

    whole = torch.randn(2, MIB // 8, generator=torch.Generator().manual_seed(0))
    own = whole[ranks.rank : ranks.rank + 1] if ranks.rank < 2 else whole[:0]
    assert ranks.mesh is not None
    rows = DTensor.from_local(
        own, ranks.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", counted)
        held = PublishedWeights(1, {"experts": rows}, ranks=ranks, is_for_all=True)
    assert max(sent) <= MIB
    assert sum(sent) == (3 * MIB // 2 if ranks.rank < 2 else 0)
    assert torch.equal(asyncio.run(held.fetch())["experts"], whole)


def test_no_rank_sends_more_than_the_largest_tensor_at_a_time(tmp_path: Path) -> None:
    on_ranks(4, sends_little, tmp_path, machines=4)


def fails_together(ranks: Ranks, directory: Path) -> None:
    def refuse() -> str:
        raise WeightsUnavailable("no port on purpose")

    tensors = {"a": torch.ones(MIB)}
    with pytest.raises(WeightsUnavailable, match="no port on purpose"):
        PublishedWeights(1, tensors, ranks=ranks, serve=refuse)
    held = PublishedWeights(1, tensors, ranks=ranks, serve=lambda: "127.0.0.1:1")
    with pytest.raises(WeightsUnavailable, match="is divided among 2 machines"):
        asyncio.run(held.fetch())
    assert gather_texts(ranks, "ä" * ranks.rank) == ["", "ä"]


def test_an_error_of_one_machine_is_that_of_all(tmp_path: Path) -> None:
    on_ranks(2, fails_together, tmp_path, machines=2)


# ---------------------------------------------------------------------------------------- a run


async def train(job: JobConfig, on_machines: str) -> dict[str, Group]:
    """Run a job whose groups' ranks are processes; in the named group each is a machine of its own."""
    async with AsyncExitStack() as stack:
        groups = {
            name: stack.enter_context(
                serving(roles, job, job.run_dir / name, job.plan[name].ranks, on_machines=name == on_machines)
            )
            for name, roles in job.plan.grouping.items()
        }
        addresses = {
            role: [await groups[name].address()] for name, roles in job.plan.grouping.items() for role in roles
        }
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, "127.0.0.1:0", None)
    return groups


@pytest.mark.timeout(600)
async def test_a_run_on_two_machines_has_the_bits_of_a_run_on_one(tiny_model: Path, tmp_path: Path) -> None:
    """The actor alone, whose stripes rollouts pull from both; and beside an engine on each of them."""
    steps = (f"trainer.{key}=2" for key in ("total_training_steps", "save_freq", "test_freq"))
    settings, ended = (*steps, "rollout.n=4"), {}
    for strategy, ranks, apart in (
        ("standalone", "{actor: 2}", ""),
        ("standalone", "{actor: 2}", "actor"),
        ("hybrid", "{policy: 2}", "policy"),
    ):
        directory = tmp_path / f"{strategy}-{apart}"
        directory.mkdir()
        placed = (f"placement.strategy={strategy}", f"placement.ranks={ranks}")
        job = small_job(directory, tiny_model, "run", *settings, *placed)
        groups = await train(job, apart)
        ended[strategy, apart] = outcome(job)
        if apart:
            assert ("FetchRange OK" in groups[apart].log(1)) == (apart == "actor")
    expected = ended.pop(("standalone", ""))
    assert len(expected[0]) == 3  # the validation before training, and two steps
    assert [case for case, found in ended.items() if found != expected] == []
