"""What a policy wrote becomes calls: well-formed, malformed, several, and none."""

from __future__ import annotations

import itertools
import json
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.agents.call_formats import MAX_CALLS, MAX_DEPTH, Call, _tagged, checked, hermes, llama3_json
from rolemesh.agents.messages import messages_of
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.plugin_imports import forget
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.model import PolicyModelConfig
from rolemesh.errors import InvalidBatch, InvalidConfig, RoleFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.conversations.conversation import ChatCodec

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "ü"]}'


def tagged(*calls: str) -> str:
    return "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in calls)


def test_hermes_calls_keep_their_order_and_the_text_around_them() -> None:
    text = "I add. " + tagged(ADD, '{"name": "now"}') + "Then I wait."
    content, calls = hermes(text)
    assert calls == [Call("add", ARGUMENTS), Call("now", "{}")]
    assert content == "I add. \n\nThen I wait."


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", 'expected an object with "name"'),
        ('{"name": 3}', 'expected an object with "name"'),
        ('{"name": ""}', 'expected an object with "name"'),
        ('{"name": "add", "arguments": [1]}', "expected \"arguments\" of 'add' to be an object"),
        ('{"name": "add", "arguments": "{"}', "expected \"arguments\" of 'add' to be an object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_hermes_call_says_what_was_wrong(call: str, problem: str) -> None:
    _, [found] = hermes(tagged(call))
    assert (found.name, found.arguments) == ("", "")
    assert found.malformed.startswith(problem)


def test_a_call_that_is_not_closed_is_malformed_and_no_text() -> None:
    content, [whole, cut] = hermes("a" + tagged(ADD) + "b<tool_call>" + ADD)
    assert content == "a\nb"
    assert whole.name == "add"
    assert cut == Call(malformed="<tool_call> without </tool_call>")


def test_a_turn_without_calls_is_its_text_as_it_is() -> None:
    text = " 1 + 1 = 2\n"
    assert hermes(text) == (text, [])
    assert llama3_json(text) == (text, [])


def test_arguments_that_are_quoted_are_the_object() -> None:
    quoted = json.dumps({"name": "add", "arguments": ARGUMENTS})
    assert hermes(tagged(quoted))[1] == [Call("add", ARGUMENTS)]


def test_llama_calls_are_split_by_semicolons_and_may_have_a_tag() -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert llama3_json(call) == ("", [Call("add", '{"a": 1}')])
    assert llama3_json(f"<|python_tag|>{call}; {call}")[1] == [Call("add", '{"a": 1}')] * 2
    assert llama3_json(f"{call}\n<|python_tag|>{call}")[1] == [Call("add", '{"a": 1}')] * 2
    assert llama3_json(f"{call}; {call[:9]}")[1][1].malformed.startswith("not JSON")
    assert llama3_json("<|python_tag|>print(1)")[1][0].malformed.startswith("not JSON")


@pytest.mark.parametrize("sentence", ["I wait for it.", "; and then 4", "\n\nThat is {a} sum."])
def test_a_sentence_after_a_llama_call_is_text(sentence: str) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert llama3_json(call + sentence) == (sentence.lstrip("; \n"), [Call("add", '{"a": 1}')])


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_are_read_under_either_key(key: str) -> None:
    call = f'{{"name": "add", "{key}": {{"a": 1}}}}'
    assert hermes(tagged(call))[1] == llama3_json(call)[1] == [Call("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("keys", "got"),
    [
        ('"args": {"a": 1}', "got 'args'"),
        ('"a": 1, "b": 2', "got 'a', 'b'"),
        ('"parameters": {}, "arguments": {"a": 1}', "got 'arguments', 'parameters'"),
    ],
)
def test_arguments_that_may_be_elsewhere_are_never_an_empty_call(keys: str, got: str) -> None:
    call = f'{{"name": "add", {keys}}}'
    for [found], key in ((hermes(tagged(call))[1], "arguments"), (llama3_json(call)[1], "parameters")):
        assert found.malformed == f"expected \"{key}\" of 'add' and no other key for its arguments; {got}"


# ----------------------------------------------------------------------------------------- thoughts

LLAMA_ADD = '{"name": "add", "parameters": {"a": 1, "b": [2, "ü"]}}'


@pytest.mark.parametrize("begin", ["<think>", "", "\n<think>\n"])  # "": the prompt ends with <think>
@pytest.mark.parametrize(
    ("read", "call"), [(hermes, f"<tool_call>{ADD}</tool_call>"), (llama3_json, LLAMA_ADD)]
)
def test_a_call_in_a_thought_is_text(begin: str, read: Any, call: str) -> None:
    for thought in (f"{begin}{call} could do.</think>", f"{begin}I could write {call}.</think>\n\n"):
        assert read(thought + call) == (thought.strip(), [Call("add", ARGUMENTS)])
        assert read(thought + "It is 4.") == (thought + "It is 4.", [])


@pytest.mark.parametrize("begin", ["<think>", ""])
@pytest.mark.parametrize("mention", ["<tool_call>", "<tool_call>{", "</tool_call>", "<tool_call>a</tool_call>"])
def test_a_tag_in_a_thought_hides_no_call_after_it(begin: str, mention: str) -> None:
    thought = f"{begin}I have to use {mention} for this.</think>"
    assert hermes(f"{thought}<tool_call>{ADD}</tool_call>") == (thought, [Call("add", ARGUMENTS)])
    assert hermes(thought + "It is 4.") == (thought + "It is 4.", [])


def test_a_thought_after_a_call_keeps_the_call() -> None:
    thought = f"<think>Not <tool_call>{ADD}</tool_call> again.</think>"
    content, calls = hermes(tagged(ADD) + thought + tagged(ADD))
    assert (content, calls) == (f"{thought}".strip(), [Call("add", ARGUMENTS)] * 2)
    assert llama3_json(LLAMA_ADD + thought) == (thought, [Call("add", ARGUMENTS)])


@pytest.mark.parametrize("begin", ["<think>so</think>", "so</think>"])  # by the turn, or by the prompt
@pytest.mark.parametrize("after", ["</think>", " ends with the </think> tag.", "</think></think>"])
def test_a_second_end_of_thought_is_text_and_keeps_earlier_calls(begin: str, after: str) -> None:
    found = (f"{begin}{after}", [Call("add", ARGUMENTS)])
    assert hermes(f"{begin}<tool_call>{ADD}</tool_call>{after}") == found
    assert llama3_json(f"{begin}{LLAMA_ADD}{after}") == (f"{begin}{after.lstrip()}", found[1])


def test_after_a_thought_a_call_ends_only_at_its_closing_tag() -> None:
    broken = '{"name": "write", "arguments": {"text": "a</think>\nb"}}'
    thought = "<think>so</think>"
    content, [first, second, third] = hermes(thought + tagged(ADD, broken, ADD))
    assert (content, first, third) == (thought, Call("add", ARGUMENTS), Call("add", ARGUMENTS))
    assert second.malformed.startswith("not JSON: Invalid control character")


def test_a_broken_call_with_a_thought_tag_keeps_earlier_calls() -> None:
    """The tag stands in a string of the arguments, and the call is malformed."""
    broken = '{"name": "write", "arguments": {"text": "a</think>\nb"}}'
    content, [good, malformed] = hermes(tagged(ADD, broken))
    assert (content, good) == ("", Call("add", ARGUMENTS))
    assert malformed.malformed.startswith("not JSON: Invalid control character")


def test_a_call_counts_if_the_thought_is_never_closed() -> None:
    assert hermes(f"<think>So:<tool_call>{ADD}</tool_call>") == ("<think>So:", [Call("add", ARGUMENTS)])


@pytest.mark.parametrize("said", ["</tool_call>", "<tool_call>", "</think>", "<think>", 'a\\"</tool_call>{'])
def test_a_tag_in_an_argument_is_text(said: str) -> None:
    arguments = f'{{"text": "so {said} it ends"}}'
    for read, call in (
        (hermes, tagged(f'{{"name": "write", "arguments": {arguments}}}')),
        (llama3_json, f'{{"name": "write", "parameters": {arguments}}}'),
    ):
        assert read(call) == ("", [Call("write", arguments)])
        assert read(f"<think>I write.</think>{call}")[1] == [Call("write", arguments)]
    two = hermes(tagged(f'{{"name": "write", "arguments": {arguments}}}', ADD))[1]
    assert two == [Call("write", arguments), Call("add", ARGUMENTS)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        ('{"number": ' + "7" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"deep": ' + "[" * 80 + "]" * 80 + "}", "nested deeper than 64 levels"),
    ],
)
def test_every_call_can_be_sent_or_is_malformed(arguments: str, why: str) -> None:
    for read, key in ((hermes, "arguments"), (llama3_json, "parameters")):
        text = f'{{"name": "add", "{key}": {arguments}}}'
        [call] = checked(read(tagged(text) if read is hermes else text))[1]
        assert why in call.malformed
        assert not call.name
    with_name = '{"name": "\\ud83d", "arguments": {}}'
    assert "half of a surrogate pair" in checked(hermes(tagged(with_name)))[1][0].malformed


def test_tags_pair_like_the_shortest_match_of_a_regex() -> None:
    pairs = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    for number in range(1, 7):
        for pieces in itertools.product(("<tool_call>", "</tool_call>", "a\n", "<tool_"), repeat=number):
            text = "".join(pieces)
            outside, inside, cut = _tagged(text)
            assert ("".join([*outside, cut]), inside) == (pairs.sub("", text), pairs.findall(text))


def test_tags_that_are_never_closed_are_read_in_linear_time() -> None:
    def cpu_s(num: int) -> float:
        began = time.thread_time()
        assert hermes("<tool_call>" * num)[1] == [Call(malformed="<tool_call> without </tool_call>")]
        return time.thread_time() - began

    assert min(cpu_s(4_000) for _ in range(3)) < 0.3  # with the square three seconds


@pytest.mark.parametrize(
    ("read", "text", "num_calls"),
    [
        (hermes, "<tool_call>{</tool_call>" * 20_000, MAX_CALLS),
        (hermes, "<tool_call>{</think>" * 20_000, 1),
        (llama3_json, "{</think>" * 40_000, 1),
    ],
    ids=["closed calls", "calls and thoughts", "Llama's calls and thoughts"],
)
def test_calls_that_are_no_json_are_read_in_linear_time(read: Any, text: str, num_calls: int) -> None:
    began = time.thread_time()
    assert len(read(text)[1]) == num_calls
    assert time.thread_time() - began < 1  # with the square more than two seconds


def test_blanks_between_calls_take_no_memory() -> None:
    tracemalloc.start()
    try:
        calls = llama3_json(LLAMA_ADD + " " * 500_000 + LLAMA_ADD)[1]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert calls == [Call("add", ARGUMENTS)] * 2
    assert peak < 8 << 20  # a text of half a megabyte; with a hundred bytes for each blank 50 MB


def test_arguments_of_every_depth_are_read_or_refused() -> None:
    """json.loads reads some depths that json.dumps cannot write."""
    for depth in range(1, 1_100):
        nested = f'{{"x": {"[" * depth}{"]" * depth}}}'
        for text, read in (
            (f'{{"name": "a", "parameters": {nested}}}', llama3_json),
            (tagged(f'{{"name": "a", "arguments": {nested}}}'), hermes),
        ):
            [call] = checked(read(text))[1]
            assert bool(call.malformed) == (depth >= MAX_DEPTH), depth  # the object is a level, too


def test_a_message_with_arguments_too_deep_for_json_is_named() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"x": nested}}}
    with pytest.raises(InvalidBatch, match=r"^the opening, message 0, has a call .*RecursionError"):
        messages_of([{"role": "assistant", "content": "", "tool_calls": [call]}], "the opening")


def test_there_are_no_more_calls_than_anybody_would_run() -> None:
    assert len(hermes(tagged(*[ADD] * 1000))[1]) == MAX_CALLS
    assert len(llama3_json(";".join([ADD] * 1000))[1]) == MAX_CALLS


@settings(deadline=None)
@given(
    st.text(alphabet=st.sampled_from(list('<tool_call>/{}[]":,name 1e9\\')), max_size=200)
    | st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", ADD, LLAMA_ADD, "{", '"', "; "])
    ).map("".join)
)
def test_whatever_is_written_is_read(text: str) -> None:
    for read in (hermes, llama3_json):
        _, calls = read(text)
        for call in calls:
            assert bool(call.malformed) != bool(call.name)
            assert not call.name or isinstance(json.loads(call.arguments), dict)


# ----------------------------------------------------------------------------- with special tokens


def codec_with(tiny_model: Path, **rollout: Any) -> tuple[Any, ChatCodec]:
    """A tokenizer with special tokens for thoughts and calls, and its codec."""
    multi_turn = {"enable": True}
    job = make_job(
        {"actor": {"model": {"path": str(tiny_model)}}, "rollout": {"multi_turn": multi_turn, **rollout}}
    )
    tokenizer = load_tokenizer(job.actor.model)
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer, ChatCodec(job, tokenizer)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_turn_that_stops_at_a_special_tag_has_its_call(tiny_model: Path, end: str) -> None:
    tokenizer, codec = codec_with(tiny_model, name="vllm", stop=["</tool_call>"])
    ids = tokenizer(f"<tool_call>{ADD}</tool_call>{end}", add_special_tokens=False)["input_ids"]
    [call] = codec.parse_turn(codec.text_of(ids), 1).tool_calls
    assert (call.name, call.arguments, call.malformed) == ("add", ARGUMENTS, "")
    assert codec.is_whole(ids)


@pytest.mark.parametrize("declared", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("said", ["It is 4.", f"<tool_call>{ADD}</tool_call>"])
def test_the_special_token_that_ends_a_turn_is_not_in_its_text(
    tiny_model: Path, tmp_path: Path, declared: str, said: str
) -> None:
    """A base model whose EOS is another token stops there by rollout.stop."""
    base = load_tokenizer(PolicyModelConfig(path=str(tiny_model)))
    base.eos_token = declared
    base.save_pretrained(tmp_path)
    tokenizer, codec = codec_with(tmp_path, name="vllm", stop=["<|im_end|>"])
    ids = tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert (codec.text_of(ids), codec.is_whole(ids), codec.end_of(ids)) == (said, True, "<|im_end|>")
    answer = [{"role": "tool", "content": "42"}]
    added = tokenizer.decode(codec.ids_after(answer, codec.end_of(ids)))
    assert added == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert not codec.is_whole(ids[:-1])


@pytest.mark.parametrize("cut", ["<think>so</think>", "<think>", f"<tool_call>{ADD}</tool_call>"])
def test_a_turn_cut_after_a_special_token_keeps_its_text(tiny_model: Path, cut: str) -> None:
    tokenizer, codec = codec_with(tiny_model)
    ids = tokenizer(cut, add_special_tokens=False)["input_ids"]
    assert (codec.text_of(ids), codec.is_whole(ids)) == (cut, False)
    ended = [*ids, tokenizer.eos_token_id]
    assert (codec.text_of(ended), codec.is_whole(ended)) == (cut, True)


# ------------------------------------------------------------------------------------ of your own


@pytest.fixture
def slashes(tmp_path: Path) -> Iterator[str]:
    """The plug-in of docs/plugins.md."""
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    [code] = re.findall(r"^```python\n(# slashes\.py\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "slashes.py").write_text(code)
    yield str(tmp_path / "slashes.py")
    forget(str(tmp_path / "slashes.py"))


def job_with(plugin: str, model: Path, format: str = "slashes") -> JobConfig:
    multi_turn = {"enable": True, "format": format}
    return make_job(
        {"plugins": [plugin], "actor": {"model": {"path": str(model)}}, "rollout": {"multi_turn": multi_turn}}
    )


def test_a_plugin_format_reads_turns_and_counts_for_a_resume(slashes: str, tiny_model: Path) -> None:
    job = job_with(slashes, tiny_model)
    tokenizer = load_tokenizer(job.actor.model)
    heard = ChatCodec(job, tokenizer).parse_turn("I ask.\n/search a cat\n/now x", 3)
    assert heard.content == "I ask."
    assert [(call.id, call.name, json.loads(call.arguments)) for call in heard.tool_calls] == [
        ("call-3-0", "search", {"text": "a cat"}),
        ("call-3-1", "now", {"text": "x"}),
    ]
    assert CALL_FORMATS["slashes"] in job.parts


def test_an_unknown_format_is_refused_with_those_that_there_are(slashes: str, tiny_model: Path) -> None:
    said = rf"'slahes', which is none of hermes, llama3_json; of {slashes}: slashes; did you mean 'slashes'\?"
    with pytest.raises(InvalidConfig, match=said):
        job_with(slashes, tiny_model, "slahes")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("text", r"TypeError: a call format returns \(text, calls\)"),
        ("(text, [('add', '{}')])", "TypeError: calls should be a list of rolemesh"),
        ("(text, [Call('add', {})])", "TypeError: name, arguments and malformed"),
        ("(text, [Call('add', '[1]')])", "ValueError: a call should have a name, and a JSON object"),
        ("(text, [Call(None, '{}')])", "TypeError: name, arguments"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(slashes.py, line 13\)"),
    ],
)
def test_a_format_that_returns_something_else_is_named(
    slashes: str, tiny_model: Path, returned: str, said: str
) -> None:
    code = Path(slashes).read_text()
    Path(slashes).write_text(code[: code.index("    calls =")] + f"    return {returned}\n")
    job = job_with(slashes, tiny_model)
    with pytest.raises(RoleFailed, match=rf"call format slashes of {slashes} raised {said}"):
        ChatCodec(job, load_tokenizer(job.actor.model)).parse_turn("AB", 1)
