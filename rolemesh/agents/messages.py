"""Messages of a conversation, as protobuf and as the dicts that chat templates take, checked in both
directions.

A call of a tool is {"id", "type": "function", "function": {"name", "arguments"}} with a dict of arguments. If
the call was malformed, it has the reason under "malformed", and no arguments.
"""

from __future__ import annotations

import json
import math
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from rolemesh.agents.environment import Chat, Observation, Outcome, Prompt
from rolemesh.agents.environment import ToolUse as UsedTool
from rolemesh.agents.tools import ToolSchema
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidBatch, RolemeshError
from rolemesh.v1 import environment_pb2
from rolemesh.v1.environment_pb2 import (
    ActResponse,
    CloseEpisodeResponse,
    Message,
    OpenEpisodeResponse,
    ToolCall,
    ToolUse,
)
from rolemesh.wire.json_text import from_json
from rolemesh.wire.limits import MAX_ANSWER_BYTES, MAX_CALLS, MAX_MESSAGES, MAX_TOOLS

ROLES = ("system", "user", "assistant", "tool")
LARGEST = 3.4028234663852886e38  # of a float32, which rewards become
MAX_NUMBERS = 1024  # of an outcome
ANSWER_MARGIN = 64 << 10  # of an answer's bytes, left for what stands around texts


@contextmanager
def invalid_as(
    error: type[RolemeshError], where: str = "", kind: type[RolemeshError] = InvalidBatch
) -> Iterator[None]:
    """Within the block, an error of a kind is about what an environment said: raise it as another one.

    Args:
        error: the class to raise.
        where: the message begins with it.
        kind: the class to catch.
    """
    try:
        yield
    except kind as invalid:
        raise error(f"{where}: {invalid}" if where else str(invalid)) from invalid


# ------------------------------------------------------------------------------- from protobuf


def chat_of(messages: Sequence[Message], what: str) -> Chat:
    """Return messages as dicts.

    Raises:
        InvalidBatch: too many, a role that no message has, or a call whose arguments are no JSON object.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidBatch(f"{what} has {len(messages)} messages; at most {MAX_MESSAGES} are read")
    return [message_of(message, f"{what}, message {index},") for index, message in enumerate(messages)]


def message_of(message: Message, what: str) -> dict[str, Any]:
    """Return a message as a dict. Raises InvalidBatch as `chat_of`."""
    _check_role(message.role, what)
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidBatch(f"{what} has {len(message.tool_calls)} calls of tools; at most {MAX_CALLS} are read")
    chat_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat_message["tool_calls"] = [_call_of(call, what) for call in message.tool_calls]
    if message.name:
        chat_message["name"] = message.name
    if message.tool_call_id:
        chat_message["tool_call_id"] = message.tool_call_id
    return chat_message


def prompt_of(prompt: environment_pb2.Prompt, what: str) -> Prompt:
    """Return a prompt. Raises InvalidBatch if it has no message, or as `chat_of`, or if a tool is no object."""
    if not prompt.messages or len(prompt.tools) > MAX_TOOLS:
        raise InvalidBatch(
            f"{what} has {len(prompt.messages)} messages and {len(prompt.tools)} tools; at least one message "
            f"and at most {MAX_TOOLS} tools expected"
        )
    return Prompt(chat_of(prompt.messages, what), [object_of(tool, f"{what}: a tool") for tool in prompt.tools])


def _call_of(call: ToolCall, what: str) -> dict[str, Any]:
    arguments: Any = {}
    if not call.malformed:
        arguments = object_of(call.arguments, f"{what} call {call.id!r:.100}: its arguments")
    read = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    return read | ({"malformed": call.malformed} if call.malformed else {})


def object_of(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidBatch if the text is none."""
    value = from_json(text, what)
    if not isinstance(value, dict):
        raise InvalidBatch(f"{what} should be a JSON object; got {reprlib.repr(value)}")
    return value


# --------------------------------------------------------------------------------- to protobuf


def messages_of(chat: Iterable[Mapping[str, Any]], what: str) -> list[Message]:
    """Return dicts as messages.

    Raises:
        InvalidBatch: one is no message: another role, a content that is no text, a text that is not UTF-8.
    """
    if not isinstance(chat, list | tuple):
        raise InvalidBatch(f"{what} should be a list of messages; got {reprlib.repr(chat)}")
    if len(chat) > MAX_MESSAGES:
        raise InvalidBatch(f"{what} has {len(chat)} messages; at most {MAX_MESSAGES} are sent")
    made = [_message(each, f"{what}, message {index},") for index, each in enumerate(chat)]
    if (size := sum(message.ByteSize() for message in made)) > MAX_ANSWER_BYTES - ANSWER_MARGIN:
        raise InvalidBatch(
            f"{what} has {size} bytes; at most {MAX_ANSWER_BYTES - ANSWER_MARGIN} are sent. Cut long texts"
        )
    return made


def _check_size(answer: Any, what: str) -> None:
    if (size := answer.ByteSize()) > MAX_ANSWER_BYTES:
        raise InvalidBatch(f"{what} has {size} bytes; at most {MAX_ANSWER_BYTES} are sent")


def _message(message: Mapping[str, Any], what: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidBatch(f"{what} should be a dict with role and content; got {reprlib.repr(message)}")
    texts = {
        key: _text(message.get(key) or "", f"{what} {key}")
        for key in ("role", "content", "name", "tool_call_id")
    }
    _check_role(texts["role"], what)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple) or len(calls) > MAX_CALLS:
        raise InvalidBatch(
            f"{what} tool_calls should be a list of at most {MAX_CALLS}; got {reprlib.repr(calls)}"
        )
    return Message(**texts, tool_calls=[_call(call, what) for call in calls])


def _call(call: Any, what: str) -> ToolCall:
    try:
        function = call["function"]
        arguments = function.get("arguments", {})
        malformed = call.get("malformed") or ""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        texts = {"id": call.get("id") or "", "name": function["name"], "malformed": malformed}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        expected = '{"id", "type": "function", "function": {"name", "arguments"}}'
        raise InvalidBatch(f"{what} has a call {reprlib.repr(call)}; {expected} expected ({error!r})") from None
    texts["arguments"] = "" if malformed else arguments
    return ToolCall(**{key: _text(text, f"{what} a call's {key}") for key, text in texts.items()})


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidBatch(f"{what} should be a text; got {reprlib.repr(value)} ({type(value).__name__})")
    if len(value) > MAX_ANSWER_BYTES:
        raise InvalidBatch(f"{what} has {len(value)} characters; at most {MAX_ANSWER_BYTES} bytes are sent")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidBatch(f"{what} is no UTF-8 text: {error.reason} at character {error.start}") from None
    return value


def _check_role(role: str, what: str) -> None:
    if role not in ROLES:
        raise InvalidBatch(f"{what} has the role {role!r:.100}, which is none of {', '.join(ROLES)}")


# ------------------------------------------------------------------- what an environment answers


def opening_of(begun: Chat | Prompt, what: str) -> OpenEpisodeResponse:
    """Return the first messages, or a prompt, as a response. Raises InvalidBatch as `answer_of`."""
    if not isinstance(begun, Prompt):
        return OpenEpisodeResponse(messages=messages_of(begun, what))
    opening = OpenEpisodeResponse(prompt=_prompt(begun, what), max_tokens=_max_tokens(begun.max_tokens, what))
    _check_size(opening, what)
    return opening


def _prompt(prompt: Prompt, what: str) -> environment_pb2.Prompt:
    if not isinstance(prompt, Prompt):
        raise InvalidBatch(f"{what} should be a Prompt; got {reprlib.repr(prompt)} ({type(prompt).__name__})")
    _check_list(prompt.tools, Mapping, f"{what}: tools")
    try:
        tools = [json.dumps(tool) for tool in prompt.tools]
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidBatch(f"{what} has a tool that is not JSON: {error}") from error
    return environment_pb2.Prompt(
        messages=messages_of(prompt.messages, what), tools=[_text(tool, f"{what}: a tool") for tool in tools]
    )


def _check_list(values: Any, kind: type, what: str) -> None:
    is_list = isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping)
    try:
        is_right = is_list and all(isinstance(value, kind) for value in values)
    except TypeError:  # an array without axes
        is_right = False
    if not is_right:
        raise InvalidBatch(f"{what} should be a list, each a {kind.__name__}; got {reprlib.repr(values)}")
    if len(values) > MAX_TOOLS:
        raise InvalidBatch(f"{what} has {len(values)}; at most {MAX_TOOLS} are sent")


def _max_tokens(value: Any, what: str) -> int:
    try:
        whole = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = -1
    if not 0 <= whole < 1 << 32:
        raise InvalidBatch(f"{what}: max_tokens is {reprlib.repr(value)}; a number of tokens, or 0, expected")
    return whole


def answer_of(observation: Observation, what: str) -> ActResponse:
    """Return an observation as a message.

    Raises:
        InvalidBatch: it is no Observation, one of its fields has another type, a message is none
            (`messages_of`), or a number is not finite.
    """
    if not isinstance(observation, Observation):
        raise InvalidBatch(
            f"{what} should be an Observation; got {reprlib.repr(observation)} ({type(observation).__name__})"
        )
    _check_list(observation.tools, UsedTool, f"{what}: tools")
    uses = [
        ToolUse(
            name=_text(use.name, f"{what}: a tool's name")[:100],
            seconds=number(use.seconds, f"{what}: seconds of the tool {use.name!r:.100}"),
            error=_text(use.error, f"{what}: a tool's error")[:500],
        )
        for use in observation.tools
    ]
    answer = ActResponse(
        messages=[] if observation.done else messages_of(observation.messages, what),
        prompt=None
        if observation.done or observation.prompt is None
        else _prompt(observation.prompt, f"{what}: its prompt"),
        reward=number(observation.reward, f"{what}: the reward"),
        done=bool(observation.done),
        why=_text(observation.why, f"{what}: why")[:100],
        tools=uses,
        max_tokens=_max_tokens(observation.max_tokens, what),
    )
    _check_size(answer, what)
    return answer


def end_of(outcome: Outcome, what: str) -> CloseEpisodeResponse:
    """Return an outcome as a message. Raises InvalidBatch as `answer_of`."""
    if not isinstance(outcome, Outcome):
        raise InvalidBatch(
            f"{what} should be an Outcome; got {reprlib.repr(outcome)} ({type(outcome).__name__})"
        )
    if not isinstance(outcome.metrics, Mapping):
        raise InvalidBatch(f"{what}: metrics should be a dict of numbers; got {reprlib.repr(outcome.metrics)}")
    if len(outcome.metrics) > MAX_NUMBERS:
        raise InvalidBatch(f"{what} has {len(outcome.metrics)} metrics; at most {MAX_NUMBERS} are sent")
    end = CloseEpisodeResponse(
        reward=number(outcome.reward, f"{what}: the reward"),
        metrics={
            _text(name, f"{what}: a metric's name"): number(value, f"{what}: metric {name!r:.100}")
            for name, value in outcome.metrics.items()
        },
    )
    _check_size(end, what)
    return end


def number(value: Any, what: str) -> float:
    """Return a number of float32's range as a float.

    Raises:
        InvalidBatch: it is none, such as NaN.
    """
    try:
        read = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        read = math.nan
    if not abs(read) <= LARGEST:
        raise InvalidBatch(f"{what} is {reprlib.repr(value)}; a finite number of float32's range expected")
    return read


# ------------------------------------------------------------- at the caller, which trusts no environment


def check_messages(messages: Sequence[Message], what: str) -> None:
    """Raise InvalidBatch unless an environment may say these messages."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidBatch(f"{what} has {len(messages)} messages; at most {MAX_MESSAGES} are read")
    for index, message in enumerate(messages):
        _check_role(message.role, f"{what}, message {index},")


def check_opening(opening: OpenEpisodeResponse, what: str) -> None:
    """Raise InvalidBatch unless an environment may begin so."""
    check_messages(opening.messages, what)
    if opening.HasField("prompt"):
        prompt_of(opening.prompt, f"the prompt of {what}")


def check_tools(tools: Sequence[str], what: str) -> None:
    """Raise InvalidBatch unless each is a tool as OpenAI's API takes it, and there are not too many."""
    if len(tools) > MAX_TOOLS:
        raise InvalidBatch(f"{what} has {len(tools)} tools; at most {MAX_TOOLS} expected")
    for number, tool in enumerate(tools):
        try:
            ToolSchema.model_validate(object_of(tool, f"{what}: tool {number}"))
        except ValidationError as error:
            raise InvalidBatch(
                f"{what}: tool {number}, {tool!r:.200}, is no tool: {one_line(str(error))}"
            ) from error


def check_answer(answer: ActResponse, what: str) -> None:
    """Raise InvalidBatch unless its messages are messages and its numbers finite."""
    check_messages(answer.messages, what)
    if answer.HasField("prompt"):
        prompt_of(answer.prompt, f"the prompt of {what}")
        if answer.messages:
            raise InvalidBatch(f"{what} has a prompt and messages; put them into the prompt")
    number(answer.reward, f"{what}: the reward")
    for use in answer.tools:
        number(use.seconds, f"{what}: seconds of the tool {use.name!r:.100}")


def check_end(end: CloseEpisodeResponse, what: str) -> None:
    """Raise InvalidBatch unless its numbers are finite."""
    number(end.reward, f"{what}: the reward")
    for name, value in end.metrics.items():
        number(value, f"{what}: metric {name!r:.100}")
