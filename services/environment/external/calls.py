"""Parses and checks calls of an OpenAI-compatible API, and writes their answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.agents.environment import Chat
from rolemesh.errors import InvalidBatch
from rolemesh.wire.json_text import from_json
from rolemesh.wire.limits import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS

log = logging.getLogger(__name__)

# Keys of a call. These are read.
READ = {"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream"}
READ |= {"stream_options", "stop"}
# The only value of each, with which it asks for nothing. Clients may send these though nobody set them.
IDLE = {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "response_format": {"type": "text"}}
READ |= IDLE.keys()
# Ignored. The job sets the sampling, because log-probabilities must belong to the policy's distribution.
# Validation may also sample differently from training, and the program does not know which one it runs in.
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"}
SAMPLING |= {"repetition_penalty", "reasoning_effort", "verbosity"}
# Ignored: they do not change the answer of a single policy.
ABOUT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ABOUT |= {"parallel_tool_calls"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_warned: set[str] = set()


class RequestRefused(Exception):
    """Raised to answer a call with an error of OpenAI's API.

    Args:
        status: HTTP status.
        message: text for people.
        param: the wrong key of the body.
        code: error code for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a call that determine its answer.

    Args:
        messages: in the form of chat templates, with arguments of tool calls as dicts.
        tools: as the program sent them.
        finds_calls: parse tool calls in the policy's turn.
        max_tokens: limit of the policy's turn; 0: only the job's limit.
        streams: send the answer in chunks.
        includes_usage: send the numbers of tokens after the last chunk.
    """

    messages: Chat
    tools: list[dict[str, Any]]
    finds_calls: bool
    max_tokens: int
    streams: bool
    includes_usage: bool


def read(body: bytes, model: str) -> ChatRequest:
    """Parse a call of chat completions.

    Args:
        body: JSON.
        model: the name of the only model.

    Raises:
        RequestRefused: the call is malformed, or asks for something that this endpoint does not support.
    """
    try:
        text = body.decode()
        asked = from_json(text, "the body")
        if "\\u" in text:  # an escape may be a lone surrogate
            json.dumps(asked, ensure_ascii=False).encode()
    except (InvalidBatch, UnicodeError) as error:
        raise RequestRefused(400, f"the body is no JSON of UTF-8 texts: {error}") from None
    if not isinstance(asked, dict):
        raise RequestRefused(400, "the body should be a JSON object")
    _check_keys(asked)
    if asked.get("model") != model:
        said = f"there is no model {asked.get('model')!r:.100}; the only one is {model!r}"
        raise RequestRefused(404, said, "model", "model_not_found")
    tools = _list(asked, "tools", MAX_TOOLS)
    for index, tool in enumerate(tools):
        if not (isinstance(tool, dict) and tool.get("type") == "function" and _is_named(tool.get("function"))):
            raise RequestRefused(
                400, 'a tool should be {"type": "function", "function": {"name", …}}', f"tools.{index}"
            )
    choice = asked.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise RequestRefused(400, "tool_choice should be auto or none: the policy decides", "tool_choice")
    options = asked.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestRefused(400, "stream_options should be an object", "stream_options")
    return ChatRequest(
        messages=_messages(asked),
        tools=tools,
        finds_calls=bool(tools) and choice == "auto",
        max_tokens=_max_tokens(asked),
        streams=asked.get("stream") is True,
        includes_usage=options.get("include_usage") is True,
    )


def _check_keys(asked: Mapping[str, Any]) -> None:
    given = {key for key, value in asked.items() if value is not None}
    if unknown := given - READ - SAMPLING - ABOUT:
        key = min(unknown)
        raise RequestRefused(
            400, f"this endpoint does not know {key!r:.100}", f"{key:.100}", "unknown_parameter"
        )
    for key in sorted(given & SAMPLING - _warned):
        _warned.add(key)
        log.warning("programs ask for %s, which has no effect: the section rollout says how to sample", key)
    for key, only in IDLE.items():
        if key in given and asked[key] != only:
            raise RequestRefused(400, f"{key} should be {json.dumps(only)}, or be left out", key)
    if asked.get("stop"):
        raise RequestRefused(
            400, "stop has no effect here: the policy ends its turns itself (rollout.stop)", "stop"
        )
    if asked.get("stream") not in (None, True, False):
        raise RequestRefused(400, "stream should be true or false", "stream")


def _max_tokens(asked: Mapping[str, Any]) -> int:
    limits = []
    for key in ("max_tokens", "max_completion_tokens"):
        value = asked.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestRefused(400, f"{key} should be a number of at least 1", key)
        limits.append(min(value, 2**31))
    return min(limits, default=0)


# ------------------------------------------------------------------------------------ messages


def _messages(asked: Mapping[str, Any]) -> Chat:
    messages: Chat = []
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    for index, message in enumerate(_list(asked, "messages", MAX_MESSAGES)):
        where = f"messages.{index}"
        if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
            raise RequestRefused(400, f"a message should have a role, one of {', '.join(ROLES)}", where)
        read: dict[str, Any] = {
            "role": ROLES[message["role"]],
            "content": _content(message.get("content"), where),
        }
        if calls := [_call(call, where) for call in _list(message, "tool_calls", MAX_CALLS, where)]:
            read["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        for key in ("name", "tool_call_id"):
            if (value := message.get(key)) is not None:
                read[key] = _text(value, f"{where}.{key}")
        if read["role"] == "tool" and read.get("tool_call_id") in names:
            read.setdefault("name", names[read["tool_call_id"]])  # templates may need it
        messages.append(read)
    if not messages:
        raise RequestRefused(400, "messages should have one message at least", "messages")
    return messages


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return _text(content, f"{where}.content")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise RequestRefused(400, "content should be a text, or parts of type text", f"{where}.content")
    return "".join(_text(part.get("text"), f"{where}.content") for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        name = function["name"]
        given = function.get("arguments") or "{}"
        id_ = call["id"]
        arguments = from_json(given, "arguments") if isinstance(given, str) else given
    except (InvalidBatch, AttributeError, KeyError, TypeError):
        arguments = None
    if not isinstance(arguments, dict):
        said = 'a call should be {"id", "type", "function": {"name", "arguments"}}, arguments a JSON object'
        raise RequestRefused(400, said, f"{where}.tool_calls") from None
    texts = {key: _text(value, f"{where}.tool_calls") for key, value in (("id", id_), ("name", name))}
    return {
        "id": texts["id"],
        "type": "function",
        "function": {"name": texts["name"], "arguments": arguments},
    }


def _list(asked: Mapping[str, Any], key: str, most: int, where: str = "") -> list[Any]:
    value = asked.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise RequestRefused(
            400, f"{key} should be a list of at most {most}", f"{where}.{key}" if where else key
        )
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(400, "a text expected", where)
    return value


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# ------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Utterance:
    """A turn of the policy, for the program.

    Args:
        number: of the turn, from 1.
        message: in the form of chat templates.
        finish_reason: stop, length or tool_calls.
        prompt_tokens: number of tokens before the turn.
        completion_tokens: number of tokens of the turn.
    """

    number: int
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        given = self.prompt_tokens
        made = self.completion_tokens
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def utterance_of(turn: Mapping[str, Any], number: int, *, finds_calls: bool) -> Utterance:
    """Return a turn as a call's answer.

    Args:
        turn: as Conversation.act gets it from an agent with `calls`.
        number: of the turn, from 1.
        finds_calls: return its calls of tools as calls, if all of them can be parsed; else they stay text.
    """
    calls = turn.get("tool_calls") or []
    if not finds_calls or any("malformed" in call for call in calls):
        calls = []
    message = {"role": "assistant", "content": turn["content"] if calls else turn["text"]}
    if calls:
        message["tool_calls"] = calls
    finish_reason = "tool_calls" if calls else "stop"
    if turn["cut"]:
        finish_reason = "length"
    return Utterance(number, message, finish_reason, turn["prompt_tokens"], turn["completion_tokens"])


def completion(utterance: Utterance, model: str) -> dict[str, Any]:
    """Return the answer to a call that does not stream."""
    choice = {
        "index": 0,
        "message": _message(utterance),
        "logprobs": None,
        "finish_reason": utterance.finish_reason,
    }
    return _head(utterance, model, "chat.completion") | {"choices": [choice], "usage": utterance.usage}


def chunks(utterance: Utterance, model: str, *, includes_usage: bool) -> list[dict[str, Any]]:
    """Return the answer to a call that streams: the whole turn in one chunk, then why it ended."""
    head = _head(utterance, model, "chat.completion.chunk")
    message = _message(utterance)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": index} | call for index, call in enumerate(calls)]
    pieces: list[tuple[dict[str, Any], str | None]] = [(message, None), ({}, utterance.finish_reason)]
    made = [
        head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": why}]}
        for delta, why in pieces
    ]
    return [*made, head | {"choices": [], "usage": utterance.usage}] if includes_usage else made


def _message(utterance: Utterance) -> dict[str, Any]:
    calls = [
        call | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in utterance.message.get("tool_calls", ())
    ]
    content = utterance.message["content"]
    message = {"role": "assistant", "content": None if calls and not content else content}
    return message | ({"tool_calls": calls} if calls else {})


def _head(utterance: Utterance, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{utterance.number}", "object": kind, "created": int(time.time()), "model": model}
