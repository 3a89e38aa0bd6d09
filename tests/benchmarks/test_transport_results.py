"""The page of the wire quotes what its benchmark has measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_wire_has_the_results_of_its_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks/results/transport.json").read_text())
    text = (ROOT / "docs/wire.md").read_text()
    large = results["256 MiB"]
    for name, found in large.items():
        shown = name.replace("frame stream", "frame stream (Rolemesh)")
        cells = f"{found['gb_per_s']:.2f} | {found['of_raw_tcp']:.2f} | {found['times_protobuf_unary']:.1f}"
        assert f"| {shown} | {cells} |" in text
    times = large["frame stream"]["gb_per_s"] / large["protobuf unary, tuned"]["gb_per_s"]
    assert f"the frame stream is {times:.1f} times as fast" in text
    batch = results["ppo_batch"]
    assert f"filled to {batch['filled']:.0%}".replace("%", " %") in text
    assert f"takes {batch['ratio']:.1f} times fewer bytes than padded" in text
