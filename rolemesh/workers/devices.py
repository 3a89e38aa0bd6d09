"""The device that a process computes on, and why an NVIDIA GPU of the machine cannot be used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from rolemesh.errors import InvalidConfig

# The oldest driver for torch built for a major version of CUDA (NVIDIA, CUDA compatibility, table 2).
NEEDED_DRIVERS = {"12": "525", "13": "580"}
_DEVICE_FILE = re.compile(r"nvidia\d+")  # nvidiactl is also there without a GPU, as in pods without one
_IN_SIGHT = re.compile(r"\s*(\+?\d|GPU-|MIG-)")
_DRIVER = re.compile(r"Kernel Module(?: for \S+)? +(\d[\d.]*)")


def resolve_device(name: str, root: Path = Path("/")) -> torch.device:
    """Return the device for trainer.device; auto is cuda if there is one, else cpu.

    Args:
        name: cpu, cuda or auto.
        root: of the file system.

    Raises:
        InvalidConfig: it is cuda and there is no CUDA device; or it is auto, and there is an NVIDIA GPU that
            CUDA cannot use. Nothing should train on a CPU because a driver is too old.
    """
    if name == "cpu" or torch.cuda.is_available():
        return torch.device("cpu" if name == "cpu" else "cuda")
    why = why_unusable(os.environ, root)
    if name == "cuda":
        raise InvalidConfig(
            "trainer.device is cuda, but "
            + (f"{why}; mend that" if why else "this machine has no CUDA device; set it to cpu or auto")
        )
    if why:
        raise InvalidConfig(f"trainer.device is auto, and {why}; mend that, or set trainer.device to cpu")
    return torch.device("cpu")


def why_unusable(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """Say why CUDA cannot use the NVIDIA GPU that the system shows; empty: it shows none, or it is hidden.

    Args:
        environment: CUDA_VISIBLE_DEVICES may hide all GPUs on purpose. CUDA shows those up to the first entry
            that is neither an index nor a UUID, so `none` and `-1,0` hide all.
        root: of the file system.
    """
    hidden = not _IN_SIGHT.match(environment.get("CUDA_VISIBLE_DEVICES", "0"))
    devices = root / "dev"
    files = [path for path in devices.glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name)]
    if hidden or not files:
        return ""
    shown = ", ".join(f"/dev/{path.name}" for path in sorted(files))
    driver = driver_version(root)
    cuda = torch.version.cuda
    if cuda is None:
        return f"there is an NVIDIA GPU ({shown}), but torch {torch.__version__} is a build without CUDA"
    needed = NEEDED_DRIVERS.get(cuda.partition(".")[0], "a newer one")
    return (
        f"there is an NVIDIA GPU ({shown}), but CUDA cannot use it: the driver is {driver or 'not loaded'}, "
        f"and torch {torch.__version__} for CUDA {cuda} needs {needed} or newer "
        "(nvidia-smi says whether the GPU answers)"
    )


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's driver, e.g. 580.65.06; empty: none is loaded."""
    try:
        found = _DRIVER.search((root / "proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def described(device: torch.device) -> str:
    """Return the device, driver and runtime, for a log."""
    if device.type != "cuda":
        return f"{device.type} (torch {torch.__version__})"
    gpu = torch.cuda.get_device_properties(device)
    return (
        f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}), "
        f"driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    )
