"""A scoring process, started by scoring_pool.py.

`python -m rolemesh.services.reward.scoring_process CONNECTION` runs a user's function, or rules that are
slow or start programs. These may hang, crash or end the process; only the rows of that call fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from numbers import Real
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.functions import ScoreFunction, default_compute_score
from rolemesh.services.reward.functions.custom import load_function
from rolemesh.services.reward.managers import PLURAL, score_together
from rolemesh.services.reward.scoring_call import Scorer
from rolemesh.telemetry.logs import shown

if TYPE_CHECKING:
    from rolemesh.config.reward import RewardConfig


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the service ends this process
    number, message = received(connection)
    try:
        scorer = scorer_in(message)
    except InvalidConfig as error:
        connection.send_bytes(number + json.dumps({"invalid": str(error)}).encode())
        return
    except OSError as error:
        connection.send_bytes(number + json.dumps({"failed": str(error)}).encode())
        return
    connection.send_bytes(number + b"{}")
    pid = os.getpid()
    while True:
        try:
            number, message = received(connection)
        except EOFError:
            return
        said = json.dumps(answer(scorer, json.loads(message))).encode()
        if os.getpid() != pid:
            os._exit(0)  # the function forked, and this is the child: its parent answers
        connection.send_bytes(number + said)


def received(connection: Connection) -> tuple[bytes, bytes]:
    """Receive a message: its number with a blank, which prefixes the answer, and its content."""
    number, blank, message = connection.recv_bytes().partition(b" ")
    return number + blank, message


def scorer_in(message: bytes) -> Scorer:
    """Import the job's plug-ins, if any, and return the scorer that the first message describes.

    Raises:
        InvalidConfig: a plug-in or the custom function cannot be loaded.
    """
    said = json.loads(message)
    if "plugins" not in said:
        return _scorer(_section(said["reward"]), resolve_name(said["manager"]))
    from rolemesh.catalog.plugin_imports import load_plugins
    from rolemesh.config.reward import RewardConfig

    load_plugins(said["plugins"])
    return scorer_of(RewardConfig.model_validate(said["reward"]))


def scorer_of(config: RewardConfig) -> Scorer:
    """Make the scorer of a job.

    Raises:
        InvalidConfig: the custom function cannot be loaded.
    """
    from rolemesh.catalog.catalog import BUILT_IN

    spec = config.manager
    manager = partial(spec.load(), **config.options) if config.options else spec.load()
    return _scorer(config, manager, None if spec.origin == BUILT_IN else str(spec))


def _section(reward: Mapping[str, Any]) -> Any:
    """Return the job's section `reward`, already checked, with the attributes that scoring reads.

    It stands in for RewardConfig, because importing pydantic takes longer than starting Python.
    """
    sections = {key: SimpleNamespace(**reward[key]) for key in ("custom_reward_function", "sandbox")}
    return SimpleNamespace(**{**reward, **sections})


def _scorer(config: RewardConfig, manager: Callable[..., Any], plugin: str | None = None) -> Scorer:
    """Make a scorer; `plugin` names the manager for messages if a plug-in declares it."""
    custom = config.custom_reward_function
    compute_score: ScoreFunction = partial(default_compute_score, config=config)
    name = "default_compute_score"
    if custom.path is not None:
        arguments = tuple(PLURAL.values() if manager is score_together else PLURAL.keys())
        compute_score = load_function(custom, None if plugin else arguments)
        name = f"{custom.name} of {custom.path}"
    if plugin is not None:
        compute_score = partial(_as_dict, compute_score)
        name = plugin
    return Scorer(manager, compute_score, name)


def _as_dict(compute_score: Callable[..., Any], **row: Any) -> Any:
    """Call the function; a number becomes {"score": number}, so a plug-in's manager reads all rules alike."""
    result = compute_score(**row)
    return {"score": result} if isinstance(result, Real) else result


def answer(scorer: Scorer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Score rows, and return their scores or the failure as JSON-like values: the service unpickles nothing."""
    try:
        return {"scores": [asdict(score) for score in scorer.score(rows)]}
    except RewardFailed as error:
        print(shown(error), file=sys.stderr)
        return {"failed": str(error)}


if __name__ == "__main__":
    main()
