"""Groups of several ranks with a rollout: an engine on each rank, beside its part of the actor."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from in_process import WORKERS, small_job
from launched import rolemesh, written
from many_ranks import on_ranks
from outcomes import outcome, with_reward
from ranked import Group, serving
from rollouts import P, T, generated, prompts_of
from sequences import sequence_batch
from turns import continued, first_turn, with_added

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import Unsupported, WeightsUnavailable
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer, named_weights
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.rpc.calling.clients import ActorClient, ReferenceClient, RolloutClient
from rolemesh.rpc.contract import ACTOR, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.servicer import ActorServicer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.rollout.rank_engines import _sharded
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights import region
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.workers.commands import command_of
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

pytestmark = pytest.mark.timeout(900)  # whole runs, of up to eight processes each

AT_ONCE = 30  # calls; a server refuses streams beyond its limit
CALL_S = 300.0  # in which every call must have ended, on a machine with other work
LOCAL = "127.0.0.1:0"
SAVED = ("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2", "rollout.n=2")
TWO_RANKS = {
    "standalone": "{actor: 2, critic: 2, reference: 2}",
    "split-collocate": "{policy: 2, scoring: 2}",
    "hybrid": "{policy: 2, scoring: 2}",
    "collocate": "{all: 2}",
}


async def train_on_ranks(job: JobConfig) -> None:
    """The whole run, every rank in a process of its own."""
    async with AsyncExitStack() as stack:
        groups = {
            name: stack.enter_context(serving(roles, job, job.run_dir / name, job.plan[name].ranks))
            for name, roles in job.plan.grouping.items()
        }
        addresses = {
            role: [await groups[name].address()] for name, roles in job.plan.grouping.items() for role in roles
        }
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None)


async def test_every_placement_of_two_ranks_ends_with_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    ended = {}
    for strategy, ranks in TWO_RANKS.items():
        (tmp_path / strategy).mkdir()
        # With one of them every operation is traced, on every rank.
        placed = (f"placement.strategy={strategy}", f"placement.ranks={ranks}")
        traced = "trainer.profile_steps=" + ("[2]" if strategy == "hybrid" else "[]")
        job = small_job(tmp_path / strategy, tiny_model, "run", *SAVED, *placed, traced)
        await train_on_ranks(job)
        ended[strategy] = outcome(job)
    assert len(ended["standalone"][0]) == 3  # the validation before training, and two steps
    traces = {path.name for path in (tmp_path / "hybrid" / "run" / "profile" / "step_2").glob("rollout*")}
    assert sum("rank-1" in name for name in traces) == 1 < len(traces)
    assert [strategy for strategy in ended if ended[strategy] != ended["standalone"]] == []


# ------------------------------------------------------------------------------- calls that end


NOTHING = 1e-60  # a learning rate whose updates change no weight: an answer has the same bits whenever it comes


def policy_job(model: Path, directory: Path, lr: float) -> JobConfig:
    return make_job(
        {
            "algorithm": {"use_kl_in_reward": True},
            "data": {"train_batch_size": 16, "max_prompt_length": P, "max_response_length": T},
            "actor": {
                "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 2,
                "optim": {"lr": lr},
            },
            "critic": {"model": {**WITHOUT_CHECKPOINTING}, "ppo_micro_batch_size_per_gpu": 2},
            "rollout": {"max_num_seqs": 4},
            "placement": {"strategy": "hybrid", "ranks": {"policy": 2}},
            "trainer": {"default_local_dir": str(directory / "run"), "device": "cpu"},
        }
    )


@asynccontextmanager
async def policy(model: Path, directory: Path) -> AsyncIterator[tuple[Group, Any, Any, Any]]:
    """A group of two ranks with actor, rollout and reference, and a client of each."""
    job = policy_job(model, directory, NOTHING)
    with serving(job.plan.grouping["policy"], job, directory / "policy", 2) as group:
        address = await group.address()
        async with AsyncExitStack() as stack:
            kinds = (ActorClient, RolloutClient, ReferenceClient)
            clients = [
                await stack.enter_async_context(kind([address], methods(job), timeout_s=CALL_S))
                for kind in kinds
            ]
            for client in clients:
                await client.wait_until_ready(CALL_S)
            actor, rollout, reference = clients
            await rollout.update_weights(await actor.publish_weights(1))
            yield group, actor, rollout, reference


def same(found: DataProto, expected: DataProto) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected.columns)


async def ended(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_call_of_generate_may_end_at_any_point(tiny_model: Path, tmp_path: Path) -> None:
    """Cancelled after so many turns of the event loop, milliseconds or rows; then the actor has its turn."""
    batch = sequence_batch(4)
    async with policy(tiny_model, tmp_path) as (group, actor, rollout, _), asyncio.timeout(CALL_S):
        rows, log_probs = await generated(rollout, 24), await actor.compute_log_probs(batch)
        for turns in range(12):
            call = asyncio.create_task(generated(rollout, 40))
            for _ in range(turns):
                await asyncio.sleep(0)
            await ended(call)
        for milliseconds in (1, 3, 10, 30, 60, 100, 150, 250):
            call = asyncio.create_task(generated(rollout, 400))
            await asyncio.wait({call}, timeout=milliseconds / 1000)
            await ended(call)
            assert same(await actor.compute_log_probs(batch), log_probs)
        for batches in (1, 2, 5):
            stream, seen = rollout.generate(prompts_of(400)), 0
            while seen < batches:
                await anext(stream)
                seen += 1
            await stream.aclose()
            assert same(await generated(rollout, 24), rows)
        assert group.processes[1].is_alive()


async def test_no_order_of_concurrent_calls_stops_a_group(tiny_model: Path, tmp_path: Path) -> None:
    """125 calls of three roles of one group, permuted; many end before, while or after they run."""
    rng, batch = random.Random(0), sequence_batch(4)
    async with policy(tiny_model, tmp_path) as (group, actor, rollout, reference), asyncio.timeout(CALL_S):
        one_by_one = asyncio.Lock()  # who publishes takes the version before away, under those who pull it

        async def weights() -> None:
            async with one_by_one:
                await rollout.update_weights(await actor.publish_weights(1))

        kinds: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "log_probs": lambda: actor.compute_log_probs(batch),
            "update": lambda: actor.update(batch),
            "reference": lambda: reference.compute_log_probs(batch),
            "generate": lambda: generated(rollout, 12),
            "weights": weights,
        }
        expected = {kind: await call() for kind, call in kinds.items()}
        order = [kind for kind in kinds for _ in range(25)]
        rng.shuffle(order)
        calls: list[tuple[str, asyncio.Task[Any]]] = []
        for kind in order:
            calls.append((kind, asyncio.create_task(kinds[kind]())))
            await asyncio.sleep(rng.choice([0, 0, 0, 0.01, 0.05]))
            while len(waiting := [call for _, call in calls if not call.done()]) > AT_ONCE:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if rng.random() < 0.3:
                rng.choice(calls[-20:])[1].cancel()
        await asyncio.wait({call for _, call in calls})
        done = [(kind, call.result()) for kind, call in calls if not call.cancelled()]
        assert len(done) > 80
        for kind, answer in done:
            if isinstance(answer, DataProto):
                assert same(answer, expected[kind]), kind
        assert same(await generated(rollout, 12), expected["generate"])
        group.kill(0, SIGTERM)
        assert await group.ended() == [0, 0]


async def test_turns_through_two_ranks_have_the_bits_of_one_engine(tiny_model: Path, tmp_path: Path) -> None:
    prompts, added = prompts_of(24), [[1 + row % 3 for row in range(24)]]

    def ask(rollout: Any) -> Any:
        async def some(request: DataProto) -> DataProto:
            answer = DataProto.concat([rows async for rows in rollout.generate(request)])
            return answer[answer["row"].argsort()]

        return some

    async with policy(tiny_model, tmp_path) as (_, _, rollout, _), asyncio.timeout(CALL_S):
        whole = await ask(rollout)(prompts)
        t = torch.arange(T).expand(24, T)
        cut = continued(prompts, whole["responses"], (t < 3).long())
        again, _ = with_added(cut, added[0], 1)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
        spread = [await ask(rollout)(cut), await ask(rollout)(again), await ask(rollout)(again[order])]
    alone = RolloutWorker(policy_job(tiny_model, tmp_path / "alone", NOTHING))
    expected = [await ask(alone)(request) for request in (cut, again, again[order])]
    alone.close()
    for found, one in zip(spread, expected, strict=True):
        for name in ("responses", "response_mask", "rollout_log_probs"):
            assert torch.equal(found[name], one[name]), name
    assert torch.equal(spread[0]["responses"], torch.where(t < 3, spread[0]["responses"], whole["responses"]))


def test_a_continuable_row_goes_to_one_rank_wherever_it_is() -> None:
    """Its place in the request does not matter."""
    prompts = first_turn(prompts_of(64), T)
    longer = continued(prompts, prompts["responses"], torch.ones(64, T).long())
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for num_ranks in (2, 3):
        shards = [set(rows.tolist()) for rows in _sharded(prompts, num_ranks)]
        assert min(len(rows) for rows in shards) > 64 / num_ranks / 2
        assert sorted(row for rows in shards for row in rows) == list(range(64))
        assert [set(order[rows].tolist()) for rows in _sharded(longer[order], num_ranks)] == shards
    assert [rows.tolist() for rows in _sharded(prompts_of(5), 2)] == [[0, 1, 2], [3, 4]]


# -------------------------------------------------------------------------- weights, on each rank


def handed_over(ranks: Ranks, directory: Path, model: Path, is_shared: bool) -> None:
    """Train, hand the weights to the engines of all ranks, and generate; then see what each rank has.

    Errors of one rank's engine, and of its weights, are those of the call.
    """
    region.CAN_SHARE = is_shared
    job, roles = policy_job(model, directory, lr=1e-3), ("actor", "rollout")
    rendezvous = Rendezvous.of(os.environ)
    worker_contexts = {
        role: WorkerContext(ComputingThread(role), ranks=Ranks.of_process("cpu")) for role in roles
    }
    workers: dict[str, Any] = {
        role: worker_contexts[role].thread.submit(WORKERS[role], job, worker_contexts[role]).result()
        for role in roles
    }
    own, shard_sizes = workers["rollout"].rank_engine, list[int]()
    begin = own.begin

    async def seen(number: int, prompts: DataProto, *others: Any) -> None:
        shard_sizes.append(len(prompts))
        await begin(number, prompts, *others)

    own.begin = seen
    generate = own.engine.generate

    async def failing(prompts: DataProto, sampling: Any) -> AsyncIterator[DataProto]:
        if len(prompts) == 1:
            raise Unsupported("no single rows today")
        async with aclosing(generate(prompts, sampling)) as finished:
            async for rows in finished:
                yield rows

    own.engine.generate = failing

    async def lead() -> str:
        actor, rollout = workers.values()
        leader, store, server = (
            Leader(roles, rendezvous),
            WeightStore(),
            RoleServer({"actor": [ACTOR, WEIGHTS]}),
        )
        await leader.start()
        await leader.gather()
        for role, worker_context in worker_contexts.items():
            object.__setattr__(worker_context, "executor", leader.executor(role))
        address = await server.start(LOCAL)
        await server.ready({ACTOR: ActorServicer(actor, store), WEIGHTS: WeightsServicer(store)})
        await actor.update(sequence_batch(16))
        published = (await actor.publish_weights(7)).holding
        store.put(published)
        await rollout.update_weights(RemoteWeights([address], 7, published.digest, store=store))
        stream = rollout.generate(prompts_of(101))
        await anext(stream)
        await stream.aclose()
        assert own._calls == {}  # at once, though most rows were still to be made
        with pytest.raises(Unsupported, match=r"^rank 1: no single rows today$"):
            _ = [rows async for rows in rollout.generate(prompts_of(3))]
        if not is_shared:
            with pytest.raises(WeightsUnavailable, match=r"^rank 1 of 2 of rollout: .* cannot map$"):
                await rollout.update_weights(await actor.publish_weights(8))
        rows = [rows["row"] async for rows in rollout.generate(prompts_of(9))]
        assert sorted(torch.cat(rows).tolist()) == list(range(9))
        await server.drain(0)
        await leader.close()
        return str(published.digest)

    if ranks.rank == 0:
        (directory / "digest").write_text(asyncio.run(lead()))
    else:
        threads = {role: worker_context.thread for role, worker_context in worker_contexts.items()}
        asyncio.run(follow(roles, rendezvous, threads, lambda role, name: command_of(workers[role], name)))
    ranks.wait()
    weights = named_weights(own.engine.model)
    assert own.engine.version == 7
    assert PublishedWeights(7, weights).holding.digest == (directory / "digest").read_text()
    assert shard_sizes == [[51, 2, 5], [50, 1, 4]][ranks.rank]
    assert (own._calls, len(own._done), own.fetched) == ({}, 0, None)
    (directory / f"memory-{ranks.rank}").write_text("\n".join(sorted({file_of(w) for w in weights.values()})))
    ranks.wait()
    files = [(directory / f"memory-{rank}").read_text() for rank in range(ranks.size)]
    if is_shared:
        assert files[0] == files[1]
        assert re.fullmatch(r"/memfd:rolemesh-weights-\w+ \(deleted\)", files[0])
    else:
        assert not any("memfd" in file for file in files)


def file_of(tensor: torch.Tensor) -> str:
    """Name the file whose pages hold a tensor; empty: memory of this process alone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return " ".join(line.split()[5:])
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.parametrize("is_shared", [True, False], ids=["one machine", "as if on two machines"])
def test_every_ranks_engine_has_the_published_sharded_version(
    tiny_model: Path, tmp_path: Path, is_shared: bool
) -> None:
    """On one machine all engines compute with the same memory, that of the version itself."""
    on_ranks(2, handed_over, tmp_path, tiny_model, is_shared)


# ----------------------------------------------------------------------------------- a rank's death

# Kills a process when so many answers of the training data have been scored: others are still being made.
KILLING = """
import json, os

scored = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, victim, marker, after):
    global scored
    scored += extra_info["split"] == "train"
    if scored == after and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(json.load(open(victim))["pid"], 9)
    return sum(character.isdigit() for character in solution_str) / 8
"""


async def test_a_rank_killed_while_generating_changes_no_bit_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    """In step 3, with the checkpoint of step 1: 4 of its 16 rows are scored, and each rank has 4 at once."""
    overrides = (
        *("placement.strategy=hybrid", "placement.ranks={policy: 2}", "rollout.max_num_seqs=4"),
        *("trainer.total_training_steps=3", "trainer.save_freq=1", "rollout.n=4"),
        *("data.max_response_length=50", "rollout.ignore_eos=true"),
    )
    directories = [tmp_path / name for name in ("killed", "unbroken")]
    for directory in directories:
        directory.mkdir()
    killed, unbroken = (small_job(directory, tiny_model, "run", *overrides) for directory in directories)
    await train_on_ranks(unbroken)

    (directories[0] / "reward.py").write_text(KILLING)
    victim = killed.run_dir / "logs" / "policy-0-rank-1.address.json"
    job = with_reward(killed, victim=str(victim), marker=str(tmp_path / "marker"), after=2 * 16 + 4)
    async with rolemesh("run", written(job, directories[0])) as launched:
        code, output = await launched.end()
    print(output)
    assert code == 0, output
    assert " ".join(output.split()).count("starting all roles anew, and going on from") == 1, output
    assert outcome(killed) == outcome(unbroken)
