"""Parse a policy's text into calls of tools. rolemesh/catalog/call_formats.py lists them.

A call in a thought is text. A thought begins with <think>, or with the turn where the prompt ends with <think>,
and ends with </think>. If no thought came before, a </think> that no <think> opens ends the prompt's thought;
after any thought it is text. Without </think> there is no thought: some models call a tool without closing
theirs, and the parser of SGLang for Qwen3 reads such a call, too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64  # of arguments
MAX_CALLS = 64  # looked for in a turn; an environment runs far fewer
THINK = "<think>"
THOUGHT = "</think>"
OPENING = "<tool_call>"
CLOSING = "</tool_call>"
TAGS = re.compile("|".join((THINK, THOUGHT, OPENING)))
THOUGHT_TAGS = re.compile("|".join((THINK, THOUGHT)))
CALL_TAGS = re.compile("|".join((OPENING, CLOSING)))
CALL_ENDS = re.compile("|".join((CLOSING, THOUGHT)))
CLOSINGS = re.compile(CLOSING)
PYTHON_TAG = "<|python_tag|>"
# Not (?:[;\s]|tag)*, for which the module re keeps a hundred bytes of memory for each blank.
BETWEEN_CALLS = re.compile(rf"[;\s]*(?:{re.escape(PYTHON_TAG)}[;\s]*)*")
SPACE = re.compile(r"\s*")
ARGUMENTS = ("arguments", "parameters")  # models write either, whatever their template shows
OTHER_KEYS = {"name", "type", "id"}  # any further key may hold the arguments
DECODER = json.JSONDecoder()


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
    outside, inside, cut = _tagged(text)
    calls = [_call(found, "arguments") for found in inside[:MAX_CALLS]]
    if cut:
        calls.append(Call(malformed="<tool_call> without </tool_call>"))
    return "".join(outside).strip() if calls else text, calls


def _tagged(text: str) -> tuple[list[str], list[str], str]:
    """Return the texts outside and inside of pairs of tags, and the text from a tag on that is not closed.

    Tags in thoughts are text.
    """
    outside: list[str] = []
    inside: list[str] = []
    at = begin = 0  # of the text outside of calls, and of what is looked at
    has_thought = False
    last = text.rfind(THOUGHT)
    while (tag := TAGS.search(text, begin)) is not None:
        begin = tag.end()
        if tag[0] == THINK:
            if begin <= last:
                begin = text.index(THOUGHT, begin) + len(THOUGHT)
                has_thought = True
        elif tag[0] == THOUGHT:
            if not has_thought:  # the prompt began the thought, so nothing before is a call
                outside = []
                inside = []
                at = 0
                has_thought = True
        else:
            # No more calls are read, and a failure of the decoder takes time linear in the whole text.
            after = _after_object(text, begin) if len(inside) < MAX_CALLS else begin
            end = (CLOSINGS if has_thought else CALL_ENDS).search(text, after)
            if end is not None and end[0] == THOUGHT and after == begin:
                end = _closing_of_broken(text, begin) or end
            if end is None:
                return [*outside, text[at : tag.start()]], inside, text[tag.start() :]
            if end[0] == THOUGHT:
                begin = end.start()
                continue
            outside.append(text[at : tag.start()])
            inside.append(text[begin : end.start()])
            at = begin = end.end()
    return [*outside, text[at:]], inside, ""


def _closing_of_broken(text: str, begin: int) -> re.Match[str] | None:
    """Return the closing tag of a call whose JSON is broken and has </think>; None if a thought ends there.

    It is a call if it begins as one and its closing tag is the next tag of calls.
    """
    is_object = text.startswith("{", _skip(SPACE, text, begin))
    tag = CALL_TAGS.search(text, begin) if is_object else None
    return tag if tag is not None and tag[0] == CLOSING else None


def _after_object(text: str, begin: int) -> int:
    """Return the index after the JSON object at `begin`, whose texts may have tags; else `begin`."""
    here = _skip(SPACE, text, begin)
    if not text.startswith("{", here):
        return begin
    try:
        return DECODER.raw_decode(text, here)[1]
    except (ValueError, RecursionError):
        return begin


def _skip(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """Return the index after what the pattern, which also matches nothing, matches at `begin`."""
    found = pattern.match(text, begin)
    return begin if found is None else found.end()


def llama3_json(text: str) -> tuple[str, list[Call]]:
    """Read calls in the JSON format of Llama 3: the turn is `{"name": "add", "parameters": {…}}`.

    Several calls are separated by semicolons or blanks. `<|python_tag|>` may come before them. A turn that does
    not begin with a brace, or the tag, has no call. Thoughts may come before, and other text after the calls.

    Args:
        text: a turn, without its end token.

    Returns:
        the text outside of calls, and the calls.
    """
    begin = 0
    has_thought = False
    while True:
        begin = _skip(SPACE, text, begin)
        if text.startswith(THINK, begin) and (closes := text.find(THOUGHT, begin)) >= 0:
            begin = closes + len(THOUGHT)
            has_thought = True
            continue
        calls, end = _objects(text, begin)
        if has_thought or (after := _after_prompts_thought(text, end)) < 0:
            return (text[:begin] + text[end:]).strip() if calls else text, calls
        begin = after
        has_thought = True


def _objects(text: str, begin: int) -> tuple[list[Call], int]:
    """Return the calls of Llama's format that stand at `begin`, and the index of what follows."""
    calls: list[Call] = []
    is_tagged = text.startswith(PYTHON_TAG, begin)
    if not is_tagged and not text.startswith("{", begin):
        return calls, begin
    at = _skip(BETWEEN_CALLS, text, begin)
    while text.startswith("{", at) or (is_tagged and not calls and at < len(text)):
        if len(calls) == MAX_CALLS:
            break
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            calls.append(Call(malformed=f"not JSON: {error}"))
            break
        calls.append(_read(value, "parameters"))
        at = _skip(BETWEEN_CALLS, text, end)
    return calls, at


def _after_prompts_thought(text: str, begin: int) -> int:
    """Return the index after the thought that the prompt began, if it ends after `begin`; else -1.

    It ends at the first </think>, unless a <think> comes before.
    """
    tag = THOUGHT_TAGS.search(text, begin)
    return tag.end() if tag is not None and tag[0] == THOUGHT else -1


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
    level = [value]
    depth = 0
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
    found = [key for key in ARGUMENTS if key in value] or [key for key in value if key not in OTHER_KEYS]
    if len(found) > 1 or not set(found) <= set(ARGUMENTS):
        return Call(
            malformed=f'expected "{arguments}" of {value["name"]!r:.100} and no other key for its arguments; '
            f"got {', '.join(map(repr, found)):.100}"
        )
    given = value[found[0]] if found else {}
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
