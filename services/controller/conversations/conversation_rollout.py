"""Wraps the rollout so that rows with an agent become conversations."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch

from rolemesh.catalog.agents import AGENTS
from rolemesh.config import JobConfig
from rolemesh.data.texts import padding_token
from rolemesh.dataproto import DataProto
from rolemesh.errors import EnvironmentFailed, EpisodeLost
from rolemesh.forwarding import Forwarding
from rolemesh.roles import Environment, Roles, Rollout
from rolemesh.services.controller.conversations.conversation import ChatCodec, ConversationAttempt
from rolemesh.services.controller.conversations.row_columns import Rows, with_conversations
from rolemesh.services.controller.conversations.turn_batches import Turns
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)

Facts = dict[str, str | float]
CALLS = itertools.count(1)  # part of an episode's name: validations ask for the same rows of the same step


class ConversationRollout(Forwarding[Rollout]):
    """A rollout that holds conversations for rows whose agent converses. Implements rolemesh.roles.Rollout.

    Args:
        rollout: generates the policy's turns.
        environment: answers them.
        job: the job.
        tokenizer: the policy's.

    Raises:
        InvalidConfig: the tokenizer's chat template cannot be continued.
    """

    def __init__(self, rollout: Rollout, environment: Environment, job: JobConfig, tokenizer: Any) -> None:
        super().__init__(rollout)
        self._environment = environment
        self._job = job
        self._codec = ChatCodec(job, tokenizer)
        self._pad = padding_token(tokenizer)

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        """Generate as Rollout.generate does, with the columns turns, environment_rewards and conversation too.

        A row is yielded as soon as its conversation has ended, while others continue.

        Raises:
            EnvironmentFailed: a conversation failed; the message names the row's uid.
        """
        rows = Rows(prompts, self._job.data.max_response_length, self._pad)
        ended: dict[int, Facts] = {}  # rows not yielded yet
        changed = asyncio.Event()
        turns = Turns(self._role, rows)
        name = f"step-{prompts.meta_info['step']}-{next(CALLS)}"
        talking = asyncio.create_task(self._all(rows, turns, name, ended, changed))
        talking.add_done_callback(lambda _: changed.set())
        try:
            while not talking.done() or ended:
                await changed.wait()
                changed.clear()
                if ended:
                    some = dict(ended)
                    ended.clear()
                    yield rows.answer(list(some), list(some.values()))
            await talking
        finally:
            talking.cancel()
            await asyncio.wait({talking})

    async def _all(
        self, rows: Rows, turns: Turns, name: str, ended: dict[int, Facts], changed: asyncio.Event
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(turns.run())

                async def talk(row: int) -> None:
                    ended[row] = await self._row(rows, turns, row, f"{name}-{row}")
                    changed.set()

                await asyncio.wait([group.create_task(talk(row)) for row in range(len(rows.prompts))])
                asking.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _row(self, rows: Rows, turns: Turns, row: int, name: str) -> Facts:
        """Hold the conversation of a row. Restart it if its environment is lost."""
        agent = rows.prompts["agent_name"][row]
        config = self._job.rollout.multi_turn
        if not AGENTS[agent].converses:
            await turns.next_turn(row)
            return {"turns": 1.0, "why": agent}
        uid = rows.prompts["uid"][row]
        for attempt in range(1, config.max_attempts + 1):
            talk = ConversationAttempt(
                row=row,
                name=name,
                attempt=attempt,
                agent=agent,
                job=self._job,
                codec=self._codec,
                environment=self._environment,
                rows=rows,
                turns=turns,
            )
            try:
                return await talk.run()
            except EpisodeLost as error:
                lost = error
                metrics.EPISODES_LOST.inc()
                log.warning("row %s: its conversation begins anew (%d): %s", uid, attempt, error)
                rows.reset(row)
        raise EnvironmentFailed(
            f"row {uid}: the environment of agent {agent} was lost {config.max_attempts} times "
            f"(rollout.multi_turn.max_attempts); the last time: {lost}"
        )


class RecordedConversationRollout(Forwarding[Rollout]):
    """Stand-in for ConversationRollout while the step graph is recorded."""

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        async for rows in self._role.generate(prompts):
            sampled = rows["response_mask"]
            facts: list[Facts] = [{"turns": 1.0, "why": ""}] * len(rows)
            turns = sampled.to(torch.int64)
            rewards = torch.zeros(sampled.shape)
            talks = {"turns": turns, "contexts": 0 * turns, "environment_rewards": rewards}
            yield with_conversations(rows, talks, facts)


def recorded(roles: Roles, job: JobConfig) -> Roles:
    """Wrap the rollout of recording roles if the job has conversations."""
    if not job.rollout.multi_turn.enable:
        return roles
    return replace(roles, rollout=RecordedConversationRollout(roles.rollout))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
