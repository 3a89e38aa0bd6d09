"""A tool that waits, as a slow service does. Only the standard library: TRL's side imports it too."""

from __future__ import annotations

import asyncio
import os
import random

from benchmarks.agents_beside_trl.setting import ANSWER

WAIT_S = "WAIT_S"  # the environment variable with the longest wait, in seconds


async def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: what to look for.
    """
    await asyncio.sleep(random.random() * float(os.environ[WAIT_S]))
    return ANSWER
