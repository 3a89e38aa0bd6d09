"""Prints what a run has left, as JSON: digests of the checkpoints' files, and metrics.jsonl without clocks.

It takes the run directory as its argument, here or in a pod: both print the same where both trained the same.
"""

import hashlib
import json
import sys
from pathlib import Path

CLOCKS = ("timing_s/", "perf/throughput", "ended_at")

run_dir = Path(sys.argv[1])
checkpoints: dict[str, dict[str, str]] = {}
for step in sorted(run_dir.glob("global_step_*")):
    files = sorted(path for path in step.rglob("*") if path.is_file())
    digests = {str(path.relative_to(step)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    checkpoints[step.name] = digests
records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
records = [{key: value for key, value in r.items() if not key.startswith(CLOCKS)} for r in records]
print(json.dumps({"checkpoints": checkpoints, "records": records}))
