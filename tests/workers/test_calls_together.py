"""Calls that wait for a role are computed together: bit for bit what each is answered alone, in fewer
passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import sequence_batch

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker

ROLES: dict[str, tuple[Callable[[JobConfig], Any], str]] = {
    "actor": (ActorWorker, "compute_log_probs"),
    "reference": (ReferenceWorker, "compute_log_probs"),
    "critic": (CriticWorker, "compute_values"),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("role", ROLES)
async def test_bits_do_not_depend_on_who_waits_beside(tiny_model: Path, role: str, packed: bool) -> None:
    model = {"use_remove_padding": packed}
    dynamic = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100_000}
    job = make_job(
        {
            "data": {"train_batch_size": 32},
            "trainer": {"device": "cpu"},
            "actor": {"model": {"path": str(tiny_model), **model}, "ppo_mini_batch_size": 32, **dynamic},
            "critic": {"model": model, **dynamic},
            "reference": {"model": model, "log_prob_micro_batch_size_per_gpu": 32},
        }
    )
    load, method = ROLES[role]
    worker = load(job)
    call = getattr(worker, method)
    passes: list[None] = []
    body = worker.model.body if role == "critic" else worker.model.get_decoder()
    body.register_forward_pre_hook(lambda *_: passes.append(None))

    batch = sequence_batch(32)
    batch = DataProto.concat([batch[:16], batch[:16]])  # rows that begin alike, in different calls
    pieces = [batch[at] for at in (slice(0, 1), slice(1, 13), slice(13, 17), slice(17, 32))]
    alone = [await call(piece) for piece in pieces]
    one_by_one = len(passes)
    passes.clear()

    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(60)

    holding = worker.worker_context.thread.submit(hold)
    assert await asyncio.to_thread(held.wait, 60)
    calls = [asyncio.create_task(call(piece)) for piece in pieces]
    await asyncio.sleep(0)  # each comes as far as the thread
    release.set()
    together = await asyncio.gather(*calls)
    holding.result()

    assert len(passes) * len(pieces) == one_by_one > 0
    for mine, answer in zip(alone, together, strict=True):
        assert mine.columns == answer.columns
        assert all(torch.equal(mine[name], answer[name]) for name in mine.columns)
    worker.close()
