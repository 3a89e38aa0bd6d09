"""One conversation of a row, from its first turn to its reward."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rolemesh.agents.call_formats import checked
from rolemesh.agents.environment import Chat, Prompt
from rolemesh.agents.messages import chat_of, invalid_as, messages_of, prompt_of
from rolemesh.agents.template import Template
from rolemesh.agents.truncation import truncated
from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.config import JobConfig
from rolemesh.data.texts import end_tokens
from rolemesh.errors import EnvironmentFailed, InvalidBatch, InvalidConfig
from rolemesh.roles import Environment
from rolemesh.services.controller.conversations.row_columns import Rows
from rolemesh.services.controller.conversations.turn_batches import Turns
from rolemesh.v1 import environment_pb2
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    CloseEpisodeRequest,
    CloseEpisodeResponse,
    Message,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
    ToolCall,
)
from rolemesh.wire.limits import MAX_CONTEXTS

NO_ROOM = "max_response_length"
TOO_MANY_PROMPTS = "max_contexts"
LATE = "episode_timeout_s"
CLOCK = "environment_s"  # seconds that a conversation waited for its environment


class ChatCodec:
    """Converts token ids to messages and back, for all conversations of a job.

    Args:
        job: sets the call format and the limits.
        tokenizer: the policy's.

    Raises:
        InvalidConfig: the tokenizer's chat template cannot be continued.
    """

    def __init__(self, job: JobConfig, tokenizer: Any) -> None:
        self._config = job.rollout.multi_turn
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, job.data.apply_chat_template_kwargs)
        self._template.check(self._config.template_rewrites)
        self._format = CALL_FORMATS[self._config.format]
        self._read = self._format.load()
        special = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special: Mapping[int, str] = special
        # A base model that learns a chat template may declare another end, and stop here by rollout.stop.
        after_turn = self._template.ends_turn.lstrip()
        of_template = {id_ for id_, text in special.items() if text and after_turn.startswith(text)}
        self._ends = end_tokens(tokenizer).intersection(special) | of_template
        self._stop = job.rollout.stop

    def end_of(self, ids: list[int]) -> str:
        """Return the text of the special token at a turn's end; "" if the turn has none.

        It may be part of the turn's text, such as </think> of a turn that was cut, or </tool_call> of
        rollout.stop.
        """
        return self._special.get(ids[-1], "")

    def is_whole(self, ids: list[int]) -> bool:
        """Return whether the policy ended a turn itself, by a token or by a text of rollout.stop."""
        return ids[-1] in self._ends or any(stop in self.text_of(ids) for stop in self._stop)

    def text_of(self, ids: list[int]) -> str:
        """Decode a turn of the policy, without the token that ends it.

        This is one that the model's directory declares, or the special token that the template writes there.
        """
        text: str = self._tokenizer.decode(ids[:-1] if ids[-1] in self._ends else ids)
        return text

    def parse_turn(self, text: str, turn: int) -> Message:
        """Parse the text of a turn into a message with its tool calls."""
        with self._format.errors_named():
            content, calls = checked(self._read(text))
        return Message(
            role="assistant",
            content=content,
            tool_calls=[
                ToolCall(
                    id=f"call-{turn}-{at}", name=call.name, arguments=call.arguments, malformed=call.malformed
                )
                for at, call in enumerate(calls)
            ],
        )

    def ids_after(self, messages: Chat, end: str) -> list[int]:
        """Return the ids that the template appends after a turn (Template.after_turn)."""
        return self._template.after_turn(messages, end)

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt that an environment sets (Template.prompt)."""
        return self._template.prompt(prompt.messages, prompt.tools)

    @property
    def splits(self) -> bool:
        """True if a row gets a new context when the template rewrites its earlier turns."""
        return self._config.template_rewrites == "split"

    def ids_after_all(self, prompt: list[int], said: Chat, messages: Chat, end: str) -> tuple[bool, list[int]]:
        """Return True and the ids of the whole conversation if the template rewrites it, else False and the ids
        that follow the turn (Template.after_all)."""
        return self._template.after_all(prompt, said, messages, end)

    def ids_before(self, messages: Chat) -> list[int]:
        """Return the ids before the first turn (Template.after_prompt)."""
        return self._template.after_prompt(messages)

    def to_chat(self, messages: Sequence[Message], what: str, *, cuts: bool) -> Chat:
        """Convert an environment's messages for the template.

        Args:
            messages: from the environment.
            what: names the messages where an error begins.
            cuts: whether to truncate answers of tools to `max_tool_response_length`.

        Raises:
            InvalidBatch: a message is malformed, or has the role `assistant`.
        """
        most = self._config.max_tool_response_length
        side = self._config.tool_response_truncate_side
        chat = chat_of(messages, what)
        for message in chat:
            if message["role"] == "assistant":
                raise InvalidBatch(f"{what} speaks for the policy: it has a message of 'assistant'")
            if message["role"] == "tool" and cuts:
                message["content"] = truncated(message["content"], most, side)
        return chat


@dataclass
class ConversationAttempt:
    """One attempt at a row's conversation.

    Args:
        row: index in `rows`.
        name: the episode's, unique in the job.
        attempt: from 1.
        agent: the row's agent_name.
        job, codec, environment, rows, turns: shared by all conversations.
    """

    row: int
    name: str
    attempt: int
    agent: str
    job: JobConfig
    codec: ChatCodec
    environment: Environment
    rows: Rows
    turns: Turns
    why: str = field(default="", init=False)
    numbers: dict[str, float] = field(default_factory=dict, init=False)
    _max_turn_tokens: int = field(default=0, init=False)  # the environment's limit for the next turn; 0: none
    _was_truncated: bool = field(default=False, init=False)  # the last turn was truncated to that limit
    _said: Chat = field(default_factory=list, init=False)  # messages after the prompt
    _prompt: list[int] = field(default_factory=list, init=False)  # the last prompt that the environment set
    _closing: asyncio.Task[CloseEpisodeResponse] | None = field(default=None, init=False)  # during a long turn

    async def run(self) -> dict[str, str | float]:
        """Hold the conversation. Return why it ended and numbers about it.

        Raises:
            EpisodeLost: its environment is gone; restart with the next attempt.
            EnvironmentFailed: the environment failed, or sent an invalid answer.
        """
        self.numbers = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0, CLOCK: 0.0}
        self._began = time.monotonic()
        opening = asyncio.create_task(self._open())
        try:
            if AGENTS[self.agent].speaks_first or AGENTS[self.agent].calls:
                await opening
            ended = False
            while not ended:
                ids = await self._next_turn(opening)  # the first turn, while the episode opens
                self.numbers["turns"] += 1
                await opening
                ids = self._truncated_turn(ids)
                ended = self._ended(LATE) if self._closing else await self._answer_turn(ids)
            closed = await (self._closing or self._close(opening))
        except BaseException:
            tasks = [task for task in (opening, self._closing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # retrieves their errors, if any
            raise
        self.rows.reward(self.row, self.job.rollout.multi_turn.episode_reward_weight * closed.reward)
        return {**closed.metrics, **self.numbers, "why": self.why}

    async def _next_turn(self, opening: asyncio.Task[None]) -> list[int]:
        """Generate the next turn. If it takes longer than a conversation may, close the episode meanwhile.

        Nobody asks its replica during a turn, so the replica would drop it.
        """

        def close() -> None:
            self._closing = asyncio.create_task(self._close(opening))

        most_s = self.job.rollout.multi_turn.episode_timeout_s
        timer = asyncio.get_running_loop().call_later(most_s, close)
        try:
            return await self.turns.next_turn(self.row)
        finally:
            timer.cancel()

    async def _close(self, opening: asyncio.Task[None]) -> CloseEpisodeResponse:
        await opening
        request = CloseEpisodeRequest(episode=self.name, attempt=self.attempt)
        closed: CloseEpisodeResponse = await self._timed(self.environment.close_episode(request))
        return closed

    async def _open(self) -> None:
        prompts = self.rows.prompts
        at = self.row
        columns = ("data_source", "reward_model", "extra_info")
        opened = await self._timed(
            self.environment.open_episode(
                OpenEpisodeRequest(
                    episode=self.name,
                    attempt=self.attempt,
                    agent=self.agent,
                    uid=prompts["uid"][at],
                    row=json.dumps({name: prompts[name][at] for name in columns}, default=str),
                    messages=messages_of([*map(_as_text, prompts["messages"][at])], self._who("the prompt")),
                    seed=int(prompts["seeds"][at]) % 2**64,
                )
            )
        )
        if opened.HasField("prompt") != AGENTS[self.agent].calls:
            brought = "brought a" if opened.HasField("prompt") else "brought no"
            raise self._failed(f"{brought} prompt, against its declaration (calls)")
        if AGENTS[self.agent].calls:
            self._use_prompt(opened)
        if bool(opened.messages) != AGENTS[self.agent].speaks_first:
            spoke = "spoke" if opened.messages else "did not speak"
            raise self._failed(
                f"{spoke} before the policy's first turn, against its declaration (speaks_first)"
            )
        if opened.messages:
            self._said = self._chat(opened.messages, "what it says first")
            with self._rendering("what it says first"):
                ids = self.codec.ids_before(self._said)
            if len(ids) >= self.rows.room(at):
                raise self._failed(
                    f"spoke {len(ids)} tokens before the policy's first turn; data.max_response_length is "
                    f"{self.rows.num_tokens}"
                )
            self.rows.append(at, ids)

    def _use_prompt(self, opened: OpenEpisodeResponse) -> None:
        """Replace the row's prompt by the environment's."""
        ids = self._ids_of(opened.prompt)
        if len(ids) > self.rows.prompt_tokens:
            raise EnvironmentFailed(
                f"{self._who('its prompt')} has {len(ids)} tokens with its tools; data.max_prompt_length is "
                f"{self.rows.prompt_tokens}"
            )
        self.rows.set_prompt(self.row, ids)
        self._max_turn_tokens = opened.max_tokens

    def _ids_of(self, prompt: environment_pb2.Prompt) -> list[int]:
        with invalid_as(EnvironmentFailed):
            read = prompt_of(prompt, self._who("its prompt"))
        with self._rendering("its prompt"):
            self._prompt = self.codec.prompt(read)
            self._said = []
        return self._prompt

    def _replace_context(self, ids: list[int]) -> bool:
        """Begin a new context of the row with these ids. Return True if that ended the conversation."""
        if self.rows.num_contexts(self.row) == MAX_CONTEXTS:
            return self._ended(TOO_MANY_PROMPTS)
        if len(ids) >= self.rows.room(self.row):
            return self._ended(NO_ROOM)
        self.rows.begin_context(self.row, ids)
        return False

    def _truncated_turn(self, ids: list[int]) -> list[int]:
        """Truncate a turn to the environment's limit of tokens, and return its ids."""
        self._was_truncated = 0 < self._max_turn_tokens < len(ids)
        if self._was_truncated:
            self.rows.drop_last(self.row, len(ids) - self._max_turn_tokens)
            return ids[: self._max_turn_tokens]
        return ids

    async def _answer_turn(self, ids: list[int]) -> bool:
        """Send a turn to the environment and append its answer. Return True if that ended the conversation."""
        config = self.job.rollout.multi_turn
        end = self.codec.end_of(ids)
        is_full = not self.rows.room(self.row) and not self.codec.is_whole(ids)
        if is_full and not AGENTS[self.agent].calls:
            return self._ended(NO_ROOM)  # the environment gets only whole turns
        request = self._turn(ids, is_cut=self._was_truncated or is_full)
        answer: ActResponse = await self._timed(self.environment.act(request))
        number = int(self.numbers["turns"])
        self.rows.reward(self.row, config.turn_reward_weight * answer.reward)
        self.numbers["tool_calls"] += len(answer.tools)
        self.numbers["tool_errors"] += sum(bool(tool.error) for tool in answer.tools)
        if is_full:
            return self._ended(NO_ROOM)
        if answer.done:
            return self._ended(answer.why or "done")
        if config.max_assistant_turns and number >= config.max_assistant_turns:
            return self._ended("max_assistant_turns")
        if config.max_user_turns and number > config.max_user_turns:
            return self._ended("max_user_turns")
        if time.monotonic() - self._began > config.episode_timeout_s:
            return self._ended(LATE)
        self._max_turn_tokens = answer.max_tokens
        if answer.HasField("prompt"):
            return self._replace_context(self._ids_of(answer.prompt))
        what = f"the answer to turn {number}"
        chat = self._chat(answer.messages, what)
        if not chat:
            raise self._failed("neither said anything nor ended the conversation")
        if self.codec.splits:
            said = [*self._said, {"role": "assistant", "content": self.codec.text_of(ids)}]
            self._said = [*said, *chat]
            prompt = self._prompt or self.rows.prompt(self.row)
            with self._rendering(what):
                is_anew, following = self.codec.ids_after_all(prompt, said, chat, end)
            if is_anew:
                return self._replace_context(following)
        else:
            with self._rendering(what):
                following = self.codec.ids_after(chat, end)
        if len(following) >= self.rows.room(self.row):
            return self._ended(NO_ROOM)
        self.rows.append(self.row, following)
        return False

    def _turn(self, ids: list[int], *, is_cut: bool) -> ActRequest:
        number = int(self.numbers["turns"])
        text = self.codec.text_of(ids)
        # A truncated call may look complete.
        said = Message(role="assistant", content=text) if is_cut else self.codec.parse_turn(text, number)
        turn = ActRequest(episode=self.name, attempt=self.attempt, turn=number, message=said)
        if AGENTS[self.agent].calls:
            turn.text = text
            turn.cut = is_cut
            turn.completion_tokens = len(ids)
            turn.prompt_tokens = self.rows.length(self.row) - len(ids)
        return turn

    def _chat(self, messages: Sequence[Message], what: str) -> Chat:
        with invalid_as(EnvironmentFailed):
            return self.codec.to_chat(messages, self._who(what), cuts=not AGENTS[self.agent].calls)

    def _rendering(self, what: str) -> AbstractContextManager[None]:
        """Within the block, a chat template that refuses messages is an error of what the environment said."""
        return invalid_as(EnvironmentFailed, self._who(what), InvalidConfig)

    def _ended(self, why: str) -> bool:
        self.why = why
        return True

    async def _timed(self, call: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call
        finally:
            self.numbers[CLOCK] += time.perf_counter() - began

    def _failed(self, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._who('it')} {what}")

    def _who(self, what: str) -> str:
        return f"row {self.rows.prompts['uid'][self.row]}: agent {self.agent}: {what}"


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of a prompt for the environment: content in parts becomes JSON."""
    content = message.get("content")
    return {
        **message,
        "content": content if isinstance(content, str) or content is None else json.dumps(content),
    }
