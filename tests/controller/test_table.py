"""The table of steps: what fits is shown, nothing wraps, and zero has no sign."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.services.controller.display.table import (
    ACCURACY,
    COLUMNS,
    ROWS_PER_HEADER,
    StepTable,
    number,
    that_fit,
)

PPO = make_job({"data": {"val_files": "val.parquet"}, "algorithm": {"use_kl_in_reward": True}})
STEP = {
    "critic/score/mean": 0.25,
    ACCURACY: 0.5,
    "response_length/mean": 8.75,
    "actor/entropy": 1.234,
    "actor/pg_loss": -0.00001,
    "critic/vf_loss": 0.5,
    "actor/ppo_kl": -1e-9,
    "actor/reward_kl_penalty": 0.0123,
    "perf/throughput": 98765.0,
    "timing_s/step": 12.34,
}


def printed(width: int, steps: int = 1, numbers: dict[str, float] = STEP, job: JobConfig = PPO) -> list[str]:
    out = io.StringIO()
    table = StepTable(job, Console(file=out, width=width))
    for step in range(1, steps + 1):
        table.add(step, numbers)
    return out.getvalue().splitlines()


def test_a_wide_terminal_has_every_column_under_its_heading() -> None:
    assert printed(130) == [
        " step    score  val acc   length  entropy   pg loss   vf loss    ppo kl    ref kl  tokens/s  seconds",
        "    1    0.250    0.500      8.8    1.234    0.0000    0.5000    0.0000    0.0123     98765     12.3",
    ]


def test_six_digit_steps_align_with_the_heading_and_do_not_wrap() -> None:
    out = io.StringIO()
    table = StepTable(PPO, Console(file=out, width=len(" step    score")))
    for step in (99_999, 100_000, 100_001):
        table.add(step, STEP)
    assert out.getvalue().splitlines() == [" step    score", "99999    0.250", "  step", "100000", "100001"]
    wide = StepTable(PPO, Console(file=(out := io.StringIO()), width=130))
    wide.add(1_000_000, STEP)
    header, row = out.getvalue().splitlines()
    assert len(header) == len(row)
    assert row.startswith("1000000    0.250")


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    assert printed(60)[0].split() == [
        "step",
        "score",
        "val",
        "acc",
        "length",
        "entropy",
        "ref",
        "kl",
        "seconds",
    ]
    assert printed(80)[0].split()[-2:] == ["tokens/s", "seconds"]
    assert printed(14)[0].split() == ["step", "score"]
    assert printed(3) == [" step", "    1"]


@pytest.mark.parametrize(
    "numbers", [STEP, dict.fromkeys(STEP, -1.23456e120), dict.fromkeys(STEP, float("nan"))]
)
def test_no_line_is_wider_than_the_terminal_for_any_numbers(numbers: dict[str, float]) -> None:
    for width in range(14, 140):
        lines = printed(width, 2, numbers)
        assert max(map(len, lines)) <= width
        assert len({len(line) for line in lines}) == 1  # each number ends under its heading's end
    assert len(that_fit(list(COLUMNS), width)) <= len(that_fit(list(COLUMNS), width + 1))


def test_the_header_comes_once_and_again_after_a_screen() -> None:
    lines = printed(80, steps=ROWS_PER_HEADER + 2)
    headers = [place for place, line in enumerate(lines) if "score" in line]
    assert headers == [0, ROWS_PER_HEADER + 1]


def test_a_terminal_that_is_resized_gets_another_header() -> None:
    out = io.StringIO()
    console = Console(file=out, width=130)
    table = StepTable(PPO, console)
    table.add(1, STEP)
    console.width = 60
    table.add(2, STEP)
    lines = out.getvalue().splitlines()
    assert [len(line) for line in lines] == [100, 100, 60, 60]


def test_a_job_has_no_column_for_a_role_that_it_lacks() -> None:
    grpo = make_job({"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}})
    assert "vf loss" not in printed(130, job=grpo)[0]
    assert "ref kl" not in printed(130, job=grpo)[0]
    assert "val acc" not in printed(130, job=grpo)[0]


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert number(-0.00004, ".4f") == "0.0000"
    assert number(-0.0, "g") == "0"
    assert number(-0.00005001, ".4f") == "-0.0001"
    assert number(-10, ".0f") == "-10"
    assert number(-1e6, ".4f", 8) == "-1e+06"
    assert number(123456.0, ".3f", 7) == "1.2e+05"


def test_a_number_keeps_as_many_digits_as_its_width_holds() -> None:
    assert number(12345.6, ".1f", 7) == "12345.6"
    kept = {8: "1.23e+06", 9: "1.235e+06", 10: "1.235e+06", 12: "1234567.0000"}
    assert {width: number(1234567.0, ".4f", width) for width in kept} == kept
    assert number(1e300, ".0f", 3) == f"{1e300:.0f}"  # nothing fits; better wide than wrong


def test_a_number_that_a_step_lacks_leaves_its_place_empty() -> None:
    _, whole = printed(130)
    _, lacking = printed(
        130, numbers={name: value for name, value in STEP.items() if name != "critic/score/mean"}
    )
    assert lacking[:5] == whole[:5]
    assert lacking[5:14].isspace()
    assert lacking[14:] == whole[14:]


def test_a_number_that_is_nan_is_printed_as_nan() -> None:
    assert number(float("nan"), ".3f", 7) == "nan"
