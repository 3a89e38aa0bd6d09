"""The controller's clients of the roles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.errors import RoleUnavailable
from rolemesh.fingerprint import Fingerprint, fingerprint
from rolemesh.methods import methods
from rolemesh.models.loading import vocabulary_in
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.term import Term
from rolemesh.tasks import gather

log = logging.getLogger(__name__)


def new_client(
    role: str,
    addresses: Sequence[str] | Members,
    job: JobConfig,
    term: Term | None = None,
    expected: Fingerprint | None = None,
) -> RoleClient:
    """Make a role's client with the job's settings, not yet entered.

    Args:
        role: its name.
        addresses: of its replicas.
        job: the job.
        term: of a controller; trained roles then answer nobody else.
        expected: the fingerprint that replicas must have; None: the job's.
    """
    expected = expected or fingerprint(job, role)
    for key in expected.unreadable:
        log.warning("cannot read the file of %s; replicas of %s may have another one", key, role)
    options: dict[str, Any] = {"timeout_s": job.trainer.rpc_timeout_s, "expected": expected}
    if not isinstance(addresses, Sequence) and not job.plan.of_role(role).is_trained:
        # A lost replica is replaced and had no state of its own, so wait until the new one has loaded. A group
        # with a trained role has one pod; if that is lost, the run is over.
        options |= {"may_grow": True, "patience_s": job.trainer.ready_timeout_s}
    if role == "rollout":
        options |= {
            "sync_timeout_s": job.trainer.weight_sync_timeout_s,
            "rows_at_once": job.rows_at_once,
        }
        options["vocabulary"] = vocabulary_in(job.actor.model, "actor")  # only rollouts answer with token ids
    if ROLES[role].trained:
        options["term"] = term
    if role == "environment":
        options["call_timeout_s"] = job.rollout.multi_turn.call_timeout_s
    client: RoleClient = load(ROLES[role].client)(addresses, methods(job), **options)
    return client


async def until_ready(clients: Iterable[RoleClient], timeout_s: float) -> None:
    """Wait until every client is ready. Raise RoleUnavailable with the problem of each that is not in time."""
    late: list[str] = []

    async def wait(client: RoleClient) -> None:
        try:
            await client.wait_until_ready(timeout_s)
        except RoleUnavailable as error:  # raised together below; any other error is raised at once
            late.append(str(error))

    await gather(*(wait(client) for client in clients))
    if late:
        raise RoleUnavailable("\n".join(late))
