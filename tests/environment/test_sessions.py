"""Sandboxed interpreters: code that breaks its own conversation, and openings that are cancelled."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from rolemesh.sandbox.box import ProgramLimits, Sandbox
from rolemesh.sandbox.interpreter import Interpreters

# It answers for itself, several thousand times, and reads no call any more.
ANSWERS_ITSELF = """
import os
for file in range(3, 64):
    try: os.write(file, b"d" * 4000)
    except OSError: pass
while True: pass
"""


async def test_an_interpreter_that_answers_without_reading_is_ended() -> None:
    """It answers calls by itself before it reads them."""
    interpreters = Interpreters()
    interpreter = await interpreters.open(ProgramLimits(cpu_s=60, wall_s=600.0))
    said = await interpreter.run(ANSWERS_ITSELF)
    async with asyncio.timeout(60):
        while not said.ended:
            said = await interpreter.run("print(1)")
    assert said.ended == "it was ended by SIGKILL"
    interpreter.close()
    interpreters.close()


class SlowToStart(Sandbox):
    """Starts when the test lets it; until then it is as one that starts anew on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_start = threading.Event(), threading.Event()

    def start(self) -> None:
        self.begun.set()
        self.may_start.wait()
        super().start()


async def test_a_cancelled_opening_leaves_the_next_one_its_own_files() -> None:
    """It is cancelled while it is sent; the next opening gets its own files."""
    gc.collect()  # what earlier tests left is closed now
    open_files = {*os.listdir("/proc/self/fd")}
    interpreters, sandbox = Interpreters(), SlowToStart()
    interpreters._sandbox = sandbox
    first = asyncio.create_task(interpreters.open(ProgramLimits()))
    await asyncio.to_thread(sandbox.begun.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(interpreters.open(ProgramLimits()))
    await asyncio.sleep(0)  # it takes the lowest free descriptors
    sandbox.may_start.set()
    interpreter = await second
    assert (await interpreter.run("x = 1")).ended == ""
    for number in range(1, 9):
        assert (await interpreter.run("x += 1; x")).output == f"{number + 1}\n"
    interpreter.close()
    interpreters.close()
    assert {*os.listdir("/proc/self/fd")} <= open_files
