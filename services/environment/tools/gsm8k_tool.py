"""The tool calc_gsm8k_reward, like verl's Gsm8kTool: returns whether the policy's answer is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema
from rolemesh.rules.gsm8k import compute_score

PENALTY = -0.05


@dataclass
class _Submitted:
    ground_truth: Any
    answer: str = ""
    reward: float = 0.0


class Gsm8kTool(BaseTool):
    """A row's right answer is in extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth.

    The episode's reward is 1 if the last submitted answer is right, else 0. A call whose answer is no better
    than the one before costs 0.05.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._episodes: dict[str, _Submitted] = {}

    def get_openai_tool_schema(self) -> ToolSchema:
        answer = {
            "type": "string",
            "description": "The model's answer to the GSM8K math problem, must be digits",
        }
        return ToolSchema(
            type="function",
            function=FunctionSchema(
                name="calc_gsm8k_reward",
                description=(
                    "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if "
                    "parsed answer is incorrect or not correctly parsed)"
                ),
                parameters={"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
            ),
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError(
                "the row has no extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth"
            )
        name = instance_id or ""
        self._episodes[name] = _Submitted(ground_truth)
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        submitted = self._episodes[instance_id]
        answer = str(parameters.get("answer", ""))
        submitted.answer = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        turn_reward = 0.0 if reward > submitted.reward else PENALTY
        submitted.reward = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), turn_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        submitted = self._episodes[instance_id]
        return float(compute_score(submitted.answer, submitted.ground_truth)["score"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._episodes.pop(instance_id, None)
