"""Tries a tokenizer's chat template before any row is rendered with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rolemesh.data import template_process
from rolemesh.errors import InvalidData

OWN_TEMPLATE = "actor.model.custom_chat_template"
CPU_SECONDS = 5
WALL_SECONDS = 120  # for a process that waits for a processor


def check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Check that a tokenizer has a chat template, and that it renders a short conversation.

    It is code from a model's directory, which may take any memory and time. So it is tried in a process with
    limits first (rolemesh/data/template_process.py). Other errors of the template are left to the rows.

    Args:
        tokenizer: a Hugging Face tokenizer.
        variables: of the template (data.apply_chat_template_kwargs).

    Raises:
        InvalidData: it has none, it exceeds the limits, or the process got no processor to try it.
    """
    name = tokenizer.name_or_path
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InvalidData(
            f"the tokenizer of {name!r} has no chat template, which rows need; take a model that has one, or "
            f"set {OWN_TEMPLATE} to a template's text"
        )
    known = tokenizer.special_tokens_map | dict(variables)
    for text in template.values() if isinstance(template, dict) else (template,):
        try:
            ends = _ends(json.dumps({"template": text, "variables": known}, default=str))
        except subprocess.TimeoutExpired as error:
            raise InvalidData(
                f"the chat template of {name!r} was not tried within {WALL_SECONDS} s: the process for it got "
                f"less than {CPU_SECONDS} s of a processor, so the machine is overloaded, or a file system "
                "does not answer; start again when it is less busy"
            ) from error
        if not ends:
            raise InvalidData(
                f"the chat template of {name!r} needs more than {template_process.MOST_BYTES >> 20} MiB of "
                f"memory, {CPU_SECONDS} s of a processor, or {template_process.MOST_CHARACTERS:,} characters "
                f"for a conversation of two words; correct it, or set {OWN_TEMPLATE} to a template's text"
            )


@lru_cache(maxsize=64)
def _ends(request: str) -> bool:
    """Return whether a template stays within the limits.

    Raises:
        TimeoutExpired: not known within WALL_SECONDS. This is not cached: the next try may have more luck.
    """
    command = [sys.executable, "-P", template_process.__file__, str(CPU_SECONDS)]
    tried = subprocess.run(
        command,
        input=request.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=WALL_SECONDS,
        check=False,
    )
    if tried.returncode not in (0, template_process.TOO_LARGE, -signal.SIGXCPU, -signal.SIGKILL):
        words = tried.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"{Path(command[2]).name} exited with {tried.returncode}: {words[-1000:]}")
    return tried.returncode == 0


def writes_arguments_as_text(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Return whether a template takes a tool call's arguments as JSON text alone.

    Most write a mapping as JSON. DeepSeek's join text to it. Others write it as Python prints it.
    """

    def takes(arguments: str | dict[str, int]) -> bool:
        call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": arguments}}
        says = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": "ask"}, says], tokenize=False, **variables
            )
        except Exception:  # the template is the model's code and may raise anything
            return False
        return isinstance(arguments, str) or str(arguments) not in text

    return not takes({"a": 1}) and takes('{"a": 1}')
