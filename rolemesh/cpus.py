"""The number of CPUs that a process may use. In a container it is usually less than the node has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use, by its affinity and its control groups' quotas.

    A quota is rounded up to whole CPUs.

    Args:
        root: the directory that contains proc and sys.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *(math.ceil(quota) for quota in _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota in CPUs of each control group that limits this process: its own and those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:  # number:controllers:path; version 2 names no controllers
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = top / path.lstrip("/")  # in a container it may be missing; then `top` is the container's own
        for each in (group, *group.parents):
            if not each.is_relative_to(top):
                break
            if (quota := _quota(each, bool(controllers))) is not None:
                yield quota


def _quota(group: Path, is_first_version: bool) -> float | None:
    try:
        if is_first_version:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        else:
            quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
    return quota / period if quota > 0 else None
