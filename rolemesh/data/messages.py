"""Chat messages in cells of a data set: their form, and whether a chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
MEDIA = ("image", "video", "audio")  # what is not text, by the types of parts: image, image_url, input_audio


def is_chat(prompt: Any) -> bool:
    """True for a non-empty list of messages, each with a role and content.

    Content is text or a list of parts. It may be missing if the message has another value (tool_calls).
    """
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and _is_message(message) for message in prompt)
    )


def _is_message(message: dict[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    says_else = content is None and any(v is not None for k, v in message.items() if k != "role")
    return bool(role) and isinstance(role, str) and (isinstance(content, str | list) or says_else)


def without_none(messages: Sequence[Message]) -> list[Message]:
    """Drop keys that Arrow adds from other rows' messages with value None: a template may test "is defined"."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def unwritten(messages: Sequence[Message], text: str) -> str:
    """Describe the first content in parts that a template did not write as text; empty if there is none.

    A template without code for parts writes the list as Python prints it, or the parts one by one.

    Args:
        messages: the conversation.
        text: what the template made of it.
    """
    for content in (message.get("content") for message in messages):
        if not content or not isinstance(content, list):
            continue
        parts = [part for part in content if part and isinstance(part, Mapping)]
        if media := [part["type"] for part in parts if any(each in str(part.get("type")) for each in MEDIA)]:
            return f"has a part of type {media[0]!r} in a message; messages are text only"
        if any(str(printed) in text for printed in (content, *parts)):
            return (
                "has a message whose content is a list of parts, and the chat template does not read parts: it "
                f"writes {str(content)!r:.200}. Make the content one text"
            )
    return ""
