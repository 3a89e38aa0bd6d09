r"""The answer in a response, its normal form, and when it agrees with the ground truth: forms of one answer are
right, other answers are wrong."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rolemesh.config.reward import RewardConfig
from rolemesh.rules.finding import answer_line, marked_number
from rolemesh.rules.normal_form import agrees, read_answer
from rolemesh.services.reward.functions import default_compute_score

VERL = RewardConfig(rules="verl")


def accuracy(source: str, response: str, truth: Any, config: RewardConfig | None = None) -> bool:
    scored = default_compute_score(source, response, truth, config=config)
    return (scored["acc"] if isinstance(scored, dict) else scored) == 1.0


MATRIX = r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}"
# Reports from elsewhere: (data source, ground truth, response, right, right in verl 0.9.1).
REPORTED = [
    ("aime24", "033", "Answer: 33", True, False),
    ("aime24", "33", "Answer: 033", True, False),
    ("aime24", "016", r"\boxed{16}", True, False),
    ("math_dapo", 34.0, "Answer: 34", True, False),
    ("HuggingFaceH4/MATH-500", "5.0", r"\boxed{5}", True, False),
    ("math_dapo", "0.5", "Answer: 0", False, False),
    ("math_dapo", "73", "Final Answer: **73**", True, False),
    ("math_dapo", "73", "**Answer:** 73", True, False),
    ("aime25", "70", r"Answer: \(70\)", True, False),
    ("aime25", "70", "Answer: 70.", True, False),
    ("math_dapo", "2a+3", "Answer: 2a + 3", True, False),
    ("math_dapo", "2a + 3", "Answer: 2 + 3", False, True),
    ("math_dapo", "123", "Answer: 1,2,3", False, True),
    ("openai/gsm8k", "12", "#### 1,2", False, True),
    ("HuggingFaceH4/MATH-500", "5", r"\boxed {5}", True, False),
    ("openai/gsm8k", "18", "#### 9*2 = 18", True, False),
    ("openai/gsm8k", "9", "#### 9*2 = 18", False, True),
    ("openai/gsm8k", "5", "#### 5-million", False, True),
    ("openai/gsm8k", "5", "#### 5-pound bags", True, True),
    ("math_dapo", "5", "Answer: The answers are $5$ as well as $6$", False, True),
    ("math_dapo", "5", "Answer: The answers are $5$ as  well as $6$", False, True),
    ("math_dapo", "5", "Answer: The answer is $5$ as well.", True, True),
    ("math_dapo", "5", "Answer: The answer is $5$ as 2 + 3 = 5", True, True),
    ("math", "5", r"\boxed{5\text{ at least}}", False, False),
    ("math", "5", r"\boxed{5 \text{ people at most}}", False, False),
    ("math", "5", r"\boxed{5\text{ approx.}}", False, False),
    ("math", "0.5", r"\boxed{0.5\text{ repeating}}", False, False),
    ("math", r"-\frac{x}{2}", r"\boxed{\frac{-x}{2}}", True, False),
    ("math", r"-\frac{\sqrt{3}}{2}", r"\boxed{y = \dfrac{-\sqrt3}{2}}", True, False),
    ("math", r"(-\frac{x}{2}, 3)", r"\boxed{(\frac{-x}{2}, 3)}", True, False),
    ("math", r"\frac{x}{2}", r"\boxed{\frac{-x}{2}}", False, False),
    ("math", r"-\frac{x+1}{2}", r"\boxed{\frac{-x+1}{2}}", False, False),
    ("math", r"-\frac{b \pm c}{2}", r"\boxed{\frac{-b \pm c}{2}}", False, False),
    ("math", r"3-\frac{x}{2}", r"\boxed{3\frac{-x}{2}}", False, False),
    ("math", "10", r"\boxed{\large 10}", True, False),
    ("math", "10", r"\boxed{\Large{10}}", True, False),
    ("math", "10", r"\boxed{1\large 0}", False, False),
    ("math", MATRIX, r"\boxed{\begin{pmatrix} -1 \\ 2 \\ \end{pmatrix}}", True, False),
    ("math", MATRIX, r"\boxed{\left[\begin{array}{c} -1 \\ 2 \\ \end{array}\right]}", True, False),
    ("math", MATRIX, r"\boxed{\begin{pmatrix} -1 \\ 2 \\ 3 \end{pmatrix}}", False, False),
    # More of each kind.
    ("math_dapo", "0", "Answer: 00", True, False),
    ("math_dapo", "-7", "Answer: -007", True, False),
    ("math_dapo", "7", "Answer: -007", False, False),
    ("math_dapo", 1e16, "Answer: 10000000000000000", True, False),
    ("math_dapo", "34.00", "Answer: 34", True, False),
    ("math_dapo", "34", "Answer: 3.4", False, False),
    ("math_dapo", "340", "Answer: 34", False, False),
    ("math_dapo", "73", "__Answer__: *73*", True, False),
    ("math_dapo", "73", "**Answer: 73**", True, False),
    ("math_dapo", "73", r"\textbf{Answer:} $73$", True, True),
    ("math_dapo", "73", "Answer:\n\\[\n73\n\\]", True, False),
    ("math_dapo", "73", r"Answer: $$\boxed{\boxed{73}}$$.", True, False),
    ("math_dapo", "73", "Answer: 72\nAnswer: ", False, False),
    ("math_dapo", "ab", "Answer: a b", True, False),
    ("math_dapo", "circle", "Answer: a circle", True, True),
    ("math_dapo", "1/3", r"Answer: \frac{1}{3}", True, False),
    ("math_dapo", r"0.\overline{3}", "Answer: 0.3", False, True),
    ("math_dapo", "12", "Answer: 12 square units", True, True),
    ("math_dapo", "73", "Answer: m + n = 73", True, True),
    ("math_dapo", "24", r"Answer: 48 \div 2 = 24", True, True),
    ("math_dapo", "1234567", "Answer: 1,234,567", True, True),
    ("math_dapo", "1,234", "Answer: 1, 234", False, True),
    ("math_dapo", "3 1/2", "Answer: 31/2", False, True),
    ("openai/gsm8k", "1234", "#### 12,34", False, True),
    ("openai/gsm8k", "12", "#### 12/5", False, True),
    ("openai/gsm8k", "5", "#### 5 million", False, True),
    ("openai/gsm8k", "18", "#### **18**", True, False),
    ("openai/gsm8k", "1234", "#### 1{,}234", True, False),
    ("openai/gsm8k", "1234", r"#### $1\,234$", True, False),
    ("openai/gsm8k", "18", r"#### $\boxed{18.00}$", True, False),
    ("openai/gsm8k", "18", r"#### \(018\)", True, False),
    ("math", r"\frac{1}{4}", r"\boxed{0.25}", True, False),
    ("math", r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", False, False),
    ("math", "10\\text{ cm}", r"\boxed{10}", True, False),
    ("math", "10\\text{ cm}", r"\boxed{10 \text{ m}}", False, False),
    ("math", "y = 5", r"\boxed{x = 5}", False, False),
    ("math", "A", r"\boxed{\textbf{(A)}}", True, False),
    ("openai/gsm8k", "12", '#### "12"', True, False),
    ("openai/gsm8k", "12.5", "#### １２．５", True, False),
    ("openai/gsm8k", "12", "#### 12⅓", False, True),
    ("openai/gsm8k", "12", "#### 12√2", False, True),
    ("openai/gsm8k", "3", "#### 3⁴", False, True),
    ("openai/gsm8k", "5", "#### 5~6", False, True),
    ("openai/gsm8k", "5600", "#### 5~600", False, False),
    ("openai/gsm8k", "1234", "#### １，２３４", True, False),
    ("openai/gsm8k", "5", "#### ５／６", False, False),
    ("openai/gsm8k", "5", "#### ５～６", False, False),
    ("openai/gsm8k", "5", "#### ５，６", False, False),
    ("openai/gsm8k", "5", '#### "5" or "6"', False, False),
    ("openai/gsm8k", "5", "#### `5` or `6`", False, False),
    ("math_dapo", r"\sqrt{12}", "Answer: √１２", True, False),
    ("math", "0.3", r"\boxed{0.\underline{3}}", False, False),
    ("math_dapo", "34", "<answer>Answer: 34</answer>", True, False),
    ("math_dapo", "34", "Answer: = 34", True, True),
    ("math_dapo", "34", "Answer: ３４", True, False),
    ("math_dapo", "101_2", "Answer: 101₂", True, False),
    ("math", r"\frac{x+1}{2}", r"\boxed{(x + 1)/2}", True, False),
    ("math", r"6 \times 10^{5}", r"\boxed{6 \cdot 10^5}", True, False),
    ("math", r"x\ge 5", r"\boxed{x >= 5}", True, False),
    ("math", "5", r"\boxed{5\,}", True, False),
]  # fmt: skip


@pytest.mark.parametrize(("source", "truth", "response", "right", "in_verl"), REPORTED)
def test_a_rule_forgives_form_and_nothing_else(
    source: str, truth: Any, response: str, right: bool, in_verl: bool
) -> None:
    assert accuracy(source, response, truth) is right
    assert accuracy(source, response, truth, VERL) is in_verl


# Texts of one row are forms of one answer. Texts of different rows are different answers.
ANSWERS = [
    ("0", "00", "-0", "0.0", "+0", "0."),
    ("7", "07", "+7", "7.0", "7.", "$7$", r"\(7\)", "**7**", r"\boxed {7}", r"\text{7}", "7e0", " 7 \n"),
    ("-7", "-07", "\u22127", r"$-7.00$"),
    ("0.5", ".5", "00.50", "1/2", r"\frac12", r"\dfrac{1}{2}", r"\frac{-1}{-2}", "½"),
    ("1/3", r"\tfrac 13", r"\frac{1}{3}", "⅓"),
    ("0.3", r"3/10"),
    (r"0.\overline{3}", r"0.\overline{3}."),
    (r"0.30\overline{3}",),
    (r"0.\overline{03}",),
    (r"0.\overline{09}",),
    (r"0.\overline{9}",),
    (r"1.\overline{027}", r"01.\overline{027}"),
    (r"1.\overline{27}",),
    ("0.(03)",),
    ("0.(3)",),
    ("0.10(3)",),
    ("0.1(3)",),
    ("3:05", "03:05"),
    ("3:5",),
    (r"\overline{05}",),
    (r"\overline{5}",),
    (r"\{1, 2\}", r"\{01, 2.0\}"),
    ("(-1, 2)", "(-01, 02)"),
    ("70", "70.", r"\[70\]", "`70`"),
    ("1000", "1,000", "1{,}000", "1{,} 000", r"1,\!000", r"1,\! 000", r"1\,000", "1 000", "1e3", r"\$1,000.00"),
    ("11111100", r"11,\! 111,\! 100", r"11{,} 111{,} 100", "11,111,100"),
    ("1, 0", "1,0", "1 ,0"),
    ("(1, 234)", "(1,234)", r"\left(1,\,234\right)"),
    ("(1234, 1)",),
    (r"(0.5, \frac{2}{3})", "(1/2, 2/3)", r"( .5,\frac23 )"),
    (
        *(r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
        *(r"\begin{bmatrix}1\\3\end{bmatrix}", r"\left[\begin{array}{c} 1 \\ 3 \end{array}\right]"),
    ),
    (r"\begin{vmatrix}1\\3\end{vmatrix}",),
    (r"\begin{pmatrix}1&3\end{pmatrix}",),
    (r"(-\infty,1)\cup[2,3]", r"(-∞, 1) ∪ [2, 3]"),
    ("2a+3", "2a + 3", "2 a+3", r"2a\,+\,3", "**2a + 3**"),
    ("2A+3",),
    ("2+3", "2 + 3"),
    ("a", "$a$", "_a_"),
    ("A", "(A)", r"\textbf{(A)}", r"\mathrm{A}", "A."),
    ("circle", "a circle", "The circle"),
    (r"3\frac{1}{2}", "3 1/2", r"3 \frac12", "3½"),
    ("31/3", r"\frac{31}{3}"),
    ("5!", "$5!$"),
    ("x^{10}", "x^10", "x¹⁰"),
    ("101_{2}", "101_2", "101₂"),
    (
        "34",
        r"34\\",
        r"34\,",
        "<answer> 34 </answer>",
        "= 34",
        "３４",
        r"\textcolor{red}{34}",
        r"\underline{34}",
    ),
    (r"6\cdot 10^{5}", r"6 \times 10^5", "6*10^5", "6 × 10⁵", r"6\cdot10^5"),
    (r"u \times v",),
    (r"u \cdot v",),
    (r"\frac{x+1}{2}", "(x+1)/2", r"\left(x + 1\right) / 2"),
    ("x+1/2", r"x+\frac{1}{2}"),
    (r"\frac{2\pi}{\omega}", r"2\pi/\omega"),
    (r"\frac{2}{3}-\frac{2}{\pi}", r"2/3 - 2/\pi"),
    (r"e^{\frac{3x}{2}}", "e^{3x/2}"),
    (r"\ln 5", r"\ln(5)"),
    (r"\ln(5)x",),
    (r"\sin 2x", r"\sin(2x)", r"\sin (2x)"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt3/2", "√3/2"),
    (r"\frac{a}{b}", "a/b"),
    ("a/bc",),
    (r"\sqrt[3]{2}", r"\sqrt[3]2", r"\sqrt[3] 2"),
    (r"\emptyset", r"\varnothing", "∅"),
    (r"\theta", "θ", r"\theta."),
    (r"x \le 5", "x <= 5", r"x \leqslant 5", "x≤5", "x＜＝5"),
    ("x < 5", "x<5"),
    ("even", "Even", r"\text{Even}", "**Even**."),
    ("no solution", r"\text{No solution}", "No solution."),
    ("yes", "Yes"),
    ("abc",),
    ("Abc",),
    ("x^{1}0",),
    (r"\pi r^2", r"\pi r^{2}", "πr²"),
    (r"\sqrt{3}", r"\sqrt3", "√3", "sqrt(3)"),
    (r"2\sqrt{10}", "2√10", "2 √ 10", "2sqrt10"),
    (r"x \in t",),
    (r"x\int",),
    ("1, 2, 3, ...", "1,2,3,..."),
    ("5 million",),
    ("3 p.m.",),
    ("3 a.m.",),
    (r"\frac{2}{4}",),
    ("10^{20}", "10^20"),
    ("100000000000000000001", "100,000,000,000,000,000,001"),
    ("100000000000000000002",),
]


@pytest.mark.parametrize("forms", ANSWERS, ids=lambda forms: forms[0])
def test_forms_of_one_answer_have_one_normal_form(forms: tuple[str, ...]) -> None:
    """The normal form of that form is itself."""
    values = {read_answer(form).value for form in forms}
    assert len(values) == 1
    for value in values:
        assert read_answer(value).value == value


def test_different_answers_have_different_normal_forms() -> None:
    values = [read_answer(forms[0]).value for forms in ANSWERS]
    assert len(set(values)) == len(values)


PIECES = (
    *("1", "0", ",", ".", " ", "a", "-", "*", "_", "$", "(", ")", "{", "}", "=", "/", "^", "%", "\\ "),
    *("\\frac", "\\text{", "\\boxed", "\\(", "\\)", "\\sqrt", " cm", "\\circ", "\\overline{", "and "),
)  # fmt: skip


def test_normalisation_is_idempotent_for_any_text() -> None:
    seeded = random.Random(1)
    texts = ["".join(pair) for pair in itertools.product(PIECES, repeat=2)]
    texts += ["".join(seeded.choices(PIECES, k=seeded.randint(3, 12))) for _ in range(3000)]
    for text in texts:
        value = read_answer(text).value
        assert read_answer(value).value == value, text


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        ("12 cm", "12", True),
        ("12", r"12\text{ cm}^2", True),
        ("12 centimeters", "12cm", True),
        ("12 cm", "12 m", False),
        ("12 apples", "12", True),
        ("5 gallons", "5 quarts", False),
        ("5 watts", "5 kilowatts", False),
        ("5 gallons", "5 liters", False),
        (r"5\text{ km/h}", r"5\text{ km/s}", False),
        (r"5\text{ km/h}", "5 kilometers per hour", True),
        ("5 miles per hour", "5 mph", True),
        ("5 hrs", "5 hours", True),
        ("5 square units", "5 units", True),
        ("5 apples", "5 apple", True),
        (r"\boxed{5\mbox{ inches}^2}", r"5 \mbox{ inches}^2", True),
        (r"\boxed{\text{5.4 \text{ cents}}}", r"5.4 \text{ cents}", True),
        (r"\boxed{5\text{ cm}}", r"5\text{ m}", False),
        ("5 apples", "5 pears", False),
        (r"\$5", "5", True),
        (r"\$5", "5 dollars", True),
        (r"-\$5", r"\$-5", True),
        (r"\$5", "5 cents", False),
        ("$5", "5 cents", False),
        ("$5$", "5 cents", True),
        (r"\$0.25", "0.25 cents", False),
        (r"\$5", "€5", False),
        (r"120^\circ C", r"120^\circ F", False),
        ("120 degrees Celsius", r"120^\circ C", True),
        ("50 percent", r"50\%", True),
        (r"50^\circ", r"50\%", False),
        ("x = 5", "5", True),
        ("the area = 5", "5", True),
        ("The final answer is $5$.", "5", True),
        ("So the answer is: x = 5", "5", True),
        ("The answer is not 5", "5", False),
        ("The answer is 5 or 6", "5", False),
        ("x = 5", "y = 5", False),
        (r"x \in [0, 1]", "[0,1]", True),
        ("x = 2 + 3 = 5", "5", True),
        ("2x + 3 = 5", "5", False),
        ("3 + 4 = 7", "8 - 1 = 7", False),
        ("m + n = 7", "7", True),
        ("x + y = 7", "x = 7", False),
        ("x = 3 + 4 = 7", "x = 7", True),
        ("x = y = 7", "7", True),
        ("10m + n = 7", "7", True),
        ("x_1 + x_2 = 7", "7", True),
        ("f(2) = 7", "7", True),
        (r"m\angle ABC = 7", "7", True),
        ("", "", False),
    ],
)
def test_units_and_names_may_be_left_out_and_may_not_differ(given: str, truth: str, same: bool) -> None:
    assert agrees(read_answer(given), read_answer(truth)) is same


@pytest.mark.parametrize(
    "given",
    [
        "x=5, x=6", r"x=-2 \text{ or } x=6", "x=5 and x=6", "x_1=5, x_2=6", "p=5, q=6", "-6, x=6",
        "not 5 but x=6", r"x \neq 5, x=6", "x=5; x=6", "x=5 x=6", "5 or = 6", "5 = 6", "five or x = 6",
        "not x = 6", "x OR y = 6", "x>=6", "x<=6", ">=6", "<=6", "x != 6", r"x \ne 6", r"x \ge 6",
        r"\not= 6", r"m\neq = 6", "2x=6", "x^2=6", r"\frac{x}{2}=6", "1/x=6", "x + x^2 = 6", "6 sevenths",
        "6 eighths", "6 sixth", "6 tenth", "6 millions", "6 thousands", "6 hundredth", "6 lakh", "6 crore",
        "6 score", "6 pairs", "6 dozens", "6 remainder", "6 less", "6 five",
    ],
)  # fmt: skip
def test_a_list_relation_equation_or_multiple_is_no_answer(given: str) -> None:
    assert not agrees(read_answer(given), read_answer("6"))
    assert not accuracy("math_dapo", f"Answer: {given}", "6")
    assert not accuracy("math", rf"\boxed{{{given}}}", "6")


def test_a_list_of_candidates_agrees_with_none_of_them() -> None:
    values = (
        "0", "-7", "5", "0.25", "1000", r"\frac{2}{3}", r"\sqrt{2}", "2a+3", "(1, 2)", "x^2", "A",
        r"12\pi",
    )  # fmt: skip
    lists = (
        "x={}, x={}", "x={} or x={}", r"x={} \text{{ or }} x={}", "x_1={}, x_2={}", "{} or {}", "{}, {}",
        "{} and {}", "{}, x={}", "x={}; x={}", "not {} but x={}", "either {} or x = {}",
    )  # fmt: skip
    for (one, other), form in itertools.product(itertools.permutations(values, 2), lists):
        for listed in (form.format(one, other), f"${form.format(one, other)}$"):
            given = read_answer(listed)
            for value in (one, other, f"x={one}", f"x={other}"):
                assert not agrees(given, read_answer(value)), (listed, value)


@pytest.mark.parametrize(
    ("truth", "number", "right"),
    [
        ("3", "3 1/2", False),
        ("5", "5k", False),
        ("5", "5 k", False),
        ("5", "5 thousands", False),
        ("5", r"5 \times 10^3", False),
        ("5", "5½", False),
        ("5", "5 or 6", False),
        ("5", "**5** or **6**", False),
        ("5", "5, 6", False),
        ("5", "5x", False),
        ("5", r"5\pi", False),
        ("10", r"10\frac{1}{2}", False),
        ("50", "50 - 48 = 2", False),
        ("1", "1 234", False),
        ("1234", "1 234", True),
        ("1234", r"1,\! 234", True),
        ("-5", "\u22125", True),
        ("5", "\n- 5 apples", True),
        ("5", "5, so it is", True),
        ("5", "5 tomatoes", True),
        ("5", "5. 6 more are left", True),
        ("18", "18 (6 + 12)", True),
        ("18", "18<|im_end|>", True),
        ("1234", "$\\boxed{1{,}234}$.", True),
        ("18", "**18** .", True),
    ],
)
def test_text_after_a_marked_number_is_ignored_only_if_harmless(truth: str, number: str, right: bool) -> None:
    """What could change the number is not left out."""
    assert accuracy("openai/gsm8k", f"#### {number}", truth) is right


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Answer: 5", "5"),
        ("Answer: 5\nso", "5"),
        ("**Answer:** 5", "5"),
        ("*Answer*: *5*", "*5*"),
        ("Answer: 5\nAnswer:", "5"),
        ("Answer: 5\nAnswer: 6", "6"),
        ("Answer:\n\n$$\n5\n$$", "$$\n5\n$$"),
        ("Answer：5", "5"),
        ("answer 5", None),
    ],
)
def test_the_answer_line_is_what_follows_the_last_label(text: str, line: str | None) -> None:
    assert answer_line(text) == line


def test_a_marked_number_keeps_its_sign_and_modifiers() -> None:
    for text, found in (("#### **-5**", "-5"), ("#### 12/5 x", "12/5"), ("#### 5e3", "5e3"), ("#### 5,", "5"),
                        ("#### five", None), ("#### 5 apples", "5"), ("#### 1\n#### 2", "2")):  # fmt: skip
        assert marked_number(text) == found
