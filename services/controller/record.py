"""Names in a run directory that a display needs, too: of a step's record, which is a line of metrics.jsonl."""

from __future__ import annotations

Record = dict[str, float | None]  # null: it was not finite

STEP = "training/global_step"
ENDED_AT = "ended_at"  # seconds since 1970

METRICS_FILE = "metrics.jsonl"  # one JSON object per step
ADDRESS_FILE = "controller.address.json"  # there while the controller runs
