"""DAPO's rule, math-verify and programs against tests, by answers written by hand; the punishment of length."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rolemesh.config.reward import OverlongBufferConfig, RewardConfig
from rolemesh.data.converters import gsm8k_dataset as gsm8k_data
from rolemesh.rules.checking import check_ground_truth
from rolemesh.rules.program_tests import Case, cases_of, check_tests
from rolemesh.rules.sources import RULES, UnknownDataSource, rule_of
from rolemesh.sandbox.inside import idle_time
from rolemesh.services.command_line import arithmetic
from rolemesh.services.reward.functions import dapo_math, default_compute_score, math_verify
from rolemesh.services.reward.functions.prime_code import (
    compute_score,
    program_of,
    same_result,
    same_text,
)
from rolemesh.services.reward.overlong import overlong_penalty

# ------------------------------------------------------------------------------------ which rule


def test_each_data_source_has_its_rule() -> None:
    config = RewardConfig()
    assert rule_of(gsm8k_data.DATA_SOURCE, config) == rule_of(arithmetic.DATA_SOURCE, config) == "gsm8k"
    for source, rule in {
        "HuggingFaceH4/MATH-500": "math", "math_dapo": "dapo", "aime24": "dapo", "aime_2025": "dapo",
        "numina_olympiads": "math_verify", "codecontests": "prime_code", "apps": "prime_code",
        "codeforces": "prime_code", "taco": "prime_code",
    }.items():  # fmt: skip
        assert rule_of(source, config) == rule
    assert rule_of("HuggingFaceH4/MATH-500", RewardConfig(math="math_verify")) == "math_verify"
    assert rule_of("aime24", RewardConfig(math="math_verify")) == "dapo"
    sources = [source for listed in RULES.values() for source in listed]
    assert len(sources) == len(set(sources)), "two rules for one data source"
    with pytest.raises(UnknownDataSource, match=r"'gsm8k'; known are openai/gsm8k.*aime\*.*taco"):
        rule_of("gsm8k", config)


# ------------------------------------------------------------------------------------------ dapo


def test_dapo_scores_the_last_answer_plus_or_minus_one() -> None:
    for response, truth, right in (
        ("so it is\nAnswer: 34", "34", True),
        ("Answer: 33\nNo.\nAnswer: 34", "34", True),
        ("Answer: 34\nNo.\nAnswer: 33", "34", False),
        ("answer : $34$", "34", True),
        (r"it is \boxed{34}", "34", True),  # without "Answer:" the last box
        (r"\boxed{34} Answer: 33", "34", False),
        ("34", "34", False),
        ("Answer: 34", ["33", "34"], True),
        ("Answer: 34", 34.0, True),
        ("Answer: 10000000000000000", 1e16, True),
    ):
        scored = dapo_math.compute_score(response, truth)
        assert (scored["score"], scored["acc"]) == (1.0 if right else -1.0, float(right)), response


@pytest.mark.parametrize(("length", "penalty"), [(60, 0.0), (80, 0.0), (90, -0.25), (100, -0.5)])
def test_the_punishment_grows_over_the_buffer(length: int, penalty: float) -> None:
    """max 100, buffer 20, factor 1/2: -(90 - 80) / 20 * 1/2 = -1/4."""
    buffer = OverlongBufferConfig(enable=True, len=20, penalty_factor=0.5)
    assert overlong_penalty(torch.tensor([length]), 100, buffer).tolist() == [penalty]


# ----------------------------------------------------------------------------------- math_verify


def test_answers_that_are_equal_as_mathematics_are_right() -> None:
    for response, truth, score in (
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{3, 1\}}", r"\{1,3\}", 1.0),
        (r"\boxed{4}", ["3", "4"], 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("no number at all", "4", 0.0),
        (r"\boxed{5} … Wait, it is \boxed{6", "5", 0.0),
        (r"\boxed{50\text{ cents}}", r"50\text{ dollars}", 0.0),
        (r"\boxed{5\text{ million}}", "5", 0.0),
    ):
        assert math_verify.compute_score(response, truth) == score, response


@pytest.mark.parametrize(
    ("response", "truth", "right", "in_library"),
    [
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", False, True),
        (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", True, True),
        (r"\boxed{0.0000012}", "0.0000013", False, True),
        (r"\boxed{0.333333}", r"\frac{1}{3}", True, True),
        (r"\boxed{(0, 2^{-98})}", "(0, 2^{-99})", False, True),
        (r"\boxed{\{1, 2^{-98}\}}", r"\{2^{-99}, 1\}", False, True),
        (r"\boxed{x = 2^{-98}}", "x = 2^{-99}", False, True),
        (r"\boxed{\sqrt{2} \cdot 10^{30}}", "1414213562373095048801688724209.69", True, False),
        (r"\boxed{10^{30} + 1}", "10^{30}", False, False),
        (r"\boxed {5}", "5", True, False),
    ],
)
def test_numbers_of_any_size_are_equal_only_relative_to_it(
    response: str, truth: str, right: bool, in_library: bool
) -> None:
    assert math_verify.compute_score(response, truth) == float(right)
    assert math_verify.compute_score(response, truth, exact=False) == float(in_library)


def test_a_job_may_have_math_compared_as_mathematics() -> None:
    answer = r"\boxed{(x+1)^2}"
    assert default_compute_score("math", answer, "x^2+2x+1") == 0.0
    assert default_compute_score("math", answer, "x^2+2x+1", config=RewardConfig(math="math_verify")) == 1.0


# ------------------------------------------------------------------------------------ prime_code


def answer(program: str) -> str:
    return f"First I thought of\n```python\nraise ValueError\n```\nbut rather\n```python\n{program}\n```\nDone."


def score(program: str, truth: Any, **sandbox: Any) -> dict[str, float]:
    return compute_score(answer(program), truth, config=RewardConfig(sandbox={"timeout_s": 2, **sandbox}))


def test_the_program_is_the_last_python_block() -> None:
    assert program_of(answer("print(1)")) == "\nprint(1)\n"
    assert program_of("print(1)") == "print(1)"
    for opening in ("```py", "```Python", "```python3", "``` python", "```"):
        fenced = f"So:\n{opening}\nprint(1)\n```\nDone."
        assert program_of(fenced) == "\nprint(1)\n"
        assert program_of(f"```cpp\nint x;\n```\n{fenced}\n```text\n1\n```") == "\nprint(1)\n"
    both = "```py\nprint(1)\n```\nprints\n```\n1\n```"
    assert program_of(both) == "\nprint(1)\n"
    assert program_of("```pyret\nx\n```") == "```pyret\nx\n```"
    for after in ("", "\nThis prints 1.", "\n\nOutput:\n```\n1\n```"):  # the prompt has opened the block
        assert program_of(f"print(1)\n```{after}") == "print(1)\n"
    assert program_of("```python\nprint(1)\n``` Python prints 1") == "\nprint(1)\n"


def test_a_program_may_stand_in_a_list_or_below_a_title() -> None:
    truth = {"inputs": ["3\n"], "outputs": ["0\n1\n2\n"]}
    program = "for i in range(int(input())):\n    print(i)\n"
    in_list = "".join(f"   {line}\n" for line in program.splitlines())
    for opening in ("```python", '```python title="a.py"', "```python {1,3}", "```python:src/a.py", "```py"):
        for solution in (f"1. So:\n   {opening}\n{in_list}   ```\n2. Done.", f"So:\n{opening}\n{program}```"):
            for text in (solution, solution.replace("\n", "\r\n")):
                assert compute_score(text, truth, config=RewardConfig())["acc"] == 1.0
    only_the_fence_is_indented = f"   ```python\n{program}```"
    for solution in (f"   ```\n{in_list}   ```", only_the_fence_is_indented):
        assert compute_score(solution, truth, config=RewardConfig())["acc"] == 1.0
    as_it_is = '\nprint("""a\n   \n  b""")\n'
    assert program_of(f"```python{as_it_is}```") == as_it_is
    assert program_of("```python\nx = 1\n  y = 2\n```") == "\nx = 1\n  y = 2\n"  # stays an error


def test_continuous_is_the_share_of_the_first_ten_tests() -> None:
    """Right for numbers below 7: of 0 to 11 the first ten have seven of these."""
    truth = {"inputs": [f"{i}\n" for i in range(12)], "outputs": [f"{i * i}\n" for i in range(12)]}
    program = "n = int(input())\nprint(n * n if n < 7 else 0)"
    assert score(program, truth) == {"score": 0.7, "acc": 0.0}
    assert score(program, json.dumps(truth)) == {"score": 0.7, "acc": 0.0}
    assert score(program, truth, continuous=False) == {"score": 0.0, "acc": 0.0}
    assert score("print(int(input()) ** 2)", truth, continuous=False) == {"score": 1.0, "acc": 1.0}
    only_the_last_is_wrong = "n = int(input())\nprint(n * n if n < 11 else 0)"
    assert score(only_the_last_is_wrong, truth) == {"score": 1.0, "acc": 1.0}
    assert score(only_the_last_is_wrong, truth, continuous=False) == {"score": 0.0, "acc": 0.0}


def test_a_function_is_called_and_its_result_compared() -> None:
    truth = {"fn_name": "pair", "inputs": [[[1, 2], 3], [[], 0]], "outputs": [[[3, 3]], [[0, 0]]]}
    program = "class Solution:\n    def pair(self, xs: List[int], k: int):\n        return (sum(xs), k)"
    assert score(program, truth) == {"score": 1.0, "acc": 1.0}
    assert score("def pair(xs, k): return [3, 3]", truth) == {"score": 0.5, "acc": 0.0}
    by_line = {"fn_name": "pair", "inputs": ["[1, 2]\n3"], "outputs": ["[3, 3]"]}
    assert score(program, by_line) == {"score": 1.0, "acc": 1.0}
    assert cases_of({"fn_name": "", "inputs": ["1"], "outputs": ["2"]}) == [Case("1", "2", None)]
    with_blank_lines = {"fn_name": "pair", "inputs": ["[1, 2]\n\n3\n"], "outputs": ["[3, 3]\n"]}
    assert score(program, with_blank_lines) == {"score": 1.0, "acc": 1.0}


READS_ITS_LIMIT = "import resource\nlimit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]\n"


def test_no_limit_tells_a_program_how_long_the_right_output_is() -> None:
    """Outputs of 6 and 606 bytes, which are equal but for blanks: 128 KiB, for every one up to 32 KiB."""
    truth = {"inputs": ["", ""], "outputs": ["131072", "131072" + 600 * " "]}
    assert score(f"{READS_ITS_LIMIT}print(limit)", truth)["acc"] == 1.0
    guesses = f'{READS_ITS_LIMIT}print("YES" if (limit - 65536) // 2 == 4 else "NO")'
    assert score(guesses, {"inputs": ["1", "2"], "outputs": ["YES\n", "NO\n"]})["score"] == 0.5
    writes = "print('7' * 40_000)"
    assert score(writes, {"inputs": [""], "outputs": ["7" * 40_000]})["acc"] == 1.0


def test_a_program_has_the_memory_that_the_job_gives_it() -> None:
    takes_400_mib = "x = bytearray(400 << 20)\nprint(5)"
    truth = {"inputs": [""], "outputs": ["5"]}
    assert score(takes_400_mib, truth, timeout_s=60, memory_limit_mb=1024)["score"] == 1.0
    assert score(takes_400_mib, truth, timeout_s=60, memory_limit_mb=256)["score"] == 0.0


@pytest.mark.parametrize(
    "program",
    ["print(", "raise SystemExit(3)", "import os; os._exit(1)", "while True: pass", "print(5); 1 / 0"],
)
def test_a_program_that_fails_fails_its_test(program: str) -> None:
    assert score(program, {"inputs": [""], "outputs": ["5"]}, timeout_s=1) == {"score": 0.0, "acc": 0.0}


def test_tests_for_which_there_is_no_time_left_are_not_passed() -> None:
    """Two seconds of sleep a test, and 0.9 * 3 seconds for all: the second has not enough."""
    truth = {"inputs": [""] * 3, "outputs": ["1"] * 3}
    config = RewardConfig(timeout_s=3.0)
    said = compute_score(answer("import time; time.sleep(2); print(1)"), truth, config=config)
    assert said == {"score": pytest.approx(1 / 3), "acc": 0.0}


def test_a_sleeping_test_uses_up_its_rows_sleep_time() -> None:
    """A second here: the first test takes all of it, so the others, which would pass at once, do not begin."""
    truth = {"inputs": [f"{k}\n" for k in range(10)], "outputs": ["1"] * 10}
    sleeps = "import time\nif input() == '0': time.sleep(600)\nprint(1)"
    assert score(sleeps, truth, timeout_s=1) == {"score": 0.0, "acc": 0.0}
    assert score(sleeps.replace("600", "0"), truth, timeout_s=60) == {"score": 1.0, "acc": 1.0}


def test_computing_or_waiting_for_a_cpu_is_not_time_asleep() -> None:
    assert idle_time(lived_s=10.0, cpu_s=0.0) == 10.0
    assert idle_time(lived_s=10.0, cpu_s=1.0) == 2.0
    assert idle_time(lived_s=1.1, cpu_s=1.0) == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        {},
        "[]",
        "1",
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": None, "outputs": "1"},
        "no JSON",
        r'{"inputs": ["\ud800"], "outputs": ["1"]}',
    ],
)
def test_a_ground_truth_without_tests_is_an_error(truth: Any) -> None:
    for read in (cases_of, check_tests):
        with pytest.raises(ValueError, match=r"ground_truth|Expecting value"):
            read(truth)


def test_a_test_that_is_never_run_is_not_read() -> None:
    """Of hundreds of tests in a row the first ten count, unless all must pass."""
    truth = {"fn_name": "f", "inputs": ["[1]\n 2"] * 10 + ["no JSON"], "outputs": ["3"] * 11}
    assert cases_of(truth, 10) == [Case("[[1],  2]", "3", "f")] * 10
    check_ground_truth("prime_code", json.dumps(truth), RewardConfig())
    every = RewardConfig(sandbox={"continuous": False})
    for of_rows in (
        truth,
        truth | {"inputs": ["1"] * 10 + ["1 2"]},
        truth | {"inputs": ["1"] * 11, "outputs": ["3"] * 10 + ["["]},
    ):
        with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
            check_ground_truth("prime_code", of_rows, every)


@pytest.mark.parametrize("given", [5, {"x": 5}, None])
def test_a_function_input_that_is_no_argument_list_is_refused(given: Any) -> None:
    truth = {"fn_name": "f", "inputs": [[5], given], "outputs": [6, 6]}
    for read in (cases_of, check_tests):
        with pytest.raises(ValueError, match="ground_truth has fn_name, so an input should be a list; it is"):
            read(truth)
        read(truth, 1)


def test_outputs_are_compared_word_by_word() -> None:
    assert same_text("1 2\n3\n\n", "1  2 \n3")
    assert not same_text("1\n2", "1 2")
    assert same_text("0.3333333333", "0.33333333")
    assert same_text("2.0", "2.00")
    assert not same_text("0.34", "0.33")
    assert not same_text("1000000008", "1000000007")  # whole numbers are exact, though near
    assert not same_text("2.0", "2")
    assert not same_text("1_0.5", "10.5")
    assert not same_text("１.5", "1.5")
    assert not same_text("", "1")
    assert not same_text("yes", "YES")


def test_a_number_beyond_float_is_right_only_if_spelled_alike() -> None:
    for expected in ("1" * 5000, "-" + "1" * 5000, "1" * 400 + ".5", "1e400", "inf", "nan"):
        assert same_text(expected, expected)
        for word in ("inf", "-inf", "1e999", "nan", "2" * 5000, "2" * 400 + ".5"):
            assert same_text(word, expected) is (word == expected)


def test_results_are_compared_as_json() -> None:
    assert same_result('{"1": 2}', '{"1": 2}')
    assert same_result("[1, 2]", "[[1, 2]]")
    assert not same_result("1", "[1, 2]")
    assert not same_result("", "1")
    assert same_result("1" * 5000, "1" * 5000)
    assert not same_result("2" * 5000, "1" * 5000)
    assert same_result("[1.0]", "[1]")


def test_a_result_too_deep_to_read_is_a_test_that_failed() -> None:
    assert not same_result("[" * 60_000, "[1]")
    assert not same_result("[" * 60_000 + "]" * 60_000, "[1]")
    truth = {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}
    by_hand = "import os\nos.write(1, b'[' * 60_000)\nos._exit(0)"
    assert score(by_hand, truth) == {"score": 0.0, "acc": 0.0}
