"""Memory and speed of devices, and parsing and printing of sizes."""

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
SHARE_REACHED = 0.5  # of the data sheet's rate, which large matrix products reach in training
FILE_BANDWIDTH = 1.5e9  # bytes per second; on a CPU, a sleeping role's tensors are in a file
# A CUDA context with the buffers of cuBLAS and NCCL takes 0.5 to 1 GiB; this is the upper end.
CONTEXT_BYTES = GIB
# GPU memory of a sleeping vLLM: its context, graphs and code. Measured for one model of 0.5B parameters
# (benchmarks/gpu/vllm_sleep.py): 1.17 and 1.20 GiB.
ASLEEP_BYTES = round(1.2 * GIB)
# Rates of a hand-over in bytes per second, on the machine of an H200 (benchmarks/gpu/large.py): the version is
# written into new shared memory, read once for its checksums, and copied to the engine's GPU.
PUBLISH_BANDWIDTH = 3e9
DIGEST_BANDWIDTH = 34e9
RECEIVE_BANDWIDTH = 13e9
LAUNCH_S = 5e-6  # launch of a kernel from Python
# Kernels of a block in bfloat16, as counted on a pretended GPU (tests/devices/test_planned_kernels.py): in a
# pass without gradients, and in a forward pass with its backward pass.
PASS_KERNELS = 55
TRAINED_KERNELS = 174
# Bytes per second and seconds of all-gathers by gloo among processes of one machine
# (benchmarks/planner/plan.py).
GLOO_BANDWIDTH = 1e9
GLOO_LATENCY = 2e-4


def parse_size(text: str) -> int:
    """Parse a size, e.g. `"80GiB"` or `"24 GB"`, to bytes.

    Raises:
        InvalidConfig: it is not a positive number with a unit.
    """
    match = SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    size = float(match[1]) * units.get(match[2].lower(), 0) if match else 0
    if size < 1:
        raise InvalidConfig(f"{text!r} is not a size; write a number with its unit, such as 80GiB or 24GB")
    return int(size)


def human_size(num_bytes: float) -> str:
    """Format bytes with about three digits, e.g. `"12.6 GiB"`."""
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
    """A device, with the rates that programs reach. They are below those of the data sheet.

    Args:
        name: to display.
        memory_bytes: of one device.
        flops: FLOP/s of matrix products by dtype; an addition and a multiplication count as two.
        memory_bandwidth: bytes per second, read or written.
        link_bandwidth: bytes per second from such a device to another one of its machine.
        network_bandwidth: bytes per second from one machine to another, over all of its network cards.
        host_bandwidth: bytes per second between the device and the tensors of a sleeping role, which are in
            host memory, on a CPU in a file.
        wire_bandwidth: bytes per second from service to service.
        block_s: seconds of launches and Python in one pass through a transformer block.
        trained_block_s: the same for a forward pass with gradients and its backward pass.
        per_node: devices of one machine.
        call_latency: seconds of a collective's start.
        link_latency: seconds of one turn of a ring between two devices of a machine.
        network_latency: seconds of one turn between two machines.
        shared: True if all groups run on this one device (a CPU), so that their memory and time add up.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    wire_bandwidth: float = 1e9  # benchmarks/results: weights.json has 0.9 GB/s, transport.json 1.0 to 1.3
    block_s: float = PASS_KERNELS * LAUNCH_S
    trained_block_s: float = TRAINED_KERNELS * LAUNCH_S
    per_node: int = 8
    # NCCL's own model, for a ring of its protocol Simple (its source, src/graph/tuning.cc); NVLink's turn.
    call_latency: float = 8.4e-6
    link_latency: float = 3.4e-6
    network_latency: float = 14e-6
    shared: bool = False

    @property
    def kind(self) -> str:
        """torch's name for the type of the device."""
        return "cpu" if self.shared else "cuda"

    @property
    def usable_bytes(self) -> int:
        """Bytes for the roles: all memory, without a GPU's context."""
        return self.memory_bytes if self.shared else max(0, self.memory_bytes - CONTEXT_BYTES)


def _gpu(
    name: str,
    memory_gib: int,
    half: float,
    single: float,
    memory: float,
    link: float,
    network: float,
    host: float,
) -> Device:
    """Make a GPU from its data sheet: TFLOP/s (dense, without TF32, off in torch by default), and GB/s.

    In training, large matrix products reach about half of the data sheet's rate, copies about three quarters.
    """
    half, single = (tera * 1e12 * SHARE_REACHED for tera in (half, single))
    flops = {"bfloat16": half, "float16": half, "float32": single}
    memory = memory * 7.5e8
    link = link * 7.5e8
    network = network * 7.5e8
    host = host * 7.5e8
    return Device(name, memory_gib * GIB, flops, memory, link, network, host)


# Data sheets: GiB of memory, TFLOP/s in half and in single precision, GB/s of memory, of NVLink (one way; PCIe
# if there is none), of a machine's network cards (eight of 200 or 400 Gbit/s; one of 100 without NVLink) and of
# PCIe (one way).
GPUS = {
    "a100": _gpu("A100 80GB SXM", 80, 312, 19.5, 2039, 300, 200, 32),
    "h100": _gpu("H100 SXM", 80, 989, 67, 3350, 450, 400, 64),
    "h200": _gpu("H200 SXM", 141, 989, 67, 4800, 450, 400, 64),
    "b200": _gpu("B200", 180, 2250, 80, 8000, 900, 400, 64),
    "l40s": _gpu("L40S", 48, 362, 91.6, 864, 32, 12.5, 32),
    "rtx4090": _gpu("RTX 4090", 24, 165, 82.6, 1008, 32, 12.5, 32),
}

# The names by which CUDA knows GPUs of these rates. Others of a family have other rates (H100 PCIe, H20), and a
# slice of a GPU (MIG) has a part of them.
CUDA_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def peak_flops(cuda_name: str, dtype: str) -> float | None:
    """Return the FLOP/s of a GPU's dense matrix products by its data sheet; None: the GPU is not known.

    Args:
        cuda_name: as CUDA names the GPU, e.g. `NVIDIA H100 80GB HBM3`.
        dtype: of the products.
    """
    gpu = GPUS.get(CUDA_NAMES.get(cuda_name, ""))
    return gpu.flops[dtype] / SHARE_REACHED if gpu else None


def cpu(memory_bytes: int, *, flops: float = 1e11, bandwidth: float = 1e10, block_s: float = 4e-4) -> Device:
    """Describe this machine's processor, on which all roles run side by side.

    The default rates are of two cores; `benchmarks/planner/calibration.py` measures them.
    """
    rates = dict.fromkeys(("bfloat16", "float16", "float32"), flops)
    return Device(
        "CPU",
        memory_bytes,
        rates,
        memory_bandwidth=bandwidth,
        link_bandwidth=GLOO_BANDWIDTH,
        network_bandwidth=GLOO_BANDWIDTH,
        host_bandwidth=FILE_BANDWIDTH,
        block_s=block_s,
        trained_block_s=3 * block_s,
        call_latency=GLOO_LATENCY,
        link_latency=GLOO_LATENCY,
        shared=True,
    )


def memory_limit() -> int | None:
    """Return the memory limit of this container in bytes; None without one, or without Linux's cgroup v2."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None


def available_memory() -> int:
    """Return the bytes that processes can still allocate on this machine, within a container's limit."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree"))
    except OSError:  # not Linux: use the total memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        cache = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())[
            "file"
        ]
    except (OSError, ValueError, KeyError):  # no control group, or no limit ("max")
        return free
    return min(free, limit - used + int(cache))
