"""What linters say of the chart."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import yaml
from rendering import CHART, EXAMPLES, KUBERNETES, ROOT, helm, run_go, template

PERFECT = 10


def test_helm_has_nothing_to_say() -> None:
    program = helm()
    assert program
    for example in EXAMPLES:
        command = [program, "lint", "--strict", "--kube-version", KUBERNETES, str(CHART), "-f", str(example)]
        ran = run_go(*command)
        assert ran.returncode == 0, ran.stdout
        assert "[WARNING]" not in ran.stdout


def test_kube_score_has_nothing_to_say_but_what_is_explained() -> None:
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    if not (program := shutil.which("kube-score", path=path)):
        pytest.skip("THE CHART IS NOT LINTED: there is no kube-score; `make .venv/bin/kube-score` builds one")
    minor = "v" + KUBERNETES.rpartition(".")[0]
    said: dict[str, str] = {}
    for example in EXAMPLES:
        command = [program, "score", "--kubernetes-version", minor, "--output-format", "json", "-"]
        ran = run_go(*command, given=template({}, files=[example]))
        for thing in json.loads(ran.stdout):
            for check in thing["checks"]:
                if not check["skipped"] and check["grade"] < PERFECT:
                    said[check["check"]["id"]] = f"{thing['object_name']}: {check['comments']}"
    explained = yaml.safe_load((ROOT / "charts" / "kube-score.yaml").read_text(encoding="utf-8"))
    assert said.keys() - explained.keys() == set(), said
    assert explained.keys() - said.keys() == set(), "explained, and no longer so"
