"""The policy sees another prompt in the middle of a row: each turn is trained on in the context that it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from echoing import TALKS
from in_process import small_job, workers
from seen import Seen
from test_conversation_rollout import talked
from test_template import FORGETFUL
from transformers import AutoTokenizer
from weighed import environment as program_environment
from weighed import forget_plugin, weighing_job, weighing_model
from weighed import talked as talked_with_program

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.rollout.worker import RolloutWorker

TOKENS = 200


@contextmanager
def roles_of(directory: Path, model: Path, *overrides: str) -> Iterator[tuple[JobConfig, Any]]:
    directory.mkdir()
    keys = (f"data.max_response_length={TOKENS}", "rollout.agent.default_agent_loop=condenser")
    job = small_job(directory, model, "talk", *TALKS, *keys, *overrides)
    with workers(job) as roles:
        yield job, roles


def assert_rows_are_what_was_fed_and_sampled(batch: DataProto, seen: Seen) -> dict[int, list[list[int]]]:
    """Each turn stands in its row after exactly the ids that the engine was fed with it: those of its context.

    Returns:
        What the engine was fed for each turn, by row.
    """
    fed_by_row: dict[int, list[list[int]]] = {}
    num_tokens = batch["responses"].shape[1]
    for row in range(len(batch)):
        turns, contexts = batch["turns"][row], batch["contexts"][row]
        ids, positions = batch["input_ids"][row], batch["position_ids"][row]
        assert torch.equal(contexts, contexts.cummax(0).values * (turns != 0))
        for number in range(1, int(turns.max()) + 1):
            new = (turns == number).nonzero().flatten()
            begin = len(ids) - num_tokens + int(new[0])
            before = ids[begin - int(positions[begin]) : begin].tolist()
            [(_, answer)] = [
                (asked, answer)
                for asked, answer in seen.turns
                if fed_ids(asked) == before
                and sampled(answer)[: len(new)] == batch["responses"][row, new].tolist()
            ]
            for name in ("rollout_log_probs", "weight_versions"):
                there = answer[name][0, answer["response_mask"][0]][: len(new)]
                assert torch.equal(there, batch[name][row, new])
            fed_by_row.setdefault(row, []).append(before)
    assert sum(map(len, fed_by_row.values())) == len(seen.turns)
    return fed_by_row


def fed_ids(asked: DataProto) -> list[int]:
    prompt = asked["prompts"][0, asked["prompt_mask"][0].bool()].tolist()
    return prompt + asked["responses"][0, asked["turns"][0] != 0].tolist()


def sampled(answer: DataProto) -> list[int]:
    ids: list[int] = answer["responses"][0, answer["response_mask"][0]].tolist()
    return ids


async def test_a_condensed_conversation_keeps_what_was_fed_and_sampled(
    tmp_path: Path, talkative_model: Path
) -> None:
    """The actor's log-probs of it agree with the engine's."""
    with roles_of(tmp_path / "a", talkative_model) as (job, roles):
        seen = Seen(roles.rollout)
        batch = await talked(job, seen, roles.environment)
        actors = (await roles.actor.compute_log_probs(batch))["old_log_probs"]
        tokenizer = load_tokenizer(job.actor.model)
    fed = assert_rows_are_what_was_fed_and_sampled(batch, seen)
    assert batch["contexts"].max() >= 2
    for row, prompts in fed.items():
        first = tokenizer.decode(prompts[0])
        for ids in prompts[1:]:
            text = tokenizer.decode(ids)
            assert "so far" in text
            assert first not in text
        assert batch["conversation"][row]["why"] in ("max_assistant_turns", "max_response_length")
    mask = batch["response_mask"]
    assert (actors[mask] - batch["rollout_log_probs"][mask]).abs().max() < 1e-5
    assert torch.equal(batch["attention_mask"][:, -TOKENS:], (batch["turns"] != 0).long())


async def test_each_context_has_a_random_stream_of_its_own(tmp_path: Path, talkative_model: Path) -> None:
    with roles_of(tmp_path / "a", talkative_model) as (job, roles):
        seen = Seen(roles.rollout)
        await talked(job, seen, roles.environment)
    seeds = [int(asked["seeds"][0]) for asked, _ in seen.turns]
    assert len(set(seeds)) == len(seeds)  # here each turn has another context


async def test_the_policy_sees_the_rendered_text_without_old_thoughts(
    tmp_path: Path, talkative_model: Path
) -> None:
    model = weighing_model(talkative_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = FORGETFUL.replace("'</think>' in m.content", "m.content | length > 3")
    # Of earlier turns the last characters alone are no thoughts.
    tokenizer.chat_template = template.replace("m.content.split('</think>')[-1].lstrip('\n')", "m.content[-2:]")
    tokenizer.save_pretrained(model)
    overrides = ("rollout.multi_turn.template_rewrites=split", "rollout.agent.default_agent_loop=echo")
    with roles_of(tmp_path / "a", model, *overrides) as (job, roles):
        seen = Seen(roles.rollout)
        batch = await talked(job, seen, roles.environment)
        actors = (await roles.actor.compute_log_probs(batch))["old_log_probs"]
    fed = assert_rows_are_what_was_fed_and_sampled(batch, seen)
    num_split = 0
    for row, prompts in fed.items():
        turns = [batch["responses"][row, batch["turns"][row] == k].tolist() for k in range(1, len(prompts))]
        said = [tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids) for ids in turns]
        messages = list(batch["messages"][row])
        for text, ids in zip([None, *said], prompts, strict=True):
            if text is not None:
                answer = {"role": "user", "content": f"{len(text)}!"}
                messages += [{"role": "assistant", "content": text}, answer]
            whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert tokenizer.decode(ids) == whole
        num_split += int(batch["contexts"][row].max())
    assert num_split > 0
    mask = batch["response_mask"]
    assert (actors[mask] - batch["rollout_log_probs"][mask]).abs().max() < 1e-5


async def test_a_program_may_ask_twice_and_continue_from_one_answer(
    tmp_path: Path, talkative_model: Path
) -> None:
    model = weighing_model(talkative_model, tmp_path / "model")
    keys = ("rollout.multi_turn.max_assistant_turns=8", "data.max_response_length=400")
    job = weighing_job(tmp_path, model, "drafter", *keys, "rollout.agent.external={reward_at_limit: 0.0}")
    rollout = RolloutWorker(job)
    try:
        seen = Seen(rollout)
        async with program_environment(job) as client:
            batch = await talked_with_program(job, seen, client)
    finally:
        rollout.close()
        forget_plugin()
    fed = assert_rows_are_what_was_fed_and_sampled(batch, seen)
    whole = [row for row, facts in enumerate(batch["conversation"]) if facts["why"] == "ended"]
    assert whole
    for row in whole:
        assert [int(batch["contexts"][row][batch["turns"][row] == turn][0]) for turn in (1, 2)] == [0, 1]
        first, again, *_ = fed[row]
        assert (first, len(fed[row])) == (again, 4)
        assert batch["environment_rewards"][row].sum() == 1.0
