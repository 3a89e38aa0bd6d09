"""What `make test-gpu` runs on a bare machine, tried on a CPU."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
from forks import FORKS

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import correctness, head, memory, prepare, services, sharding, speed
from rolemesh.config.job import make_job
from rolemesh.workers.numerics import device_prepared


def test_parts_that_need_no_gpu_pass_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes its own checks; a few figures are looked at again."""
    monkeypatch.setattr(head, "ROUNDS", 1)  # nobody reads a CPU's times

    def room(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    compared = correctness.log_probs("cpu", room("compared"))
    assert compared["float32 packed values"]["max"] < 1e-6
    offloaded = memory.offloading("cpu", room("offloaded"))
    assert offloaded["actor"]["moved_bytes"] > offloaded["actor"]["planned_bytes"] > 0
    handed = speed.handover("cpu", room("handed"))
    assert handed["bytes"] == offloaded["actor"]["planned_bytes"] // 3
    assert handed["copies"].keys() == {"pageable", "pinned", "write", "publish"}
    with device_prepared(["actor", "rollout"], make_job({"trainer": {"device": "cpu"}})):  # restored afterwards
        assert correctness.twice("cpu", room("twice"))["as it runs"]["weights_equal"]
    assert head.most_kernels(3533, 151_936) == 12
    assert head.most_kernels(7067, 151_936) == 12 + 2 * 5  # 4 GiB of logits: 3533 rows, and 3534 halved again
    off = head.head("cpu", room("head"))["errors"]
    assert off["float32"]["gradient, 30 chunks"] < off["autocast"]["gradient, 30 chunks"] / 2


def test_update_flops_are_those_of_its_products(tmp_path: Path) -> None:
    """Worked by hand: two layers of q, o [128, 128], k, v [64, 128] and three of the MLP [352, 128]; the head
    [512, 128]; 6 for each weight and token, and for causal attention 6 · 128 for each of 64 places."""
    figures = speed.update("cpu", tmp_path)
    weights, tokens, answered = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128), 8 * 64, 8 * 48
    flops = 6 * weights * tokens + 6 * 512 * 128 * answered + 2 * 6 * 128 * tokens * 64
    median = sorted(figures["seconds"]["ours"])[2]
    assert figures["tokens"] == tokens
    assert figures["tflops"]["ours"] * 1e12 * median == pytest.approx(flops)


def test_two_ranks_train_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "PROCESSES", FORKS)  # with CUDA they cannot be forks
    figures = sharding.sharded("cpu", tmp_path)
    assert (figures["ranks"], figures["backend"]) == (2, "gloo")
    assert all(figures[f"float32 {name}"]["difference"]["norm"] < 1e-5 for name in sharding.SETTINGS)


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "hangs": gpu.Part("correctness:log_probs", 0.001, ""),
        "tests": gpu.Part("services:tests", 240, ""),
    }
    monkeypatch.setattr(gpu, "PARTS", {**gpu.PARTS, **parts})
    found = gpu.run_all(list(parts), "cpu", tmp_path, time.monotonic() + 280)
    assert json.loads((tmp_path / "gpu.json").read_text()) == found
    assert not found["passed"]
    assert re.fullmatch(r"no result after \d+ of 0 s: killed", found["parts"]["hangs"]["why"])
    assert (found["parts"]["tests"]["state"], found["parts"]["tests"]["why"]) == ("skipped", "they need a GPU")
    late = gpu.run_all(["tests"], "cpu", tmp_path, time.monotonic())
    assert late["parts"]["tests"]["why"] == "no time was left"


def test_the_documentation_has_every_part() -> None:
    text = (gpu.ROOT / "docs" / "testing.md").read_text().partition("## On a GPU")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ", text, re.MULTILINE)
    assert sorted(rows) == sorted(gpu.PARTS)


def test_all_tests_with_the_mark_gpu_are_run() -> None:
    files = [path for path in (gpu.ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    marked = {str(path.relative_to(gpu.ROOT)) for path in files if "pytest.mark.gpu\n" in path.read_text()}
    assert sorted(marked) == sorted(services.TESTS)


def wheel(directory: Path, name: str, version: str, *needs: str) -> Path:
    path = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    with ZipFile(path, "w") as file:
        file.writestr(f"{path.name.split('-py3')[0]}.dist-info/METADATA", "\n".join(lines) + "\n\nText")
    return path


def test_missing_packages_come_from_the_bundle_or_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's own needs count, those of an extra do not; what is there in the right version stays."""
    one = wheel(tmp_path, "not-here", "2.0", "deeper-need>=1", "numpy", "never; extra == 'all'")
    other = wheel(tmp_path, "deeper-need", "1.5", "absent-everywhere>3")
    newer = wheel(tmp_path, "packaging", "999.0")
    monkeypatch.setattr(prepare, "BUNDLE", tmp_path)
    monkeypatch.setattr(prepare, "OF_TESTS", ())
    monkeypatch.setattr(prepare, "requirements", lambda: ["not_here>=1.9", "pytest", "packaging>=999"])
    assert prepare.lacking() == {
        "install": sorted(map(str, (one, other, newer))),
        "missing": {"absent-everywhere": "needs absent-everywhere>3, has none"},
    }
