"""The OpenAI-compatible endpoint of a program, called by OpenAI's own client. The test plays the policy."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from rolemesh.agents.environment import Endpoint, Prompt
from rolemesh.services.environment.external.calls import utterance_of
from rolemesh.services.environment.external.endpoint import MAX_BODY_BYTES, EpisodeEndpoint
from rolemesh.services.environment.external.program_session import ProgramSession

ASK = [{"role": "user", "content": "ask"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "call-1-0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[ProgramSession, Endpoint, openai.AsyncOpenAI]]:
    session = ProgramSession()
    async with EpisodeEndpoint().serving(session) as endpoint, client_of(endpoint) as client:
        yield session, endpoint, client


def client_of(endpoint: Endpoint, **other: Any) -> openai.AsyncOpenAI:
    given = {"base_url": endpoint.base_url, "api_key": endpoint.key, "max_retries": 0} | other
    return openai.AsyncOpenAI(**given)


def turn(text: str = "fine", *calls: dict[str, Any], content: str = "", cut: bool = False) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, "text": text, "cut": cut}
    return said | {"prompt_tokens": 7, "completion_tokens": 3} | ({"tool_calls": [*calls]} if calls else {})


async def answered(
    session: ProgramSession, call: Any, said: dict[str, Any], number: int = 1
) -> tuple[Any, list[Any]]:
    """What the program and what the policy heard."""
    asked = asyncio.ensure_future(call)
    _, new = await session.next()
    session.answer(utterance_of(said, number, finds_calls=session.finds_calls))
    return await asked, new


async def test_a_conversation_goes_on_and_only_new_messages_are_heard() -> None:
    async with served() as (session, _, client):
        chat = client.chat.completions
        first, new = await answered(
            session, chat.create(model="policy", messages=ASK, tools=TOOLS), turn("<call>", CALL, content="so")
        )
        assert new == Prompt(ASK, TOOLS)
        [choice] = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so")
        assert first.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
        }
        answer = {"role": "tool", "tool_call_id": "call-1-0", "content": "2"}
        messages = [*ASK, choice.message, answer]
        second, new = await answered(
            session, chat.create(model="policy", messages=messages, tools=TOOLS), turn("half", cut=True), 2
        )
        assert new == [{**answer, "name": "add"}]  # which templates may show
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("length", "half")


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [{"role": "user", "content": "asked"}, said, *ASK],
        lambda said: [*ASK, {"role": "assistant", "content": "better"}, *ASK],
        lambda said: [*ASK, said],
        lambda said: ASK,
        lambda said: [*ASK, said, *ASK, said, *ASK],
    ],
)
async def test_a_call_that_rewrites_the_conversation_is_another_prompt(change: Any) -> None:
    async with served() as (session, _, client):
        chat = client.chat.completions
        first, _ = await answered(session, chat.create(model="policy", messages=ASK), turn())
        messages = change(first.choices[0].message)
        second, new = await answered(session, chat.create(model="policy", messages=messages), turn(), 2)
        assert isinstance(new, Prompt)
        assert (len(new.messages), new.tools) == (len(messages), [])
        on = [*messages, second.choices[0].message, *ASK]  # goes on from there, but with other tools
        _, new = await answered(session, chat.create(model="policy", messages=on, tools=TOOLS), turn(), 3)
        assert isinstance(new, Prompt)
        assert new.tools == TOOLS


async def test_concurrent_calls_are_answered_in_turn_and_retries_alike() -> None:
    """A retry gets the answer of the call that it repeats."""
    async with served() as (session, _, client):
        chat = client.chat.completions

        async def ask(**headers: str) -> Any:
            return await chat.create(model="policy", messages=ASK, extra_headers=headers)

        calls = [asyncio.ensure_future(ask()) for _ in range(2)]
        for number, text in enumerate(("one", "two"), start=1):
            _, new = await session.next()
            assert new == Prompt(ASK, [])
            session.answer(utterance_of(turn(text), number, finds_calls=False))
        answers = {answer.choices[0].message.content for answer in await asyncio.gather(*calls)}
        assert answers == {"one", "two"}
        again = await ask(**{"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == "two"


async def test_a_retry_gets_its_answer_even_after_a_later_call() -> None:
    async with served() as (session, _, client):
        for number, text in enumerate(("a", "b"), start=1):
            messages = [{"role": "user", "content": text}]
            await answered(
                session, client.chat.completions.create(model="policy", messages=messages), turn(text), number
            )
        again = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "a"}],
            extra_headers={"x-stainless-retry-count": "1"},
            timeout=120,
        )
        assert again.choices[0].message.content == "a"


async def test_calls_stay_text_unless_all_parse_and_tools_are_wanted() -> None:
    """The program must offer tools and want calls of them."""
    bad = {"id": "x", "type": "function", "function": {"name": "", "arguments": {}}, "malformed": "not JSON"}
    for said, given in (
        (turn("<call><bad>", CALL, bad), {"tools": TOOLS}),
        (turn("<call>", CALL), {}),
        (turn("<call>", CALL), {"tools": TOOLS, "tool_choice": "none"}),
    ):
        async with served() as (session, _, client):
            call = client.chat.completions.create(model="policy", messages=ASK, **given)
            [choice] = (await answered(session, call, said))[0].choices
            assert (choice.message.content, choice.message.tool_calls) == (said["text"], None)
            assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"model": "gpt-5"}, 404, "model"),
        ({"n": 2}, 400, "n"),
        ({"stop": ["."]}, 400, "stop"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"top_logprobs": 5}, 400, "top_logprobs"),
        ({"logit_bias": {"50256": -100}}, 400, "logit_bias"),
        ({"tool_choice": "required", "tools": TOOLS}, 400, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "critic", "content": ""}]}, 400, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"extra_body": {"beams": 4}}, 400, "beams"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_unsupported_parameters_are_refused(asked: dict[str, Any], status: int, param: str) -> None:
    async with served() as (_, _, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(**{"model": "policy", "messages": ASK} | asked)
    assert (refused.value.status_code, refused.value.body["param"]) == (status, param)


async def test_a_parameter_whose_value_has_no_effect_is_accepted() -> None:
    idle: dict[str, Any] = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "response_format": {"type": "text"},
        "stop": [],
    }  # fmt: skip
    async with served() as (session, _, client):
        said, _ = await answered(
            session, client.chat.completions.create(model="policy", messages=ASK, **idle), turn()
        )
    assert said.choices[0].message.content == "fine"


async def test_a_key_is_of_one_episode_and_ends_with_it() -> None:
    server, one, other = EpisodeEndpoint(), ProgramSession(), ProgramSession()
    async with server.serving(one) as its_own:
        async with server.serving(other) as ended:
            assert (its_own.base_url, its_own.model) == (ended.base_url, ended.model)
            async with client_of(ended) as client:
                assert [model.id async for model in client.models.list()] == ["policy"]
        name, _, secret = its_own.key.partition(".")
        for key in (
            ended.key,
            "sk-1",
            name,
            f"{name}.",
            f"{name}.{secret}x",
            f"{name}.{ended.key[-43:]}",
            "ä.ö",
        ):
            async with httpx.AsyncClient() as plain:
                answer = await plain.post(
                    f"{its_own.base_url}/chat/completions", headers={b"Authorization": f"Bearer {key}".encode()}
                )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), key
    async with httpx.AsyncClient() as plain:
        with pytest.raises(httpx.ConnectError):
            await plain.get(f"{its_own.base_url}/models")


async def test_a_bad_body_or_path_gets_an_error_in_openais_shape() -> None:
    """The body is no JSON or too large."""
    async with served() as (_, endpoint, _), httpx.AsyncClient(
        base_url=endpoint.base_url, headers={"Authorization": f"Bearer {endpoint.key}"}
    ) as plain:  # fmt: skip
        for body, status in (
            (b"{", 400),
            (b"[]", 400),
            (b"\xff", 400),
            (b"[" * 100_000, 400),
            (b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
            (b" " * (MAX_BODY_BYTES + 1), 413),
        ):
            answer = await plain.post("/chat/completions", content=body)
            assert answer.status_code == status, body[:20]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await plain.post("/embeddings", json={})).json()["error"]["message"].endswith("Not Found")


async def test_after_the_end_waiting_and_later_calls_are_refused() -> None:
    async with served() as (session, _, client):
        asking = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=ASK))
        await session.next()
        session.end()
        for call in (asking, client.chat.completions.create(model="policy", messages=ASK)):
            with pytest.raises(openai.BadRequestError, match="has no more turns") as refused:
                await call
            assert refused.value.code == "context_length_exceeded"
        assert session.is_at_limit


@pytest.mark.parametrize("is_abrupt", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "rest",
    ["Content-Length: 9\r\n\r\n{", "Content-Length: 9\r\nExpect: 100-continue\r\n\r\n{", "no header\r\n\r\n"],
    ids=["in its body", "before it may send its body", "without HTTP"],
)
async def test_a_client_that_leaves_mid_call_is_one_quiet_log_line(
    rest: str, is_abrupt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served() as (_, endpoint, _):
        address = httpx.URL(endpoint.base_url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        writer.write(f"{head}{endpoint.key}\r\n{rest}".encode())
        await writer.drain()
        if is_abrupt:
            option = struct.pack("ii", 1, 0)  # a close then sends a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        writer.close()
        async with asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110  # the server's task logs it
                await asyncio.sleep(0.005)
    [line] = [each for each in caplog.records if each.name.startswith(("aiohttp", "rolemesh"))]
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert line.getMessage().startswith("a client left, or sent no HTTP: ")
