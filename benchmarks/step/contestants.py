"""Processes that take turns on one machine, and environments of their own for those that are not ours."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "benchmarks"
PATIENCE_S = 300.0  # for a start or a step


@dataclass
class Contestant:
    """A process that makes a step when it is asked for one."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    async def start(cls, name: str, python: str, arguments: Sequence[str]) -> Contestant:
        log = CACHE / "logs" / f"{'-'.join(arguments[:1])}-{name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
            )
        return cls(name, process, log)

    async def answer(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            RuntimeError: it ended, or took too long; with the end of its log.
        """
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)
        except TimeoutError:
            line = b""
        if not line:
            end = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} gave no answer; the end of {self.log}:\n{end}")
        result: dict[str, Any] = json.loads(line)
        return result

    async def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"step\n")
        await self.process.stdin.drain()
        return await self.answer()

    async def end(self) -> None:
        """Its input ends, and with it the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 30)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def interpreter(name: str) -> str:
    """The interpreter of an environment with what trl-NAME.txt says, made where it is not there as it says."""
    wanted = Path(__file__).with_name(f"trl-{name}.txt").read_text()
    directory = CACHE / f"trl-{name}"
    python = directory / "bin" / "python"
    made = directory / "installed.txt"
    if not (made.is_file() and made.read_text() == wanted):
        print(f"installing {wanted.split()[-1]} into {directory.relative_to(ROOT)}", flush=True)
        uv = str(Path(sys.executable).with_name("uv"))
        requirements = str(Path(__file__).with_name(f"trl-{name}.txt"))
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(directory)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), "-r", requirements], check=True)
        made.write_text(wanted)
    return str(python)
