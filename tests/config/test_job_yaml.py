"""YAML from outside: content, or one line that says what is wrong and where. And what a value's kind may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from rolemesh.config import load_job, parse_overrides
from rolemesh.config.base import kinds_of, leaves
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.yaml_file import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_yaml, read_yaml, to_yaml
from rolemesh.errors import InvalidConfig

SCHEMA = json.loads((Path(__file__).parents[2] / "charts/rlhf-job/values.schema.json").read_text())
CHARTS_JOB = Draft202012Validator({"$defs": SCHEMA["$defs"], "$ref": "#/$defs/JobConfig"})


def chain(links: int, width: int) -> str:
    """Line k has an anchor whose list repeats line k - 1's `width` times: width ** links values in all."""
    lines = ["a0: &a0 [x]", *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * width)}]" for k in range(1, links))]
    return "\n".join(lines)


def merges(links: int) -> str:
    return "\n".join(
        ["a0: &a0 {x: 1}"] + [f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}], k{k}: 1}}" for k in range(1, links)]
    )


HOSTILE = {
    "aliases that multiply": (chain(9, 9), "line 6: more than 20,000 values, counting repetitions by aliases"),
    "merges that multiply": (merges(25), "more than 20,000 values, counting repetitions by aliases"),
    "aliases that nest": (chain(40, 1), "line 31: lists and sections nest deeper than 32 levels"),
    "an alias of itself": ("x: 1\na: &a [*a]", "line 2: *a refers to a value that contains it"),
    "lists in lists": ("[" * 100_000, "line 1: lists and sections nest deeper than 32 levels"),
    "sections in sections": (
        "".join(" " * level + "a:\n" for level in range(900)),
        "line 32: lists and sections nest deeper than 32 levels",
    ),
    "many values": ("a: [" + "1," * MAX_VALUES + "]", "line 1: more than 20,000 values"),
    "a whole number": ("a: 1\nb: " + "1" * 100_000, "line 2: a number of 100,000 characters; the limit is 100"),
    "a hexadecimal number": ("a: 0x" + "f" * 100_000, "line 1: a number of 100,002 characters"),
    "a fraction": ("a: ." + "1" * 100_000, "line 1: a number of 100,001 characters"),
    "a section twice": ("actor: {}\ndata: {}\nactor: {}", "line 3: duplicate key 'actor', first in line 1"),
    "a key twice, deep": (
        "actor:\n  optim:\n    lr: 1\n    eps: 1\n    lr: 2",
        "line 5: duplicate key 'lr', first in line 3",
    ),
    "a key twice, once in quotes": ('rollout: {n: 1,\n "n": 2}', "line 2: duplicate key 'n', first in line 1"),
    "a key twice in a list": ("- {a: 1}\n- {b: 1, b: 1}", "line 2: duplicate key 'b', first in line 2"),
    "a list as a key": ("a: 1\n? [b]\n: 1", "line 2: a key must be a name"),
    "a tag that is not there": ("a: !!int x", "line 1: 'x' is not a valid int"),
    "a truth that is none": ("a: !!bool 7", "line 1: '7' is not a valid bool"),
    "bytes": ("a: !!binary aGk=", "line 1: could not determine a constructor for the tag"),
    "code": ("a: 1\nb: !!python/object:os.system x", "line 2: could not determine a constructor for the tag"),
    "a tag with a line break": ("a: !%0Ab c", r"could not determine a constructor for the tag '!\nb'"),
    "an alias of nothing": ("a: *b", "line 1: found undefined alias 'b'"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document"),
    "a control character": ("a: 1\nb: \x01", "line 2: character 0x1 in it"),
    "an escaped NUL": ('a: "b\\0"', "line 1: character 0x0 cannot be in a text"),
    "half a surrogate pair": ('a: "\\ud800"', "line 1: character 0xd800 cannot be in a text"),
    "the other half": ('a: "\\ude00"', "line 1: character 0xde00 cannot be in a text"),
    "both halves the wrong way": ('a: "\\ude00\\ud83d"', "line 1: character 0xde00 cannot be in a text"),
    "half a surrogate pair in a key": (
        '{"a": 1,\n "\\ud83d": 1}',
        "line 2: character 0xd83d cannot be in a text",
    ),
    "a NUL in a key": ('{"a\\0": 1}', "line 1: character 0x0 cannot be in a text"),
    "two merges": (
        "a: &a {x: 1}\nb: &b {x: 2}\nc:\n  <<: *a\n  <<: *b",
        "line 5: duplicate key '<<', first in line 4; write <<: [*a, *b]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_refused_in_one_line_with_file_and_line(case: str, tmp_path: Path) -> None:
    text, words = HOSTILE[case]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as error:
        load_job(path)
    assert f"{path}, line " in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(path))
    with pytest.raises(InvalidConfig) as of_overlay:  # the same words for what is laid on a job
        parse_overrides([str(path)])
    assert str(of_overlay.value) == str(error.value)
    with pytest.raises(InvalidConfig, match="override 'data=") as of_override:
        parse_overrides([f"data={text}"])
    assert words.partition(": ")[2] in str(of_override.value)
    assert "\n" not in str(of_override.value)


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(InvalidConfig, match=r"job.yaml is larger than 1 MiB"):
        read_yaml(path)
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_yaml(path) == {}
    path.write_bytes(b"actor: {}\ndata: {seed: \xff}\n")
    with pytest.raises(InvalidConfig, match=r"job.yaml, line 2: not UTF-8"):
        read_yaml(path)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_yaml(Path("/dev/null/job.yaml"))
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_yaml(tmp_path / "a\0b.yaml")


def test_anchors_and_merges_are_read() -> None:
    text = "base: &base {lr: 1, eps: 2}\nactor: {<<: *base, lr: 3}\ncritic: *base\nboth: [*base, *base]"
    base = {"lr": 1, "eps": 2}
    assert parse_yaml(text, "job") == {
        "base": base, "actor": {"lr": 3, "eps": 2}, "critic": base, "both": [base, base]
    }  # fmt: skip
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "job")


def test_of_several_merged_sections_the_first_comes_first() -> None:
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b], z: 3}"
    assert parse_yaml(text, "job")["c"] == {"x": 1, "y": 2, "z": 3}


@pytest.mark.parametrize("text", ["\U0001f600", "a\U0001f600b\U00010000", "\U0010ffff", "é\ud7ff\ue000"])
def test_json_that_escapes_a_character_beyond_u_ffff_is_read(text: str, tmp_path: Path) -> None:
    """json.dumps writes it as two escapes, of a pair of surrogates."""
    wanted = {"trainer": {"experiment_name": text}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(wanted), encoding="ascii")
    assert load_job(path).trainer.experiment_name == text
    assert parse_overrides([f"trainer.experiment_name={json.dumps(text)}"]) == wanted
    assert parse_yaml(json.dumps({text: 1}), "job") == {text: 1}


def test_keys_are_text_numbers_have_exponents_and_dates_are_text() -> None:
    text = "{on: 1e-6, 1: 1.5e3, n: 1e+06, ~: -2E4, 2025-11-02: 2025-13-45, x: 1_000, y: 1_5}"
    assert parse_yaml(text, "job") == {
        "on": 1e-6, "1": 1500.0, "n": 1e6, "~": -2e4, "2025-11-02": "2025-13-45", "x": 1000, "y": "1_5"
    }  # fmt: skip


def test_an_equals_sign_and_a_merge_sign_are_text_as_values() -> None:
    """YAML 1.1 has tags for them, and Helm's toYaml writes them without quotes."""
    text = "stop: [=, <<, '=', ==]\nmark: =\n=: {<<: {a: =}}"
    assert parse_yaml(text, "job") == {"stop": ["=", "<<", "=", "=="], "mark": "=", "=": {"a": "="}}
    kwargs = parse_overrides(["reward.custom_reward_function={path: f.py, reward_kwargs: {mark: =}}"])
    assert make_job(kwargs).reward.custom_reward_function.reward_kwargs == {"mark": "="}


def test_a_recorded_job_is_the_job_whatever_its_texts_look_like(tmp_path: Path) -> None:
    for text in (
        "1e-6",
        "2025-11-02",
        "on",
        "~",
        "1_5",
        "1:30",
        "a: b",
        "*a",
        "é\t\u2028",
        "#",
        "0x10",
        "[",
        "-",
        "=",
        "<<",
    ):
        names = {"experiment_name": text, "project_name": f"{text}\n", "default_local_dir": "a"}
        job = make_job({"trainer": names})
        (tmp_path / "config.yaml").write_text(job.to_yaml())
        assert load_job(tmp_path / "config.yaml") == job


def test_a_backslash_makes_a_placeholder_the_text_that_it_is(tmp_path: Path) -> None:
    """In keys and values; `$NAME` is one in paths alone. Of two backslashes one stays."""
    written = {
        "rollout": {"name": "vllm", "stop": [r"\${a}", r"\\${a}", r"\d", "$5", "$a", "${", r"\${a\${b}}"]},
        "trainer": {"default_local_dir": r"/\$a/\${b}/\$c", "experiment_name": r"\$a"},
        "data": {"apply_chat_template_kwargs": {r"\${k}": {"at": [r"\${v}"]}}},
    }
    job = make_job(written)
    assert job.rollout.stop == ("${a}", r"\${a}", r"\d", "$5", "$a", "${", r"\${a${b}}")
    assert (job.trainer.default_local_dir, job.trainer.experiment_name) == ("/$a/${b}/$c", "$a")
    assert job.data.apply_chat_template_kwargs == {"${k}": {"at": ["${v}"]}}
    (tmp_path / "config.yaml").write_text(job.to_yaml())
    assert load_job(tmp_path / "config.yaml") == job


def test_an_override_of_too_many_parts_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="the key has 5001 parts") as error:
        parse_overrides([".".join(["a"] * 5001) + "=1"])
    assert len(str(error.value)) < 400


def test_errors_quote_little_and_are_one_line() -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job({**{f"k{i}\n": 1 for i in range(1000)}, "data": {"seed": "x\n" * 10_000}})
    assert len(str(error.value)) < 5000
    assert "\n" not in str(error.value)
    assert "and 981 more" in str(error.value)
    with pytest.raises(InvalidConfig, match=r"a\\nb") as error:
        make_job({"placement": {"strategy": "a\nb"}})
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------- kinds


def field(key: str) -> object:
    """A key's type."""
    schema = JobConfig
    *sections, name = key.split(".")
    for section in sections:
        schema = schema.model_fields[section].annotation
    return schema.model_fields[name].annotation


WRONG = {"number": ["true", "'1'", "[true]"], "boolean": ["1", "0", "1.0", "'true'", "'1'"]}
KEYS = {key: kinds_of(field(key)) for key in leaves(JobConfig)}


def test_no_key_converts_between_booleans_numbers_and_texts() -> None:
    """Nor by the chart, whose schema is held against the same values."""
    assert CHARTS_JOB.is_valid({"actor": {"optim": {"lr": 1}, "use_kl_loss": True}, "data": {"seed": 8}})
    num_tried = 0
    for key, kinds in KEYS.items():
        for kind, texts in WRONG.items():
            for text in texts if kinds == {kind} else []:
                num_tried += 1
                job = parse_overrides([f"{key}={text}"])
                with pytest.raises(InvalidConfig) as error:
                    make_job(job)
                assert f"'{key}' is " in str(error.value)
                if not key.startswith("placement."):
                    assert not CHARTS_JOB.is_valid(job), (key, text)
    assert num_tried > 300


def test_integers_are_numbers_and_whole_fractions_are_integers() -> None:
    job = make_job({"actor": {"optim": {"lr": 1, "betas": [0, 0.5]}}, "data": {"seed": 8.0}})
    assert (job.actor.optim.lr, job.actor.optim.betas, job.data.seed) == (1.0, (0.0, 0.5), 8)
    with pytest.raises(InvalidConfig, match=r"'data.seed' is 8.5: Input should be a valid integer"):
        make_job({"data": {"seed": 8.5}})
    with pytest.raises(InvalidConfig, match=r"'actor.optim.betas' is \[0.9, True\]"):
        make_job({"actor": {"optim": {"betas": [0.9, True]}}})


@pytest.mark.parametrize(
    ("key", "text", "read", "chart_takes"),
    [
        ("data.seed", "8.0", 8, True),
        ("data.seed", "1e6", 1_000_000, True),
        ("data.seed", "8.5", None, False),
        ("data.seed", '"8"', None, False),
        ("data.seed", '"8.0"', None, False),
        ("data.seed", '"1e6"', None, False),
        ("actor.optim.lr", "1e-6", 1e-6, True),
        ("actor.optim.lr", '"1e-6"', 1e-6, False),
        ("actor.optim.lr", '"1E-6"', 1e-6, False),
        ("actor.optim.lr", '"1.0e-06"', 1e-6, False),
        ("actor.optim.lr", '"0.1"', None, False),
        ("actor.optim.lr", '"1"', None, False),
        ("actor.use_kl_loss", "1", None, False),
    ],
)
def test_which_spellings_of_a_number_the_job_and_the_chart_take(
    key: str, text: str, read: float | None, chart_takes: bool
) -> None:
    """What docs/input.md says."""
    job = parse_overrides([f"{key}={text}"])
    assert CHARTS_JOB.is_valid(job) is chart_takes
    if read is None:
        with pytest.raises(InvalidConfig, match=f"'{key}' is "):
            make_job(job)
        return
    value = make_job(job)
    for part in key.split("."):
        value = getattr(value, part)
    assert value == read


def test_a_whole_number_that_helm_would_change_is_refused() -> None:
    """A double holds every whole number up to 2^53. The next one becomes 2^53, so that is refused, too."""
    own = "reward.custom_reward_function={path: f.py, reward_kwargs: {a: %s}}"
    for override in ("rollout.seed=%s", "data.seed=-%s", "trainer.profile_steps=[%s]", own):
        for number, fits in (
            ("9007199254740991", True),
            ("9007199254740992", False),
            ("1234567890123456789", False),
        ):
            job = parse_overrides([override % number])
            assert CHARTS_JOB.is_valid(job) is fits, (override, number)
            if not fits:
                with pytest.raises(
                    InvalidConfig, match=r"a number above 2\^53 - 1 .* becomes another one in Helm"
                ):
                    make_job(job)
    assert make_job({"rollout": {"seed": 2**53 - 1}}).rollout.seed == 2**53 - 1
    with pytest.raises(InvalidConfig, match="becomes another one in Helm"):
        make_job({"rollout": {"seed": 1e18}})
    big = {"actor": {"optim": {"eps": 1e300}}}  # a fraction is a double everywhere
    assert CHARTS_JOB.is_valid(big)
    assert make_job(big).actor.optim.eps == 1e300


def test_a_key_of_any_number_takes_large_fractions_not_infinity() -> None:
    """1e18 is a fraction in a job file. Helm has one kind of number, so the chart refuses it as whole."""
    function = "reward.custom_reward_function={path: f.py, reward_kwargs: {cap: %s}}"
    for override in (function, "data.apply_chat_template_kwargs={cap: %s}"):
        job = parse_overrides([override % "1e18"])
        read = make_job(job)
        found = {**read.reward.custom_reward_function.reward_kwargs, **read.data.apply_chat_template_kwargs}
        assert found == {"cap": 1e18}
        assert type(found["cap"]) is float
        assert parse_yaml(to_yaml(found), "") == found
        assert not CHARTS_JOB.is_valid(job)
        for text in ("1e400", "-.inf", ".nan"):
            with pytest.raises(InvalidConfig, match="should be a finite number"):
                make_job(parse_overrides([override % text]))


def test_a_value_of_any_type_keeps_its_type() -> None:
    kwargs = {"a": True, "b": 1, "c": 1.5, "d": "1"}
    job = make_job({"reward": {"custom_reward_function": {"path": "f.py", "reward_kwargs": kwargs}}})
    kept = job.reward.custom_reward_function.reward_kwargs
    assert {key: (type(value), value) for key, value in kept.items()} == {
        key: (type(value), value) for key, value in kwargs.items()
    }


def test_a_learning_rate_as_people_and_helm_write_it_is_a_number(tmp_path: Path) -> None:
    for text in ("1e-6", "1e-06", "1.0e-6", "0.000001", "1E-6"):
        (tmp_path / "job.yaml").write_text(f"actor: {{optim: {{lr: {text}}}}}")
        assert load_job(tmp_path / "job.yaml").actor.optim.lr == 1e-6
        assert load_job(tmp_path / "job.yaml", [f"critic.optim.lr={text}"]).critic.optim.lr == 1e-6
    assert make_job(yaml.safe_load("actor: {optim: {lr: 1e-6}}")).actor.optim.lr == 1e-6  # text to that reader
    (tmp_path / "job.yaml").write_text("data: {seed: 1e+06}")
    assert load_job(tmp_path / "job.yaml").data.seed == 1_000_000
