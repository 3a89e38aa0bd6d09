"""How many CPUs a process may use, with files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.cpus import usable_cpus

CGROUP2, CGROUP1 = "0::/kubepods/pod1\n", "3:cpuset:/\n2:cpu,cpuacct:/docker/ab\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        (CGROUP2, {}, 8),
        (CGROUP2, {"kubepods/pod1/cpu.max": "max 100000"}, 8),
        (CGROUP2, {"kubepods/pod1/cpu.max": "250000 100000"}, 3),
        (CGROUP2, {"kubepods/pod1/cpu.max": "max 100000", "kubepods/cpu.max": "400000 100000"}, 4),
        (CGROUP2, {"kubepods/pod1/cpu.max": "1600000 100000"}, 8),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        (CGROUP1, {"cpu/docker/ab/cpu.cfs_quota_us": "-1", "cpu/docker/ab/cpu.cfs_period_us": "100000"}, 8),
        (CGROUP1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cpus_are_limited_by_affinity_and_cgroup_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], cpus: int
) -> None:
    """The quota of every group above the process counts."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    for name, content in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{n}": c for n, c in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_cpus(tmp_path) == cpus


def test_without_cgroups_affinity_sets_the_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 5})
    assert usable_cpus(tmp_path) == 2
