"""The dashboard *transport*: traffic between the roles, its duration, and its errors."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import Panel, Query, board, lines, quantile, rate, role, run

DESCRIPTION = "Traffic between the roles, its duration, and its errors."


def transport() -> Dashboard:
    """Build the dashboard *transport*."""
    rows = {"Calls": _calls(), "Weights": _weights()}
    return board("transport", DESCRIPTION, rows, roles=True)


def _calls() -> list[Panel]:
    """Panels on calls."""
    asked = role("rolemesh_rpc_client_requests_total")
    failed = rate(role("rolemesh_rpc_client_requests_total", 'code!="OK"'), "role", "code")
    none = f"label_replace(0 * {rate(asked, 'role')}, 'code', 'none', '', '')"
    return [
        lines(
            "Bytes",
            "Message bytes at the roles' servers: in (to the role) and out (from it).",
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
            "Mean number of concurrent calls of a method, counted when they end.",
            Query(rate(role("rolemesh_rpc_server_seconds_sum"), "role", "method"), "{{role}}.{{method}}"),
            width=12,
            least=0,
        ),
        lines(
            "Calls",
            "Completed calls of the controller to replicas.",
            Query(rate(asked, "role", "method"), "{{role}}.{{method}}"),
            unit="reqps",
            least=0,
        ),
        lines(
            "Failed calls",
            "Failed calls by status. Calls to a replica that goes away are UNAVAILABLE, and retried elsewhere.",
            Query(f"{failed} or {none}", "{{role}} {{code}}"),
            unit="reqps",
            least=0,
        ),
        lines(
            "Retries",
            "Calls retried because a replica was unavailable or had no memory.",
            Query(rate(role("rolemesh_rpc_client_retries_total"), "role"), "{{role}}"),
            unit="reqps",
            least=0,
        ),
    ]


def _weights() -> list[Panel]:
    """Panels on the transfer of weights from the actor to the rollouts."""
    return [
        lines(
            "Version",
            "Published by the actor, and in use at each rollout. A rollout with an old version gets no work.",
            Query(f"max by (role, pod) ({run('rolemesh_weights_version')})", "{{role}} {{pod}}"),
        ),
        lines(
            "Seconds of a sync",
            "Time from a version's announcement to its use: median and 95th percentile.",
            Query(quantile(0.5, run("rolemesh_weights_sync_seconds_bucket")), "median"),
            Query(quantile(0.95, run("rolemesh_weights_sync_seconds_bucket")), "95 of 100"),
            unit="s",
        ),
        lines(
            "Bytes of weights taken",
            "Received by rollouts: from the actor, from another rollout, or from shared memory on the machine.",
            Query(rate(run("rolemesh_weights_received_bytes_total"), "source"), "from {{source}}"),
            unit="Bps",
            least=0,
        ),
        lines(
            "Versions that could not be taken, in an hour",
            "The old weights stay in use. The replica gets no work until it has the new ones.",
            Query(f"sum by (pod) (increase({run('rolemesh_weights_sync_failures_total')}[1h]))", "{{pod}}"),
            width=12,
            least=0,
        ),
        lines(
            "Sources of weights that failed, in an hour",
            "Sources that were gone, refused, stalled or damaged. The receiver continues with the next one.",
            Query(
                f"sum by (reason) (increase({run('rolemesh_weights_source_failures_total')}[1h]))", "{{reason}}"
            ),
            width=12,
            least=0,
        ),
    ]
