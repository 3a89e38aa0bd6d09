"""Checkpoints of a role, from the copy to the disk."""

from __future__ import annotations

from pathlib import Path

from rolemesh.roles import Actor, Critic


async def saved(role: Actor | Critic, directory: Path) -> None:
    """Write a checkpoint, and wait until it is on disk."""
    await role.begin_checkpoint(directory)
    await role.finish_checkpoint(directory)
