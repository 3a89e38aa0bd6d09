"""Conversations of real rows: a real engine talks to a real environment, and rows are exactly what was said."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from echoing import TALKS, TOKENS
from in_process import small_job, workers
from seen import Seen
from transformers import AutoTokenizer

from rolemesh.agents.template import Template
from rolemesh.config import JobConfig
from rolemesh.data.dataset import Agents, PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.errors import EnvironmentFailed, EpisodeLost
from rolemesh.forwarding import Forwarding
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Environment, Rollout
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.telemetry import metrics
from rolemesh.token_mask import token_mask


async def talked(job: JobConfig, rollout: Rollout, environment: Environment, n: int = 3) -> DataProto:
    """Rows of the job's first prompts, once all conversations have ended, in order."""
    tokenizer = load_tokenizer(job.actor.model)
    agents = Agents(job.rollout.agent.default_agent_loop) if job.rollout.multi_turn.enable else None
    data = PromptDataset(job.data.train_files, job.data, tokenizer, agents=agents)
    rows = fan_out(data.batch(range(6)), n, job.rollout.seed, 1)
    if agents:
        rollout = ConversationRollout(rollout, environment, job, tokenizer)

    async def same(finished: DataProto) -> DataProto:
        return finished

    return await collect(rollout.generate(rows), rows, same)


@contextmanager
def roles_of(tmp_path: Path, model: Path, *overrides: str) -> Iterator[tuple[JobConfig, Any]]:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    job = small_job(directory, model, "talk", *TALKS, *overrides)
    with workers(job) as roles:
        yield job, roles


def assert_equal(a: DataProto, b: DataProto, *but: str) -> None:
    for name in a.tensors.keys() | b.tensors.keys() - set(but):
        assert torch.equal(a[name], b[name]), name


async def test_a_row_has_the_tokens_that_the_engine_read_and_sampled(
    tmp_path: Path, talkative_model: Path
) -> None:
    with roles_of(tmp_path, talkative_model) as (job, roles):
        seen = Seen(roles.rollout)
        batch = await talked(job, seen, roles.environment)
        tokenizer = load_tokenizer(job.actor.model)
    template = Template(tokenizer)
    assert {int(row.max()) for row in batch["turns"]} >= {1, 2}  # some talk longer than others
    by_seed: dict[int, list[tuple[DataProto, DataProto]]] = {}
    for asked, answer in seen.turns:
        by_seed.setdefault(int(asked["seeds"][0]), []).append((asked, answer))
    for row in range(len(batch)):
        turns, responses = batch["turns"][row], batch["responses"][row]
        talk = by_seed[int(batch["seeds"][row])]
        assert len(talk) == int(turns.max())
        rewards, said = torch.zeros(TOKENS), 0
        for number, (asked, answer) in enumerate(talk, 1):
            begin = int((turns.abs() < number).long().argmin()) if number > 1 else 0
            fed = int((asked["turns"][0] != 0).sum()) if "turns" in asked else 0
            if fed:
                assert torch.equal(asked["responses"][0, :fed], responses[:fed])
                assert torch.equal(asked["turns"][0, :fed], turns[:fed])
            new = answer["response_mask"][0]
            assert new.nonzero()[0] == fed >= begin
            assert torch.equal(new, turns == number)
            for name in ("responses", "rollout_log_probs", "weight_versions"):
                assert torch.equal(batch[name][row, new], answer[name][0, new])
            ids = responses[new].tolist()
            end = "<|im_end|>" if ids[-1] == tokenizer.eos_token_id else ""
            length = len(tokenizer.decode(ids[:-1] if end else ids))
            last = int(new.nonzero()[-1])
            if end or last < TOKENS - 1:
                rewards[last] += 0.25 if length % 2 else 0.5
                said += length
            added = responses[turns == -(number + 1)].tolist()
            if added:
                assert added == template.after_turn([{"role": "user", "content": f"{length}!"}], end)
        rewards[int((turns > 0).nonzero()[-1])] += 1.0
        assert torch.equal(batch["environment_rewards"][row], rewards)
        facts = batch["conversation"][row]
        assert (facts["turns"], facts["characters"]) == (len(talk), said)
        assert facts["why"] in ("odd", "max_assistant_turns", "max_response_length")
    assert torch.equal(batch["response_mask"], batch["turns"] > 0)
    assert torch.equal(batch["attention_mask"][:, -TOKENS:].bool(), token_mask(batch))


async def test_when_the_environment_answers_changes_no_bit(tmp_path: Path, talkative_model: Path) -> None:
    outcomes = []
    for _ in range(2):
        with roles_of(tmp_path, talkative_model) as (job, roles):
            outcomes.append(await talked(job, roles.rollout, roles.environment))
    assert_equal(*outcomes)


async def test_the_actors_log_probs_of_many_turns_are_the_rollouts(
    tmp_path: Path, talkative_model: Path
) -> None:
    with roles_of(tmp_path, talkative_model) as (job, roles):
        batch = await talked(job, roles.rollout, roles.environment)
        actors = (await roles.actor.compute_log_probs(batch))["old_log_probs"]
    mask = batch["response_mask"]
    assert (actors[mask] - batch["rollout_log_probs"][mask]).abs().max() < 1e-5
    assert (actors[~mask] == 0).all()


async def test_one_turn_is_the_present_path_bit_for_bit(tmp_path: Path, talkative_model: Path) -> None:
    with roles_of(tmp_path, talkative_model, "rollout.multi_turn.max_assistant_turns=1") as (job, roles):
        talk = await talked(job, roles.rollout, roles.environment)
    with roles_of(tmp_path, talkative_model, "rollout.agent.default_agent_loop=single_turn_agent") as (
        job,
        roles,
    ):
        single = await talked(job, roles.rollout, roles.environment)
    off = ("rollout.multi_turn.enable=false", "rollout.agent.default_agent_loop=single_turn_agent")
    with roles_of(tmp_path, talkative_model, *off) as (job, roles):
        plain = await talked(job, roles.rollout, roles.environment)
    for name in plain.tensors:
        assert torch.equal(plain[name], talk[name]), name
        assert torch.equal(plain[name], single[name]), name
    assert single["environment_rewards"].sum() == 0


async def test_an_environment_may_speak_before_the_first_turn(tmp_path: Path, talkative_model: Path) -> None:
    speaks = ("rollout.agent.default_agent_loop=riddler",)
    with roles_of(tmp_path, talkative_model, *speaks) as (job, roles):
        batch = await talked(job, roles.rollout, roles.environment)
        actors = (await roles.actor.compute_log_probs(batch))["old_log_probs"]
        tokenizer = load_tokenizer(job.actor.model)
    mask = batch["response_mask"]
    assert (actors[mask] - batch["rollout_log_probs"][mask]).abs().max() < 1e-5
    for row in range(len(batch)):
        prompt = tokenizer.decode(batch["prompts"][row][batch["prompt_mask"][row]])
        first = tokenizer.decode(batch["responses"][row][batch["turns"][row] == -1])
        said = [*batch["messages"][row], {"role": "user", "content": f"[{int(batch['seeds'][row]) % 1000}]"}]
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert prompt + first == whole


@pytest.mark.parametrize(
    ("agent", "what", "roles"),
    [
        ("riddler", "what it says first", "user"),
        ("stutterer", "the answer to turn 1", "user, assistant"),
        ("director", "its prompt", "system, user"),
    ],
)
async def test_messages_the_template_refuses_name_the_row_and_agent(
    tmp_path: Path, talkative_model: Path, agent: str, what: str, roles: str
) -> None:
    """As Gemma's and Mistral's templates do."""
    model = tmp_path / "model"
    shutil.copytree(talkative_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += (
        "{% for m in messages %}{% if m.role == 'system' or loop.previtem and loop.previtem.role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    said = (
        rf"row train-\d+: agent {agent}: {what}: the chat template of '.*' refuses messages of {roles}: roles"
    )
    default = f"rollout.agent.default_agent_loop={agent}"
    with roles_of(tmp_path, model, default) as (job, of_job), pytest.raises(EnvironmentFailed, match=said):
        await talked(job, of_job.rollout, of_job.environment)


class Slow(Forwarding[Rollout]):
    """Takes as long for a turn as one that has many rows before this one."""

    async def generate(self, prompts: DataProto) -> Any:
        await asyncio.sleep(1.5)
        async for rows in self._role.generate(prompts):
            yield rows


async def test_a_turn_past_episode_timeout_s_keeps_the_rows_reward(
    tmp_path: Path, talkative_model: Path
) -> None:
    """Though its replica would have dropped the episode by the end of the turn: it is closed before."""
    lost = metrics.EPISODES_LOST._value.get()
    with roles_of(tmp_path, talkative_model, "rollout.multi_turn.episode_timeout_s=0.5") as (job, roles):
        batch = await talked(job, Slow(roles.rollout), roles.environment)
    for row, facts in enumerate(batch["conversation"]):
        assert (facts["why"], facts["turns"], facts["characters"]) == ("episode_timeout_s", 1.0, 0.0)
        last = int((batch["turns"][row] == 1).nonzero()[-1])
        assert batch["environment_rewards"][row].nonzero().flatten().tolist() == [last]
        assert batch["environment_rewards"][row, last] == 1.0  # of the conversation; no turn has been answered
    assert metrics.EPISODES_LOST._value.get() == lost


class Losing(Forwarding[Environment]):
    """Loses some episodes, as a replica that is killed does."""

    def __init__(self, environment: Environment, losses: int) -> None:
        super().__init__(environment)
        self.losses, self.num_lost = losses, 0

    async def act(self, request: Any) -> Any:
        if request.attempt <= self.losses and hash((request.episode, request.turn)) % 2:
            self.num_lost += 1
            raise EpisodeLost("the replica is gone")
        return await self._role.act(request)


async def test_a_lost_environment_restarts_a_conversation_bit_for_bit(
    tmp_path: Path, talkative_model: Path
) -> None:
    with roles_of(tmp_path, talkative_model) as (job, roles):
        whole = await talked(job, roles.rollout, roles.environment)
        losing = Losing(roles.environment, 2)
        assert_equal(whole, await talked(job, roles.rollout, losing))
        assert losing.num_lost > 0
        with pytest.raises(EnvironmentFailed, match=r"row train-\d+: .* of agent echo was lost 3 times"):
            await talked(job, roles.rollout, Losing(roles.environment, 3))
