"""The base of a role that stands in front of another one and changes some of its methods."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Role = TypeVar("Role")


class Forwarding(Generic[Role]):
    """Forward every method that the subclass does not define to the role behind it.

    mypy takes a subclass for any Protocol of rolemesh/roles.py, and checks the methods that it defines against
    that Protocol.

    Args:
        role: the role behind this one.
    """

    def __init__(self, role: Role) -> None:
        self._role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)
