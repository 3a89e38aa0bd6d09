"""Interactions: what answers a turn without a call, as a user would. The shape is verl's BaseInteraction.

A row names its interaction in extra_info.interaction_kwargs.name, and tool_agent asks it after every turn of
the policy that calls no tool.
"""

from __future__ import annotations

from typing import Any


class BaseInteraction:
    """An interaction. One object serves all episodes of a replica, and tells them apart by instance_id.

    Args:
        config: its section `config` in the YAML file, and its name.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode. `kwargs` are the row's extra_info.interaction_kwargs."""
        return instance_id or ""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation.

        Args:
            instance_id: the episode.
            messages: all of it, the prompt included.
            kwargs: as of start_interaction.

        Returns:
            whether the conversation ends; what the user says; the turn's reward; numbers about it.
        """
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the episode's reward."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the episode holds."""
