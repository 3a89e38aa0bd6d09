"""Generation that runs ahead of training: whose rows, and by which weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from in_process import recorded, small_job
from observed import ASYNC, NO_CRITIC, Observed, in_process, over_grpc, run
from serving import serve_process, served
from torch.testing import assert_close

from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Roles
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.rpc.metadata import VERSION_KEY
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.weights.weight_source import WeightSource
from rolemesh.wire.streams import receive_batches, send
from rolemesh.workers.local import LocalWorker


def assert_rows_are_those_of_the_steps(job: JobConfig, batches: list[DataProto], max_staleness: int) -> None:
    """The prompts of each step, n times each, in their order; and each token by weights that were in use."""
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    order = PromptOrder(len(data), job.data)
    for step, batch in enumerate(batches, 1):
        rows = fan_out(data.batch(order.rows(step)), job.rollout.n, job.rollout.seed, step)
        assert batch["uid"].tolist() == rows["uid"].tolist()
        assert torch.equal(batch["seeds"], rows["seeds"])
        assert torch.equal(batch["prompts"], rows["prompts"])
        versions, mask = batch["weight_versions"], batch["response_mask"]
        assert set(versions[~mask].tolist()) <= {-1}
        assert set(versions[mask].tolist()) <= set(range(max(0, step - 1 - max_staleness), step))
        for row, sampled in zip(versions, mask, strict=True):
            assert (row[sampled].diff() >= 0).all()  # weights only grow newer while a row is made


# ------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize(
    ("roles_of", "max_staleness"), [(in_process, 1), (over_grpc, 2)], ids=["in process", "over grpc"]
)
async def test_each_step_trains_on_its_own_rows_within_max_staleness(
    roles_of: Callable[[JobConfig], Any], max_staleness: int, tiny_model: Path, tmp_path: Path
) -> None:
    """With validation between the steps, which must be answered by the weights of its step."""
    job = small_job(
        tmp_path, tiny_model, "run", ASYNC, f"trainer.max_staleness={max_staleness}",
        "trainer.total_training_steps=5", "trainer.test_freq=1",
    )  # fmt: skip
    async with roles_of(job) as roles:
        observed = Observed(roles)
        await run(job, observed.watched())
    assert sorted(set(observed.begun)) == [f"step {step} begins" for step in range(6)]
    assert [event for event in observed.begun if "step 0" not in event] == [
        f"step {step} begins" for step in range(1, 6)
    ]
    assert len(observed.batches) == 5
    assert_rows_are_those_of_the_steps(job, observed.batches, max_staleness)
    for step, (batch, record) in enumerate(zip(observed.batches, recorded(job)[1:], strict=True), 1):
        behind = (step - 1 - batch["weight_versions"])[batch["response_mask"]]
        assert record["rollout/stale_tokens"] == (behind > 0).sum()
        assert record["rollout/staleness/max"] == behind.max() <= max_staleness
        assert record["rollout/staleness/mean"] == pytest.approx(behind.float().mean().item())
    # step 2 was begun with the weights of step 1, and step 3 too where it may be two behind
    assert recorded(job)[2]["rollout/staleness/max"] == 1
    assert max(record["rollout/staleness/max"] or 0 for record in recorded(job)[1:]) >= 1


async def test_the_next_rows_are_generated_while_the_actor_trains(tiny_model: Path, tmp_path: Path) -> None:
    """The actor does not end its update before the next step's rows are all there."""
    job = small_job(tmp_path, tiny_model, "run", ASYNC, *NO_CRITIC, "trainer.total_training_steps=3")

    class Patient(Observed):
        async def update(self, batch: DataProto) -> Metrics:
            metrics = await super().update(batch)
            if (step := len(self.batches)) < 3:
                await self.seen(f"step {step + 1} generated")
            await self.note(f"step {step} learnt")
            return metrics

    async with in_process(job) as roles:
        observed = Patient(roles)
        await run(job, observed.watched())
    order = observed.events.index
    for step in (1, 2):
        assert order(f"step {step + 1} generated") < order(f"step {step} learnt")
        assert order(f"step {step} learnt") < order(f"weights {step} taken")


async def test_rows_in_the_making_go_on_with_new_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Rows are decoded four at a time. The second four of step 2 are being made when version 1 comes."""
    job = small_job(
        tmp_path, tiny_model, "run", ASYNC, *NO_CRITIC, "trainer.total_training_steps=2",
        "rollout.max_num_seqs=4", "data.max_response_length=256", "rollout.ignore_eos=true",
    )  # fmt: skip

    class Late(Observed):
        """Begins step 2 when step 1 has learnt; takes version 1 up when it has rows of step 2."""

        async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
            if prompts.meta_info["step"] == 2:
                await self.seen("update 1 ends")
            async for rows in super().generate(prompts):
                yield rows

        async def update_weights(self, source: WeightSource) -> None:
            if source.version == 1:
                await self.seen("step 2 has rows")
                for _ in range(8):  # the thread that decodes takes one job of each in turn
                    await cast(LocalWorker, self.roles.rollout).run(lambda: None)
            await super().update_weights(source)

    async with in_process(job) as roles:
        observed = Late(roles)
        await run(job, observed.watched())
    versions = observed.batches[1]["weight_versions"]
    assert (versions[:4] == 0).all()
    assert set(versions[4:, -1].tolist()) == {1}
    mixed = int((versions[:, 0] != versions[:, -1]).sum())
    assert recorded(job)[2]["rollout/mixed_rows"] == mixed == 4
    assert recorded(job)[2]["rollout/stale_tokens"] == (versions == 0).sum()


async def test_stale_tokens_are_weighed_by_how_the_policy_has_changed(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run", ASYNC, *NO_CRITIC, "trainer.total_training_steps=3",
        "algorithm.rollout_correction.rollout_is=token", "actor.optim.lr=1e-2",
        "algorithm.rollout_correction.rollout_is_threshold=1.01",
    )  # fmt: skip

    class AtOnce(Observed):
        """New weights wait until the rows of the next step are there: all of them are one step old."""

        async def update_weights(self, source: WeightSource) -> None:
            if source.version in (1, 2):
                await self.seen(f"step {source.version + 1} generated")
            await super().update_weights(source)

    async with in_process(job) as roles:
        observed = AtOnce(roles)
        await run(job, observed.watched())
    fresh, *stale = observed.batches
    assert (fresh["rollout_is_weights"][fresh["response_mask"]] - 1).abs().max() < 1e-4
    for batch, record in zip(stale, recorded(job)[2:], strict=True):
        mask = batch["response_mask"]
        ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp()
        assert_close(batch["rollout_is_weights"], ratio.clamp(max=1.01) * mask)
        assert ratio[mask].max() > 1.01
        assert record["rollout_corr/rollout_is_raw_max"] == pytest.approx(ratio[mask].max().item())
        assert record["rollout_corr/rollout_is_max"] == pytest.approx(1.01)
        assert record["rollout/stale_tokens"] == mask.sum()


async def test_no_row_is_lost_when_a_replica_dies_generating_ahead(tiny_model: Path, tmp_path: Path) -> None:
    """Its rows are made anew by the other, which by then may have newer weights, and they say so."""
    job = small_job(
        tmp_path, tiny_model, "run", ASYNC, *NO_CRITIC, "trainer.total_training_steps=4",
        "data.max_response_length=32", "rollout.ignore_eos=true", "rollout.max_num_seqs=4",
    )  # fmt: skip
    (tmp_path / "other").mkdir()
    async with AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(serve_process("rollout", job, tmp_path))
        other = await stack.enter_async_context(serve_process("rollout", job, tmp_path / "other"))
        roles: dict[str, Any] = {}
        for role in ("actor", "reward"):
            addresses = await stack.enter_async_context(served(role, job))
            roles[role] = await stack.enter_async_context(new_client(role, addresses, job))
        rollout = RolloutClient([doomed.address, other.address], methods(job))
        roles["rollout"] = await stack.enter_async_context(rollout)
        for client in roles.values():
            await client.wait_until_ready(240)

        class Deadly(Observed):
            async def update(self, batch: DataProto) -> Metrics:
                if len(self.batches) == 1:
                    doomed.process.kill()  # step 3 is being made
                return await super().update(batch)

        observed = Deadly(Roles(**roles))
        await run(job, observed.watched())
    assert len(observed.batches) == 4
    assert_rows_are_those_of_the_steps(job, observed.batches, 1)


async def test_a_request_sent_before_a_swap_uses_the_newer_weights(tiny_model: Path, tmp_path: Path) -> None:
    """It names version 1 when it is sent, and version 2 is there when its rows arrive."""
    job = small_job(tmp_path, tiny_model, "run")
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    rows = methods(job)["rollout.generate"].prune(fan_out(data.batch(range(4)), 2, seed=1, step=3))
    swapped = asyncio.Event()

    async def frames() -> AsyncIterator[bytes]:
        await swapped.wait()
        async for frame in send(rows):
            yield frame

    async with over_grpc(job) as roles:
        rollout = cast(RolloutClient, roles.rollout)
        await roles.sync_weights(1)
        async with grpc.aio.insecure_channel(rollout.pool.replicas[0].address) as channel:
            named = ((VERSION_KEY, rollout._dispatcher.metadata[VERSION_KEY]),)
            generate = channel.stream_stream("/rolemesh.v1.RolloutService/Generate")
            call = generate(frames(), metadata=named)
            await roles.sync_weights(2)
            swapped.set()
            answer = DataProto.concat([part async for part in receive_batches(call)])
    assert len(answer) == 8
    assert (answer["weight_versions"][answer["response_mask"]] == 2).all()
