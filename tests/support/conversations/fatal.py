"""A plug-in with the agent `echo` (echo_agent.py), which kills a process in the middle of a talk, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echoing import PLUGIN

FATAL = """

import os
from pathlib import Path

from rolemesh.services.processes import fork_server


def _launcher():
    parent = os.getppid()
    if not fork_server.is_fork:
        return parent
    return int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])  # parent's parent


def _fatal(call, of, after, whom, done):
    plain, seen = getattr(of, call), 0

    async def counted(self, *args):
        nonlocal seen
        seen += 1
        if seen == after and not done.exists():
            done.touch()
            os.kill({"itself": os.getpid(), "launcher": _launcher()}.get(whom) or int(whom), 9)
        return await plain(self, *args)

    setattr(of, call, counted)


_fatal("%s", EchoTalk, %d, "%s", Path("%s"))
"""


@dataclass(frozen=True)
class FatalEcho:
    """Such a plug-in.

    Args:
        directory: of its files.
        call: in which it kills: begin, act or close of a conversation.
        after: the number of that call in its process, from 1.
        whom: a process id, `itself`, or `launcher`, which started it.
    """

    directory: Path
    call: str
    after: int
    whom: str

    @property
    def done(self) -> Path:
        """Exists once it has killed. Where it exists, the agent is an ordinary one."""
        return self.directory / "killed"

    @property
    def file(self) -> Path:
        """The plug-in."""
        return self.directory / "fatal_echo.py"

    def written(self) -> Path:
        """Write the file."""
        self.file.write_text(PLUGIN.read_text() + FATAL % (self.call, self.after, self.whom, self.done))
        return self.file
