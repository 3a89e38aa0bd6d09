"""Engine hf continues rows: a row has the bits of one that was never cut, whatever was kept, whoever else there
is, and in whatever order turns come.

Bits are compared on each architecture. What is kept for how long, and for whom, does not depend on it.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import PAD, generated, prompts_of
from hf_turns import ADDED, LONG, job_of, three_turns, worker_of
from turns import assert_same, continued, conversation, first_turn, lengths_of, with_added, with_answer

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.engines.hf import batch
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics

NEW = ("responses", "response_mask", "rollout_log_probs", "weight_versions", "kept_ids")


def tokens_by_source() -> dict[str, float]:
    return {
        source: metrics.ROLLOUT_CONTEXT_TOKENS.labels(source)._value.get() for source in ("kept", "computed")
    }


# ----------------------------------------------------------------------------- where rows are cut


async def test_a_row_that_is_cut_anywhere_is_the_row_that_was_not(any_model: Path):
    prompts, t = prompts_of(13), torch.arange(LONG)
    with worker_of(any_model, ignore_eos=True) as worker:
        whole = await generated(worker, prompts)
        for begun in (torch.arange(13), torch.full((13,), LONG - 1), torch.zeros(13).long()):
            is_new = t >= begun[:, None]
            responses = torch.where(is_new, PAD, whole["responses"])
            rest = await generated(worker, continued(prompts, responses, (~is_new).long()))
            assert torch.equal(rest["response_mask"], is_new)
            assert torch.equal(rest["responses"], torch.where(is_new, whole["responses"], PAD))
            assert torch.equal(rest["rollout_log_probs"], torch.where(is_new, whole["rollout_log_probs"], 0))
            assert torch.equal(rest["weight_versions"], torch.where(is_new, 0, -1))
            assert torch.equal(rest["kept_ids"], torch.where(is_new[..., None], whole["kept_ids"], -1))


async def test_a_first_turn_is_the_answer_without_turns(ending_model: Path):
    prompts = prompts_of(13)
    with worker_of(ending_model) as worker:
        assert_same(await generated(worker, first_turn(prompts, LONG)), await generated(worker, prompts))
        assert len(worker._engine.kept) == 13
    with worker_of(ending_model) as worker:
        await generated(worker, prompts)
        assert not len(worker._engine.kept), "nothing is kept of rows that have one turn"


# ------------------------------------------------------------------------------- what is kept


async def test_turns_have_the_same_bits_with_and_without_kept_kv_cache(ending_model: Path):
    with worker_of(ending_model) as worker:
        before = tokens_by_source()
        exchanged = await three_turns(worker)
        reused = tokens_by_source()["kept"] - before["kept"]
    context = sum(int(lengths_of(request["turns"]).sum()) for request, _ in exchanged)
    assert len(exchanged) == 3
    assert min(len(request) for request, _ in exchanged) > 3, "rows go on, or the test shows nothing"
    assert reused > 0.5 * context
    for request, answer in exchanged:
        with worker_of(ending_model) as fresh:
            before = tokens_by_source()
            assert_same(await generated(fresh, request), answer)
            assert tokens_by_source()["kept"] == before["kept"]


async def test_exactly_the_new_tokens_are_computed(ending_model: Path):
    """Turn 2 computes the last token of turn 1 and the five that were added, and no other."""
    with worker_of(ending_model) as worker:
        first = first_turn(prompts_of(13), LONG)
        request, going_on = with_added(with_answer(first, await generated(worker, first), 1), [5] * 13, 1)
        assert len(going_on) > 5
        before = tokens_by_source()
        await generated(worker, request)
        after = tokens_by_source()
    context = request["prompt_mask"].sum() + (request["turns"] != 0).sum()
    computed = (1 + 5) * len(going_on)
    assert after["computed"] - before["computed"] == computed
    assert after["kept"] - before["kept"] == context - computed


@pytest.mark.parametrize("room", [0, 3, 8])
async def test_rows_that_had_no_room_are_computed_again(tiny_ending_model: Path, room: int):
    with worker_of(tiny_ending_model) as worker:
        expected = await three_turns(worker)
    with worker_of(tiny_ending_model) as worker:
        kept = worker._engine.kept
        kept.max_bytes = room * worker._engine._row_bytes() // 2
        for (_, found), (_, wanted) in zip(await three_turns(worker), expected, strict=True):
            assert_same(found, wanted)
        assert kept.num_bytes <= kept.max_bytes
        assert kept.num_bytes == sum(row.num_bytes for row in kept._rows)


async def test_sleep_drops_what_was_kept_and_changes_no_bit(tiny_ending_model: Path):
    with worker_of(tiny_ending_model) as worker:
        expected = await three_turns(worker)
    with worker_of(tiny_ending_model) as worker:

        async def after_sleep(request: DataProto) -> DataProto:
            await worker.sleep()
            assert not len(worker._engine.kept)
            await worker.wake()
            return await generated(worker, request)

        found = await conversation(prompts_of(13), LONG, ADDED, [after_sleep] * 3)
    for (_, answer), (_, wanted) in zip(found, expected, strict=True):
        assert_same(answer, wanted)


async def test_another_row_with_the_same_prompt_is_never_taken_for_it(tiny_ending_model: Path):
    """Five answers to each prompt, whose beginnings are alike in part; each continues its own."""
    prompts = prompts_of(4).repeat(5)
    prompts["seeds"] = torch.arange(20)
    with worker_of(tiny_ending_model) as worker:
        exchanged = await conversation(prompts, LONG, [[2] * 20], [partial(generated, worker)] * 2)
    request, answer = exchanged[1]
    assert len(request) > 10
    for row in range(len(request)):
        with worker_of(tiny_ending_model) as fresh:
            assert_same(await generated(fresh, request[[row]]), answer[[row]], NEW)


# --------------------------------------------------------------------------------- who else there is


async def test_overlapping_turns_in_any_order_have_the_same_bits(
    tiny_ending_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each row is a call of its own, and its turns follow each other. 40 other rows are at other tokens."""
    monkeypatch.setattr(batch, "STEPS_S", 0.005)
    with worker_of(tiny_ending_model) as worker:
        expected = await three_turns(worker)
        others = prompts_of(40)
        others_alone = await generated(worker, others)
    alone: list[dict[int, DataProto]] = [{}, {}, {}]
    which = torch.arange(13)
    for turn, (request, answer) in enumerate(expected):
        if turn:
            which = which[went_on(expected[turn - 1], ADDED[turn - 1], which)]
        for at, row in enumerate(which.tolist()):
            alone[turn][row] = answer[[at]]
        assert len(which) == len(request)
    prompts = prompts_of(13)

    async def talk(worker: RolloutWorker, row: int) -> None:
        added = [[counts[row]] for counts in ADDED]
        own = await conversation(prompts[[row]], LONG, added, [partial(generated, worker)] * 3)
        assert len(own) == sum(row in answers for answers in alone)
        for turn, (_, answer) in enumerate(own):
            assert_same(answer, alone[turn][row], NEW)

    most = 0
    step = batch.Batch._step

    def stepping(running: Any) -> None:
        nonlocal most
        step(running)
        most = max(most, len(running._groups))

    monkeypatch.setattr(batch.Batch, "_step", stepping)
    for max_num_seqs, order in ((64, range(13)), (16, range(13)), (4, reversed(range(13)))):
        with worker_of(tiny_ending_model, max_num_seqs=max_num_seqs) as worker:
            beside = asyncio.create_task(generated(worker, others))
            await asyncio.gather(*(talk(worker, row) for row in order))
            assert_same(await beside, others_alone)
    assert most > 5, "rows at different tokens were decoded together, or the test shows nothing"


def went_on(exchange: tuple[DataProto, DataProto], added: list[int], which: torch.Tensor) -> list[int]:
    after = with_answer(*exchange, 1)
    return with_added(after, [added[row] for row in which.tolist()], 1)[1]


async def first_rows(worker: RolloutWorker) -> DataProto:
    async with aclosing(worker.generate(prompts_of(13))) as stream:
        return await anext(stream)


async def test_a_call_that_is_left_frees_its_rows(tiny_ending_model: Path):
    """Calls are left after their first rows or before; one that stays does not notice."""
    with worker_of(tiny_ending_model, max_num_seqs=8) as worker:
        expected = await generated(worker, prompts_of(13))
        leaving = [asyncio.create_task(first_rows(worker)) for _ in range(8)]
        staying = asyncio.create_task(generated(worker, prompts_of(13)))
        await asyncio.gather(*leaving[:2])
        for call in leaving:
            call.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert_same(await staying, expected)
        call = asyncio.create_task(first_rows(worker))
        await asyncio.sleep(0)
        running = worker._engine._batch
        await call
        await worker.sleep()
        assert worker._engine._batch is None
        assert running is not None
        running.steps()
        assert running._slots.num_free == 8
        await worker.wake()
        assert_same(await generated(worker, prompts_of(13)), expected)


async def test_a_call_that_is_left_before_its_first_step_never_joins(tiny_model: Path):
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    with worker_of(tiny_model, max_num_seqs=64) as worker:
        hook = worker._engine.model.register_forward_pre_hook(hold)
        staying = asyncio.create_task(generated(worker, prompts_of(3)))
        await asyncio.to_thread(begun.wait, 60)
        running = worker._engine._batch
        assert running is not None
        leaving = asyncio.create_task(first_rows(worker))
        while not running.arriving:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0)
        (left,) = running.arriving
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        hook.remove()
        go_on.set()
        assert len(await staying) == 3
        assert not running.arriving
        assert left.finished.empty()
        assert not running._waiting
        assert left not in [call for call, _ in running._slots.owners.values()]


async def test_a_step_error_reaches_every_call_and_the_next_ones_work(tiny_model: Path):
    with worker_of(tiny_model) as worker:
        expected = await generated(worker, prompts_of(3))
        engine = worker._engine
        hook = engine.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        failed = await asyncio.gather(
            *(generated(worker, prompts_of(3)) for _ in range(3)), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["full"] * 3
        hook.remove()
        assert_same(await generated(worker, prompts_of(3)), expected)


# ------------------------------------------------------------------------------------- the trainer


async def test_the_actors_log_probs_of_many_turns_are_the_rollouts(any_model: Path):
    """As of one turn: within 1e-5, with attention over prompt, sampled and added tokens."""
    job = job_of(any_model)
    with closing(RolloutWorker(job)) as worker:
        worker._engine.ends = torch.arange(0, 256, 8)
        exchanged = await conversation(prompts_of(13), LONG, ADDED, [partial(generated, worker)] * 2)
    request, answer = exchanged[1]
    rows = with_answer(request, answer, 2)
    mask = torch.cat([rows["prompt_mask"], rows["turns"] != 0], 1).long()
    actor = ActorWorker(job)
    computed = await actor.compute_log_probs(
        DataProto(
            {
                "input_ids": torch.cat([rows["prompts"], rows["responses"]], 1),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": rows["turns"] > 0,
            }
        )
    )
    actor.close()
    new = answer["response_mask"]
    assert (rows["turns"] < 0).any()
    assert new.any(1).all()
    difference = computed["old_log_probs"] - answer["rollout_log_probs"]
    assert torch.where(new, difference, 0).abs().max() < 1e-5


# -------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"turns": None}, r"both of the columns 'responses' and 'turns'.*got \['responses'\]"),
        ({"responses": None}, r"both of the columns 'responses' and 'turns'.*got \['turns'\]"),
        (
            {"turns": torch.tensor([1, 0, -2] + [0] * (LONG - 3))},
            r"'turns', row 0, position 2, is -2 after a 0; 0 only beyond the end",
        ),
        ({"turns": torch.ones(LONG).long()}, r"row 0, has 64 tokens already; fewer than T = 64"),
    ],
)
async def test_rows_that_cannot_be_continued_are_refused(tiny_model: Path, columns: Any, message: str):
    request = first_turn(prompts_of(2), LONG)
    for name, value in columns.items():
        if value is None:
            request.pop([name])
        else:
            request[name] = value.expand(2, LONG).clone()
    with worker_of(tiny_model) as worker, pytest.raises(InvalidBatch, match=message):
        await generated(worker, request)
