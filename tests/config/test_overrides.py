"""Keys and files on the command line: how they are merged, and which are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from rolemesh.config import load_job, parse_overrides
from rolemesh.errors import InvalidConfig


@pytest.mark.parametrize(
    "overrides",
    [
        ("a.b.n=4", "a.b={m: true}"),
        ("a.b.n=4", "a={b: {m: true}}"),
        ("a={b: {n: 4}}", "a.b.m=true"),
        ("a.b={n: 4, m: false}", "a.b={m: true}"),
        ("a.b.n=3", "a.b.n=4", "a.b.m=true"),
    ],
)
def test_sections_on_the_command_line_are_merged(overrides: tuple[str, ...]) -> None:
    assert parse_overrides(overrides) == {"a": {"b": {"n": 4, "m": True}}}


@pytest.mark.parametrize(
    "contradictory", [("a.b.n=4", "a.b=null"), ("a.b.n=4", "a={b: 5}"), ("a.b.n=4", "a=x")]
)
def test_a_value_and_a_section_for_one_key_contradict_each_other(
    contradictory: tuple[str, str],
) -> None:
    for overrides in itertools.permutations(contradictory):
        with pytest.raises(InvalidConfig) as error:
            parse_overrides(overrides)
        assert str(error.value) == f"override {overrides[1]!r} contradicts an earlier override"


def test_a_key_below_an_alias_is_set_there_alone() -> None:
    tree = parse_overrides(["a={x: &x {n: 1}, y: *x}", "a.x.n=2"])
    assert tree == {"a": {"x": {"n": 2}, "y": {"n": 1}}}


@pytest.mark.parametrize("value", ["run #1", "#1", "[a, # x\n b]", "{a: 1} # x", "'run' #1"])
def test_a_comment_in_a_value_is_refused(value: str) -> None:
    with pytest.raises(InvalidConfig, match=r"# begins a comment here; put a text with a # in quotes"):
        parse_overrides([f"trainer.experiment_name={value}"])


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("'run #1'", "run #1"),
        ('"#1"', "#1"),
        ("run#1", "run#1"),
        ('[a#, "b #c", {"d #": e}]', ["a#", "b #c", {"d #": "e"}]),
        ("|\n a\n # b\n", "a\n# b\n"),
    ],
)
def test_a_hash_that_begins_no_comment_stays(value: str, read: object) -> None:
    assert parse_overrides([f"a={value}"]) == {"a": read}


def test_a_file_may_lie_in_a_folder_with_an_equals_sign(tmp_path: Path) -> None:
    """Also where a wrong order of files is looked for."""
    folder = tmp_path / "lr=1e-5"
    folder.mkdir()
    (folder / "over.yaml").write_text(yaml.safe_dump({"actor": {"optim": {"lr": 1e-5}}}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"data": {"seed": 1}}))
    assert load_job(tmp_path / "job.yaml", [str(folder / "over.yaml")]).actor.optim.lr == 1e-5
    (folder / "job.yaml").write_text(yaml.safe_dump({"data": {"seed": 1}}))
    with pytest.raises(InvalidConfig, match=r"the job file comes first"):
        load_job(folder / "over.yaml", [str(folder / "job.yaml")])
    assert parse_overrides(["a.file=x/over.yaml"]) == {"a": {"file": "x/over.yaml"}}


def test_a_name_below_a_mapping_may_have_hyphens() -> None:
    servers = "rollout.multi_turn.mcp_servers"
    tree = parse_overrides([f"{servers}.my-server.command=[a]"])
    assert tree == {"rollout": {"multi_turn": {"mcp_servers": {"my-server": {"command": ["a"]}}}}}
    for key in ("-a", "a.-b", "--a", "1a", "a..b", "a."):
        with pytest.raises(InvalidConfig, match=r"is not of the form section\.key=value, nor a \.yaml file$"):
            parse_overrides([f"{key}=1"])


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("+a.b=1", "leave out the +"),
        ("++a.b=1", "leave out the +"),
        ("~a.b", "a key can only be taken out in the file"),
    ],
)
def test_the_signs_of_hydra_are_refused_with_the_way_out(override: str, hint: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        parse_overrides([override])
    assert str(error.value).endswith(f"nor a .yaml file; {hint}")
