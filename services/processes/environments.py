"""The environment variables of role processes."""

from __future__ import annotations

import os

from rolemesh.cpus import usable_cpus

# The first two belong to the launcher if it is a rank itself; the token lets a process use Ray.
NOT_INHERITED = ("RANK", "WORLD_SIZE", "RAY_AUTH_TOKEN")


def inherited() -> dict[str, str]:
    """Return the variables that this process passes on to the processes that it starts."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def role_environment(num_ranks: int = 1) -> dict[str, str]:
    """Return the environment variables of a role process on this machine.

    Args:
        num_ranks: ranks of its group, which compute at the same time and share the cores.
    """
    return inherited() | role_settings(num_ranks)


def role_settings(num_ranks: int = 1) -> dict[str, str]:
    """Return the variables that every role process gets. Values that this process has already are kept.

    OpenMP threads wait passively, because spinning at barriers would slow down several processes on few cores.

    Args:
        num_ranks: ranks of its group on one machine, which compute at the same time and share the cores.
    """
    settings = {
        "OMP_NUM_THREADS": str(max(1, usable_cpus() // num_ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {name: os.environ.get(name, value) for name, value in settings.items()}
