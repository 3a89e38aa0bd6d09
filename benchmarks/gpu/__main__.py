"""Try everything that only a GPU shows, and measure it: `make test-gpu` prepares a machine and runs this.

    python -m benchmarks.gpu [--device cuda|cpu] [--only PART …] [--out DIR] [--seconds 490]

Each part is a process with a bound of time of its own, and one that fails does not stop the others. Results are
in DIR/gpu.json ($OUT, else outputs/gpu):

    device, versions   the machine
    parts              by name: `state` passed, failed or skipped; `seconds`; `figures`, which differ by
                       part; `why`, the error or the reason; `log`, the end of what a failed part printed
    passed             whether no part failed

The exit status is 1 if a part failed, and 2 if none passed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
SO_FAR = "so_far.json"  # in a part's directory: figures that it keeps if it is killed
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "grpcio",
    "protobuf",
    "pydantic",
    "safetensors",
    "pyarrow",
    "vllm",
)
LOG_BYTES = 6000
GPUS = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[gpu.name, gpu.total_memory, gpu.multi_processor_count] for gpu in found]))
"""


@dataclass(frozen=True)
class Part:
    """A part, in order of worth.

    Args:
        code: module:function of this folder, called with the device and an empty directory; returns figures.
        bound_s: of its process, its imports included.
        meaning: for the table.
    """

    code: str
    bound_s: float
    meaning: str


PARTS = {
    "log-probs": Part("correctness:log_probs", 70, "the numbers of a CPU; varlen attention; bfloat16"),
    "sharded": Part("sharding:sharded", 110, "FSDP2 on NCCL, offload, checkpointing, publishing from shards"),
    "offloading": Part("memory:offloading", 70, "memory is free while a role sleeps"),
    "update": Part("speed:update", 90, "tokens per second and MFU beside plain torch"),
    "head": Part("head:head", 90, "kernels and seconds of log-probs at V = 151,936; errors of bfloat16 logits"),
    "steps": Part("services:steps", 120, "PPO through real services"),
    "twice": Part("correctness:twice", 60, "the same bits twice"),
    "peaks": Part("memory:peaks", 90, "peak memory beside the planner's"),
    "hybrid": Part("hybrid:hybrid", 120, "what it costs that actor and rollout share the GPU"),
    "handover": Part("speed:handover", 70, "new weights from actor to rollout, GB/s"),
    "offloading-3b": Part("large:offloaded", 90, "3e9 parameters with their moments sleep and wake"),
    "handover-3b": Part("large:handed_over", 90, "3e9 new weights in bfloat16, each copy timed, beside IPC"),
    "tests": Part("services:tests", 90, "the tests with the mark gpu"),
    "vllm": Part("vllm_rows:numbers", 150, "vLLM's log-probs, kept ids and seeds beside the trainer's"),
    "vllm-updates": Part("vllm_rows:updates", 150, "ten updates of vLLM, read back, and a swap"),
    "vllm-sleep": Part("vllm_sleep:sleep", 180, "vLLM asleep and awake, both levels, two shares of the memory"),
    "vllm-speed": Part("vllm_speed:decoding", 180, "tokens per second beside vLLM alone"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "outputs" / "gpu"))
    parser.add_argument("--seconds", type=float, default=490.0, help="of all parts together")
    parser.add_argument("--part", help="run this part here, and print its result as JSON (used by itself)")
    parser.add_argument("--directory", type=Path, help="of --part")
    arguments = parser.parse_args()
    if arguments.part:
        run_here(arguments.part, arguments.device, arguments.directory)
        return
    found = run_all(arguments.only, arguments.device, arguments.out, time.monotonic() + arguments.seconds)
    states = [part["state"] for part in found["parts"].values()]
    sys.exit(1 if "failed" in states else 0 if "passed" in states else 2)


def run_all(names: Sequence[str], device: str, out: Path, deadline: float) -> dict[str, Any]:
    """Run parts one after another, write gpu.json after each, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": describe(device), "versions": versions(), "parts": {}}
    print(f"{found['device']}\n{found['versions']}", flush=True)
    for name in names:
        left = deadline - time.monotonic()
        if left < 5:
            found["parts"][name] = {"state": "skipped", "seconds": 0.0, "why": "no time was left"}
        else:
            found["parts"][name] = run(name, device, min(left, PARTS[name].bound_s))
        part = found["parts"][name]
        print(f"{name:13} {part['state']:8} {part['seconds']:6.1f} s  {part.get('why', '')[:200]}", flush=True)
        found["passed"] = all(each["state"] != "failed" for each in found["parts"].values())
        (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found), flush=True)
    return found


def run(name: str, device: str, bound_s: float) -> dict[str, Any]:
    """Run a part in a process group of its own; whatever it leaves is killed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", device]
    began = time.monotonic()
    with TemporaryDirectory(prefix="rolemesh-gpu-") as folder:
        directory = Path(folder) / "work"
        directory.mkdir()
        log = Path(folder) / "log"
        with log.open("wb") as output:
            part = subprocess.Popen(
                [*command, "--directory", str(directory)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    part.wait(bound_s)
            finally:
                _end(part)
        result = directory / "result.json"
        seconds = round(time.monotonic() - began, 1)
        if result.exists():
            found = dict(json.loads(result.read_text()))
        else:
            ended = f"exit code {part.returncode}" if part.returncode != -signal.SIGKILL else "killed"
            found = {"state": "failed", "why": f"no result after {seconds:.0f} of {bound_s:.0f} s: {ended}"}
            if (so_far := directory / SO_FAR).exists():
                found["figures"] = json.loads(so_far.read_text())
        if found["state"] == "failed":
            found["log"] = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
    return {"state": found.pop("state"), "seconds": seconds, **found}


def _end(part: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(part.pid, signal.SIGKILL)
    part.wait()


def run_here(name: str, device: str, directory: Path) -> None:
    """Run a part in this process, and write directory/result.json."""
    result: dict[str, Any]
    try:
        module, _, function = PARTS[name].code.partition(":")
        part = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        result = {"state": "passed", "figures": part(device, directory)}
    except Exception as error:
        traceback.print_exc()
        state = "skipped" if type(error).__name__ == "Skipped" else "failed"
        result = {
            "state": state,
            "why": f"{type(error).__name__}: {error}" if state == "failed" else str(error),
            "figures": getattr(error, "figures", {}),
        }
    sys.stderr.flush()
    (directory / "result.part").write_text(json.dumps(result))
    (directory / "result.part").replace(directory / "result.json")
    os._exit(0)  # a thread of a library must not keep the next part waiting


def describe(device: str) -> dict[str, Any]:
    """The machine: its processor, and its GPUs as torch names them."""
    described: dict[str, Any] = {"kind": device, "machine": platform.machine(), "cores": os.cpu_count()}
    if device == "cuda":
        found = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True)
        described["gpus"] = json.loads(found.stdout) if found.returncode == 0 else found.stderr[-500:]
    return described


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(found: Mapping[str, Any]) -> str:
    """All figures, one a line, then how each part ended."""
    lines = []
    for name, part in found["parts"].items():
        lines += [f"{name}.{label} = {value}" for label, value in _flat(part.get("figures", {}))]
    lines += [""]
    for name, part in found["parts"].items():
        lines.append(f"{part['state']:8} {name:13} {PARTS[name].meaning}  {part.get('why', '')[:300]}")
    return "\n".join(lines)


def _flat(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            found.append((f"{prefix}{name}", ", ".join(_short(each) for each in value)))
        else:
            found.append((f"{prefix}{name}", _short(value)))
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
