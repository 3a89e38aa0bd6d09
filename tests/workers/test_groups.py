"""Roles that share a process, a port and a device."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sequences import sequence_batch
from serving import num_switches, reward_batch, reward_job, serve_process, served, served_group

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleFailed
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import (
    ActorClient,
    CriticClient,
    ReferenceClient,
    RewardClient,
    RoleClient,
    RolloutClient,
)
from rolemesh.services.processes import serve
from rolemesh.services.processes.serve import group_server, load_group
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.offloading import Offloader

PROMPT, RESPONSE = 6, 10


def small(model: Path, directory: Path) -> JobConfig:
    return make_job(
        {
            "algorithm": {"use_kl_in_reward": True},
            "data": {"max_prompt_length": PROMPT, "max_response_length": RESPONSE},
            "actor": {
                "model": {"path": str(model)},
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 2,
            },
            "critic": {"ppo_micro_batch_size_per_gpu": 2},
            "rollout": {"max_num_seqs": 4},
            "trainer": {"default_local_dir": str(directory / "run"), "device": "cpu"},
        }
    )


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> JobConfig:
    return small(tiny_model, tmp_path)


def prompts(rows: int) -> DataProto:
    return DataProto(
        {
            "prompts": torch.arange(rows * PROMPT).reshape(rows, PROMPT) % 200,
            "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.bool),
            "seeds": torch.arange(rows),
        },
        {},
        {"sampling": "train"},
    )


@asynccontextmanager
async def clients(address: str, job: JobConfig, *kinds: type[RoleClient]) -> AsyncIterator[list[Any]]:
    """A client of each kind, all of one group."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(kind([address], methods(job), timeout_s=60)) for kind in kinds]


async def test_a_group_answers_on_one_port_as_each_of_its_roles(job: JobConfig, tmp_path: Path) -> None:
    """A real process: health by role and by service; metrics say the role of the call, and who is resident."""
    batch = sequence_batch(4)
    async with (
        serve_process("actor,reference", job, tmp_path) as process,
        clients(process.address, job, ActorClient, ReferenceClient) as (actor, reference),
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        await actor.wait_until_ready(120)
        await reference.wait_until_ready(120)
        stub = health_pb2_grpc.HealthStub(channel)
        services = [f"rolemesh.v1.{name}Service" for name in ("Actor", "Reference", "Weights")]
        for name in ("", "actor", "reference", *services):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with CriticClient([process.address], methods(job)) as critic:
            with pytest.raises(InvalidConfig, match="another role serves there, not critic"):
                await critic.wait_until_ready(120)

        old = await actor.compute_log_probs(batch)
        assert torch.equal((await reference.compute_log_probs(batch))["ref_log_probs"], old["old_log_probs"])
        await actor.update(batch)
        assert not torch.equal((await actor.compute_log_probs(batch))["old_log_probs"], old["old_log_probs"])
        assert torch.equal((await reference.compute_log_probs(batch))["ref_log_probs"], old["old_log_probs"])

        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{process.metrics}/metrics").read().decode()
        )
        for line in (
            'rolemesh_rpc_server_requests_total{code="OK",method="ComputeLogProbs",role="actor"} 2.0',
            'rolemesh_rpc_server_requests_total{code="OK",method="ComputeLogProbs",role="reference"} 2.0',
            'rolemesh_role_ready{rank="0",role="actor"} 1.0',
            'rolemesh_role_ready{rank="0",role="reference"} 1.0',
            'rolemesh_lease_resident{role="actor"} 0.0',
            'rolemesh_lease_resident{role="reference"} 1.0',
            'rolemesh_lease_switch_seconds_count{from_role="reference",to_role="actor"} 2.0',
            'rolemesh_lease_switch_seconds_count{from_role="actor",to_role="reference"} 2.0',
            'rolemesh_lease_wait_seconds_count{role="actor"} 3.0',
        ):
            assert line in page.splitlines()
        assert 'rolemesh_lease_switch_bytes_total{direction="in",role="actor"}' in page


async def test_a_stream_reader_may_wait_for_other_roles_of_its_group(job: JobConfig) -> None:
    """They wait for the stream's end, and the stream does not wait for its reader."""
    batch, seen = sequence_batch(4), []
    async with (
        served_group(["actor", "rollout", "critic"], job) as address,
        clients(address, job, ActorClient, RolloutClient, CriticClient) as (actor, rollout, critic),
    ):
        before = num_switches()
        async for rows in rollout.generate(prompts(24)):  # six batches of four
            seen += rows["row"].tolist()
            await actor.compute_log_probs(batch)
            await critic.compute_values(batch)
    assert sorted(seen) == list(range(24))
    assert num_switches() > before


async def test_a_stream_that_is_left_gives_its_turn_back(job: JobConfig) -> None:
    async with (
        served_group(["actor", "rollout"], job) as address,
        clients(address, job, ActorClient, RolloutClient) as (actor, rollout),
    ):
        expected = await actor.compute_log_probs(sequence_batch(4))
        stream = rollout.generate(prompts(400))
        await anext(stream)
        await stream.aclose()
        again = await actor.compute_log_probs(sequence_batch(4))
        assert torch.equal(again["old_log_probs"], expected["old_log_probs"])


async def test_a_reward_without_a_model_takes_nobodys_place(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with (
        served_group(["critic", "reward"], job) as address,
        clients(address, job, CriticClient, RewardClient) as (critic, reward),
    ):
        before = num_switches()
        for _ in range(3):
            await critic.compute_values(sequence_batch(4, response=8))
            await reward.compute_scores(reward_batch(2))
        assert num_switches() == before


async def test_weights_reach_the_rollout_in_one_group_and_in_two(job: JobConfig) -> None:
    async def generated(actor: Any, rollout: Any) -> torch.Tensor:
        await actor.update(sequence_batch(4))
        await rollout.update_weights(await actor.publish_weights(1))
        batches = [rows async for rows in rollout.generate(prompts(8))]
        whole = DataProto.concat(batches)
        return whole["rollout_log_probs"][whole["row"].argsort()]

    async with (
        served_group(["rollout", "actor"], job) as address,
        clients(address, job, ActorClient, RolloutClient) as pair,
    ):
        together = await generated(*pair)
    async with (
        served("actor", job) as actors,
        served("rollout", job) as rollouts,
        ActorClient(actors, methods(job)) as actor,
        RolloutClient(rollouts, methods(job)) as rollout,
    ):
        apart = await generated(actor, rollout)
    assert torch.equal(together, apart)


async def test_a_disk_that_takes_no_tensors_error_says_who_is_where(job: JobConfig) -> None:
    async with (
        served_group(["actor", "critic"], job) as address,
        clients(address, job, ActorClient, CriticClient) as (actor, critic),
    ):
        await actor.compute_log_probs(sequence_batch(4))
        job.run_dir.rename(job.run_dir.with_name("away"))
        job.run_dir.touch()
        with pytest.raises(
            RoleFailed, match=r"critic\.ComputeValues.*could not take its turn .*actor is still on it"
        ):
            await critic.compute_values(sequence_batch(4))
        await actor.compute_log_probs(sequence_batch(4))
        job.run_dir.unlink()
        await critic.compute_values(sequence_batch(4))


async def test_a_process_of_two_roles_holds_at_most_one_at_a_time(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each role's tensors hold, seen whenever one loads, leaves the device or comes back: never two."""
    workers: dict[str, LocalWorker] = {}
    seen: list[dict[str, int]] = []

    def held() -> dict[str, int]:
        offloaders = {role: worker.offloader for role, worker in workers.items()}
        return {
            role: sum(tensor.untyped_storage().nbytes() for tensor in offloader._tensors())
            for role, offloader in offloaders.items()
            if offloader is not None
        }

    def watched(move: Callable[[Offloader], int]) -> Callable[[Offloader], int]:
        def moving(offloader: Offloader) -> int:
            seen.append(held())
            moved = move(offloader)
            seen.append(held())
            return moved

        return moving

    load = serve.load_role

    def loading(role: str, *args: Any) -> Any:
        seen.append(held())
        workers[role], servicers = load(role, *args)
        seen.append(held())
        return workers[role], servicers

    monkeypatch.setattr(Offloader, "offload", watched(Offloader.offload))
    monkeypatch.setattr(Offloader, "reload", watched(Offloader.reload))
    monkeypatch.setattr(serve, "load_role", loading)
    (critic, reference), _ = await load_group(["critic", "reference"], job)
    try:
        for _ in range(2):
            await critic.compute_values(sequence_batch(2))  # type: ignore[attr-defined]
            assert held()["critic"] > held()["reference"] == 0
            await reference.compute_log_probs(sequence_batch(2))  # type: ignore[attr-defined]
            assert held()["reference"] > held()["critic"] == 0
    finally:
        critic.close()
        reference.close()
    assert all(sum(num_bytes > 0 for num_bytes in at_once.values()) <= 1 for at_once in seen), seen
    assert len(seen) >= 4 + 2 * 2 * 4  # two loads, then a role out and one in, four times


@pytest.mark.parametrize("roles", [["actor", "judge"], ["actor", "actor"], [""], []])
def test_a_group_is_of_different_roles_that_there_are(roles: list[str]) -> None:
    with pytest.raises(InvalidConfig, match="expected different roles of actor"):
        group_server(roles)


async def test_a_role_of_a_group_that_cannot_load_is_named(job: JobConfig) -> None:
    broken = job.model_copy(
        update={
            "critic": job.critic.model_copy(
                update={"model": job.critic.model.model_copy(update={"path": "no"})}
            )
        }
    )
    with pytest.raises(FileNotFoundError, match="critic: no such model directory: no"):
        await load_group(["actor", "critic"], broken)


async def test_a_role_computes_on_the_thread_that_loaded_it(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_on: list[int] = []
    load = serve.load_role

    def seen(role: str, *args: Any) -> Any:
        if role == "critic":
            loaded_on.append(threading.get_ident())
        return load(role, *args)

    monkeypatch.setattr(serve, "load_role", seen)
    (actor, critic), _ = await load_group(["actor", "critic"], job)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)  # of this thread, and of no other that computes
    try:
        numbers = [await worker.run(torch.get_num_threads) for worker in (actor, critic)]
        idents = [await worker.run(threading.get_ident) for worker in (actor, critic)]
    finally:
        torch.set_num_threads(before)
        actor.close()
        critic.close()
    assert numbers == [before, before]
    assert idents[1:] == loaded_on
    assert len({*idents, threading.get_ident()}) == 3
