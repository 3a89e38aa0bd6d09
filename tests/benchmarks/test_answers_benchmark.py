"""The benchmark of the rules: what it generates is labelled right, and the page has its numbers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from benchmarks.answers import RESULTS, gsm8k_cases, math_like_cases, measured

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "gsm8k"
TOTALS = ("false negatives", "false positives")


def test_the_rules_score_every_generated_response_as_it_was_made() -> None:
    made = itertools.chain(itertools.islice(gsm8k_cases(FIXTURE), 500), math_like_cases())
    for rule, kinds in measured(made).items():
        assert {kind: row["rolemesh"] for kind, row in kinds.items() if row["rolemesh"]} == {}, rule


def test_the_page_has_the_numbers_of_the_results() -> None:
    results, page = json.loads(RESULTS.read_text()), (ROOT / "docs/reward-guarantees.md").read_text()
    for answers, by_rule in results.items():
        for rule, kinds in by_rule.items():
            cells = [
                " | ".join(f"{number:,}" for number in row.values())  # num, and by mode
                for row in (kinds[total] for total in TOTALS)
            ]
            assert f"| {answers} | {rule} | {' | '.join(cells)} |" in page
