"""Prepare a bare machine for `make test-gpu`: find a Python with torch, and install what else it lacks.

    python3 -m benchmarks.gpu.prepare bundle [--python-version 3.12] [--without NAME …] [--all]
    python3 -m benchmarks.gpu.prepare run [--device cuda|cpu] [--missing] …

`bundle` runs where there are package registries, and downloads the locked wheels into build/gpu-bundle. `run`
needs no network: it installs from there what the chosen Python lacks, beside its own packages and never over
them, and starts benchmarks.gpu with the rest of its arguments. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build" / "gpu-bundle"
SITE = ROOT / "outputs" / "gpu" / "site"
TORCH = (2, 11)
# Packages that the tests with the mark gpu need in addition to the project's requirements.
OF_TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
# Large, and on every machine with a CUDA torch that was seen.
USUALLY_THERE = ("numpy", "pyarrow", "pillow", "fonttools", "hf-xet")
# pip takes the first that a package has, so older ones come first.
GLIBC = (28, 27, 26, 24, 17, 12, 31, 34, 35, 36, 39)
PROBE = """
import importlib.util as u, json, sys
found = {"python": sys.version.split()[0], "torch": None, "gpus": []}
if u.find_spec("torch"):
    import torch
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps(found))
"""


# ---------------------------------------------------------------------------------------- the bundle


def bundle(python_version: str, without: Sequence[str], everything: bool) -> None:
    """Download the locked wheels of the requirements, without torch and what torch brings along."""
    left_out = {canonical(name) for name in without}
    left_out |= set() if everything else {*USUALLY_THERE, *names_in(resolved(["torch"], python_version))}
    left_out.add("torch")
    wanted = requirements() + [name for name in OF_TESTS if name not in left_out]
    pins = [pin for pin in resolved(wanted, python_version) if name_of(pin) not in left_out]
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    legacy = [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    of_python = [f"--python-version={python_version}", "--implementation=cp", *platforms, *legacy]
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*fetch, "--only-binary=:all:", *of_python, "-d", str(BUNDLE), *pins], check=True)
    wheels = list(BUNDLE.iterdir())
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{BUNDLE.relative_to(ROOT)}: {len(wheels)} wheels for Python {python_version}, {size:.0f} MiB")
    print("left out:", ", ".join(sorted(left_out)))


def requirements() -> list[str]:
    """Return the project's requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def resolved(wanted: Sequence[str], python_version: str) -> list[str]:
    """Return the locked versions of requirements and of all that they need, each as name==version."""
    uv = Path(sys.executable).with_name("uv")
    target = ["--python-version", python_version, "--python-platform", "x86_64-manylinux_2_28"]
    plain = [
        "--no-emit-index-url",
        "--no-header",
        "--no-annotate",
        "--constraint",
        str(ROOT / "requirements.lock"),
    ]
    command = [str(uv), "pip", "compile", "-q", "-", *target, *plain]
    found = subprocess.run(command, input="\n".join(wanted), text=True, check=True, stdout=subprocess.PIPE)
    return [line.split(";")[0].strip() for line in found.stdout.splitlines() if "==" in line]


def names_in(pins: Sequence[str]) -> set[str]:
    return {name_of(pin) for pin in pins}


def name_of(pin: str) -> str:
    return canonical(pin.split("==")[0])


def canonical(name: str) -> str:
    return name.split("[")[0].strip().lower().replace("_", "-").replace(".", "-")


# ----------------------------------------------------------------------------- on the bare machine


def candidates() -> Iterator[str]:
    """Yield the Pythons of this machine, each once: PYTHON, .venv's, the PATH's, and those in /opt."""
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    named = [os.environ.get("PYTHON", ""), str(ROOT / ".venv" / "bin" / "python"), sys.executable]
    named += [str(Path(folder) / name) for folder in folders for name in ("python3", "python")]
    for pattern in ("/opt/*/bin/python3", "/opt/*/.venv/bin/python3", "/opt/*/venv/bin/python3"):
        named += sorted(glob(pattern))
    seen = set()
    for name in named:
        path = shutil.which(name) if name else None
        if path and path not in seen:
            seen.add(path)
            yield path


def probe(python: str) -> dict[str, Any] | None:
    """Return what a Python has; None if it does not even start."""
    try:
        ended = subprocess.run([python, "-P", "-c", PROBE], capture_output=True, text=True, timeout=120)
        return dict(json.loads(ended.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def choose(device: str) -> str:
    """Return the first Python with a torch that is new enough and, unless the device is cpu, sees a GPU."""
    for python in candidates():
        found = probe(python)
        print(f"{python}: {found or 'cannot be used'}")
        if not found or not found["torch"] or tuple(map(int, found["python"].split(".")[:2])) < (3, 11):
            continue
        version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
        if version >= TORCH and (found["gpus"] or device == "cpu"):
            return python
    what = "torch 2.11 or newer" + ("" if device == "cpu" else " that sees a GPU")
    sys.exit(f"no Python here has {what}; set PYTHON to one that has, or try --device cpu")


def lacking() -> dict[str, Any]:
    """Say what this Python lacks of the requirements, and of what they need in turn.

    Returns:
        `install`: the wheels of the bundle that fill the gap; `missing`: requirements that it does not fill.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    wheels = {canonical(wheel.name.split("-")[0]): wheel for wheel in sorted(BUNDLE.glob("*.whl"))}
    queue = [Requirement(line) for line in [*requirements(), *OF_TESTS]]
    seen: set[str] = set()
    install: dict[str, str] = {}
    missing: dict[str, str] = {}
    while queue:
        wanted = queue.pop()
        name = canonical(wanted.name)
        if name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        here = _installed(name)
        found = wheels.get(name)
        if here and wanted.specifier.contains(here.version, prereleases=True):
            needs = here.requires or []
        elif name == "torch":
            needs = []  # choose() has looked at it
        elif found:
            install[name] = str(found)
            needs = _needs(found)
        else:
            missing[name] = f"needs {wanted}, has {here.version if here else 'none'}"
            needs = []
        queue += [Requirement(line) for line in needs]
    return {"install": sorted(install.values()), "missing": missing}


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _needs(wheel: Path) -> list[str]:
    with ZipFile(wheel) as file:
        about = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(about).decode().split("\n\n")[0].splitlines()
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]


def fill(python: str) -> Mapping[str, str]:
    """Install what a Python lacks into SITE, and return the environment that has it."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [python, "-m", "benchmarks.gpu.prepare", "lacking"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ended.stdout)
    if found["install"]:
        options = ["--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
        pip = [python, "-m", "pip", "install", "-q", *options, "--target", str(SITE)]
        subprocess.run([*pip, *found["install"]], check=True)
        print(f"from the bundle: {', '.join(sorted(Path(wheel).name for wheel in found['install']))}")
    for name, why in sorted(found["missing"].items()):
        print(f"MISSING {name}: {why}; make gpu-bundle where there is a network, and bring build/gpu-bundle")
    paths = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run(device: str, only_missing: bool, rest: Sequence[str]) -> None:
    """Prepare, and become benchmarks.gpu."""
    python = choose(device)
    environment = fill(python)
    if only_missing:
        return
    os.chdir(ROOT)
    command = [python, "-m", "benchmarks.gpu", "--device", device, *rest]
    sys.stdout.flush()
    os.execve(python, command, environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.prepare", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("bundle", help="download the wheels")
    making.add_argument("--python-version", default="3.12", help="of the machine with the GPU")
    making.add_argument("--without", nargs="*", default=[], help="packages that the machine has")
    making.add_argument(
        "--all", action="store_true", help=f"also {', '.join(USUALLY_THERE)} and torch's own needs"
    )
    running = commands.add_parser("run", help="prepare this machine, and run")
    running.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    running.add_argument("--missing", action="store_true", help="only say what is missing")
    commands.add_parser("lacking", help="what this Python lacks, as JSON")
    arguments, rest = parser.parse_known_args()
    if arguments.command == "bundle":
        bundle(arguments.python_version, arguments.without, arguments.all)
    elif arguments.command == "run":
        run(arguments.device, arguments.missing, rest)
    else:
        print(json.dumps(lacking()))


if __name__ == "__main__":
    main()
