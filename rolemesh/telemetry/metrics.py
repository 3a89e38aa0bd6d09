"""Every Prometheus name of the project. All begin with `rolemesh_`; seconds and bytes are base units."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A forward pass of a tiny model takes milliseconds, the update of a large one many minutes.
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

# ------------------------------------------------------- a role's server (rolemesh/rpc/serving/guard.py)
SERVER_REQUESTS = Counter(
    "rolemesh_rpc_server_requests", "Calls that have ended, by status code", ["role", "method", "code"]
)
SERVER_SECONDS = Histogram(
    "rolemesh_rpc_server_seconds", "From a call's first byte to its last", ["role", "method"], buckets=SECONDS
)
SERVER_BYTES = Counter(
    "rolemesh_rpc_server_bytes", "Message bytes, direction in or out", ["role", "method", "direction"]
)
SERVER_IN_FLIGHT = Gauge("rolemesh_rpc_server_in_flight", "Calls that have not ended", ["role", "method"])
ROLE_READY = Gauge("rolemesh_role_ready", "1 when the role serves, 0 while it loads or drains", ["role"])
ROLE_LOAD_SECONDS = Gauge("rolemesh_role_load_seconds", "How long the role took to load", ["role"])
DEVICE_BYTES = Gauge("rolemesh_device_bytes", "GPU memory that this process's torch holds; 0 without a GPU")
NONFINITE_GRADIENTS = Counter(
    "rolemesh_nonfinite_gradients", "Optimizer steps not taken, as a gradient was NaN or infinite", ["role"]
)

# ------------------------------------------------------------------------------ weights (rolemesh/weights/)
WEIGHTS_VERSION = Gauge("rolemesh_weights_version", "The version held (actor) or in use (rollout)", ["role"])
WEIGHTS_SENT_BYTES = Counter(
    "rolemesh_weights_sent_bytes", "Bytes of weights sent by the actor, or relayed by a rollout", ["role"]
)
WEIGHTS_RECEIVED_BYTES = Counter(
    "rolemesh_weights_received_bytes",
    "Bytes of weights a rollout took: from the actor, from a rollout, or from memory shared on the machine",
    ["source"],
)
WEIGHTS_SYNC_SECONDS = Histogram(
    "rolemesh_weights_sync_seconds", "From being told of a version until it is in use", buckets=SECONDS
)
WEIGHTS_SYNC_FAILURES = Counter("rolemesh_weights_sync_failures", "Versions that a rollout could not take")
WEIGHTS_SOURCE_FAILURES = Counter(
    "rolemesh_weights_source_failures",
    "What a source of weights did wrong: gone, refused, stalled or damaged",
    ["reason"],
)
# 0 from the start, so that the first one is an increase.
for _source in ("actor", "rollout", "memory"):
    WEIGHTS_RECEIVED_BYTES.labels(_source)
for _reason in ("gone", "refused", "stalled", "damaged"):
    WEIGHTS_SOURCE_FAILURES.labels(_reason)

# --------------------------------------------- turns on a shared device (rolemesh/workers/lease.py)
LEASE_RESIDENT = Gauge("rolemesh_lease_resident", "1 for the role of the group that is on the device", ["role"])
LEASE_SWITCH_SECONDS = Histogram(
    "rolemesh_lease_switch_seconds",
    "One role sleeps and another wakes; the count is that of switches",
    ["from_role", "to_role"],
    buckets=SECONDS,
)
LEASE_SWITCH_BYTES = Counter(
    "rolemesh_lease_switch_bytes", "Moved off the device (out) and back (in)", ["role", "direction"]
)
LEASE_WAIT_SECONDS = Histogram(
    "rolemesh_lease_wait_seconds", "What a call waited for its role's turn", ["role"], buckets=SECONDS
)

# ------------------------------------------- the controller's client (rolemesh/rpc/calling/dispatch.py)
CLIENT_REQUESTS = Counter(
    "rolemesh_rpc_client_requests", "Calls to one replica that have ended", ["role", "method", "code"]
)
CLIENT_RETRIES = Counter(
    "rolemesh_rpc_client_retries",
    "Calls asked again because a replica went away, or had no memory",
    ["role", "method"],
)
CLIENT_OUTSTANDING_ROWS = Gauge(
    "rolemesh_rpc_client_outstanding_rows",
    "Rows a replica has been sent and has not answered",
    ["role", "address"],
)
CLIENT_PENDING_ROWS = Gauge(
    "rolemesh_rpc_client_pending_rows", "Rows that wait for a replica, or for its answer", ["role"]
)
REPLICAS_LIVE = Gauge("rolemesh_replicas_live", "Replicas that are not known to be gone", ["role"])

# ------------------------------------------------------------------ the controller's loop (services/controller)
# In a registry of their own, which the controller alone shows: zeros from roles would spoil every mean.
CONTROLLER = CollectorRegistry()
TRAINING_STEP = Gauge("rolemesh_training_step", "Steps that have ended", registry=CONTROLLER)
TRAINING_STEPS_PLANNED = Gauge(
    "rolemesh_training_steps_planned", "Steps that the job will make", registry=CONTROLLER
)
RUN_STATE = Gauge("rolemesh_run_state", "1 for the state that the run is in", ["state"], registry=CONTROLLER)
ROLE_LOAD_ROWS = Gauge(
    "rolemesh_role_load_rows",
    "Mean number of pending rows over the recent steps, weighted by time",
    ["role"],
    registry=CONTROLLER,
)
PHASE_RUNNING = Gauge(
    "rolemesh_phase_running", "1 while the phase of a step is under way", ["phase"], registry=CONTROLLER
)
STEP_ENDED = Gauge(
    "rolemesh_step_ended_timestamp_seconds", "When the last step ended, or the run began", registry=CONTROLLER
)
CHECKPOINT_WRITTEN = Gauge(
    "rolemesh_checkpoint_timestamp_seconds",
    "When the last checkpoint was written, or the run began: what was learnt since can be lost",
    registry=CONTROLLER,
)
STEP_SECONDS = Histogram("rolemesh_step_seconds", "One training step", buckets=SECONDS, registry=CONTROLLER)
STEP_METRIC = Gauge(
    "rolemesh_step_metric",
    "The latest step's metrics, under their names in metrics.jsonl",
    ["name"],
    registry=CONTROLLER,
)
