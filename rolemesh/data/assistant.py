"""Finds what the assistant says in a conversation, in tokens: what supervised training learns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from rolemesh.data.message_cells import Message
from rolemesh.data.texts import end_tokens
from rolemesh.errors import InvalidData

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the tag of templates that mark what the assistant says


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: of the whole conversation.
        spans: first character, and first one beyond, of what the assistant says in each of its turns.
        ended: whether each of these turns has a token that ends it.
    """

    text: str
    spans: list[tuple[int, int]]
    ended: list[bool]


class TurnEnds:
    """Finds where a turn of the assistant ends in the text of a conversation.

    Args:
        tokenizer: a Hugging Face tokenizer. Any of its special tokens may end a turn within a template's text
            of the turn. A token that follows this text ends the turn if generation stops at it.
    """

    def __init__(self, tokenizer: Any) -> None:
        stops: list[str | None] = tokenizer.convert_ids_to_tokens(sorted(end_tokens(tokenizer)))
        known = [stop for stop in stops if stop]
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = tuple({*tokenizer.all_special_tokens, *added, *known})
        self._stops = tuple(known)
        self._next_stop = re.compile(rf"\s*(?:{'|'.join(map(re.escape, known))})") if known else None

    def of_addition(self, text: str, begin: int) -> int:
        """Return the end of the turn at the end of a text: after its special token, if one ends it."""
        bare = len(text.rstrip())
        return bare if self.ends(text[begin:]) else len(text)

    def beyond(self, text: str, begin: int, end: int) -> int:
        """Return the end of a turn with the token that ends it, if this token follows the turn's text.

        In GLM-4's template it is the next role. Other templates leave it out of `{% generation %}`. Another
        special token at the text's end, such as </tool_call>, does not replace it.
        """
        if self._next_stop is None or text[begin:end].rstrip().endswith(self._stops):
            return end
        found = self._next_stop.match(text, end)
        return found.end() if found else end

    def ends(self, turn: str) -> bool:
        """Return whether a special token ends this text of a turn."""
        return turn.rstrip().endswith(self._special)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    variables: Mapping[str, Any] | None = None,
    ends: TurnEnds | None = None,
) -> Rendered:
    """Render a conversation, and find the assistant's turns, each with the token that ends it, if there is one.

    A template with `{% generation %}` marks them. With any other a turn is what is added to the conversation
    before it, with the generation prompt: the text that the model writes itself when it answers.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the conversation.
        tools: that the template describes.
        variables: of the template (data.apply_chat_template_kwargs).
        ends: of the tokenizer; None: made here.

    Raises:
        InvalidData: the template refuses the conversation, or writes earlier turns differently once others
            follow, so the assistant's tokens cannot be found.
    """
    variables = variables or {}
    ends = ends or TurnEnds(tokenizer)
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
        return _with_ends(text, [(int(begin), int(end)) for begin, end in spans], ends)
    text = _text(tokenizer, messages, tools, variables, opens=False)
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _text(tokenizer, messages[:number], tools, variables, opens=True)
        after = _text(tokenizer, messages[: number + 1], tools, variables, opens=False)
        end = ends.of_addition(after, len(before))
        if not after.startswith(before) or text[:end] != after[:end]:
            raise InvalidData(
                f"the chat template has no {{% generation %}} marks, and it renders message {number} "
                "differently within the whole conversation, so the assistant's tokens cannot be found; add the "
                "marks to the template, or make a row of each of the conversation's turns"
            )
        spans.append((len(before), end))
    return _with_ends(text, spans, ends)


def _with_ends(text: str, spans: Sequence[tuple[int, int]], ends: TurnEnds) -> Rendered:
    whole = [(begin, ends.beyond(text, begin, end)) for begin, end in spans]
    return Rendered(text, whole, [ends.ends(text[begin:end]) for begin, end in whole])


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

    A token belongs to a turn if any of its characters does, as in transformers. So the token is learned in
    which a generation prompt's last blank joins the turn's first word.
    """
    texts = [each.text for each in rendered]
    found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(found["input_ids"], found["offset_mapping"], rendered, strict=True)
    return [(ids, _turns(offsets, each.spans)) for ids, offsets, each in pairs]


def _turns(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    turns = []
    number = 0
    for begin, end in offsets:
        while number < len(spans) and begin >= spans[number][1]:
            number += 1
        # A token without characters is where its begin is.
        inside = number < len(spans) and min(max(end, begin + 1), spans[number][1]) > spans[number][0]
        turns.append(number + 1 if inside else -(number + 1))
    return turns
