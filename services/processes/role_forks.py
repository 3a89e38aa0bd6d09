"""Lets the roles that this process starts be forks of one that has imported what they need (fork_server.py)."""

from __future__ import annotations

import sys

# What the roles import when they load a model.
WHEN_LOADED = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "rolemesh.models.heads")


def fork_roles() -> None:
    """Start the server that forks the roles. It imports while this process goes on.

    Call it before the job file is read: a plug-in may start threads, or touch a device, at its import. Each
    fork imports plug-ins itself.

    No server is started where torch has been imported, because something may have computed already, nor on
    systems whose own frameworks do not survive a fork. Each role is then a process of its own from the start.
    """
    from rolemesh.catalog.roles import ROLES
    from rolemesh.services.processes import fork_server

    # a fork of a server, as tests start commands, has imported torch and done nothing else
    if sys.platform != "linux" or ("torch" in sys.modules and not fork_server.is_fork):
        return
    code = [part for spec in ROLES.values() for part in (spec.code, spec.servicer)]
    own = {part.partition(":")[0]: None for part in code if isinstance(part, str)}
    fork_server.begin_forking(["rolemesh.services.processes.serve", *WHEN_LOADED, *own])
