"""Chat messages in cells of a data set: their form, and whether a chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.errors import InvalidData

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
    role = message.get("role")
    content = message.get("content")
    says_else = content is None and any(v is not None for k, v in message.items() if k != "role")
    return bool(role) and isinstance(role, str) and (isinstance(content, str | list) or says_else)


def as_read(messages: Sequence[Message], *, arguments_as_text: bool = False) -> list[Message]:
    """Return messages as chat templates read them.

    Keys with value None are dropped: Arrow adds them from other rows' messages, and a template may test "is
    defined". The arguments of tool calls become mappings; OpenAI's API has them as JSON text, which a template
    would encode once more.

    Args:
        messages: of a row.
        arguments_as_text: the template takes the arguments as text alone. Text that is no JSON stays as it is.

    Raises:
        InvalidData: arguments are no mapping and no text that stands for one, or they are no UTF-8 text.
    """
    without_none = [{k: v for k, v in message.items() if v is not None} for message in messages]
    return [_with_arguments(message, arguments_as_text) for message in without_none]


def _with_arguments(message: Message, as_text: bool) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call(call, as_text) for call in calls]}


def _call(call: Any, as_text: bool) -> Any:
    """Return a call with its arguments in the form wanted; they are in its function, or in the call itself."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": _call(inner, as_text)}
    given = call.get("arguments")
    if given is None:
        return call
    try:
        arguments = given
        if isinstance(given, str):
            arguments = json.loads(given) if given.strip() else {}
        text = json.dumps(arguments, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        arguments = None
        text = ""
    if isinstance(arguments, Mapping) and _is_utf8(text):
        return {**call, "arguments": text if as_text else arguments}
    if as_text and isinstance(given, str) and _is_utf8(given):
        return call
    raise InvalidData(
        "has a tool call whose arguments should be a mapping, or JSON text of one, without half of a surrogate "
        f"pair; they are {given!r:.200}"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
