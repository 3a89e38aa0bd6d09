"""The dashboard *roles*: which replicas run, which role is the bottleneck, and which resources each uses."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    WINDOW,
    Panel,
    Query,
    board,
    gpu,
    lines,
    process,
    quantile,
    rate,
    role,
    run,
    timeline,
)

DESCRIPTION = "Which replicas run, which role is the bottleneck, and which resources each uses."


def roles() -> Dashboard:
    """Build the dashboard *roles*."""
    rows = {
        "There": _there(),
        "Work": _work(),
        "Ranks": _ranks(),
        "Turns on a shared device": _lease(),
        "Taken": _taken(),
        "GPUs, by NVIDIA's DCGM exporter": _gpus(),
    }
    return board("roles", DESCRIPTION, rows, roles=True)


def _there() -> list[Panel]:
    """Panels on replicas and their readiness."""
    return [
        lines(
            "Replicas",
            "Replicas that report ready (serve), and replicas that the controller sends work to (used).",
            Query("sum by (role) ({})".format(role("rolemesh_role_ready", 'rank="0"')), "{{role}} serve"),
            Query(f"max by (role) ({role('rolemesh_replicas_live')})", "{{role}} used"),
            least=0,
        ),
        lines(
            "Restarts in an hour",
            "Restarts of a process in the same pod. The ranks of a pod restart together, and count as one.",
            Query(f"max by (pod) (changes({run('process_start_time_seconds')}[1h]))", "{{pod}}"),
            least=0,
        ),
        lines(
            "Seconds to load",
            "Time from the start of a role until it is ready.",
            Query(f"max by (role, pod) ({role('rolemesh_role_load_seconds')})", "{{role}} {{pod}}"),
            unit="s",
            least=0,
        ),
    ]


def _work() -> list[Panel]:
    """Panels on pending and running calls."""
    calls = 'role!="controller",method!~"GetManifest|FetchRange|WatchRegion"'
    busy = f"max by (role, pod) ({role('rolemesh_rpc_server_in_flight', calls)}) > bool 0"
    seconds = role("rolemesh_rpc_server_seconds_bucket")
    return [
        lines(
            "Rows that wait",
            "Rows waiting for the role's answer: all (pending), and those sent to a replica (outstanding).",
            Query(f"sum by (role) ({role('rolemesh_rpc_client_pending_rows')})", "{{role}} pending"),
            Query(f"sum by (role) ({role('rolemesh_rpc_client_outstanding_rows')})", "{{role}} outstanding"),
            least=0,
        ),
        lines(
            "Calls under way",
            "Calls in progress at the role's servers, including those that wait for their turn on the device.",
            Query(f"sum by (role, method) ({role('rolemesh_rpc_server_in_flight')})", "{{role}}.{{method}}"),
            least=0,
        ),
        lines(
            "Idle share",
            "Share of time without a call (other than for weights), by pod. A role that is never idle is the "
            "bottleneck.",
            Query(f"1 - avg_over_time(({busy}){WINDOW[:-1]}:1s])", "{{role}} {{pod}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Latency, median",
            "Median duration of a call at the server, by method.",
            Query(
                quantile(0.5, seconds, "role", "method"),
                "{{role}}.{{method}}",
            ),
            unit="s",
            width=12,
        ),
        lines(
            "Latency, 95 of 100 are quicker",
            "95th percentile of the duration of a call at the server, by method.",
            Query(
                quantile(0.95, seconds, "role", "method"),
                "{{role}}.{{method}}",
            ),
            unit="s",
            width=12,
        ),
    ]


def _ranks() -> list[Panel]:
    """Panels on the ranks of roles that have several."""
    tokens = rate(role("rolemesh_rank_tokens_total"), "role", "rank")
    collectives = rate(role("rolemesh_rank_collective_seconds_total"), "role", "rank")
    return [
        lines(
            "Tokens per second, by rank",
            "Tokens that each rank of a role computes.",
            Query(tokens, "{{role}} rank {{rank}}"),
            least=0,
        ),
        lines(
            "Imbalance of ranks",
            "Tokens of the busiest rank over the mean of all ranks: 1 is even. The others wait for it.",
            Query(f"max by (role) ({tokens}) / avg by (role) ({tokens})", "{{role}}"),
            least=1,
        ),
        lines(
            "Share of the time in collectives",
            "Share of a rank's working time in which its collectives ran, the wait for slower ranks included.",
            Query(
                f"{collectives} / {rate(role('rolemesh_rank_seconds_total'), 'role', 'rank')}",
                "{{role}} rank {{rank}}",
            ),
            unit="percentunit",
            least=0,
        ),
    ]


def _lease() -> list[Panel]:
    """Panels on roles that take turns on a device."""
    switches = run("rolemesh_lease_switch_seconds_count")
    return [
        timeline(
            "On the device",
            "Of the roles that share a device, the one whose turn it is.",
            Query(f"max by (role) ({role('rolemesh_lease_resident')})", "{{role}}"),
            width=8,
        ),
        lines(
            "Switches per minute",
            "Switches from one role to another. A step should need one for each role.",
            Query(f"60 * {rate(switches, 'from_role', 'to_role')}", "{{from_role}} to {{to_role}}"),
            least=0,
        ),
        lines(
            "Share of the time lost to switches",
            "Share of time in which one role is moved off the device and another back on.",
            Query(rate(run("rolemesh_lease_switch_seconds_sum"), "pod"), "{{pod}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Wait for a turn, 95 of 100 wait less",
            "95th percentile of the time a call waits for its role's turn, by role.",
            Query(quantile(0.95, role("rolemesh_lease_wait_seconds_bucket"), "role"), "{{role}}"),
            unit="s",
            width=12,
        ),
        lines(
            "Moved by switches",
            "Bytes moved off the device (out) and back (in).",
            Query(
                rate(role("rolemesh_lease_switch_bytes_total"), "role", "direction"), "{{role}} {{direction}}"
            ),
            unit="Bps",
            width=12,
            least=0,
        ),
    ]


def _taken() -> list[Panel]:
    """Panels on memory and CPU of the processes."""
    return [
        lines(
            "Memory",
            "Resident memory of the process, without that of vLLM's own processes and of /dev/shm.",
            Query(process("process_resident_memory_bytes"), "{{pod}}"),
            unit="bytes",
            least=0,
        ),
        lines(
            "GPU memory",
            "GPU memory held by the process's torch, without that of vLLM's own processes.",
            Query(process("rolemesh_device_bytes"), "{{pod}}"),
            unit="bytes",
            least=0,
        ),
        lines(
            "CPU, cores",
            "CPU cores used by the process.",
            Query(
                f"rate({run('process_cpu_seconds_total')}{WINDOW}) and on (namespace, pod) "
                f"{role('rolemesh_role_ready')}",
                "{{pod}}",
            ),
            least=0,
        ),
    ]


def _gpus() -> list[Panel]:
    """Panels on the GPUs of the pods, as NVIDIA's exporter sees them; empty without it."""
    return [
        lines(
            "Memory of the GPUs",
            "Memory that all processes hold on a GPU of the pod, those of vLLM included.",
            Query(f"2^20 * ({gpu('DCGM_FI_DEV_FB_USED')})", "{{pod}} {{gpu}}"),
            unit="bytes",
            least=0,
        ),
        lines(
            "Share of the time that a GPU is busy",
            "Share of time in which at least one kernel runs on a GPU of the pod.",
            Query(f"0.01 * ({gpu('DCGM_FI_DEV_GPU_UTIL')})", "{{pod}} {{gpu}}"),
            unit="percentunit",
            least=0,
        ),
        lines(
            "Last Xid",
            "The last Xid, an error that NVIDIA's driver reports, of a GPU of the pod; 0: there was none.",
            Query(gpu("DCGM_FI_DEV_XID_ERRORS"), "{{pod}} {{gpu}}"),
            least=0,
        ),
    ]
