"""The dashboard *transport*: what goes over the wire, how long it takes, and what goes wrong."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import Panel, Query, board, lines, quantile, rate, role, run

DESCRIPTION = "What goes over the wire, how long it takes, and what goes wrong."


def transport() -> Dashboard:
    """The dashboard *transport*."""
    rows = {"Calls": _calls(), "Weights": _weights()}
    return board("transport", DESCRIPTION, rows, roles=True)


def _calls() -> list[Panel]:
    """Batches and answers."""
    asked = role("rolemesh_rpc_client_requests_total")
    failed = rate(role("rolemesh_rpc_client_requests_total", 'code!="OK"'), "role", "code")
    none = f"label_replace(0 * {rate(asked, 'role')}, 'code', 'none', '', '')"
    return [
        lines(
            "Bytes",
            "Messages of the roles' servers: in, to the role; out, from it.",
            Query(
                rate(role("rolemesh_rpc_server_bytes_total"), "role", "method", "direction"),
                "{{role}}.{{method}} {{direction}}",
            ),
            unit="Bps",
            width=12,
            least=0,
        ),
        lines(
            "Seconds of calls, per second",
            "How many calls of a method ran beside each other, on average, as they ended.",
            Query(rate(role("rolemesh_rpc_server_seconds_sum"), "role", "method"), "{{role}}.{{method}}"),
            width=12,
            least=0,
        ),
        lines(
            "Calls",
            "Of the controller to replicas, that have ended.",
            Query(rate(asked, "role", "method"), "{{role}}.{{method}}"),
            unit="reqps",
            least=0,
        ),
        lines(
            "Failed calls",
            "By status. A replica that goes away is UNAVAILABLE, and its calls are made again elsewhere.",
            Query(f"{failed} or {none}", "{{role}} {{code}}"),
            unit="reqps",
            least=0,
        ),
        lines(
            "Retries",
            "Calls made again because a replica went away.",
            Query(rate(role("rolemesh_rpc_client_retries_total"), "role"), "{{role}}"),
            unit="reqps",
            least=0,
        ),
    ]


def _weights() -> list[Panel]:
    """New weights, from the actor to the rollouts."""
    return [
        lines(
            "Version",
            "Published by the actor, in use at each rollout. A rollout that stays behind gets no work.",
            Query(f"max by (role, pod) ({run('rolemesh_weights_version')})", "{{role}} {{pod}}"),
        ),
        lines(
            "Seconds of a sync",
            "From being told of a version until it is in use: median, and what 95 of 100 take less than.",
            Query(quantile(0.5, run("rolemesh_weights_sync_seconds_bucket")), "median"),
            Query(quantile(0.95, run("rolemesh_weights_sync_seconds_bucket")), "95 of 100"),
            unit="s",
        ),
        lines(
            "Bytes of weights taken",
            "By rollouts: from the actor, from another rollout, or from memory shared on the machine.",
            Query(rate(run("rolemesh_weights_received_bytes_total"), "source"), "from {{source}}"),
            unit="Bps",
            least=0,
        ),
        lines(
            "Versions that could not be taken, in an hour",
            "The old weights stay in use, and the replica gets no work until it has the new ones.",
            Query(f"sum by (pod) (increase({run('rolemesh_weights_sync_failures_total')}[1h]))", "{{pod}}"),
            width=12,
            least=0,
        ),
        lines(
            "Sources of weights that failed, in an hour",
            "Gone, refused, stalled or damaged; the receiver goes on with the next one.",
            Query(
                f"sum by (reason) (increase({run('rolemesh_weights_source_failures_total')}[1h]))", "{{reason}}"
            ),
            width=12,
            least=0,
        ),
    ]
