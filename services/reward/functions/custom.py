"""Loads the user's reward function from a Python file (reward.custom_reward_function)."""

from __future__ import annotations

import functools
import sys
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rolemesh.catalog.user_files import spec_of_file
from rolemesh.errors import InvalidConfig, unreadable
from rolemesh.services.reward.functions import ScoreFunction

if TYPE_CHECKING:
    from rolemesh.config.reward import CustomRewardConfig


def load_function(config: CustomRewardConfig) -> ScoreFunction:
    """Load the function `config.name` from the file `config.path`, with `config.reward_kwargs` bound.

    Raises:
        InvalidConfig: the file does not exist, cannot be imported, or lacks the function.
    """
    path = Path(config.path or "")
    if not path.is_file():
        raise InvalidConfig(f"reward.custom_reward_function.path: no such file: {path.absolute()}")
    spec = spec_of_file(f"rolemesh_custom_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidConfig(f"reward.custom_reward_function.path: {path} is not a Python file (.py)")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise unreadable(
            InvalidConfig,
            error,
            f"reward.custom_reward_function.path: importing {path} raised {type(error).__name__}: {error}",
        ) from error
    function = getattr(module, config.name, None)
    if not callable(function):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise InvalidConfig(
            f"reward.custom_reward_function.name: {path} has no function {config.name!r}; it has {names}"
        )
    bound: ScoreFunction = functools.partial(function, **config.reward_kwargs)
    return bound
