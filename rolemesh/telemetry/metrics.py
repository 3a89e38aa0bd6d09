"""All Prometheus metrics of the project. Names begin with `rolemesh_`; times are in seconds, sizes in bytes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A forward pass of a tiny model takes milliseconds, the update of a large one many minutes.
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)

# ------------------------------------------------------- a role's server (rolemesh/rpc/serving/guard.py)
SERVER_REQUESTS = Counter(
    "rolemesh_rpc_server_requests", "Calls that have ended, by status code", ["role", "method", "code"]
)
SERVER_SECONDS = Histogram(
    "rolemesh_rpc_server_seconds", "Duration of a call at the server", ["role", "method"], buckets=SECONDS
)
SERVER_BYTES = Counter(
    "rolemesh_rpc_server_bytes", "Message bytes by direction, in or out", ["role", "method", "direction"]
)
SERVER_IN_FLIGHT = Gauge("rolemesh_rpc_server_in_flight", "Calls in progress", ["role", "method"])
ROLE_READY = Gauge(
    "rolemesh_role_ready",
    "1 while the role serves, 0 while it loads or drains; above rank 0: 1 once its part is loaded",
    ["role", "rank"],
)
ROLE_LOAD_SECONDS = Gauge("rolemesh_role_load_seconds", "Time the role took to load", ["role"])
DEVICE_BYTES = Gauge("rolemesh_device_bytes", "GPU memory held by this process's torch; 0 without a GPU")
NONFINITE_GRADIENTS = Counter(
    "rolemesh_nonfinite_gradients", "Optimizer steps skipped for a NaN or infinite gradient", ["role"]
)

# ------------------------------------------------------- ranks of a role (rolemesh/ranks/rank_load.py)
RANK_TOKENS = Counter(
    "rolemesh_rank_tokens",
    "Tokens that a rank computed, without fillers, in a role of several ranks",
    ["role", "rank"],
)
RANK_SECONDS = Counter("rolemesh_rank_seconds", "Seconds in which a rank ran commands", ["role", "rank"])
RANK_COLLECTIVE_SECONDS = Counter(
    "rolemesh_rank_collective_seconds",
    "Seconds in which collectives of a rank ran, the wait for slower ranks included",
    ["role", "rank"],
)

# --------------------------------------------------------- engine hf (services/rollout/engines/hf/batch.py)
ROLLOUT_CONTEXT_TOKENS = Counter(
    "rolemesh_rollout_context_tokens",
    "Tokens of prompts and earlier turns, by the source of their keys and values in hf: kept or computed",
    ["source"],
)
for _source in ("kept", "computed"):
    ROLLOUT_CONTEXT_TOKENS.labels(_source)

# ------------------------------------------------------------------------------ weights (rolemesh/weights/)
WEIGHTS_VERSION = Gauge("rolemesh_weights_version", "Version held (actor) or in use (rollout)", ["role"])
WEIGHTS_SENT_BYTES = Counter(
    "rolemesh_weights_sent_bytes", "Bytes of weights sent by the actor or relayed by a rollout", ["role"]
)
WEIGHTS_RECEIVED_BYTES = Counter(
    "rolemesh_weights_received_bytes",
    "Bytes of weights a rollout received from the actor, from a rollout, or from shared memory on its machine",
    ["source"],
)
WEIGHTS_SYNC_SECONDS = Histogram(
    "rolemesh_weights_sync_seconds", "Time from a version's announcement to its use", buckets=SECONDS
)
WEIGHTS_SYNC_FAILURES = Counter("rolemesh_weights_sync_failures", "Versions that a rollout could not load")
WEIGHTS_SOURCE_FAILURES = Counter(
    "rolemesh_weights_source_failures",
    "Sources of weights that a rollout gave up, by reason: gone, refused, stalled or damaged",
    ["reason"],
)
# Create the series with value 0, so that the first event counts as an increase.
for _source in ("actor", "rollout", "memory"):
    WEIGHTS_RECEIVED_BYTES.labels(_source)
for _reason in ("gone", "refused", "stalled", "damaged"):
    WEIGHTS_SOURCE_FAILURES.labels(_reason)

# --------------------------------------------- turns on a shared device (rolemesh/workers/lease.py)
LEASE_RESIDENT = Gauge("rolemesh_lease_resident", "1 for the group's role that is on the device", ["role"])
LEASE_SWITCH_SECONDS = Histogram(
    "rolemesh_lease_switch_seconds",
    "Time to switch the device from one role to another",
    ["from_role", "to_role"],
    buckets=SECONDS,
)
LEASE_SWITCH_BYTES = Counter(
    "rolemesh_lease_switch_bytes", "Bytes moved off the device (out) and back (in)", ["role", "direction"]
)
LEASE_WAIT_SECONDS = Histogram(
    "rolemesh_lease_wait_seconds", "Time a call waited for its role's turn", ["role"], buckets=SECONDS
)

# --------------------------------------------------------------- environments (services/environment/)
ENVIRONMENT_EPISODES = Gauge("rolemesh_environment_episodes", "Episodes that are open at this replica")
ENVIRONMENT_TURNS = Counter("rolemesh_environment_turns", "Turns of the policy that were answered", ["agent"])
ENVIRONMENT_ENDED = Counter(
    "rolemesh_environment_ended",
    "Episodes that ended, by reason: closed, failed, abandoned (nobody asked about them) or replaced",
    ["agent", "reason"],
)
TOOL_CALLS = Counter("rolemesh_tool_calls", "Calls of tools", ["tool"])
TOOL_ERRORS = Counter("rolemesh_tool_errors", "Calls of tools that failed or were refused", ["tool"])
TOOL_SECONDS = Histogram("rolemesh_tool_seconds", "Duration of a tool's call", ["tool"], buckets=SECONDS)
TOOL_THREADS_LEFT = Gauge(
    "rolemesh_tool_threads_left", "Threads of tools that ran too long and still run; they end with the process"
)
EPISODES_LOST = Counter(
    "rolemesh_episodes_lost", "Episodes whose replica was gone or no longer had them, seen by the caller"
)

# --------------------------------------------------------- the controller's clients (rolemesh/rpc/calling/)
CLIENT_REQUESTS = Counter(
    "rolemesh_rpc_client_requests", "Calls to a replica that have ended, by status", ["role", "method", "code"]
)
CLIENT_RETRIES = Counter(
    "rolemesh_rpc_client_retries",
    "Calls retried because a replica was unavailable or had no memory",
    ["role", "method"],
)
CLIENT_OUTSTANDING_ROWS = Gauge(
    "rolemesh_rpc_client_outstanding_rows",
    "Rows sent to a replica and not yet answered",
    ["role", "address"],
)
CLIENT_PENDING_ROWS = Gauge(
    "rolemesh_rpc_client_pending_rows", "Rows waiting for a replica or for its answer", ["role"]
)
REPLICAS_LIVE = Gauge("rolemesh_replicas_live", "Replicas not known to be gone", ["role"])

# ------------------------------------------------------------------ the controller's loop (services/controller)
# These have a registry of their own, which only the controller serves: zeros from roles would distort every
# mean.
CONTROLLER = CollectorRegistry()
TRAINING_STEP = Gauge("rolemesh_training_step", "Number of completed steps", registry=CONTROLLER)
TRAINING_STEPS_PLANNED = Gauge(
    "rolemesh_training_steps_planned", "Total number of steps of the job", registry=CONTROLLER
)
RUN_STATE = Gauge("rolemesh_run_state", "1 for the run's current state", ["state"], registry=CONTROLLER)
ROLE_LOAD_ROWS = Gauge(
    "rolemesh_role_load_rows",
    "Time-weighted mean number of pending rows over recent steps",
    ["role"],
    registry=CONTROLLER,
)
PHASE_RUNNING = Gauge(
    "rolemesh_phase_running", "1 while this phase of the step runs", ["phase"], registry=CONTROLLER
)
STEP_ENDED = Gauge(
    "rolemesh_step_ended_timestamp_seconds",
    "End of the last step, or of a pause after it, or start of the run",
    registry=CONTROLLER,
)
CHECKPOINT_WRITTEN = Gauge(
    "rolemesh_checkpoint_timestamp_seconds",
    "Time of the last checkpoint, or start of the run; training since then can be lost",
    registry=CONTROLLER,
)
STEP_SECONDS = Histogram("rolemesh_step_seconds", "Time of one step", buckets=SECONDS, registry=CONTROLLER)
STEP_METRIC = Gauge(
    "rolemesh_step_metric",
    "Metrics of the last step and the last validation, by their names in metrics.jsonl",
    ["name"],
    registry=CONTROLLER,
)
