"""A plug-in for tests: a tool that weighs texts, a format in which most turns call it, and programs that do."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from openai import DefaultHttpxClient, OpenAI

from rolemesh.agents.call_formats import Call
from rolemesh.catalog.call_formats import CALL_FORMATS, CallFormatSpec
from rolemesh.plugins import program, tool

hold = runpy.run_path(str(Path(__file__).with_name("weigher.py")))["hold"]
HTTP = DefaultHttpxClient()  # of all episodes: each would read the system's certificates anew
TOOLS = json.loads(Path(__file__).with_name("tools.json").read_text())


@tool("weigh")
def weigh(text: str) -> int:
    """Weigh a text.

    Args:
        text: The text.
    """
    return len(text)


def weighing(text):
    """Read a turn: a call of the tool, unless its length ends in 7."""
    if len(text) % 10 == 7:
        return text, []
    return text[:2], [Call("weigh", json.dumps({"text": text}))]


CALL_FORMATS.add(CallFormatSpec(name="weighing", code=weighing, origin=str(Path(__file__).resolve())))


def _client(endpoint):
    return OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, http_client=HTTP)


@program("weigher", meaning="weighs with OpenAI's client")
def weigher(episode, endpoint, job):
    return hold(_client(endpoint), endpoint.model, episode.messages, TOOLS, False)


@program("streamer", meaning="weighs with OpenAI's client, and streams")
def streamer(episode, endpoint, job):
    return hold(_client(endpoint), endpoint.model, episode.messages, TOOLS, True)


@program("brief", meaning="lets the policy say five tokens at a time")
def brief(episode, endpoint, job):
    client, messages = _client(endpoint), [{"role": "user", "content": "Be brief."}]
    for _ in range(3):
        answer = client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=5)
        assert answer.usage.completion_tokens <= 5
        messages = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "on"}]
    return 1.0


@program("wordy", meaning="has a prompt that is too long")
def wordy(episode, endpoint, job):
    messages = [{"role": "user", "content": "x" * job.data.max_prompt_length}]
    _client(endpoint).chat.completions.create(model=endpoint.model, messages=messages)


@program("drafter", meaning="lets the policy answer twice, and goes on with one of the answers alone")
def drafter(episode, endpoint, job):
    client, messages = _client(endpoint), episode.messages
    for _ in range(2):
        drafts = [
            client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=12)
            for _ in range(2)
        ]
        better = max((draft.choices[0].message.content for draft in drafts), key=lambda text: (len(text), text))
        messages = [*messages, {"role": "assistant", "content": better}, {"role": "user", "content": "on"}]
    return 1.0
