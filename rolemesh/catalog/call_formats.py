"""Call formats: how a policy writes calls of tools (rollout.multi_turn.format)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class CallFormatSpec(Declaration):
    """A format. Its function takes a turn's text, and returns the text outside of calls and the calls
    (rolemesh.agents.call_formats.Call)."""

    kind: ClassVar[str] = "call format"

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("text",), ()


FORMATS = "rolemesh.agents.call_formats"

CALL_FORMATS = Catalog(
    CallFormatSpec,
    CallFormatSpec(
        name="hermes", code=f"{FORMATS}:hermes", meaning="<tool_call>{…}</tool_call>, as Qwen has it"
    ),
    CallFormatSpec(name="llama3_json", code=f"{FORMATS}:llama3_json", meaning="the turn is a JSON object"),
)
