r"""How often the rules misjudge in both modes: right answers in other forms, and wrong answers that look alike.

    python -m benchmarks.answers FOLDER MATH
    python -m benchmarks.answers FOLDER MATH --math-verify

FOLDER is grade_school_math/data of https://github.com/openai/grade-school-math. Every solution of GSM8K is
given once with each rewording of its answer, by a generator with a fixed seed. example_model_solutions.jsonl
has what four models wrote, and whether GSM8K's authors found it right. MATH is test.jsonl of MATH-500
(https://huggingface.co/datasets/HuggingFaceH4/MATH-500), whose 500 solutions are reworded likewise. MATH_LIKE
is a list of answers in MATH's style with wrong ones that look alike, written by hand for this benchmark.
math-verify takes some 10 ms for a response, so with --math-verify it alone is measured, over every 400th of
GSM8K's solutions and every tenth of MATH's.

The forms are those that the authors of the rules thought of. So no misjudged response means that these forms
are read, and not that all are.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.config.reward import RewardConfig
from rolemesh.services.reward.functions import default_compute_score

RESULTS = Path(__file__).parent / "results" / "answers.json"
SOURCES = {"gsm8k": "openai/gsm8k", "dapo": "math_dapo", "math": "HuggingFaceH4/MATH-500"}
MODES = {"verl": {"rules": "verl"}, "rolemesh": {}}
EQUALITY = {
    "math-verify alone": {"math": "math_verify", "rules": "verl"},
    "math_verify": {"math": "math_verify"},
}
# solutions, for math-verify
EVERY = 400
EVERY_OF_MATH = 10

# The answer, other answers that look like it.
MATH_LIKE: list[tuple[str, tuple[str, ...]]] = [
    ("2a+3", ("2+3", "2a-3", "2A+3")),
    ("x^2+2x+1", ("x^2+2x-1", "x^{2+2x}+1")),
    (r"\frac{1}{3}", (r"\frac{3}{1}", "0.3", r"\frac{1}{-3}")),
    (r"-\frac{7}{12}", (r"\frac{7}{12}", r"-\frac{12}{7}")),
    (r"0.\overline{3}", ("0.3", r"0.\overline{6}")),
    (r"1.20\overline{5}", (r"1.2\overline{5}",)),
    (r"3\frac{1}{2}", ("31/2", r"\frac{31}{2}")),
    (r"\sqrt{3}", ("3", r"\sqrt{13}")),
    (r"2\sqrt{5}", (r"\sqrt{25}", r"5\sqrt{2}")),
    (r"\frac{\sqrt{2}}{2}", (r"\sqrt{2}", r"\frac{2}{\sqrt{2}+1}")),
    (r"\frac{\pi}{4}", (r"\frac{4}{\pi}", r"\pi")),
    (r"12\pi", ("12", r"1+2\pi")),
    ("(1,2)", ("(2,1)", "[1,2)", "(1,2,3)")),
    ("(1,234)", ("(1234)", "1234")),
    ("[0,1)", ("(0,1)", "[0,1]")),
    (r"(-\infty,2)", (r"(-\infty,2]", r"(\infty,2)")),
    (r"\{1,2,3\}", (r"\{1,2\}", "(1,2,3)", "123")),
    ("1,2,3", ("123", "1,23", "3,2,1")),
    ("12345", ("1,2,3,4,5", "1,2345", "12,34,5")),
    ("033", ("330", "303")),
    ("-5", ("5", "--5")),
    ("0", ("0.1", "10")),
    ("0.5", ("0", "5", "0.05")),
    ("5!", ("5", "15")),
    ("A", ("B", "a")),
    ("AB", ("BA", "A")),
    ("ab", ("b", "a b c")),
    ("a", ("b", "an")),
    ("x=5", ("x=-5", "x=5y")),
    ("y=2x+1", ("y=2x-1", "x=2y+1")),
    (r"10^{20}", (r"10^{2}0", "1020")),
    ("2^{10}", ("210", "2^{1}0")),
    ("1:2", ("2:1", "12")),
    (r"45^\circ", ("54", r"45^\circ+1")),
    ("3+4i", ("3-4i", "7i", "34i")),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", (r"\begin{pmatrix}2\\1\end{pmatrix}",)),
    (r"\log 2", (r"\log 3", "2")),
    (r"\sin x", (r"\cos x", "x")),
    (r"n\ge 3", (r"n\le 3", "n>3")),
    (r"\frac{x+1}{x-1}", (r"\frac{x-1}{x+1}", "x+1")),
]
BOXES = (r"\boxed{%s}", r"\boxed {%s}", r"\boxed{\boxed{%s}}", r"\boxed{\text{%s}}")
WORDS = ("dollars", "apples", "hours", "meters", "square feet", "students")


@dataclass(frozen=True)
class Case:
    """A response with a verdict that is known, because it was made from a right or from a wrong answer."""

    rule: str
    truth: str
    response: str
    kind: str
    is_right: bool


def right_forms(answer: str, rng: random.Random) -> dict[str, str]:
    """Return the answer in another form of each kind that applies to it."""
    spaced = re.sub(r"(?<=[^{\\])[+=,](?!\\!|[0-9]{3})", r" \g<0> ", answer)  # not in a thousands sign
    forms = {
        "as it is": answer,
        "blanks": f"  {spaced.replace('( ', '(')}  ",
        "emphasis": rng.choice(("**{}**", "*{}*", "__{}__")).format(answer),
        "delimiters": rng.choice(("${}$", r"\({}\)", "$${}$$", r"\[{}\]")).format(answer),
        "full stop": f"{answer}.",
        "boxes": rng.choice(BOXES) % answer,
    }
    if answer.lstrip("-").isdecimal():
        value = int(answer)
        forms |= {
            "zeros": rng.choice((f"{answer}.0", f"{answer}.00", f"{'-' * (value < 0)}0{abs(value)}")),
            "units": rng.choice((r"\$%s", f"%s {rng.choice(WORDS)}", r"%s\text{ cm}", r"%s\%%")) % answer,
        }
        if abs(value) >= 1000:
            forms["thousands signs"] = rng.choice((f"{value:,}", f"{value:,}".replace(",", "{,}")))
    return forms


def wrong_forms(answer: str) -> dict[str, str]:
    """Return other answers that look like a number."""
    value = int(answer)
    forms = {
        "another number": str(value + 1),
        "a digit more": f"{answer}1",
        "a half more": f"{answer}.5",
    }
    if value:
        forms |= {
            "its negative": str(-value),
            "a fraction of it": f"{answer}/7",
            "a multiple of it": f"{answer} million",
        }
    if abs(value) >= 10:
        forms["a list of its digits"] = f"{answer[:-1]},{answer[-1]}"
    return forms


def response(rule: str, solution: str, form: str) -> str:
    """Return a solution that ends with an answer, as the rule's prompt asks for it."""
    if rule == "gsm8k":
        return f"{solution}\n#### {form}"
    if rule == "dapo":
        return f"{solution}\nAnswer: {form}"
    boxed = form if form.startswith(r"\boxed") else rf"\boxed{{{form}}}"
    return f"{solution}\nThe answer is {boxed}."


def gsm8k_cases(folder: Path, every: int = 1) -> Iterator[Case]:
    """Yield the cases of all solutions of GSM8K, or of each `every`-th of a split, for the three rules."""
    for split in ("train", "test"):
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        for number, line in [*enumerate(lines)][::every]:
            solution, _, answer = json.loads(line)["answer"].rpartition("\n#### ")
            truth = answer.replace(",", "")
            rng = random.Random(f"{split} {number}")
            yield from cases(solution, truth, wrong_forms(truth), rng, tuple(SOURCES))


def labelled_cases(folder: Path) -> Iterator[Case]:
    """Yield what models wrote, with "####" for its mark "A:", and the verdict of GSM8K's authors."""
    for line in (folder / "example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        truth = record["ground_truth"].rpartition("\nA: ")[2].strip()
        for said in record.values():
            if isinstance(said, dict):
                marked = re.sub("^A: ", "#### ", said["solution"], flags=re.MULTILINE)
                yield Case("gsm8k", truth, marked, "labelled", said["is_correct"])


def math_cases(file: Path, every: int = 1) -> Iterator[Case]:
    """Yield the cases of MATH-500, or of each `every`-th of its solutions, for the rules math and dapo."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for number, row in [*enumerate(rows)][::every]:
        truth = row["answer"]
        wrong = wrong_forms(truth) if truth.lstrip("-").isdecimal() else wrong_answers(truth, rows[number - 1])
        text = row["solution"].rpartition(r"\boxed")[0]
        yield from cases(text, truth, wrong, random.Random(number), ("math", "dapo"))


def wrong_answers(answer: str, other: Mapping[str, str]) -> dict[str, str]:
    """Return wrong answers that look like one which is no whole number, the last of them of another problem."""
    changed = re.sub("[1-9]", lambda digit: str(int(digit[0]) % 9 + 1), answer, count=1)
    forms = {"a digit changed": changed, "its negative": f"-{answer}", "of another problem": other["answer"]}
    if not re.fullmatch(r"(\\frac|\\sqrt|\\pi|[0-9.{}/])+", answer):
        del forms["its negative"]  # of a list, a set, or words
    return {kind: form for kind, form in forms.items() if form != answer and not answer.endswith(f"={form}")}


def math_like_cases() -> Iterator[Case]:
    """Yield the cases of MATH_LIKE, for the rules math and dapo."""
    for number, (answer, others) in enumerate(MATH_LIKE):
        wrong = {f"another answer {at}": other for at, other in enumerate(others)}
        yield from cases("So it is.", answer, wrong, random.Random(number), ("math", "dapo"))


def cases(
    solution: str, truth: str, wrong: dict[str, str], rng: random.Random, rules: tuple[str, ...]
) -> Iterator[Case]:
    right = right_forms(truth, rng)
    for rule in rules:
        for is_right, forms in ((True, right), (False, wrong)):
            for kind, form in forms.items():
                yield Case(rule, truth, response(rule, solution, form), kind, is_right)


def measured(
    made: Iterable[Case], modes: Mapping[str, Mapping[str, str]] = MODES
) -> dict[str, dict[str, dict[str, int]]]:
    """Score cases in each mode, which is a section reward of a job.

    Returns:
        By rule and kind: num, and for each mode the number of misjudged responses; and the same of all right
        ("false negatives") and all wrong ("false positives") responses.
    """
    configs = {mode: RewardConfig.model_validate(section) for mode, section in modes.items()}
    found: Any = defaultdict(lambda: defaultdict(lambda: dict.fromkeys(("num", *modes), 0)))
    for case in made:
        total = "false negatives" if case.is_right else "false positives"
        rows = [found[case.rule][kind] for kind in (case.kind, total)]
        for row in rows:
            row["num"] += 1
        for mode, config in configs.items():
            scored = default_compute_score(SOURCES[case.rule], case.response, case.truth, config=config)
            scored_right = (scored["acc"] if isinstance(scored, dict) else scored) == 1.0
            for row in rows:
                row[mode] += scored_right != case.is_right
    return {rule: dict(kinds) for rule, kinds in found.items()}


def main(
    folder: Annotated[Path, typer.Argument(help="grade_school_math/data of OpenAI's repository")],
    math: Annotated[Path, typer.Argument(help="test.jsonl of MATH-500")],
    math_verify: Annotated[
        bool, typer.Option("--math-verify", help="measure math-verify, and it alone")
    ] = False,
) -> None:
    if math_verify:
        made = {
            f"GSM8K, every {EVERY}th": gsm8k_cases(folder, EVERY),
            f"MATH-500, every {EVERY_OF_MATH}th": math_cases(math, EVERY_OF_MATH),
            "MATH-like, with math-verify": math_like_cases(),
        }
        measurements = {
            answers: measured((case for case in every if case.rule == "math"), EQUALITY)
            for answers, every in made.items()
        }
    else:
        measurements = {
            "GSM8K": measured(gsm8k_cases(folder)),
            "GSM8K, labelled by its authors": measured(labelled_cases(folder)),
            "MATH-500": measured(math_cases(math)),
            "MATH-like": measured(math_like_cases()),
        }
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    RESULTS.write_text(json.dumps(kept | measurements, indent=1) + "\n", encoding="utf-8")
    modes = [*(EQUALITY if math_verify else MODES)]
    table = Table("answers", "rule", "kind", "responses", *(f"misjudged by {mode}" for mode in modes))
    for answers, by_rule in measurements.items():
        for rule, kinds in by_rule.items():
            for kind, row in kinds.items():
                table.add_row(answers, rule, kind, *(str(row[name]) for name in ("num", *modes)))
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
