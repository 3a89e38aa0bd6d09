"""The interaction gsm8k, like verl's: asks the policy to try again until its answer is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolemesh.agents.interactions import BaseInteraction
from rolemesh.rules.gsm8k import compute_score

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
NO_ANSWER = (
    'Your response has no final answer! You need to write it after "####", as in "#### 42". Please try again.'
)


@dataclass
class _Conversation:
    ground_truth: Any
    response: str = ""


class Gsm8kInteraction(BaseInteraction):
    """A row's right answer is in extra_info.interaction_kwargs.ground_truth.

    The conversation ends with a right answer. Its score is 1 if the last answer is right, else 0. Turns have no
    reward of their own.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
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
        conversation.response = next(said, "")
        scored = compute_score(conversation.response, conversation.ground_truth)
        if scored["score"] == 1.0:
            return True, RIGHT, 0.0, {}
        return False, WRONG if scored["pred"] else NO_ANSWER, 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        conversation = self._episodes[instance_id]
        return float(compute_score(conversation.response, conversation.ground_truth)["score"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._episodes.pop(instance_id, None)
