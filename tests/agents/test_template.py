"""What a chat template adds to a conversation is appended in ids, and no id before it changes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolemesh.agents.template import Template
from rolemesh.errors import InvalidConfig
from rolemesh.models.tiny import byte_tokenizer

END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thoughts of turns before the last question are dropped, and tools answer as a user.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As DeepSeek-R1's: the thoughts of every turn are dropped, and the prompt opens those of the next.
THOUGHTLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# As GLM-4's: nothing ends a turn but the begin of the next message, which the policy writes, too.
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
    "{% else %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)

# As Llama 3's: the blanks at a message's ends are dropped.
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")

NO_CONTINUING = "cannot be continued token by token: "


def tokenizer_with(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def sentence_piece(template: str, prepend_scheme: str) -> Any:
    """A tokenizer of one token per character that writes blanks as SentencePiece does."""
    characters = ["▁", "\n", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["<s>", "</s>", END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = template
    return fast


def text(tokenizer: Any, ids: list[int]) -> str:
    decoded: str = tokenizer.decode(ids)
    return decoded


def test_a_turn_that_the_policy_ended_is_not_ended_twice() -> None:
    tokenizer = tokenizer_with(CHATML)
    template = Template(tokenizer)
    answer = [{"role": "tool", "content": "42"}]
    added = f"\n<|im_start|>tool\n42{END}\n{ASSISTANT}"
    assert text(tokenizer, template.after_turn(answer, END)) == added
    assert text(tokenizer, template.after_turn(answer, "")) == END + added
    assert text(tokenizer, template.after_turn(answer, "<|endoftext|>")) == END + added


@pytest.mark.parametrize(
    ("template", "end", "added"),
    [
        (GLM, "<|observation|>", "\n42<|assistant|>\n"),
        (GLM, "<|user|>", "<|observation|>\n42<|assistant|>\n"),
        (GLM, "", "<|observation|>\n42<|assistant|>\n"),
        (LLAMA_2, "</s>", "<s>[INST] 42 [/INST]"),
        (LLAMA_2, "", " </s><s>[INST] 42 [/INST]"),
    ],
)
def test_a_turn_end_written_by_the_policy_is_not_written_twice(template: str, end: str, added: str) -> None:
    tokenizer = tokenizer_with(template)
    appending, answer = Template(tokenizer), [{"role": "tool", "content": "42"}]
    assert text(tokenizer, appending.after_turn(answer, end)) == added
    if template == GLM:
        appending.check()
        said = [{"role": "assistant", "content": "I ask."}]
        is_anew, ids = appending.after_all([], said, answer, end)
        assert (is_anew, text(tokenizer, ids)) == (False, added)


def test_variables_of_the_template_are_in_what_is_appended() -> None:
    thoughtless = "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
    tokenizer = tokenizer_with(CHATML + thoughtless)
    answer = [{"role": "tool", "content": "42"}]
    added = text(tokenizer, Template(tokenizer, {"enable_thinking": False}).after_turn(answer, END))
    assert added == text(tokenizer, Template(tokenizer).after_turn(answer, END)) + "<think></think>"


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_ids_turn_by_turn_equal_the_whole_conversations(template: str) -> None:
    tokenizer = tokenizer_with(template)
    end = tokenizer.convert_tokens_to_ids(END)
    turns = ["I ask. ", "Straße", ""]
    answers = [[{"role": "tool", "content": "a\nb"}, {"role": "tool", "content": "é"}]] * 2
    template_ = Template(tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for turn, said in zip(turns, [*answers, []], strict=True):
        messages += [{"role": "assistant", "content": turn}, *said]
        ids += [*tokenizer(turn, add_special_tokens=False)["input_ids"], end]
        if said:
            ids += template_.after_turn(said, END)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text(tokenizer, ids) + "\n" == whole


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    ("template", "end"),
    [(LLAMA_2, "</s>"), (LLAMA_2, ""), (CHATML.replace("<|im_start|>", "="), END), (CHATML, "")],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_sentence_piece_ids_equal_the_whole_conversations(
    template: str, end: str, role: str, scheme: str
) -> None:
    tokenizer = sentence_piece(template, scheme)
    template_ = Template(tokenizer)
    asked, answer = {"role": "user", "content": "1+1"}, {"role": role, "content": "42"}
    said = [asked, {"role": "assistant", "content": "I ask."}, answer]
    whole = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    turn = whole[: whole.index("I ask.") + len("I ask.")]
    if end:
        turn = whole[: whole.index(end, len(turn)) + len(end)]
    begun = tokenizer(turn, add_special_tokens=False)["input_ids"]
    assert begun + template_.after_turn([answer], end) == ids
    if template != LLAMA_2:  # which has a blank before each turn
        assert template_.after_all([], said[1:2], [answer], end) == (False, ids[len(begun) :])


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("template", [FORGETFUL.replace("<|im_start|>", "="), LLAMA_2])
def test_sentence_piece_rewrites_have_the_ids_of_the_whole(template: str, scheme: str) -> None:
    """So has what an environment says before the first turn."""
    tokenizer = sentence_piece(template, scheme)
    template_, asked = Template(tokenizer), {"role": "user", "content": "1+1"}
    first = {"role": "user", "content": "sure?"}

    def ids(messages: list[dict[str, Any]], opens: bool = True) -> Any:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False)
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    assert ids([asked], opens=False) + template_.after_prompt([first]) == ids([asked, first])
    if template != LLAMA_2:
        thought = {"role": "assistant", "content": "<think>so</think>2"}
        anew = template_.after_all(ids([asked]), [thought], [first], END)
        assert anew == (True, ids([asked, thought, first]))


def test_an_environment_may_speak_between_prompt_and_policy() -> None:
    tokenizer = tokenizer_with(CHATML)
    said = [{"role": "user", "content": "My number has one digit."}]
    prompt = [{"role": "user", "content": "Guess."}]
    whole = tokenizer.apply_chat_template([*prompt, *said], add_generation_prompt=True, tokenize=False)
    begun = tokenizer.apply_chat_template(prompt, tokenize=False)
    assert begun + text(tokenizer, Template(tokenizer).after_prompt(said)) == whole


def test_a_template_that_drops_thoughts_is_refused_by_default() -> None:
    """template_rewrites keep accepts it."""
    template = Template(tokenizer_with(FORGETFUL))
    with pytest.raises(InvalidConfig, match=r"with a user's message it rewrites an earlier turn.*<think>"):
        template.check()
    template.check("keep")
    Template(tokenizer_with(CHATML)).check()


def test_a_template_that_trims_turns_is_refused_by_default() -> None:
    """template_rewrites keep and split accept it."""
    template = Template(tokenizer_with(TRIMMING))
    with pytest.raises(
        InvalidConfig,
        match=r"it rewrites an earlier turn: turn by turn the conversation has '.*assistant.n.n mark of.*', "
        r"as a whole '.*assistant.nmark of.*Set rollout.multi_turn.template_rewrites to split",
    ):
        template.check()
    template.check("keep")
    template.check("split")


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, THOUGHTLESS, TRIMMING])
@pytest.mark.parametrize("answer", [{"role": "user", "content": "sure?"}, {"role": "tool", "content": "4"}])
def test_split_shows_what_the_template_makes_of_the_conversation(template: str, answer: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(template)
    splitting, asked = Template(tokenizer), {"role": "user", "content": "1+1"}
    splitting.check("split")
    prompt = seen = splitting.prompt([asked], [])
    said: list[dict[str, Any]] = []
    for turn in ("so\n</think>2", "2", "<think>\nno\n</think>\n\n3", " 3\n"):
        said.append({"role": "assistant", "content": turn})
        is_anew, ids = splitting.after_all(prompt, said, [answer], END)
        seen = ids if is_anew else seen + tokenizer(turn + END, add_special_tokens=False)["input_ids"] + ids
        said.append(answer)
        whole = tokenizer.apply_chat_template([asked, *said], add_generation_prompt=True, tokenize=False)
        assert text(tokenizer, seen) == whole


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{{ messages[0].content }}",
            f"{NO_CONTINUING}its output does not contain the text of the policy's turn unchanged",
        ),
        (
            "{{ messages | length }}" + CHATML,
            f"{NO_CONTINUING}messages of user after a turn of the policy changes what came before",
        ),
        (
            CHATML + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
            "refuses messages of user, assistant, tool: no tools",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template: str, why: str) -> None:
    """The message names the reason."""
    with pytest.raises(InvalidConfig, match=f"the chat template of '.*' {why}"):
        Template(tokenizer_with(template)).check()
