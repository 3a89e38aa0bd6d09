"""Devices: NVIDIA's files of a machine, which tests lay out in a directory, and what CUDA can use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolemesh.errors import InvalidConfig
from rolemesh.workers.devices import NEEDED_DRIVERS, driver_version, resolve_device, why_unusable

KERNEL_MODULES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023": "535.129.03",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build": "580.65.06",
    "GCC version:  gcc version 12.3.0": "",
}


def machine(root: Path, *files: str, module: str = "") -> Path:
    """A root directory with these device files, and the driver's line."""
    (root / "dev").mkdir(parents=True)
    for name in files:
        (root / "dev" / name).touch()
    if module:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(f"{module}\n")
    return root


@pytest.mark.parametrize("module", KERNEL_MODULES)
def test_the_driver_version_is_read_from_either_kernel_module(module: str, tmp_path: Path) -> None:
    assert driver_version(machine(tmp_path, module=module)) == KERNEL_MODULES[module]


def test_the_error_of_an_unusable_gpu_names_both_drivers(tmp_path: Path) -> None:
    module = next(iter(KERNEL_MODULES))
    why = why_unusable({}, machine(tmp_path, "nvidia0", "nvidia10", "nvidiactl", module=module))
    assert "(/dev/nvidia0, /dev/nvidia10)" in why
    if torch.version.cuda is None:
        assert "is a build without CUDA" in why
    else:
        assert f"the driver is 535.129.03, and torch {torch.__version__} for CUDA" in why
        assert f"needs {NEEDED_DRIVERS[torch.version.cuda[:2]]} or newer" in why


def test_a_gpu_without_a_driver_is_an_error(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        assert "the driver is not loaded" in why_unusable({}, machine(tmp_path, "nvidia0"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can use a GPU here")
def test_auto_trains_on_a_cpu_only_where_no_gpu_is_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with_gpu, without = machine(tmp_path / "gpu", "nvidia0"), machine(tmp_path / "none", "nvidiactl")
    shown = r"there is an NVIDIA GPU \(/dev/nvidia0\)"
    with pytest.raises(InvalidConfig, match=rf"is auto, and {shown}.* or set trainer\.device to cpu"):
        resolve_device("auto", with_gpu)
    with pytest.raises(InvalidConfig, match=rf"is cuda, but {shown}.*; mend that"):
        resolve_device("cuda", with_gpu)
    assert resolve_device("cpu", with_gpu).type == resolve_device("auto", without).type == "cpu"
    with pytest.raises(InvalidConfig, match="this machine has no CUDA device; set it to cpu or auto"):
        resolve_device("cuda", without)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto", with_gpu).type == "cpu"


def test_no_gpu_and_a_hidden_one_are_a_cpu(tmp_path: Path) -> None:
    """Other files of NVIDIA's driver are no GPU: a pod without one may have them."""
    others = ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "null")
    assert why_unusable({}, machine(tmp_path / "none", *others, module=next(iter(KERNEL_MODULES)))) == ""
    root = machine(tmp_path / "hidden", "nvidia0")
    for hidden in ("", " ", "-1", "-1,0", "none", "NoDevFiles"):
        assert why_unusable({"CUDA_VISIBLE_DEVICES": hidden}, root) == ""
    for shown in ("0", " 0", "0,-1", "GPU-8932f937", "MIG-8932f937"):
        assert why_unusable({"CUDA_VISIBLE_DEVICES": shown}, root)
