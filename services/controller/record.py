"""What a step left: a line of metrics.jsonl."""

from __future__ import annotations

Record = dict[str, float | None]  # null: it was not finite

STEP = "training/global_step"
ENDED_AT = "ended_at"  # seconds since 1970
