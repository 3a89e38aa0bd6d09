"""What a device can hold and do, and sizes as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolemesh.errors import InvalidConfig

UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

GIB = 2**30
FILE_BANDWIDTH = 1.5e9  # bytes per second: a role that sleeps on a CPU leaves its tensors in a file


def parse_size(text: str) -> int:
    """`"80GiB"` and `"24 GB"` to bytes.

    Raises:
        InvalidConfig: not a positive number with a unit.
    """
    match = SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    size = float(match[1]) * units.get(match[2].lower(), 0) if match else 0
    if size < 1:
        raise InvalidConfig(f"{text!r} is not a size; write a number with its unit, such as 80GiB or 24GB")
    return int(size)


def human_size(num_bytes: float) -> str:
    """Bytes for people, three digits or so: `"12.6 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            return (
                f"{num_bytes:.0f} {unit}"
                if unit == "B" or abs(num_bytes) >= 99.95
                else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


@dataclass(frozen=True)
class Device:
    """Rates that programs reach, which are not those of the data sheet.

    Args:
        name: for people.
        memory_bytes: of one device.
        flops: matrix products per second by dtype, additions and multiplications counted apart.
        memory_bandwidth: bytes per second, read or written.
        link_bandwidth: bytes per second between two such devices of one group.
        host_bandwidth: bytes per second to where a role that sleeps leaves its tensors: host memory, on a CPU a
            file.
        wire_bandwidth: bytes per second from service to service.
        block_s: seconds of launches and Python in one pass through a transformer block.
        shared: all groups run on this one device: their memory and their time add up.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    wire_bandwidth: float = 2e9  # gRPC frames of 1 MiB between two processes: 1.4 to 2.4 GB/s
    block_s: float = 2e-4  # some 40 kernels of 5 µs
    shared: bool = False


def _gpu(
    name: str, memory_gib: int, half: float, single: float, memory: float, link: float, host: float
) -> Device:
    """From a data sheet: TFLOP/s (dense, without TF32, which torch does not use unless told) and GB/s. Large
    matrix products reach about half of it in training, copies about three quarters."""
    flops = {"bfloat16": half * 5e11, "float16": half * 5e11, "float32": single * 5e11}
    memory, link, host = memory * 7.5e8, link * 7.5e8, host * 7.5e8
    return Device(name, memory_gib * GIB, flops, memory, link, host)


# Data sheets: TFLOP/s in half and in single precision, GB/s of memory, of NVLink (one way; PCIe where there is
# none) and of PCIe (one way).
GPUS = {
    "a100": _gpu("A100 80GB SXM", 80, 312, 19.5, 2039, 300, 32),
    "h100": _gpu("H100 SXM", 80, 989, 67, 3350, 450, 64),
    "h200": _gpu("H200 SXM", 141, 989, 67, 4800, 450, 64),
    "b200": _gpu("B200", 180, 2250, 80, 8000, 900, 64),
    "l40s": _gpu("L40S", 48, 362, 91.6, 864, 32, 32),
    "rtx4090": _gpu("RTX 4090", 24, 165, 82.6, 1008, 32, 32),
}


def cpu(memory_bytes: int, *, flops: float = 1e11, bandwidth: float = 1e10, block_s: float = 4e-4) -> Device:
    """This machine's processor, on which all roles run beside each other. The default rates are those of two
    cores; `benchmarks/calibration.py` measures them."""
    rates = dict.fromkeys(("bfloat16", "float16", "float32"), flops)
    return Device(
        "CPU", memory_bytes, rates, bandwidth, bandwidth, FILE_BANDWIDTH, block_s=block_s, shared=True
    )


def available_memory() -> int:
    """Bytes that this machine can still give to processes, a container's limit respected."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree"))
    except OSError:  # no Linux: all that there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        cache = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())[
            "file"
        ]
    except (OSError, ValueError, KeyError):  # no control group, or "max": none
        return free
    return min(free, limit - used + int(cache))
