"""Parts of your own: estimators, policy losses, pages, engines, reward managers, data sets, agents, tools and
call formats.

    # my_parts.py
    from rolemesh.plugins import estimator

    @estimator("centred", reads=("token_level_rewards", "response_mask"))
    def compute_centred(token_level_rewards, response_mask):
        ...
        return advantages, returns

A job file lists the files and modules under `plugins:`. Every process of the job imports them before it reads
the rest of the job. An installed package is found by itself if it declares the entry point group
`rolemesh.plugins`. Each decorator takes the arguments of its declaration in rolemesh/catalog/, where Rolemesh's
own parts stand. docs/plugins.md is the guide.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.catalog import Catalog, Declaration
from rolemesh.catalog.datasets import DATASETS
from rolemesh.catalog.engines import ENGINES
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.plugin_imports import importing
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.catalog.reward_managers import REWARD_MANAGERS
from rolemesh.catalog.tools import TOOLS
from rolemesh.config.base import Config as Options
from rolemesh.errors import InvalidConfig

__all__ = [
    "Options",
    "agent",
    "call_format",
    "dataset",
    "engine",
    "estimator",
    "page",
    "policy_loss",
    "program",
    "reward_manager",
    "tool",
]

F = TypeVar("F", bound=Callable[..., Any])

# ------------------------------------------------------------------------------------ decorators


def estimator(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare an advantage estimator; `declared` are the arguments of EstimatorSpec, `reads` among them."""
    return _declare(ESTIMATORS, name, declared)


def policy_loss(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare a policy loss; `declared` are the arguments of PolicyLossSpec."""
    return _declare(POLICY_LOSSES, name, declared)


def page(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare a page; `declared` are the arguments of PageSpec."""
    declare = _declare(PAGES, name, declared)

    def declare_async(code: F) -> F:
        if not iscoroutinefunction(code):
            raise InvalidConfig(f"the page {name!r} should be an `async def`; it is {code!r:.100}")
        return declare(code)

    return declare_async


def engine(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare an engine; `declared` are the arguments of EngineSpec."""
    return _declare(ENGINES, name, declared)


def reward_manager(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare a reward manager; `declared` are the arguments of RewardManagerSpec."""
    return _declare(REWARD_MANAGERS, name, declared)


def dataset(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare a data set; `declared` are the arguments of DatasetSpec."""
    return _declare(DATASETS, name, declared)


def agent(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare an agent: a class that takes the job; `declared` are the arguments of AgentSpec."""
    return _declare(AGENTS, name, declared)


def program(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare an agent that calls the policy as an OpenAI-compatible API: a function that takes the episode,
    its endpoint and the job, and returns the reward; `declared` are the arguments of AgentSpec."""
    return _declare(AGENTS, name, {"calls": True} | declared)


def tool(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare a tool: a function with type hints and a docstring; `declared` are the arguments of ToolSpec."""
    return _declare(TOOLS, name, declared)


def call_format(name: str, **declared: Any) -> Callable[[F], F]:
    """Declare how a policy writes calls of tools; `declared` are the arguments of CallFormatSpec."""
    return _declare(CALL_FORMATS, name, declared)


def _declare(catalog: Catalog[Any], name: str, declared: dict[str, Any]) -> Callable[[F], F]:
    spec = catalog.spec

    def declare(code: F) -> F:
        origin = importing.get(None) or _file_of(code)
        known = {field.name for field in fields(spec)} - {"name", "code", "origin"}
        try:
            if unknown := declared.keys() - known:
                raise ValueError(f"{min(unknown)} is no argument; there are {', '.join(sorted(known))}")
            declaration = TypeAdapter(spec).validate_python(
                {"name": name, "code": code, "origin": origin} | declared
            )
            _check_arguments(declaration, code)
        except ValueError as error:
            raise InvalidConfig(f"the {spec.kind} {name!r}: {_first(error)}") from error
        catalog.add(declaration)
        return code

    return declare


def _check_arguments(declaration: Declaration, code: Callable[..., Any]) -> None:
    """Raise ValueError unless the function takes the arguments that it will get."""
    positional, keywords = declaration.arguments()
    keywords = (*keywords, *(declaration.options.model_fields if declaration.options else ()))
    try:
        signature(code).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        expected = ", ".join((*positional, *(("*", *keywords) if keywords else ())))
        raise ValueError(f"its function should take ({expected}): {error}") from error
    except ValueError:
        pass  # compiled code has no signature


def _first(error: ValueError) -> str:
    """The first finding."""
    if not isinstance(error, ValidationError):
        return str(error)
    finding = error.errors()[0]
    argument = str(finding["loc"][0])
    if finding["type"] == "missing":
        return f"{argument} is missing"
    return f"{argument} is {finding['input']!r:.100}: {finding['msg']}"


def _file_of(code: Callable[..., Any]) -> str:
    """The origin of a part that is declared outside `plugins:`, as in a notebook."""
    module = sys.modules.get(code.__module__)
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else code.__module__ or "__main__"
