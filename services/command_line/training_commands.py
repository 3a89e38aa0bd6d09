"""The commands that train: `rolemesh run|sft`."""

from __future__ import annotations

import typer

import rolemesh
from rolemesh.services.command_line.arguments import ConfigArgument, Overrides, job_of
from rolemesh.services.processes.role_forks import fork_roles

app = typer.Typer()


@app.command(epilog="Example: rolemesh run configs/tiny.yaml trainer.total_training_steps=5")
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train on this machine: start a process for each group of roles, run the steps, and stop them all.

    placement.strategy defines the groups; by default each role is in its own group.
    """
    fork_roles()
    job = job_of(config, overrides)
    rolemesh.run(job)


@app.command(epilog="Example: rolemesh sft job.yaml data.messages_key=conversation trainer.total_epochs=2")
def sft(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train on given responses, with only the actor (docs/sft.md): `run` with algorithm.page=sft."""
    fork_roles()
    job = job_of(config, overrides, "algorithm.page=sft")
    rolemesh.run(job)
