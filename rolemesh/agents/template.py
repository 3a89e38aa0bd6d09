"""Appends messages to a conversation in token ids: what a chat template adds, and nothing made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolemesh.agents.environment import Chat
from rolemesh.errors import InvalidConfig

MARK = "mark of a turn"  # a turn that no template writes by itself
ASKS: dict[str, Any] = {"role": "user", "content": "ask"}
TURN: dict[str, Any] = {"role": "assistant", "content": MARK}
# Conversations on which a template is tried: what a turn is, and what comes after it.
TRIED: tuple[tuple[str, Chat], ...] = (
    ("a user's message", [{"role": "user", "content": "once more"}]),
    ("a tool's answer", [{"role": "tool", "content": "42", "name": "add", "tool_call_id": "call-1"}]),
)
THOUGHT = "<think>\nso\n</think>\n\n"
WITH_BLANKS = f"\n {MARK} \n"


class Template:
    """A tokenizer's chat template, for conversations that grow.

    Attributes:
        ends_turn: text that it writes after a turn of the policy, before any message follows.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        variables: of the template (data.apply_chat_template_kwargs).

    Raises:
        InvalidConfig: the template does not put a turn's text into the conversation as it is.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._variables = variables or {}
        self._begun = self._render([ASKS, TURN], opens=False)
        _, found, self.ends_turn = self._begun.rpartition(MARK)
        if not found:
            raise self._refused("its output does not contain the text of the policy's turn unchanged")

    def after_turn(self, messages: Chat, end: str) -> list[int]:
        """Return the ids that follow a turn of the policy: its end, messages, the next one's begin.

        Args:
            messages: what the policy gets next.
            end: text of the special token at the end of the policy's turn; "" if it ends without one.
        """
        return self._ids(_after_end(self.ends_turn + self._added(messages), end), end or MARK)

    def after_all(
        self, prompt: list[int], messages_so_far: Chat, messages: Chat, end: str
    ) -> tuple[bool, list[int]]:
        """Return whether the template rewrites earlier turns, and the ids: if so, of the whole conversation;
        else those that follow its last turn.

        Args:
            prompt: the ids before all turns.
            messages_so_far: what followed, up to a turn of the policy.
            messages: what the policy gets next.
            end: as for after_turn.
        """
        # What it saw and said, not the rendering of it: some templates drop the thoughts of the last turn, too.
        begun = self._render([ASKS, *messages_so_far[:-1]], opens=True) + str(messages_so_far[-1]["content"])
        whole = self._render([ASKS, *messages_so_far, *messages], opens=True)
        if whole.startswith(begun):
            return False, self._ids(_after_end(whole[len(begun) :], end), end or MARK)
        asked = self._render([ASKS], opens=False)
        opened = self._render([ASKS], opens=True)
        if not (whole.startswith(asked) and opened.startswith(asked)):
            raise self._refused(f"{_kinds(messages)} after a turn of the policy changes the prompt")
        opens = self._ids(opened[len(asked) :], asked)
        before = prompt[: -len(opens)] if opens and prompt[-len(opens) :] == opens else prompt
        return True, before + self._ids(whole[len(asked) :], asked)

    def prompt(self, messages: Chat, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the policy begins, as data sets have prompts."""
        return self._ids(self._render(messages, opens=True, tools=tools))

    def after_prompt(self, messages: Chat) -> list[int]:
        """Return the ids that follow a prompt without the policy's begin: messages, and that begin."""
        prompt = self._render([ASKS], opens=False)
        text = self._render([ASKS, *messages], opens=True)
        if not text.startswith(prompt):
            raise self._refused(f"{_kinds(messages)} after a prompt changes what came before")
        return self._ids(text[len(prompt) :], prompt)

    def _added(self, messages: Chat) -> str:
        """Return what the template appends for messages that follow a turn, up to where the policy begins."""
        text = self._render([ASKS, TURN, *messages], opens=True)
        if not text.startswith(self._begun):
            raise self._refused(f"{_kinds(messages)} after a turn of the policy changes what came before")
        return text[len(self._begun) :]

    def _render(self, messages: Chat, *, opens: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                add_generation_prompt=opens,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # the template is the model's code and may raise anything
            name = self._tokenizer.name_or_path
            raise InvalidConfig(f"the chat template of {name!r} refuses {_kinds(messages)}: {error}") from error
        return text

    def _ids(self, text: str, before: str = "") -> list[int]:
        """Tokenise text as it is tokenised after other text.

        Many SentencePiece tokenizers write a blank before the first text of all, and nowhere else. Where the
        two texts share a token, this one is tokenised alone.
        """
        known, whole, alone = self._tokenizer([before, before + text, text], add_special_tokens=False)[
            "input_ids"
        ]
        following: list[int] = whole[len(known) :] if whole[: len(known)] == known else alone
        return following

    # ------------------------------------------------------------------------------- at start

    def check(self, rewrites: str = "refuse") -> None:
        """Try the template on conversations of two turns.

        What is appended turn by turn must be the text of the whole conversation. A template that rewrites
        earlier turns (some drop the thoughts of all but the last, or the blanks at a turn's ends) shows the
        policy another text when it is used than when it was trained.

        Args:
            rewrites: "keep" accepts that: ids stay as they were sampled. "split" accepts it, too: after_all
                makes another prompt there.

        Raises:
            InvalidConfig: they differ; the message says after what.
        """
        for what, messages in TRIED:
            if rewrites == "split":
                turn = {"role": "assistant", "content": THOUGHT + MARK}
                self.after_all([], [turn, *messages, turn], messages, "")
                continue
            texts = [MARK] + ([THOUGHT + MARK, WITH_BLANKS] if rewrites == "refuse" else [])
            for text in texts:
                turn = {"role": "assistant", "content": text}
                grown = self._render([ASKS], opens=True) + text + self.ends_turn
                grown += self._added(messages) + text + self.ends_turn
                whole = self._render([ASKS, turn, *messages, turn], opens=False)
                if grown != whole:
                    at = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), 0)
                    raise self._refused(
                        f"with {what} it rewrites an earlier turn: turn by turn the conversation has "
                        f"{_near(grown, at)}, as a whole {_near(whole, at)}. Set "
                        "rollout.multi_turn.template_rewrites to split, to show the policy what the template "
                        "makes of it from there on, or to keep, to leave the ids as they were sampled"
                    )

    def _refused(self, why: str) -> InvalidConfig:
        name = self._tokenizer.name_or_path
        return InvalidConfig(f"the chat template of {name!r} cannot be continued token by token: {why}")


def _after_end(following: str, end: str) -> str:
    """Return what follows a turn after the token that the policy has written.

    This is the turn's end or, as in GLM-4, the begin of the next message. Llama 2's has a blank before.
    """
    bare = following if following.startswith(end) else following.lstrip()
    return bare.removeprefix(end) if end and bare.startswith(end) else following


def _near(text: str, at: int) -> str:
    return repr(text[max(0, at - 20) : at + 20])


def _kinds(messages: Chat) -> str:
    return "messages of " + ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
