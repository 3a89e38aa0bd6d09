"""A process that scores: `python -m services.reward.judge CONNECTION PARENT`, started by judges.py.

A user's function runs here, and rules that are slow or start programs. It may hang, crash or end the process:
that costs its row and no other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rolemesh.config.reward import RewardConfig
from rolemesh.errors import InvalidConfig, RewardFailed
from services.reward.functions import ScoreFunction, default_compute_score
from services.reward.functions.custom import load_function
from services.reward.parent import die_with_parent
from services.reward.verdict import judge


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends its judges
    config = RewardConfig.model_validate_json(connection.recv_bytes())
    try:
        function, name = function_of(config)
    except InvalidConfig as error:
        connection.send_bytes(json.dumps({"invalid": str(error)}).encode())
        return
    connection.send_bytes(b"{}")
    while True:
        try:
            arguments = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(answer(function, name, arguments)).encode())


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
        traceback.print_exc()
        return {"failed": str(error)}


if __name__ == "__main__":
    main()
