"""Lets this process's roles be forks of one that has imported what they need (fork_server.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterable

# What the roles import when they load a model.
WHEN_LOADED = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "rolemesh.models.heads")


def fork_roles(roles: Iterable[str]) -> None:
    """Start the server that forks this process's roles. It imports while this process goes on.

    It is not started where something may have computed already, because a plug-in has imported torch, nor on
    systems whose own frameworks do not survive a fork. Each role is then a process of its own from the start.

    Args:
        roles: keys of ROLES that this process will start.
    """
    from rolemesh.catalog.roles import ROLES
    from rolemesh.services.processes import fork_server

    if sys.platform != "linux" or ("torch" in sys.modules and not fork_server.is_fork):
        return

    code = [part for role in roles for part in (ROLES[role].code, ROLES[role].servicer)]
    own = {part.partition(":")[0]: None for part in code if isinstance(part, str)}
    fork_server.begin_forking(["rolemesh.services.processes.serve", *WHEN_LOADED, *own])
