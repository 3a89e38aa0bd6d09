"""Finds what the assistant says in a conversation, in tokens: what supervised training learns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from rolemesh.data.messages import Message
from rolemesh.errors import InvalidData

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the tag of templates that mark what the assistant says


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: of the whole conversation.
        spans: first character, and first one beyond, of what the assistant says in each of its turns.
    """

    text: str
    spans: list[tuple[int, int]]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render a conversation, and find the assistant's turns, each with the token that ends it.

    A template with `{% generation %}` marks them. With any other a turn is what is added to the conversation
    before it, with the generation prompt: the text that the model writes itself when it answers.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the conversation.
        tools: that the template describes.
        variables: of the template (data.apply_chat_template_kwargs).

    Raises:
        InvalidData: the template refuses the conversation, or writes earlier turns differently once others
            follow, so the assistant's tokens cannot be found.
    """
    variables = variables or {}
    if GENERATION.search(template := tokenizer.get_chat_template(tools=list(tools) or None)):
        try:
            [text], [spans] = render_jinja_template(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **(tokenizer.special_tokens_map | variables),
            )
        except Exception as error:  # the template is the model's code and may raise anything
            raise InvalidData(f"the chat template refuses it: {error}") from error
        return Rendered(text, [(int(begin), int(end)) for begin, end in spans])
    text = _text(tokenizer, messages, tools, variables, opens=False)
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _text(tokenizer, messages[:number], tools, variables, opens=True)
        after = _text(tokenizer, messages[: number + 1], tools, variables, opens=False)
        end = _end_of_turn(after, len(before), tokenizer)
        if not after.startswith(before) or text[:end] != after[:end]:
            raise InvalidData(
                f"the chat template has no {{% generation %}} marks, and it renders message {number} "
                "differently within the whole conversation, so the assistant's tokens cannot be found; add the "
                "marks to the template, or make a row of each of the conversation's turns"
            )
        spans.append((len(before), end))
    return Rendered(text, spans)


def _end_of_turn(text: str, begin: int, tokenizer: Any) -> int:
    """Return the end of the turn that begins at `begin`: after its last special token, if it has one."""
    ends = [at + len(token) for token in tokenizer.all_special_tokens if (at := text.rfind(token, begin)) >= 0]
    return max(ends, default=len(text))


def _text(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    opens: bool,
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=opens, tokenize=False, **variables
        )
    except Exception as error:  # the template is the model's code and may raise anything
        raise InvalidData(f"the chat template refuses it: {error}") from error
    return text


def tokenised(tokenizer: Any, rendered: Sequence[Rendered]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each conversation, and for each token its turn: k >= 1 in the assistant's k-th turn,
    else -(k + 1) after k turns.

    A token belongs to a turn if all of its characters do.
    """
    texts = [each.text for each in rendered]
    found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(found["input_ids"], found["offset_mapping"], rendered, strict=True)
    return [(ids, _turns(offsets, each.spans)) for ids, offsets, each in pairs]


def _turns(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    turns, number = [], 0
    for begin, end in offsets:
        while number < len(spans) and begin >= spans[number][1]:
            number += 1
        inside = number < len(spans) and spans[number][0] <= begin and end <= spans[number][1]
        turns.append(number + 1 if inside else -(number + 1))
    return turns
