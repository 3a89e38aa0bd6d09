"""No result of a test depends on what a user has on this machine, or on what the process does meanwhile."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from pathlib import Path

from syntax_trees import parsed

ROOT = Path(__file__).parents[1]
# They expect that outputs/tiny/model is not there, that the Hub is asked, also by processes, and that a fetched
# model needs none.
OF_THE_HUB = (
    "test_a_path_neither_directory_nor_hub_name_is_refused",
    "test_a_plan_downloads_the_configuration_alone",
    "test_two_processes_at_once_fetch_once",
    "test_a_fetched_model_is_used_offline",
)


def test_tests_pass_beside_the_demo_and_with_user_hf_settings(tmp_path: Path) -> None:
    """The settings are those of Hugging Face in the user's environment."""
    (tmp_path / "outputs" / "tiny" / "model").mkdir(parents=True)
    cache = str(tmp_path / "cache")
    settings = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": cache,
        "HF_HUB_CACHE": cache,
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "hf_of_the_user",
        "HUGGINGFACE_HUB_CACHE": cache,
        "TRANSFORMERS_OFFLINE": "1",
    }
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    names = [f"{ROOT / 'tests' / 'hub' / 'test_models_by_name.py'}::{name}" for name in OF_THE_HUB]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest, "-c", str(ROOT / "pyproject.toml"), *names],
        cwd=tmp_path,
        env=ours | settings,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(OF_THE_HUB)} passed" in done.stdout


class Parses:
    """Garbage whose end parses something, as the logging of a traceback does."""

    def __init__(self) -> None:
        self.itself = self  # so only a collection ends it

    def __del__(self) -> None:
        ast.parse("f(a, b)")


def test_a_program_is_parsed_though_what_is_collected_parses_too() -> None:
    """With ast.parse in place of `parsed` nearly every round fails, before Python 3.11.8."""
    assert gc.isenabled()
    text = "\n".join(f"x{i} = f(a{i}, b.c[{i}])" for i in range(3000))
    for _ in range(5):
        for _ in range(50):
            Parses()
        assert len(parsed(text).body) == 3000
    assert gc.isenabled()
