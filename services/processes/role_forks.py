"""Starts the server that forks the roles of this process (fork_server.py)."""

from __future__ import annotations

import sys

# Modules that roles import only when they load a model.
WHEN_LOADED = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "rolemesh.models.heads")


def fork_roles() -> None:
    """Start the server that forks the roles. It imports their code while this process goes on.

    Call this before the job file is read, because a plug-in may start threads or touch a device when it is
    imported. Each fork imports plug-ins itself.

    No server is started if torch has been imported already, because something may have computed, nor on other
    systems than Linux, whose frameworks do not survive a fork. Then each role starts as a new process.
    """
    from rolemesh.catalog.role_specs import ROLES
    from rolemesh.services.processes import fork_server

    # a fork of a server (tests start commands so) has imported torch, but has not computed
    if sys.platform != "linux" or ("torch" in sys.modules and not fork_server.is_fork):
        return
    code = [part for spec in ROLES.values() for part in (spec.code, spec.servicer)]
    own = {part.partition(":")[0]: None for part in code if isinstance(part, str)}
    fork_server.begin_forking(["rolemesh.services.processes.serve", *WHEN_LOADED, *own])
