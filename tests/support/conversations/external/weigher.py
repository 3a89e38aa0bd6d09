"""A program that knows nothing of Rolemesh: asks a model that may weigh texts with a tool.

OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python weigher.py TOOLS.json [stream]
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

from openai import BadRequestError, OpenAI

TURNS = 3


def hold(client: OpenAI, model: str, messages: list, tools: list, streams: bool) -> dict:
    """Hold the conversation, and return its reward."""
    weighed = 0
    for turn in range(TURNS):
        asked = {"model": model, "messages": messages, "tools": tools}
        try:
            message, finish, usage = streamed(client, asked) if streams else whole(client, asked)
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                break
            raise
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert finish == "tool_calls" if message.get("tool_calls") else finish in ("stop", "length")
        messages = [*messages, message]
        if not message.get("tool_calls") or turn == TURNS - 1:
            break
        for call in message["tool_calls"]:
            weighed += (weight := len(json.loads(call["function"]["arguments"])["text"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(weight)})
    return {"reward": 0.5, "weighed": weighed}


def whole(client, asked):
    answer = client.chat.completions.create(**asked)
    [choice] = answer.choices
    return choice.message.model_dump(), choice.finish_reason, answer.usage


def streamed(client, asked):
    message, calls, finish, usage = {"role": "assistant", "content": None}, {}, None, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            if choice.delta.content is not None:
                message["content"] = (message["content"] or "") + choice.delta.content
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, SimpleNamespace(id=part.id, name="", arguments=""))
                call.name += part.function.name or ""
                call.arguments += part.function.arguments or ""
    if calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in calls.values()
        ]
    return message, finish, usage


if __name__ == "__main__":
    row = json.load(sys.stdin)
    with open(sys.argv[1]) as file:
        tools = json.load(file)
    # base URL and key are the client's own variables
    print("the last line counts")
    print(json.dumps(hold(OpenAI(), os.environ["OPENAI_MODEL"], row["messages"], tools, "stream" in sys.argv)))
