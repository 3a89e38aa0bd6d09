"""Runs programs against tests, in the sandbox (docs/rewards.md).

The tests are from APPS, TACO, CodeContests and Codeforces, in the layout of PRIME (Cui et al. 2025,
arXiv:2502.01456).
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rolemesh.rules.program_tests import CONTINUOUS_TESTS, Case, cases_of
from rolemesh.sandbox.box import ProgramLimits, Sandbox

if TYPE_CHECKING:
    from rolemesh.config.reward import RewardConfig

FENCE = "```"
LANGUAGE = r"(?:python|py)[0-9.]*"
OPENING = re.compile(
    rf"```(?:{LANGUAGE}(?![A-Za-z0-9_])|[ \t]+{LANGUAGE}[ \t]*$)", re.IGNORECASE | re.MULTILINE
)  # after a blank only alone on its line: a closing fence may have words behind it
# Behind a fence's language: title="a.py", {1,3} or :a.py.
TITLE = re.compile(r"(?:[ \t]++(?:\{[^\n]*\}|[A-Za-z][\w-]*+=[^\n]*)|:[\w./-]++)(?=\n)")
WHOLE = re.compile(r"[-+]?[\d_]+")
SPARE_OUTPUT = 1 << 16  # bytes allowed beyond twice the expected output, at least: blanks, and longer numbers

_sandbox = Sandbox()  # one per process; starts with the first program


def compute_score(solution_str: str, ground_truth: Any, *, config: RewardConfig) -> dict[str, float]:
    """Score the share of the first ten tests that the program passes.

    Without `sandbox.continuous`, run all tests, and score 1.0 if the program passes all, otherwise 0.0. acc is
    1 if it passed all tests that were run. The program is that of `program_of`.

    Args:
        solution_str: the response.
        ground_truth: {"inputs", "outputs"} as a mapping or as JSON; each pair of texts is a test. With
            "fn_name", pairs of that function's arguments (a list, or a JSON value per line) and its result.
        config: `sandbox` and `timeout_s`; tests for which the row has no time left count as failed.

    Raises:
        ValueError: the ground truth has no tests.
        SandboxUnavailable: programs cannot be run safely on this machine; no program was run.
    """
    most = CONTINUOUS_TESTS if config.sandbox.continuous else None
    cases = cases_of(ground_truth, most)
    attempt = Attempt(program_of(solution_str), config)
    if most is None:
        right = all(attempt.passes(case) for case in cases)
        return {"score": float(right), "acc": float(right)}
    share = sum(attempt.passes(case) for case in cases) / len(cases)
    return {"score": share, "acc": float(share == 1)}


def program_of(solution_str: str) -> str:
    """Return the last ```python (```py, ```Python3) block; or the last block that names no language; or all.

    If the fences are no pairs, the prompt may have opened the first block: it ends at the first fence. A block
    in a list is indented, which is not part of its program, and neither is the title of a fence.
    """
    block = _block_of(solution_str.replace("\r\n", "\n"))
    return textwrap.dedent(block) if block.lstrip("\n")[:1] in (" ", "\t") else block


def _block_of(solution_str: str) -> str:
    if openings := list(OPENING.finditer(solution_str)):
        begin = openings[-1].end()
        titled = TITLE.match(solution_str, begin)
        return solution_str[titled.end() if titled else begin :].partition(FENCE)[0]
    parts = solution_str.split(FENCE)
    if len(parts) % 2 == 0:
        return parts[0] if parts[0].strip() else parts[-1]
    bare = [block for block in parts[1::2] if not block.partition("\n")[0].strip()]
    return bare[-1] if bare else solution_str


class Attempt:
    """A program, with a time limit for all tests of its row."""

    def __init__(self, program: str, config: RewardConfig) -> None:
        self._program = program
        self._sandbox = config.sandbox
        self._ends = time.monotonic() + 0.9 * config.timeout_s
        self._idle_s = float(config.sandbox.timeout_s)

    def passes(self, case: Case) -> bool:
        """Return whether the program passes a test. Without time left, it fails."""
        left = self._ends - time.monotonic()
        if min(left, self._idle_s) <= 0:
            return False
        limits = ProgramLimits(
            cpu_s=self._sandbox.timeout_s,
            wall_s=min(2 * self._sandbox.timeout_s, left),
            idle_s=self._idle_s,
            memory_bytes=self._sandbox.memory_limit_mb << 20,
            output_bytes=_output_limit(len(case.expected.encode())),
        )
        outcome = _sandbox.run(self._program, case.given, limits, function=case.function)
        self._idle_s -= outcome.idle_s
        same = same_text if case.function is None else same_result
        return outcome.status == 0 and same(outcome.output, case.expected)


def _output_limit(num_bytes: int) -> int:
    """Return the limit of a test's output: a power of two, so that it does not tell a program the length."""
    return 1 << (2 * num_bytes + SPARE_OUTPUT).bit_length()


def same_text(output: str, expected: str) -> bool:
    """Compare the words of each line, ignoring blank lines and blanks.

    An expected number that is not an integer matches a number within 1e-6 (relative, or absolute below one).
    """
    lines, right = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    return len(lines) == len(right) and all(
        len(words) == len(these) and all(map(_same_word, words, these))
        for words, these in zip(lines, right, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if WHOLE.fullmatch(expected):
        return False  # integers are compared exactly; they may be too large for a float
    if "_" in word or not word.isascii():
        return False  # float() reads 1_0.5 as 10.5, and digits of every script
    try:
        given = float(word)
        right = float(expected)
    except ValueError:
        return False
    return math.isfinite(given) and math.isclose(given, right, rel_tol=1e-6, abs_tol=1e-6)


def same_result(output: str, expected: str) -> bool:
    """Compare a result with the expected one, or with its only element: data sets use both forms."""
    right = json.loads(expected, parse_int=Decimal)  # int() refuses more than 4300 digits
    try:
        result = json.loads(output, parse_int=Decimal)
        return bool(result == right or [result] == right)
    except (ValueError, RecursionError):
        return False
