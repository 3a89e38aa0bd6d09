"""A process that scores: `python -m rolemesh.services.reward.judge CONNECTION PARENT`, started by judges.py.

A user's function runs here, and rules that are slow or start programs. It may hang, crash or end the process:
that costs its row and no other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rolemesh.config.reward import RewardConfig
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.functions import ScoreFunction, default_compute_score
from rolemesh.services.reward.functions.custom import load_function
from rolemesh.services.reward.parent import die_with_parent
from rolemesh.services.reward.verdict import judge
from rolemesh.telemetry.logs import shown


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends its judges
    number, message = received(connection)
    try:
        function, name = function_of(RewardConfig.model_validate_json(message))
    except InvalidConfig as error:
        connection.send_bytes(number + json.dumps({"invalid": str(error)}).encode())
        return
    connection.send_bytes(number + b"{}")
    pid = os.getpid()
    while True:
        try:
            number, message = received(connection)
        except EOFError:
            return
        said = json.dumps(answer(function, name, json.loads(message))).encode()
        if os.getpid() != pid:
            os._exit(0)  # the function forked, and this is the child: its parent answers
        connection.send_bytes(number + said)


def received(connection: Connection) -> tuple[bytes, bytes]:
    """The number of a message, which its answer begins with, and the message."""
    number, blank, message = connection.recv_bytes().partition(b" ")
    return number + blank, message


def function_of(config: RewardConfig) -> tuple[ScoreFunction, str]:
    """The function that scores, and what errors call it.

    Raises:
        InvalidConfig: the custom function cannot be loaded.
    """
    custom = config.custom_reward_function
    if custom.path is not None:
        return load_function(custom), f"{custom.name} of {custom.path}"
    return partial(default_compute_score, config=config), "default_compute_score"


def answer(function: ScoreFunction, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbers and text: the service unpickles nothing that comes back."""
    try:
        return {"verdicts": [asdict(verdict) for verdict in judge(function, name, arguments)]}
    except RewardFailed as error:
        print(shown(error), file=sys.stderr)
        return {"failed": str(error)}


if __name__ == "__main__":
    main()
