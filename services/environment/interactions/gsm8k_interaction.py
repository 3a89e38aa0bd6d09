"""The interaction gsm8k, like verl's: asks the policy to try again until its answer is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolemesh.agents.interactions import BaseInteraction
from rolemesh.rules.finding import marked_number
from rolemesh.rules.gsm8k import compute_score

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
# No digit and no point follows the mark: the rule would take it for the policy's answer where no other follows.
NO_ANSWER = 'Your response has no final answer! You need to write "####" and then the number. Please try again.'


@dataclass
class _Conversation:
    ground_truth: Any
    response: str = ""


class Gsm8kInteraction(BaseInteraction):
    """A row's right answer is in extra_info.interaction_kwargs.ground_truth.

    The conversation ends with a right answer. Its score is 1 if the last answer is right, else 0. Turns have no
    reward of their own.

    Args:
        config: `answer_chars`, the characters at a turn's end in which the answer counts (None: all of them).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._answer_chars: int | None = config.get("answer_chars", 300)
        self._episodes: dict[str, _Conversation] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        if ground_truth is None:
            raise ValueError("the row has no extra_info.interaction_kwargs.ground_truth, the right answer")
        name = instance_id or ""
        self._episodes[name] = _Conversation(ground_truth)
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        conversation = self._episodes[instance_id]
        said = (message["content"] for message in reversed(messages) if message["role"] == "assistant")
        response = next(said, "")
        conversation.response = response if self._answer_chars is None else response[-self._answer_chars :]
        if await self.calculate_score(instance_id) == 1.0:
            return True, RIGHT, 0.0, {}
        return False, NO_ANSWER if marked_number(conversation.response) is None else WRONG, 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        episode = self._episodes[instance_id]
        return float(compute_score(episode.response, episode.ground_truth, answer_chars=None)["score"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._episodes.pop(instance_id, None)
