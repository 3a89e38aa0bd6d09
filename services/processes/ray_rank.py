"""The module for Ray: the actor of one rank, and a hook of `ray start`. It imports neither torch nor Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The log of a rank in a pod: standard output of the container's first process.
CONTAINER_LOG = Path("/proc/1/fd/1")


def without_client_server(parameters: Any, is_head: bool) -> None:
    """Keep `ray start --head` from serving Ray's clients, by default on port 10001 of all interfaces.

    The launcher is on the head and needs no client. No option of `ray start` leaves the server out.

    Args:
        parameters: Ray's RayParams of the node, which this changes.
        is_head: whether the node is a head; only a head has the server.
    """
    parameters.ray_client_server_port = None


class RayRank:
    """Starts `rolemesh serve` in a process of its own, waits for its end, and passes signals on.

    The process holds the read end of a pipe, and the actor holds the write end. If the actor ends, even by kill
    -9, the process ends itself.
    """

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: str, log_file: str | None
    ) -> int:
        """Start the rank, and return its process id.

        Args:
            arguments: of `rolemesh`.
            environment: variables in addition to this node's, of which Ray's are not passed on.
            directory: its working directory.
            log_file: for its output; None: the log of the container.
        """
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with open(log_file or CONTAINER_LOG, "wb" if log_file else "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rolemesh", *arguments],
                stdin=subprocess.PIPE,  # never written to; it closes when the actor ends
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own | dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        return self._process.pid

    def wait(self) -> int:
        """Wait for the process to end, kill the rest of its process group, and return its exit code."""
        code = self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def signal(self, number: int) -> None:
        """Send the process a signal, if it has not ended."""
        self._process.send_signal(number)
