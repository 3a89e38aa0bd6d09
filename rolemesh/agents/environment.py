"""The other side of a conversation, as Python code writes it. It runs in the environment role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Chat = list[dict[str, Any]]
"""Messages as chat templates take them: role, content, and of an assistant tool_calls."""


@dataclass(frozen=True)
class Episode:
    """The beginning of a conversation.

    Args:
        uid: names the row in messages.
        row: its columns data_source, reward_model and extra_info.
        messages: the prompt.
        seed: of the episode's own random stream, in [0, 2^64).
    """

    uid: str
    row: Mapping[str, Any]
    messages: Chat
    seed: int


@dataclass(frozen=True)
class Endpoint:
    """Where the program of an episode calls the policy: an OpenAI-compatible API, on loopback.

    Args:
        base_url: as OpenAI's clients take it; it ends in /v1.
        key: of this episode alone.
        model: the only model that it has.
    """

    base_url: str
    key: str
    model: str


@dataclass(frozen=True)
class Prompt:
    """A prompt that a conversation brings along, in place of its row's or of all that was said so far.

    Args:
        messages: at least one.
        tools: that it describes, each as OpenAI's API takes it.
        max_tokens: of the policy's first turn; 0: no limit of its own. An Observation has its own.
    """

    messages: Chat
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int = 0


@dataclass(frozen=True)
class ToolUse:
    """One use of a tool: its name, its seconds, and why it failed ("": it did not)."""

    name: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to a turn.

    Args:
        messages: appended to the conversation; ignored if done.
        reward: of the turn.
        done: the conversation has ended.
        why: it has, in a word or a few; for metrics.
        tools: that ran.
        max_tokens: of the policy's next turn; 0: no limit of its own.
        prompt: what the policy sees from now on, in place of the prompt and of all that was said; without
            `messages`. What it said before stays in its row, and is trained on as it was said.
    """

    messages: Chat = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    why: str = ""
    tools: Sequence[ToolUse] = ()
    max_tokens: int = 0
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of a conversation: its reward as a whole, and further numbers by name."""

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Conversation(Protocol):
    """One episode. Its answers depend on the episode and the turns alone, so that it can begin anew."""

    async def begin(self) -> Chat | Prompt:
        """Return what is said before the policy's first turn, often nothing; a Prompt if the agent `calls`."""
        ...

    async def act(self, turn: dict[str, Any]) -> Observation:
        """Answer a turn of the policy: a message whose tool_calls are the calls found in it.

        Of an agent that `calls`, the turn also has `text` (all of it as it was written), `cut` (True if it was
        cut short), and `prompt_tokens` and `completion_tokens`, the tokens before it and its own.
        """
        ...

    async def close(self) -> Outcome:
        """Free what the episode holds, and return how it ended. Called once, also in the middle."""
        ...


class Agent(Protocol):
    """The environments of all rows with one agent_name, in one replica."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools offered to the policy, each as OpenAI's API takes it."""
        ...

    def open(self, episode: Episode) -> Conversation:
        """Make an episode's conversation. Raises InvalidData if the row lacks what the agent needs."""
        ...
