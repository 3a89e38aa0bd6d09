"""Parse a policy's text into calls of tools. rolemesh/catalog/call_formats.py lists them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64  # of arguments
MAX_CALLS = 64  # looked for in a turn; an environment runs far fewer
OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it.

    Args:
        name: of the tool; "" if it cannot be read.
        arguments: a JSON object as text; "" if the call cannot be read.
        malformed: why not, for the policy.
    """

    name: str = ""
    arguments: str = ""
    malformed: str = ""


TOO_DEEP = Call(malformed=f"arguments are nested deeper than {MAX_DEPTH} levels")


def hermes(text: str) -> tuple[str, list[Call]]:
    """Read calls in the format of Hermes and Qwen.

        <tool_call>
        {"name": "add", "arguments": {"a": 1, "b": 2}}
        </tool_call>

    Args:
        text: a turn, without its end token.

    Returns:
        the text outside of calls, and the calls.
    """
    outside, inside = _tagged(text)
    calls = [_call(found, "arguments") for found in inside[:MAX_CALLS]]
    content = "".join(outside)
    before, opened, _ = content.partition(OPENING)
    if opened:
        calls.append(Call(malformed="<tool_call> without </tool_call>"))
        content = before
    return content.strip() if calls else text, calls


def _tagged(text: str) -> tuple[list[str], list[str]]:
    """Return the texts outside and inside of pairs of tags, in time linear in the text."""
    outside: list[str] = []
    inside: list[str] = []
    at = 0
    while (begin := text.find(OPENING, at)) >= 0:
        end = text.find(CLOSING, begin + len(OPENING))
        if end < 0:
            break  # no later opening is closed either
        outside.append(text[at:begin])
        inside.append(text[begin + len(OPENING) : end])
        at = end + len(CLOSING)
    return [*outside, text[at:]], inside


def llama3_json(text: str) -> tuple[str, list[Call]]:
    """Read calls in the JSON format of Llama 3: the turn is `{"name": "add", "parameters": {…}}`.

    Several calls are separated by semicolons. `<|python_tag|>` may come before them. A turn that does not begin
    with a brace, or the tag, has no call.

    Args:
        text: a turn, without its end token.

    Returns:
        the text outside of calls, and the calls.
    """
    stripped = text.strip()
    tagged = stripped.startswith(PYTHON_TAG)
    rest = stripped.removeprefix(PYTHON_TAG).strip()
    if not (tagged or rest.startswith("{")):
        return text, []
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while rest and len(calls) < MAX_CALLS:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            calls.append(Call(malformed=f"not JSON: {error}"))
            break
        calls.append(_read(value, "parameters"))
        rest = rest[end:].lstrip("; \n\t")
    return "", calls


def checked(read: Any) -> tuple[str, list[Call]]:
    """Return what a format has read. A call that is no text, or nested too deeply, is malformed.

    Raises:
        TypeError, ValueError: it is no text and list of calls, each with a name and arguments or malformed.
    """
    if not (isinstance(read, tuple) and len(read) == 2 and isinstance(read[0], str)):
        raise TypeError(f"a call format returns (text, calls); it returned {read!r:.200}")
    content, calls = read
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Call) for call in calls):
        raise TypeError(f"calls should be a list of rolemesh.agents.call_formats.Call; got {calls!r:.200}")
    for call in calls:
        if not all(isinstance(text, str) for text in (call.name, call.arguments, call.malformed)):
            raise TypeError(f"name, arguments and malformed of a call should be texts: {call!r:.200}")
        if not call.malformed and not (call.name and isinstance(json.loads(call.arguments), dict)):
            raise ValueError(f"a call should have a name, and a JSON object as arguments: {call!r:.200}")
    return content, [_sendable(call) for call in calls[:MAX_CALLS]]


def _sendable(call: Call) -> Call:
    """Return the call, or a malformed one if its arguments could not be sent, or repeated by a tool."""
    if call.malformed:
        return call
    given = json.loads(call.arguments)
    if _depth(given) > MAX_DEPTH:
        return TOO_DEEP
    try:
        f"{call.name}{json.dumps(given, ensure_ascii=False)}".encode()
    except UnicodeError:
        return Call(malformed="a character is half of a surrogate pair")
    return call


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def _call(text: str, arguments: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(malformed=f"not JSON: {error}")
    return _read(value, arguments)


def _read(value: Any, arguments: str) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Call(malformed='expected an object with "name", a text')
    given = value.get(arguments, {})
    if isinstance(given, str):  # some models quote the object
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, dict):
        return Call(malformed=f'expected "{arguments}" of {value["name"]!r:.100} to be an object')
    if _depth(given) > MAX_DEPTH:  # before json.dumps, which fails at some depths that json.loads reads
        return TOO_DEEP
    return Call(value["name"], json.dumps(given, ensure_ascii=False))
