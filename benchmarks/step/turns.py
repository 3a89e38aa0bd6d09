"""How a contestant is asked for a step: a line in, a line of JSON out, so that contestants of several
environments take turns on one machine. Nothing but the standard library: TRL's environments import this too."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_out = None
_cpu_s = 0.0


def begin() -> None:
    """What anybody prints from here on goes to standard error: standard output is for results alone."""
    global _out
    _out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def answer(result: dict[str, Any]) -> None:
    """One line: that we are ready, or what a step took; with the processor seconds of this process since it was
    asked for."""
    print(json.dumps(result | {"cpu_s": time.process_time() - _cpu_s}), file=_out)


def wait() -> bool:
    """Until the next step is asked for; False: no other will be."""
    global _cpu_s
    asked = bool(sys.stdin.readline())
    _cpu_s = time.process_time()
    return asked
