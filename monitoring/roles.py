"""The dashboard *roles*: who is there, who waits for whom, and what each takes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    WINDOW,
    Panel,
    Query,
    board,
    lines,
    process,
    quantile,
    rate,
    role,
    run,
    timeline,
)

DESCRIPTION = "Who is there, who waits for whom, and what each takes."


def roles() -> Dashboard:
    """The dashboard *roles*."""
    rows = {"There": _there(), "Work": _work(), "Turns on a shared device": _lease(), "Taken": _taken()}
    return board("roles", DESCRIPTION, rows, roles=True)


def _there() -> list[Panel]:
    """Who is there."""
    return [
        lines(
            "Replicas",
            "That serve, by their own word, and that the controller sends work to.",
            Query(f"sum by (role) ({role('rolemesh_role_ready')})", "{{role}} serve"),
            Query(f"max by (role) ({role('rolemesh_replicas_live')})", "{{role}} used"),
            least=0,
        ),
        lines(
            "Restarts in an hour",
            "Of a process in the same pod.",
            Query(f"sum by (pod) (changes({run('process_start_time_seconds')}[1h]))", "{{pod}}"),
            least=0,
        ),
        lines(
            "Seconds to load",
            "From the start of a role to its readiness.",
            Query(f"max by (role, pod) ({role('rolemesh_role_load_seconds')})", "{{role}} {{pod}}"),
            unit="s",
            least=0,
        ),
    ]


def _work() -> list[Panel]:
    """Who waits for whom."""
    calls = 'role!="controller",method!~"GetManifest|FetchRange|WatchRegion"'
    busy = f"max by (role, pod) ({role('rolemesh_rpc_server_in_flight', calls)}) > bool 0"
    seconds = role("rolemesh_rpc_server_seconds_bucket")
    return [
        lines(
            "Rows that wait",
            "For an answer of the role: all (pending), and those of them that a replica has (outstanding).",
            Query(f"sum by (role) ({role('rolemesh_rpc_client_pending_rows')})", "{{role}} pending"),
            Query(f"sum by (role) ({role('rolemesh_rpc_client_outstanding_rows')})", "{{role}} outstanding"),
            least=0,
        ),
        lines(
            "Calls under way",
            "At the role's servers; those that wait for their turn on the device count.",
            Query(f"sum by (role, method) ({role('rolemesh_rpc_server_in_flight')})", "{{role}}.{{method}}"),
            least=0,
        ),
        lines(
            "Idle share",
            "Of the time, by pod: no call but for weights. What is never idle is what the others wait for.",
            Query(f"1 - avg_over_time(({busy}){WINDOW[:-1]}:1s])", "{{role}} {{pod}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Latency, median",
            "From a call's first byte to its last, by method.",
            Query(
                quantile(0.5, seconds, "role", "method"),
                "{{role}}.{{method}}",
            ),
            unit="s",
            width=12,
        ),
        lines(
            "Latency, 95 of 100 are quicker",
            "From a call's first byte to its last, by method.",
            Query(
                quantile(0.95, seconds, "role", "method"),
                "{{role}}.{{method}}",
            ),
            unit="s",
            width=12,
        ),
    ]


def _lease() -> list[Panel]:
    """Roles that take turns on a device."""
    switches = run("rolemesh_lease_switch_seconds_count")
    return [
        timeline(
            "On the device",
            "The role whose turn it is, of roles that share a device.",
            Query(f"max by (role) ({role('rolemesh_lease_resident')})", "{{role}}"),
            width=8,
        ),
        lines(
            "Switches per minute",
            "One role sleeps, another wakes. A step should need one for each role.",
            Query(f"60 * {rate(switches, 'from_role', 'to_role')}", "{{from_role}} to {{to_role}}"),
            least=0,
        ),
        lines(
            "Share of the time lost to switches",
            "While one role sleeps and another wakes.",
            Query(rate(run("rolemesh_lease_switch_seconds_sum"), "pod"), "{{pod}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Wait for a turn, 95 of 100 wait less",
            "By role.",
            Query(quantile(0.95, role("rolemesh_lease_wait_seconds_bucket"), "role"), "{{role}}"),
            unit="s",
            width=12,
        ),
        lines(
            "Moved by switches",
            "Off the device (out) and back (in).",
            Query(
                rate(role("rolemesh_lease_switch_bytes_total"), "role", "direction"), "{{role}} {{direction}}"
            ),
            unit="Bps",
            width=12,
            least=0,
        ),
    ]


def _taken() -> list[Panel]:
    """What the processes take."""
    return [
        lines(
            "Memory",
            "Of the process (resident).",
            Query(process("process_resident_memory_bytes"), "{{pod}}"),
            unit="bytes",
            least=0,
        ),
        lines(
            "GPU memory",
            "What the process's torch holds. Not what an engine's own processes hold.",
            Query(process("rolemesh_device_bytes"), "{{pod}}"),
            unit="bytes",
            least=0,
        ),
        lines(
            "CPU, cores",
            "In use by the process.",
            Query(
                f"rate({run('process_cpu_seconds_total')}{WINDOW}) and on (namespace, pod) "
                f"{role('rolemesh_role_ready')}",
                "{{pod}}",
            ),
            least=0,
        ),
    ]
