"""docs/algorithms.md has a row for all that a job file can choose, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rolemesh.algos import kl
from rolemesh.algos.aggregation import MODES
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config.base import leaves
from rolemesh.config.job import JobConfig
from rolemesh.rules.sources import RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def rows(section: str) -> list[str]:
    """The first cell of each row."""
    cells = [line.split(" | ")[0] for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [cell.removeprefix("| ") for cell in cells]


def names(section: str) -> list[str]:
    return [name for cell in rows(section) for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("Advantages", ESTIMATORS),
        ("Policy losses", POLICY_LOSSES),
        ("Aggregation", MODES),
        ("KL", kl.KL_ESTIMATORS | kl.ALIASES),
        ("Rewards", {*RULES, "reward.overlong_buffer"}),
    ],
)
def test_each_name_has_one_row_and_no_row_is_of_another(section: str, known: dict[str, object]) -> None:
    assert sorted(names(section)) == sorted(known)


def test_each_estimator_of_verl_has_a_row_or_is_named_as_absent() -> None:
    """verl 0.9.1's enumeration AdvantageEstimator; one that is absent leads to one that is there."""
    of_verl = {
        "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "gpg",
        "gdpo", "grpo_passk", "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }  # fmt: skip
    cells = [
        line.split(" | ") for line in SECTIONS["Other names in verl"].splitlines() if line.startswith("| `")
    ]
    absent = {re.findall(r"`([^`]+)`", cell[0])[0]: cell[1] for cell in cells if cell[1].startswith("absent; ")}
    assert of_verl - set(ESTIMATORS) == set(absent)
    assert {re.findall(r"`([^`]+)`", instead)[0] for instead in absent.values()} <= set(ESTIMATORS)


def test_a_row_with_two_names_is_of_an_estimator_and_its_alias() -> None:
    together = [re.findall(r"`([^`]+)`", cell) for cell in rows("KL")]
    assert {pair[1]: pair[0] for pair in together if len(pair) == 2} == kl.ALIASES


def test_keys_that_are_named_exist() -> None:
    keys = set(leaves(JobConfig))
    known = keys | {key.rpartition(".")[0] for key in keys}
    tops = "|".join(JobConfig.model_fields)
    named = set(re.findall(rf"`((?:{tops})\.[a-z_.]+)", TEXT))
    assert len(named) > 10
    assert named <= known, named - known
    correction = {cell.split(":")[0].strip("`") for cell in names("Rollout correction")}
    assert {f"algorithm.rollout_correction.{name}" for name in correction} <= keys


def test_recipes_that_are_named_are_the_ones_that_are_there() -> None:
    linked = set(re.findall(r"\(\.\./(configs/recipes/[^)]+\.yaml)\)", TEXT))
    assert linked == {str(path.relative_to(ROOT)) for path in (ROOT / "configs" / "recipes").glob("*.yaml")}


def test_pictures_and_files_that_it_links_to_are_there() -> None:
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", TEXT):
        assert (ROOT / "docs" / target.partition("#")[0]).exists(), target
