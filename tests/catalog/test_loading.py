"""Plug-ins: files, modules and installed packages, imported before a job is read."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import recorded, small_job, train

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.plugin_imports import NAMED, load_plugins, used_plugins
from rolemesh.config import load_job
from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import InvalidConfig
from rolemesh.plugins import estimator
from rolemesh.services.controller.run.resume_compat import settings_to_keep

# The scores of a group less their median. It imports no torch, which would take each process seconds.
SOURCE = """
from rolemesh.plugins import Options, dataset, estimator, page, policy_loss, reward_manager

class Scale(Options):
    scale: float = 1.0

@estimator("centred", reads=("token_level_rewards", "response_mask"), options=Scale)
def compute_centred(token_level_rewards, response_mask, *, scale):
    scores = token_level_rewards.sum(1, keepdim=True)
    advantages = scale * (scores - scores.median()) * response_mask
    return advantages, advantages
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test declares is forgotten."""
    before = [dict(catalog) for catalog in NAMED.values()]
    yield
    for catalog, declared in zip(NAMED.values(), before, strict=True):
        for each in list(catalog.values()):
            if each.name not in declared:
                catalog.remove(each.origin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_parts.py"
    path.write_text(SOURCE)
    return path


def job_of(*plugins: Any, **algorithm: Any) -> JobConfig:
    return make_job(
        {"plugins": [str(each) for each in plugins], "algorithm": {"adv_estimator": "centred", **algorithm}}
    )


def test_a_file_is_imported_before_the_rest_of_the_job_is_read(file: Path) -> None:
    with pytest.raises(InvalidConfig, match="'centred', which is none of gae"):
        job_of()
    job = job_of(file, options={"scale": 2})
    assert job.estimator.origin == str(file)
    assert job.algorithm.options == {"scale": 2.0}
    assert f"- {file}" in job.to_yaml()  # what a role process reads


def test_a_job_file_and_the_command_line_name_plug_ins(file: Path, tmp_path: Path) -> None:
    written = tmp_path / "job.yaml"
    written.write_text("algorithm: {adv_estimator: centred}\n")
    assert load_job(written, [f"plugins=[{file}]"]).estimator.name == "centred"
    assert load_job(written, [f"plugins={file}"]).plugins == [str(file)]


def test_an_unknown_names_error_says_where_known_ones_come_from(file: Path) -> None:
    with pytest.raises(InvalidConfig) as raised:
        make_job({"plugins": [str(file)], "algorithm": {"adv_estimator": "centered"}})
    assert f"egpo; of {file}: centred; did you mean 'centred'?" in str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", r"SyntaxError"),
        (
            "import no_such_module",
            r"ModuleNotFoundError: No module named 'no_such_module' .*my_parts\.py, line 1",
        ),
        ("\n1 / 0", r"ZeroDivisionError: division by zero .*my_parts\.py, line 2"),
        ("raise SystemExit(3)", r"SystemExit: 3"),
        (
            SOURCE.replace('"centred"', '"grpo"'),
            r"declares the .*estimator 'grpo', which rolemesh has declared",
        ),
        (
            SOURCE.replace("reads=", "raeds="),
            r"the advantage estimator 'centred': raeds is no argument; there are",
        ),
        (
            SOURCE.replace('("token_level_rewards", "response_mask")', '"uid"'),
            r"'centred': reads is 'uid': Input should be a valid tuple",
        ),
        (
            SOURCE.replace('reads=("token_level_rewards", "response_mask"), ', ""),
            r"'centred': reads is missing",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_used_says_why_and_where(file: Path, source: str, said: str) -> None:
    file.write_text(source)
    with pytest.raises(InvalidConfig, match=rf"plugins: {file}.*{said}"):
        job_of(file)


def test_a_missing_file_and_a_missing_module_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=rf"job: plugins: no such file: {tmp_path}/absent\.py"):
        job_of(tmp_path / "absent.py")
    with pytest.raises(InvalidConfig, match=r"the module no_such_package\.parts could not be imported: Module"):
        job_of("no_such_package.parts")
    with pytest.raises(InvalidConfig, match="plugins"):
        make_job({"plugins": {"a": 1}})


def test_only_a_file_that_has_changed_is_imported_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    written = file.stat()
    job_of(file)
    first = ESTIMATORS["centred"].code
    job_of(file)
    assert ESTIMATORS["centred"].code is first
    file.write_text(SOURCE.replace("centred", "central"))
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))  # an edit in the same second
    with pytest.raises(InvalidConfig, match=rf"'centred', which is none of .* of {file}: central"):
        job_of(file)


def test_two_files_cannot_declare_one_name(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    with pytest.raises(
        InvalidConfig, match=rf"other\.py declares .*'centred', which {file} has declared already"
    ):
        job_of(file, other)


def test_a_resume_keeps_the_digest_of_a_plugin(file: Path) -> None:
    first = settings_to_keep(job_of(file), 8)["digest of plug-in my_parts.py"]
    assert settings_to_keep(job_of(file), 8)["digest of plug-in my_parts.py"] == first
    file.write_text(SOURCE + "# changed\n")
    assert settings_to_keep(job_of(file), 8)["digest of plug-in my_parts.py"] != first


def test_a_part_that_other_processes_would_not_import_is_refused() -> None:
    """Before those processes start."""
    estimator("here", reads=("token_level_rewards", "response_mask"))(lambda rewards, mask: (rewards, rewards))
    job = make_job({"algorithm": {"adv_estimator": "here"}})
    with pytest.raises(InvalidConfig, match=r"'here' is declared by .*test_loading\.py.*set plugins to \["):
        used_plugins(job.plugins, job.parts)


async def test_a_run_whose_plug_in_has_changed_is_another_run(
    file: Path, tiny_model: Path, tmp_path: Path
) -> None:
    overrides = (
        *(f"plugins=[{file}]", "algorithm.adv_estimator=centred", "trainer.save_freq=1"),
        "trainer.total_training_steps=2",
    )
    await train(small_job(tmp_path, tiny_model, "run", *overrides[:-1], "trainer.total_training_steps=1"))
    again = small_job(tmp_path, tiny_model, "run", *overrides)
    await train(again)
    assert [record["training/global_step"] for record in recorded(again)] == [0, 1, 2]
    written = await asyncio.to_thread((again.run_dir / "config.yaml").read_text)
    assert "adv_estimator: centred" in written
    await asyncio.to_thread(file.write_text, SOURCE + "# changed\n")
    longer = small_job(tmp_path, tiny_model, "run", *overrides[:-1], "trainer.total_training_steps=3")
    with pytest.raises(
        InvalidConfig, match=r"cannot be resumed exactly: digest of plug-in my_parts\.py is '\w+' now"
    ):
        await train(longer)


# ------------------------------------------------------------------------- modules and packages

ASK = """
import json, sys
from rolemesh.catalog.plugin_imports import used_plugins
from rolemesh.config.job import make_job
job = make_job(json.loads(sys.argv[1]))
print(json.dumps({"origin": job.estimator.origin, "used": used_plugins(job.plugins, job.parts)}))
"""


def asked(path: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """What a process whose modules lie at `path` makes of a job."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", ASK, json.dumps(sections)],
        env=os.environ | {"PYTHONPATH": str(path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_module_is_found_by_name_and_its_package_is_its_digest(tmp_path: Path) -> None:
    package = tmp_path / "parts_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    sections = {"plugins": ["parts_of_mine"], "algorithm": {"adv_estimator": "centred"}}
    first = asked(tmp_path, sections)
    assert first["origin"] == "parts_of_mine"
    (package / "other.py").write_text("x = 1\n")
    second = asked(tmp_path, sections)
    assert first["used"].keys() == second["used"].keys() == {"parts_of_mine"}
    assert first["used"] != second["used"]


def test_text_moved_between_package_files_changes_the_digest(tmp_path: Path) -> None:
    """The same text in the same order, of three sources that do not mean the same."""
    package = tmp_path / "parts_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    sections = {"plugins": ["parts_of_mine"], "algorithm": {"adv_estimator": "centred"}}
    digests = set()
    for files in (
        {"a": "x = 1\n", "b": "y = 2\n"},
        {"a": "x = 1\ny = 2\n", "b": ""},
        {"a": "x = 1\n", "c": "y = 2\n"},
    ):
        for each in ("a", "b", "c"):
            (package / f"{each}.py").unlink(missing_ok=True)
        for each, text in files.items():
            (package / f"{each}.py").write_text(text)
        digests.add(asked(tmp_path, sections)["used"]["parts_of_mine"])
    assert len(digests) == 3


def test_an_installed_package_brings_its_parts_by_itself(tmp_path: Path) -> None:
    (tmp_path / "shop_of_parts.py").write_text(SOURCE)
    info = tmp_path / "shop_of_parts-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-of-parts\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[rolemesh.plugins]\nshop = shop_of_parts\n")
    found = asked(tmp_path, {"algorithm": {"adv_estimator": "centred"}})
    assert found["origin"] == "shop-of-parts 1.2"
    assert found["used"].keys() == {"shop-of-parts 1.2"}
    # one of which nothing is used is no setting that a resume keeps
    assert asked(tmp_path, {"algorithm": {"adv_estimator": "gae"}})["used"] == {}


def test_no_plug_in_no_cost() -> None:
    assert [plugin for plugin in load_plugins(()) if plugin.name != "shop-of-parts"] == []


def test_a_file_changed_during_a_run_changes_no_part_or_setting(file: Path) -> None:
    """The settings to keep are written with every checkpoint."""
    job = job_of(file)
    before, code = settings_to_keep(job, 8), ESTIMATORS["centred"].code
    file.write_text(SOURCE.replace("scale * (", "2 * scale * ("))
    assert settings_to_keep(job, 8) == before
    assert ESTIMATORS["centred"].code is code
    file.unlink()
    assert settings_to_keep(job, 8) == before


def test_two_files_of_one_name_count_both(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text("x = 1\n")
    first = settings_to_keep(job_of(file, other), 8)
    other.write_text("x = 2\n")
    assert settings_to_keep(job_of(file, other), 8) != first
    file.write_text(SOURCE + "# changed\n")
    other.write_text("x = 1\n")
    assert settings_to_keep(job_of(file, other), 8) != first
