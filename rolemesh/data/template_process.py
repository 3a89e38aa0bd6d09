"""Renders a short conversation with a chat template, in a process with bounded memory and time.

A template may multiply text, nest loops or double a text in each round. Jinja's sandbox limits only the length
of a range. Outside Linux the memory is not limited; the time and the length of the text are.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 256 << 20  # beyond what the process has at start
MOST_CHARACTERS = 1 << 20
TOO_LARGE = 3  # exit code
AS = resource.RLIMIT_AS
CHATS: tuple[Sequence[dict[str, str]], ...] = (
    [{"role": "user", "content": "ask"}],
    [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}],
)


class Generation(Extension):
    """The tag of templates that mark what the assistant says; here its body is rendered alone."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _try(template: str, variables: dict[str, Any]) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    compiled = environment.from_string(template)
    for chat in CHATS:
        for opens in (True, False):
            length = 0
            for part in compiled.generate(messages=chat, add_generation_prompt=opens, **variables):
                length += len(part)
                if length > MOST_CHARACTERS:
                    raise MemoryError


def _limit(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(AS)
        most = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    _limit(int(sys.argv[1]))
    try:
        _try(request["template"], request["variables"])
    except MemoryError:
        sys.exit(TOO_LARGE)
    except Exception:  # the template is the model's code; rows show its errors
        sys.exit(0)
