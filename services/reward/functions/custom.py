"""Loads the user's reward function from a Python file (reward.custom_reward_function)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib.util import module_from_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolemesh.catalog.user_files import spec_of_file
from rolemesh.errors import InvalidConfig, unreadable
from rolemesh.services.reward.functions import ScoreFunction

if TYPE_CHECKING:
    from rolemesh.config.reward import CustomRewardConfig


def load_function(config: CustomRewardConfig, arguments: Iterable[str] | None = None) -> ScoreFunction:
    """Load the function `config.name` from the file `config.path`, with `config.reward_kwargs` bound.

    Args:
        config: names the function.
        arguments: names of the arguments that a call passes; None: unknown.

    Raises:
        InvalidConfig: the file does not exist, cannot be imported, or lacks the function; or the function does
            not take these arguments with `config.reward_kwargs`.
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
    if arguments is not None:
        _check_arguments(function, list(arguments), config)
    bound: ScoreFunction = functools.partial(function, **config.reward_kwargs)
    return bound


def _check_arguments(function: Callable[..., Any], arguments: list[str], config: CustomRewardConfig) -> None:
    """Raise InvalidConfig unless the function takes the arguments that it will get."""
    try:
        taken = signature(function, follow_wrapped=False)  # a decorator may adapt a function of other arguments
    except ValueError:
        return  # compiled code has no signature
    try:
        taken.bind(**dict.fromkeys(arguments), **config.reward_kwargs)
    except TypeError as error:
        own = f" and its reward_kwargs {sorted(config.reward_kwargs)}" if config.reward_kwargs else ""
        raise InvalidConfig(
            f"reward.custom_reward_function: {config.name} of {config.path} should take the keyword arguments "
            f"{', '.join(arguments)}{own}: {error}"
        ) from error
