r"""Which answers are right: forms of the right answer are, and no other answer is.

A table has a case a line, with " | " between cells. "⏎" is a new line.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rolemesh.config.reward import RewardConfig
from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.finding import answer_line, marked_number
from rolemesh.rules.normal_form import agrees, read_answer
from rolemesh.services.reward.functions import default_compute_score, math_verify

VERL = RewardConfig(rules="verl")


def accuracy(source: str, response: str, truth: Any, config: RewardConfig | None = None) -> bool:
    scored = default_compute_score(source, response, truth, config=config)
    return (scored["acc"] if isinstance(scored, dict) else scored) == 1.0


def table(text: str) -> list[list[str]]:
    return [line.replace("⏎", "\n").split(" | ") for line in text.strip().splitlines()]


def rows(text: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", table(text), ids=lambda row: " ".join(row[:2]))


# ---------------------------------------------------------------------------------- reports from elsewhere

# data source | ground truth | responses, by whether they are right here and in verl 0.9.1
REPORTED = {
    (True, False): r"""
aime24 | 033 | Answer: 33
aime24 | 33 | Answer: 033
aime24 | 016 | \boxed{16}
aime25 | 70 | Answer: \(70\) | Answer: 70.
HuggingFaceH4/MATH-500 | 5.0 | \boxed{5}
HuggingFaceH4/MATH-500 | 5 | \boxed {5} | \boxed{5\,}
math_dapo | 73 | Final Answer: **73** | **Answer:** 73 | __Answer__: *73* | **Answer: 73** | Answer:⏎\[⏎73⏎\]
math_dapo | 73 | Answer: $$\boxed{\boxed{73}}$$.
math_dapo | 2a+3 | Answer: 2a + 3
math_dapo | -7 | Answer: -007
math_dapo | 34.00 | Answer: 34 | <answer>Answer: 34</answer> | Answer: ３４
math_dapo | 101_2 | Answer: 101₂
math_dapo | \sqrt{12} | Answer: √１２
math | -\frac{x}{2} | \boxed{\frac{-x}{2}}
math | -\frac{\sqrt{3}}{2} | \boxed{y = \dfrac{-\sqrt3}{2}}
math | (-\frac{x}{2}, 3) | \boxed{(\frac{-x}{2}, 3)}
math | 10 | \boxed{\large 10} | \boxed{\Large{10}}
math | \begin{pmatrix} -1 \\ 2 \end{pmatrix} | \boxed{\begin{pmatrix} -1 \\ 2 \\ \end{pmatrix}}
math | \begin{pmatrix} -1 \\ 2 \end{pmatrix} | \boxed{\left[\begin{array}{c} -1 \\ 2 \\ \end{array}\right]}
math | \frac{1}{4} | \boxed{0.25}
math | 10\text{ cm} | \boxed{10}
math | A | \boxed{\textbf{(A)}}
openai/gsm8k | 18 | #### 9*2 = 18 | #### **18** | #### $\boxed{18.00}$ | #### \(018\)
openai/gsm8k | 1234 | #### 1{,}234 | #### $1\,234$ | #### １，２３４
openai/gsm8k | 12.5 | #### "12.5" | #### １２．５
""",
    (False, False): r"""
math_dapo | 0.5 | Answer: 0
math_dapo | 7 | Answer: -007
math_dapo | 34 | Answer: 3.4 | Answer: 340 | Answer: 34⏎Answer: 33⏎Answer:
math | 5 | \boxed{5\text{ at least}} | \boxed{5 \text{ people at most}} | \boxed{5\text{ approx.}}
math | 0.5 | \boxed{0.5\text{ repeating}}
math | \frac{x}{2} | \boxed{\frac{-x}{2}}
math | -\frac{x+1}{2} | \boxed{\frac{-x+1}{2}}
math | -\frac{b \pm c}{2} | \boxed{\frac{-b \pm c}{2}}
math | 3-\frac{x}{2} | \boxed{3\frac{-x}{2}}
math | 10 | \boxed{1\large 0}
math | \begin{pmatrix} -1 \\ 2 \end{pmatrix} | \boxed{\begin{pmatrix} -1 \\ 2 \\ 3 \end{pmatrix}}
math | \frac{1}{2} | \boxed{\frac{2}{4}}
math | 10\text{ cm} | \boxed{10 \text{ m}}
math | y = 5 | \boxed{x = 5}
math | 0.3 | \boxed{0.\underline{3}}
openai/gsm8k | 5 | #### ５／６ | #### ５～６ | #### ５，６ | #### "5" or "6" | #### `5` or `6`
openai/gsm8k | 5600 | #### 5~600
""",
    (False, True): r"""
math_dapo | 2a + 3 | Answer: 2 + 3
math_dapo | 123 | Answer: 1,2,3
math_dapo | 1,234 | Answer: 1, 234
math_dapo | 3 1/2 | Answer: 31/2
math_dapo | 0.\overline{3} | Answer: 0.3
math_dapo | 5 | Answer: The answers are $5$ as well as $6$ | Answer: The answers are $5$ as  well as $6$
openai/gsm8k | 12 | #### 1,2 | #### 12/5 | #### 12⅓ | #### 12√2
openai/gsm8k | 9 | #### 9*2 = 18
openai/gsm8k | 5 | #### 5-million | #### 5 million | #### 5~6
openai/gsm8k | 1234 | #### 12,34
openai/gsm8k | 3 | #### 3⁴
""",
    (True, True): r"""
openai/gsm8k | 5 | #### 5-pound bags
math_dapo | 5 | Answer: The answer is $5$ as well. | Answer: The answer is $5$ as 2 + 3 = 5
math_dapo | 73 | \textbf{Answer:} $73$ | Answer: m + n = 73 | Answer: = 73
math_dapo | 12 | Answer: 12 square units
math_dapo | 24 | Answer: 48 \div 2 = 24
math_dapo | circle | Answer: a circle
math_dapo | 1234567 | Answer: 1,234,567
""",
}


@pytest.mark.parametrize("verdicts", REPORTED)
def test_a_rule_forgives_form_and_nothing_else(verdicts: tuple[bool, bool]) -> None:
    for source, truth, *responses in table(REPORTED[verdicts]):
        for response in responses:
            said = accuracy(source, response, truth), accuracy(source, response, truth, VERL)
            assert said == verdicts, (source, response, truth)


# ------------------------------------------------------------------------------------------ the normal form

# Cells of a line are forms of one answer. First cells, and those of OTHERS, are different answers.
FORMS = r"""
0 | 00 | -0 | 0.0 | +0 | 0.
7 | 07 | +7 | 7.0 | 7. | $7$ | \(7\) | **7** | \boxed {7} | \text{7} | 7e0 | `7` | {\bf 7} | \left(7\right)
-7 | -07 | −7 | $-7.00$
0.5 | .5 | 00.50 | 1/2 | \frac12 | \dfrac{1}{2} | \tfrac12 | \frac1{2} | \frac 1 2 | \frac{-1}{-2} | ½ | 1⁄2
-0.5 | (-0.5) | -\frac{1}{2}
1/3 | \tfrac 13 | \frac{1}{3} | ⅓
0.\overline{3} | 0.\overline{3}.
3:05 | 03:05
\{1, 2\} | \{01, 2.0\}
(-1, 2) | (-01, 02)
1000 | 1,000 | 1{,}000 | 1{,} 000 | 1,\!000 | 1,\! 000 | 1\!000 | 1\,000 | 1 000 | 1e3 | \$1,000.00
11111100 | 11,\! 111,\! 100 | 11{,} 111{,} 100 | 11,111,100
1, 0 | 1,0 | 1 ,0 | 1 \text{ or } 0
1, 234 | \[1\]\[234\] | 1 \quad 234
(1, 234) | (1,234) | \left(1,\,234\right)
(0.5, \frac{2}{3}) | (1/2, 2/3) | ( .5,\frac23 )
\frac{1}{2}, \frac{3}{4} | $1/2$ $3/4$
\begin{pmatrix}1\\3\end{pmatrix} | \begin{bmatrix} 1 \\ 3 \end{bmatrix} | \begin{pmatrix}1\\3\\\end{pmatrix}
(-\infty,1)\cup[2,3] | (-∞, 1) ∪ [2, 3]
2a+3 | 2a + 3 | 2 a+3 | 2a\,+\,3 | **2a + 3**
a | $a$ | _a_
A | (A) | \textbf{(A)} | \mathrm{A} | A.
A, B | “A”, “B”
circle | a circle | The circle
3\frac{1}{2} | 3 1/2 | 3 \frac12 | 3\dfrac12 | 3½ | 3.5 | 3 $1/2$ | $3$ 1/2 | \( 3 \) \( 1/2 \) | <b>3</b> 1/2
-3\frac12 | -\frac{7}{2}
x^{10} | x^10 | x¹⁰
101_{2} | 101_2 | 101₂
34 | 34\\ | <answer> 34 </answer> | = 34 | ３４ | \textcolor{red}{34} | \underline{34} | 34<b> | <b>34</b>
6\cdot 10^{5} | 6 \times 10^5 | 6*10^5 | 6 × 10⁵ | 6\cdot10^5
\frac{x+1}{2} | (x+1)/2 | \left(x + 1\right) / 2
x+1/2 | x+\frac{1}{2}
\frac{2\pi}{\omega} | 2\pi/\omega
\frac{\frac{\pi}{2}}{3} | \frac{\frac\pi2}3
e^{\frac{3x}{2}} | e^{3x/2}
\ln 5 | \ln(5)
\sin 2x | \sin(2x) | \sin (2x)
\frac{\sqrt{3}}{2} | \sqrt3/2 | √3/2
\sqrt[3]{2} | \sqrt[3]2 | \sqrt[3] 2
\emptyset | \varnothing | ∅
\theta | θ | \theta.
x \le 5 | x <= 5 | x \leqslant 5 | x≤5 | x＜＝5
1 < b > 2 | 1<b>2 | 1 \lt b \gt 2
30^\circ 15' | 30\degree15'
even | Even | \text{Even} | **Even**.
no solution | \text{No solution} | No solution.
the word MATH | the word “MATH”
when x > 5 | when<b>x > 5</b>
\pi r^2 | \pi r^{2} | πr²
2\sqrt{10} | 2√10 | 2 √ 10 | 2sqrt10 | 2 \sqrt{10} | 2sqrt(10)
1, 2, 3, ... | 1,2,3,...
100000000000000000001 | 100,000,000,000,000,000,001
"""
OTHERS = r"""
0.30\overline{3} | 0.\overline{03} | 0.\overline{09} | 0.\overline{9} | 1.\overline{27} | \overline{05}
\overline{5} | 0.(03) | 0.(3) | 0.10(3) | 0.1(3) | 3:5 | (1234, 1) | \begin{vmatrix}1\\3\end{vmatrix}
\begin{pmatrix}1&3\end{pmatrix} | 2+3 | 2A+3 | u \times v | u \cdot v | \ln(5)x | a/bc | abc | Abc | x^{1}0
1.\overline{027} | 5! | 0.3 | \frac{31}{3} | x < 5
x \in t | x\int | 5 million | 3 p.m. | 3 a.m. | \frac{2}{4} | 100000000000000000002 | \frac{2}{1}
\text{Evelyn} | \text{Angela} | (2, 1) | (1, 2) | 3 | \sqrt{3} | 2x+3=5 | \frac{1 | \frac | \frac1 | 10^{20}
1<b>2, 5 | ac | a<b>c | 1234/5 | $1$ $234/5$ | 5678 | 5 ~ 678
"""


@rows(FORMS)
def test_forms_of_one_answer_have_one_normal_form(row: list[str]) -> None:
    """The normal form of that form is itself."""
    (value,) = {read_answer(form).value for form in row}
    assert read_answer(value).value == value


def test_different_answers_have_different_normal_forms() -> None:
    values = [
        read_answer(form).value
        for form in (*(row[0] for row in table(FORMS)), *itertools.chain(*table(OTHERS)))
    ]
    assert sorted(set(values)) == sorted(values)


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


# ------------------------------------------------------------------------------ labels, names, lists, choices

# ground truth | answers that agree with it
SAME = r"""
12 | 12 cm | 12 apples | 12 años | 12\text{ cm}^2 | \boxed{12\mbox{ inches}^2} | 12^\circ | 12^{\circ} | 12\%
12 | \$12
12\text{ cm}^2 | 12 | 12cm | 12 centimeters | “12” cm | 12~cm | 12㎝
5.4 \text{ cents} | \boxed{\text{5.4 \text{ cents}}} | $5.4$
60\text{ km/h} | 60 km/h | 60 kilometers per hour | 60 | \text{60 km/h}
5 mph | 5 miles per hour
5 hours | 5 hrs
5 units | 5 square units | 5 unit
5\text{ volts} | 5\text{ V}
5 dollars | \$5
\$-5 | -\$5
120^\circ C | 120 degrees Celsius
50\% | 50 percent | 50％
5 | x = 5 | the area = 5 | The final answer is $5$. | So the answer is: x = 5 | The answer is __5__ | 5 “apples”
5 | 5 miles | x = 2 + 3 = 5 | x = y = 5 | m + n = 5 | 10m + n = 5 | x_1 + x_2 = 5 | f(2) = 5 | m\angle ABC = 5
5 | (A) x = 5 | 5 m/s | a_{2023} = 5 | a_{n+1} = 5 | x_{\max} = 5 | S_{\triangle ABC} = 5 | \text{Answer: } 5
5 | 5\mathrm{m}^2 | \textbf{(A) } 5
x = 7 | x = 3 + 4 = 7
[0,1] | x \in [0, 1]
1+2i | 1+2\mathrm{i}
2e | 2\mathrm{e}
A | \textbf{(A)}\ 5 | (A) -5 | (A) B | (A) Thursday
\textbf{(A)}\ 5 | A | 5
(2,3) | \textbf{(B)}\ (2,3)
rhombus | \textbf{(D)}\ \text{rhombus}
3 1/2 cups | 3 $1/2 \text{ cups}$ | $3$ 1/2 cups
"""
# ground truth | answers that do not agree with it
OTHER = r"""
12 cm | 12 m | 12 gallons | 12\text{ km/h}
5\text{ km/s} | 5\text{ km/h} | 5 watts | 5 apples | 5\%
5 gallons | 5 quarts | 5 liters
5 cents | \$5 | $5 | 5 pears | €5
\$0.25 | 0.25 cents | €0.25
50^\circ | 50\% | 51^\circ
120^\circ C | 120^\circ F
5 | The answer is not 5 | The answer is 5 or 6 | The sum is less than $5$ | The sums are $5$ and $6$ | -5
5 | 2x + 3 = 5 | 5a/b | 5\mathrm{x} | 5\text{k} | 5\text{ M} | 5 millones | 5 Millionen | 5 milliards | 5 mil
5 | 5 Dutzend | $5$ million
2 | 2\mathrm{i} | 2\mathrm{e}^2 | 1 or 2
x = 5 | y = 5 | x + y = 5
8 - 1 = 7 | 3 + 4 = 7
A | (B) 5 | (A), (B) | (A) or (B) | (A) or 5 | (A) 5, (B) 6 | (A)(B) | (A)^2 | (A)+1 | (A) \cap B
B | (A) B | (A) x = B
\textbf{(A)}\ 5 | B | (A) 6
a_{2024} = 5 | a_{2023} = 5
4 | 3\frac{4}{3}
3 1/2 | <answer>3</answer> 1/2 | $3$$1/2$ | \(3\)\(1/2\) | <b>3</b><b>1/2</b> | 31/2
6 | x=5, x=6 | x=-2 \text{ or } x=6 | x=5 and x=6 | x_1=5, x_2=6 | p=5, q=6 | -6, x=6 | not 5 but x=6
6 | x \neq 5, x=6 | x=5; x=6 | x=5 x=6 | 5 or = 6 | 5 = 6 | five or x = 6 | not x = 6 | x OR y = 6 | x>=6 | x<=6
6 | >=6 | <=6 | x != 6 | x \ne 6 | x \ge 6 | \not= 6 | m\neq = 6 | 2x=6 | x^2=6 | \frac{x}{2}=6 | 1/x=6
6 | x + x^2 = 6 | 6 sevenths | 6 eighths | 6 sixth | 6 tenth | 6 millions | 6 thousands | 6 hundredth | 6 lakh
6 | 6 crore | 6 score | 6 pairs | 6 dozens | 6 remainder | 6 less | 6 five
"""


@pytest.mark.parametrize(("text", "same"), [(SAME, True), (OTHER, False)])
def test_labels_and_names_may_be_left_out_and_may_not_differ(text: str, same: bool) -> None:
    for truth, *answers in table(text):
        for answer in answers:
            assert agrees(read_answer(answer), read_answer(truth)) is same, (answer, truth)
            assert accuracy("math_dapo", f"Answer: {answer}", truth) is same, (answer, truth)
            assert accuracy("math", rf"\boxed{{{answer}}}", truth) is same, (answer, truth)
    assert not agrees(read_answer(""), read_answer(""))


def test_a_list_of_candidates_agrees_with_none_of_them() -> None:
    values = ("0", "-7", "0.25", "1000", r"\frac{2}{3}", r"\sqrt{2}", "2a+3", "(1, 2)", "x^2", "A", r"12\pi")
    lists = (
        "x={}, x={}", "x={} or x={}", r"x={} \text{{ or }} x={}", "x_1={}, x_2={}", "{} or {}", "{}, {}",
        "{} and {}", "{}, x={}", "x={}; x={}", "not {} but x={}", "either {} or x = {}",
    )  # fmt: skip
    for (one, other), form in itertools.product(itertools.permutations(values, 2), lists):
        for listed in (form.format(one, other), f"${form.format(one, other)}$"):
            for value in (one, other, f"x={one}", f"x={other}"):
                assert not agrees(read_answer(listed), read_answer(value)), (listed, value)


# ------------------------------------------------------------------------------- numbers after "####" (gsm8k)

# ground truth | what follows "#### "
MARKED = r"""
5 | 5, so it is | 5; so it is | **5**, and so on | 5%, so it is | 5. 6 more are left | 5~ | ✅ 5 | ¥5
5 | ⏎- 5 apples | 5 tomatoes | → 5 | ∴ 5 | \mathrm{5} | \fbox{5} | <strong>5</strong> | 1⏎#### 5 | 5⏎#### done
5 | 5. | 5 hours per 30 minutes | 5 minutes, so 6 dollars | 5 hours for 3 days | 5 dollars for 3 cents
0.5 | \frac{1}{2}. | \frac{1}{2}, so half of it | ½ | \dfrac{1}{2}
18 | 18(9×2) | **18**(9×2) | 18(2×(3+6)=18) | 18 (6 + 12) | 18（9×2=18） | 18[9×2] | 18[1]
18 | 18<sup>[1]</sup> | -> 18 | => 18 | ⟶ 18 | \therefore 18 | \Rightarrow 18 | 18<|im_end|> | **18** .
18 | 18 ∵ 9×2=18 | 18∵9×2=18 | $18 | 18.00 | $9 * 2 = $18 | 9 × 2 = 18 apples. | 36/2 = 9*2 = 18
-18 | --> -18 | -$18 | $-18 | −18 | —18
1234 | 1 234 | 1,\! 234 | $\boxed{1{,}234}$. | $ 1,234.00 | 1234
1,234 | 1234
5.5 | ٥٫٥
"""
NOT_MARKED = r"""
5 | 5 and a half | 5 and a quarter | 5 and three quarters | 5k | 5 k | 5 thousands | 5 \times 10^3 | 5½ | 5 ⅒
5 | 5x | 5\pi | $5$, $6$ | **5**, 6 | <b>5</b>, <b>6</b> | 5; 6 | 5→6 | 5, 6 | 5 or 6 | **5** or **6** | 5~ 6
5 | 5%, 6% | 5\% or 6\% | (5), (6) | (5) or (6) | （5）、（6） | [5], [6] | '5', '6' | “5”, “6” | 5€, 6€ | 5(6)
5 | 5(6+1) | 5(6+1)6 | 5((6+1)) | 5[6+1] | 5<sup>2</sup> | $5$ million | 5\,\text{million} | ≈5 | -5 | 5⏎#### 6
5 | , | 1.2.3 | 5 hours 30 minutes | 5 hours and 30 minutes | 5 hours, 30 minutes | 5 h 30 min | 5 ft. 6 in.
5 | 5 dollars and 30 cents | 5 m 20 cm
0.5 | \frac{1}{2}234 | \frac1234 | \frac{1}{2}, \frac{3}{4} | \frac{1}{2}, 6
18 | > 18 | 9 = 18 | (9) = 18 | 9% = 18 | 9*2 = 18 or 19 | 9*2 = 18 million | 2x = 18 | 9, 2*9 = 18
3 | 3(1/2) | 3(½) | 3 1/2
2 | 2(-3)
12 | 12∶3
-5 | ~5 | 5
1 | 1 234
10 | 10\frac{1}{2}
50 | 50 - 48 = 2
6 | 9*2 = 18, 3*2 = 6
"""


@pytest.mark.parametrize(("text", "right"), [(MARKED, True), (NOT_MARKED, False)])
def test_a_marked_number_is_read_with_what_stands_beside_it(text: str, right: bool) -> None:
    for truth, *answers in table(text):
        for answer in answers:
            assert accuracy("openai/gsm8k", f"#### {answer}", truth) is right, (answer, truth)


THINGS = (
    "apples, bins, birds, boys, cents, donuts, eggs, elevators, euros, forts, halters, kids, kilograms, "
    "kites, knights, M&Ms, M&M’s, marbles, men, millimeters, millipedes, months, nails, ninjas, onesies, "
    "ounces, oxen, pianos, pies, pigs, pillows, pints, pizzas, points, quarters, questions, sixpacks, "
    "teenagers, tennis balls, tents, tons, toys, twigs, twins, x-rays, zebras, B's, K-cups, Bücher, Kč, "
    "Mädchen, one-dollar bills, two-liter bottles, three-pointers, half-gallon jugs, third-graders, "
    "seven-year-olds, pi-shaped cakes, hundred-dollar bills, twenty-five-cent stamps, eighteen-wheelers"
)
MULTIPLES = (
    r"pi, \pi, \pi r, pi r, π, k, K, M, B, bn, half, halves, third, tenths, dozen, hundred, thousands, "
    "million, million apples, million—so it is, million-plus, twenty-fifths, one-half, two-thirds, one-half "
    "cups, crore, lakhs, quarters of an hour, and a half, M-6 M, millones"
)


def test_a_counted_thing_leaves_a_number_and_a_multiple_changes_it() -> None:
    for text, right in ((THINGS, True), (MULTIPLES, False)):
        for word in text.split(", "):
            for form in ("5 {}", "**5** {}", "$5$ {}", r"5\text{{ {}}}", r"\boxed{{5}} {}"):
                marked = f"#### {form.format(word)}"
                assert accuracy("openai/gsm8k", marked, "5") is right, marked


# ------------------------------------------------------------------------------------- answers side by side


@rows(r"""
<answer>1</answer><answer>234</answer>
<answer>1</answer>⏎<ANSWER>234</ANSWER>
<answer id="1">1</answer><answer id="2">2</answer> <answer>234</answer>
<answer>x < 1</answer><answer>234</answer>
<final_answer>1</final_answer><final_answer>234</final_answer>
<solution>1</solution><br><solution>234</solution>
\boxed{1}\boxed{234}
\fbox{1} \boxed{234}
\boxed{\frac{1}{2}}\boxed{234}
**$\boxed{1}$** **$\boxed{234}$**
""")
def test_the_last_of_two_answers_side_by_side_counts(row: list[str]) -> None:
    line = row[0].replace("\n", " ")
    responses = [("math_dapo", f"Answer: {line}"), ("openai/gsm8k", f"#### {line}")]
    responses += [("math", line), ("math_dapo", line)] if "box" in line else [("math", rf"\boxed{{{line}}}")]
    for source, response in responses:
        assert accuracy(source, response, "234"), (source, response)
        for other in ("1", "1234", "2", "12234"):
            assert not accuracy(source, response, other), (source, response, other)


@rows(r"""
$1$ $234$ | $1$$234$ | \(1\)\(234\) | \(1\) \(234\) | \[1\]\[234\] | $$1$$ $$234$$ | $1$ and $234$ | 1\$234
**1****234** | **1** **234** | *1* *234* | _1_ _234_ | __1__ __234__ | `1``234` | `1` `234` | "1""234"
"1" "234" | “1”“234” | <b>1</b><b>234</b> | <i>1</i> <i>234</i> | <p>1</p><p>234</p> | {1}{234} | 1~234
1\left234 | \text{1}\text{234} | \textbf{1} \textbf{234} | \mathbf{1}\mathbf{234} | \boxed{1}234
\boxed{1} or \boxed{234} | 1</answer>234 | <answer>1</answer>234 | <answer>1</answer> or <answer>234</answer>
""")
def test_other_neighbours_are_a_list_which_agrees_with_no_number(row: list[str]) -> None:
    for answers, number in itertools.product(row, ("1", "234", "1234")):
        for source, response in (("math_dapo", f"Answer: {answers}"), ("openai/gsm8k", f"#### {answers}")):
            assert not accuracy(source, response, number), (source, response, number)


@rows(r"""
openai/gsm8k | #### 1 #### 234
openai/gsm8k | ####1####234
openai/gsm8k | <answer>#### 1</answer><answer>#### 234</answer>
math_dapo | Answer: 1 Answer: 234
math_dapo | **Answer: 1** **Answer: 234**
math_dapo | \boxed{1} Answer: 234
math | \boxed{1} or \boxed{234}
""")
def test_the_last_mark_label_and_box_counts(row: list[str]) -> None:
    source, response = row
    assert [accuracy(source, response, number) for number in ("234", "1", "1234")] == [True, False, False]


def test_an_empty_pair_of_tags_is_no_answer() -> None:
    """One pair of tags leaves what stands beside it."""
    assert read_answer("<answer>5</answer><answer> </answer>").value == "5"
    assert read_answer("x = <answer>5</answer>") == read_answer("x = 5")
    assert read_answer("<answer>5</answer> cm") == read_answer("5 cm")


# ------------------------------------------------------------------------------------- other scripts


OTHER_SCRIPTS = """
5元 | 5 个 | 5개 | 5 통 | 5 рублей | 5р | 5टि | 5 つ | 5ש"ח | $5$ 元 | 5小时 | 5％ 折 | 5元。 | 5ｋ
5 ｍｉｌｌｉｏｎ
5万 | 5 万 | $5$万 | 5억 | 5 만 | 5 млн | 5 тысяч | 5半 | 5个半小时 | 5百 | 5十 | 5 अरब | 5百万
5 或 6 | 5或者6 | 5元或6元 | 5, 或 6 | 5 から 6 | 5개 또는 6개 | 5 или 6 | 5元5角 | 5小时30分钟 | 5乘以6
3分之5 | 5分之一
"""


@rows(OTHER_SCRIPTS)
def test_no_number_is_read_beside_a_word_of_another_script(row: list[str]) -> None:
    """Neither where the word is a label nor where it makes another answer of the number."""
    for answer in row:
        for number in ("5", "6", "5.5", "50000"):
            assert not accuracy("openai/gsm8k", f"#### {answer}", number), answer
            assert not accuracy("math_dapo", f"Answer: {answer}", number), answer
            assert not accuracy("math", rf"\boxed{{{answer}}}", number), answer
            assert not accuracy("math", rf"\boxed{{{number}}}", answer), answer
        with pytest.raises(ValueError, match="is not a number, which gsm8k's rule compares"):
            accuracy("openai/gsm8k", "#### 5", answer)
        assert math_verify.compute_score(rf"\boxed{{{answer}}}", "5") == 0.0
        assert accuracy("math", rf"\boxed{{{answer}}}", answer), "the same text is the same answer"


# ------------------------------------------------------------------------------------- where the answer is

FINDERS = {"line": answer_line, "mark": marked_number, "box": last_boxed}


@rows(r"""
line | 5 | Answer: 5 | Answer: 5⏎so | **Answer:** 5 | Answer: 5⏎Answer: | Answer: 6⏎Answer: 5 | Answer：5
line | *5* | *Answer*: *5*
line | $$⏎5⏎$$ | Answer:⏎⏎$$⏎5⏎$$
line | None | answer 5
mark | -5 | #### **-5**
mark | 12/5 | #### 12/5 x
mark | 5e3 | #### 5e3
mark | 5 | #### 5, | #### 5 apples
mark | None | #### five
box | 5 | so \boxed{5}. | \boxed{1} and then \boxed{5} | \boxed{5} \fbox{4} | \fbox{4} \boxed{5} | \boxed⏎{5}
box | 5 | \fbox{5} | $\boxed 5$ is | \(\boxed 5\) is | \boxed 4$, no, $\boxed{5}$
box | \frac{1}{\sqrt{2}} | \boxed{\frac{1}{\sqrt{2}}} is it
box | \{1, 2\} | \boxed{\{1, 2\}}
box | None | \fbox{4} \boxed{5 | 42 | \boxed
""")
def test_the_last_answer_is_found_as_it_is_written(row: list[str]) -> None:
    finder, answer, *texts = row
    assert {str(FINDERS[finder](text)) for text in texts} == {answer}


@rows(r"""
True | The final answer is $5$. I hope it is correct. | The sum is $5$ | The value is \(5\).
True | \boxed{5} because 2+3
False | \boxed{5} or \boxed{6} | -\boxed{5} | The sum is not $5$ | The sums are $5$ and $6$
False | The answer is $5$. Or 6.
""")
def test_the_formula_of_a_sentence_is_its_answer(row: list[str]) -> None:
    assert {str(accuracy("math_dapo", f"Answer: {line}", "5")) for line in row[1:]} == {row[0]}
