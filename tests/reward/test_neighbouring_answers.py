r"""Two answers side by side: of boxes, tags and marks the last one counts. No two are read as one number."""

from __future__ import annotations

import pytest

from rolemesh.rules.normal_form import read_answer
from rolemesh.services.reward.functions import default_compute_score


def accuracy(source: str, response: str, truth: str) -> bool:
    scored = default_compute_score(source, response, truth)
    return (scored["acc"] if isinstance(scored, dict) else scored) == 1.0


LAST_COUNTS = [
    "<answer>1</answer><answer>234</answer>",
    "<answer>1</answer>\n<answer>234</answer>",
    "<ANSWER>1</ANSWER> <answer>234</answer>",
    '<answer id="1">1</answer><answer id="2">234</answer>',
    "<answer>1</answer><answer>2</answer><answer>234</answer>",
    "<answer>x < 1</answer><answer>234</answer>",
    "<final_answer>1</final_answer><final_answer>234</final_answer>",
    "<solution>1</solution><br><solution>234</solution>",
    r"\boxed{1}\boxed{234}",
    r"\boxed{1} \boxed{234}",
    r"\boxed{\frac{1}{2}}\boxed{234}",
    r"$\boxed{1}$ $\boxed{234}$",
    r"**\boxed{1}** **\boxed{234}**",
    r"\fbox{1}\boxed{234}",
]


@pytest.mark.parametrize("answers", LAST_COUNTS)
def test_the_last_of_two_answers_side_by_side_counts(answers: str) -> None:
    line = answers.replace("\n", " ")
    responses = [("math_dapo", f"Answer: {line}"), ("openai/gsm8k", f"#### {line}")]
    if "box" in answers:
        responses += [("math", answers), ("math_dapo", answers)]
    else:
        responses += [("math", rf"\boxed{{{line}}}")]
    for source, response in responses:
        assert accuracy(source, response, "234"), (source, response)
        for other in ("1", "1234", "2", "12234"):
            assert not accuracy(source, response, other), (source, response, other)


@pytest.mark.parametrize(
    "answers",
    [
        "$1$ $234$", "$1$$234$", r"\(1\)\(234\)", r"\(1\) \(234\)", r"\[1\]\[234\]", "$$1$$ $$234$$",
        "**1****234**", "**1** **234**", "*1* *234*", "_1_ _234_", "__1__ __234__", "`1``234`", "`1` `234`",
        '"1""234"', '"1" "234"', "“1”“234”", "<b>1</b><b>234</b>", "<i>1</i> <i>234</i>", "<p>1</p><p>234</p>",
        r"\text{1}\text{234}", r"\textbf{1} \textbf{234}", r"\mathbf{1}\mathbf{234}", r"\boxed{1}234",
        "1</answer>234", "<answer>1</answer>234", r"1\$234", "1~234", r"1\left234", "{1}{234}",
        "<answer>1</answer> or <answer>234</answer>", r"\boxed{1} or \boxed{234}", r"$1$ and $234$",
    ],
)  # fmt: skip
def test_other_neighbours_are_a_list_which_agrees_with_no_number(answers: str) -> None:
    for source, response in (("math_dapo", f"Answer: {answers}"), ("openai/gsm8k", f"#### {answers}")):
        for number in ("1", "234", "1234"):
            assert not accuracy(source, response, number), (source, response, number)


@pytest.mark.parametrize(
    ("source", "response"),
    [
        ("openai/gsm8k", "#### 1 #### 234"),
        ("openai/gsm8k", "####1####234"),
        ("openai/gsm8k", "#### 1\n#### 234"),
        ("openai/gsm8k", "<answer>#### 1</answer><answer>#### 234</answer>"),
        ("math_dapo", "Answer: 1 Answer: 234"),
        ("math_dapo", "Answer: 1Answer: 234"),
        ("math_dapo", "**Answer: 1** **Answer: 234**"),
        ("math", r"\boxed{1} or \boxed{234}"),
    ],
)
def test_the_last_mark_label_and_box_counts(source: str, response: str) -> None:
    assert accuracy(source, response, "234")
    assert not accuracy(source, response, "1")
    assert not accuracy(source, response, "1234")


def test_an_empty_pair_of_tags_is_no_answer() -> None:
    """One pair of tags leaves what stands beside it."""
    assert read_answer("<answer>5</answer><answer> </answer>").value == "5"
    assert read_answer("x = <answer>5</answer>") == read_answer("x = 5")
    assert read_answer("<answer>5</answer> cm") == read_answer("5 cm")
    assert read_answer("<b>5</b>") == read_answer("<answer>5</answer>") == read_answer("5")


@pytest.mark.parametrize(
    ("marked", "truth", "right"),
    [
        ("5 and a half", "5", False),
        ("$5$, $6$", "5", False),
        ("**5**, 6", "5", False),
        ("<b>5</b>, <b>6</b>", "5", False),
        ("**5**, and so on", "5", True),
        (r"\frac{1}{2}234", "0.5", False),
        (r"\frac1234", "0.5", False),
        (r"\frac{1}{2}, \frac{3}{4}", "0.5", False),
        (r"\frac{1}{2}, 6", "0.5", False),
        (r"\frac{1}{2}.", "0.5", True),
        (r"\frac{1}{2}, so half of it", "0.5", True),
        ("5; 6", "5", False),
        ("5; so it is", "5", True),
        ("5→6", "5", False),
        ("5 ⅒", "5", False),
        ("5 万", "5", False),
        ("5 一共", "5", True),
        ("5千克", "5", True),
        ("5元，每天6元", "5", True),
        ("5美元,即2+3=5", "5", True),
        ("5天6小时", "5", False),
        ("5千焦", "5", True),
        ("5百分点", "5", True),
        ("5조각", "5", True),
        ("5 조각", "5", True),
        ("5조", "5", False),
        ("5千字", "5", False),
        ("5千字节", "5", True),
        ("5百分點", "5", True),
        ("5千升", "5", True),
        ("5兆瓦", "5", True),
        ("5，一共5元", "5", True),
        ("5，共6天", "5", True),
        ("5、三人で", "5", True),
        ("18，三个人", "18", True),
        ("18，即2×9", "18", True),
        ("18（9×2=18）", "18", True),
        ("18元（9×2=18）", "18", True),
        ("18(9×2)", "18", True),
        ("**18**(9×2)", "18", True),
        ("5(6)", "5", False),
        ("5(6+1)6", "5", False),
        ("5(6+1)", "5", False),
        ("5((6+1))", "5", False),
        ("3(1/2)", "3", False),
        ("3(½)", "3", False),
        ("2(-3)", "2", False),
        ("5（6）", "5", False),
        ("18（6+12）", "18", True),
        ("18（2×(3+6)=18）", "18", True),
        ("18(2×(3+6)=18)", "18", True),
        (r"\(18\)（9×2=18）", "18", True),
        ("“18”（9×2）", "18", True),
        ("18【9×2】", "18", True),
        ("18[9×2]", "18", True),
        ("5[6+1]", "5", False),
        ("12∵3×4=12", "12", True),
        ("12∶3", "12", False),
        ("（5）、（6）", "5", False),
        ("18[1]", "18", True),
        ("18<sup>[1]</sup>", "18", True),
        ("5<sup>2</sup>", "5", False),
        ("12 ∵ 3×4=12", "12", True),
        ("18р", "18", True),
        ("18đ", "18", True),
        ('18ש"ח', "18", True),
        ("3分之2", "3", False),
        ("5分之一", "5", False),
        ("5小时30分钟", "5", False),
        ("5小时", "5", True),
        ("5 小时 30 分钟", "5", False),
        ("5 元 5 角", "5", False),
        ("5元 × 6", "5", False),
        ("5元或6元", "5", False),
        ("5 元 或 6 元", "5", False),
        ("5日から6日", "5", False),
        ("5개 또는 6개", "5", False),
        ("5 または 6", "5", False),
        ("3분의 2", "3", False),
        ("18元因为9×2", "18", True),
        ("18 元 9×2", "18", True),
        ("18美元即9×2", "18", True),
        ("18只其中3只是黑的", "18", True),
        ("5元每天6元", "5", True),
        ("18個なので9×2", "18", True),
        ("18개이므로9×2", "18", True),
        ("5点半", "5", False),
        ("5斤半", "5", False),
        ("5个半圆", "5", True),
        ("5个半径", "5", True),
        ("18 还是一样的", "18", True),
        ("$5$万", "5", False),
        (r"\(5\)亿", "5", False),
        ("$5$ million", "5", False),
        (r"5\,\text{million}", "5", False),
        (r"\boxed{5}万", "5", False),
        ("$5$ 元", "5", True),
        ("-> 18", "18", True),
        ("--> -18", "-18", True),
        ("=> 18", "18", True),
        ("⟶ 18", "18", True),
        (r"\therefore 18", "18", True),
        (r"\Rightarrow 18", "18", True),
        ("> 18", "18", False),
        ("5或者6", "5", False),
        ("5 或 6", "5", False),
        ("5还是六", "5", False),
        ("5乘以6", "5", False),
        ("5元×6", "5", False),
        ("5又二分之一", "5", False),
        ("5个半小时", "5", False),
        ("5 年半", "5", False),
        ("5%, 6%", "5", False),
        (r"5\% or 6\%", "5", False),
        ("(5), (6)", "5", False),
        ("(5) or (6)", "5", False),
        ("[5], [6]", "5", False),
        ("'5', '6'", "5", False),
        ("“5”, “6”", "5", False),
        ("5€, 6€", "5", False),
        ("5%, so it is", "5", True),
        ("→ 5", "5", True),
        ("∴ 5", "5", True),
        (r"\mathrm{5}", "5", True),
        ("5টি", "5", True),
        ("5रुपये", "5", True),
        ("5。6", "5", True),
        ("≈5", "5", False),
        ("~5", "-5", False),
        ("5~", "5", True),
        ("5~ 6", "5", False),
        ("✅ 5", "5", True),
        ("¥5", "5", True),
        ("\u20145", "-5", True),
        ("1\u00a0234", "1", False),
        ("1\u00a0234", "1234", True),
        ("½", "0.5", True),
        (r"\dfrac{1}{2}", "0.5", True),
        (r"\fbox{5}", "5", True),
        ("<strong>5</strong>", "5", True),
        ("٥٫٥", "5.5", True),
    ],
)
def test_a_marked_number_is_read_with_what_stands_beside_it(marked: str, truth: str, right: bool) -> None:
    assert accuracy("openai/gsm8k", f"#### {marked}", truth) is right


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        (r"\left(5\right)", "5", True),
        ("(-0.5)", r"-\frac{1}{2}", True),
        ("The answer is __5__", "5", True),
        (r"3\dfrac12", r"3\frac{1}{2}", True),
        (r"1\leq2", r"1 \le 2", True),
        (r"30\degree15'", r"30^\circ 15'", True),
        ("3 $1/2$", "3 1/2", True),
        (r"\( 3 \) \( 1/2 \)", "3 1/2", True),
        ("$3$ 1/2", "3 1/2", True),
        (r"\(3\) 1/2", "3 1/2", True),
        ("3 $ 1/2 $", "3 1/2", True),
        (r"3 $1/2 \text{ cups}$", "3 1/2 cups", True),
        ("$3$ 1/2 cups", "3 1/2 cups", True),
        (r"3 $1/2\%$", r"3 1/2\%", True),
        ("3 <b>1/2</b>", "3 1/2", True),
        ("<b>3</b> 1/2", "3 1/2", True),
        ("$2$ $3$ 1/2", "2, 3 1/2", True),
        ("<answer>3</answer> 1/2", "3 1/2", False),
        ("$3$ $1/2$", r"3\frac{1}{2}", True),
        ("$1$ $234/5$", "1234/5", False),
        (r"3 \(1/2\)", "3 1/2", True),
        ("$3$$1/2$", "3 1/2", False),
        (r"\(3\)\(1/2\)", "3 1/2", False),
        ("<b>3</b><b>1/2</b>", "3 1/2", False),
        ("$1/2$ $3/4$", "1/2, 3/4", True),
        ("1<b>2", "1, 2", False),
        ("1 < b > 2", "1<b>2", True),
        ("a<b>c", "ac", False),
        ("it is<b>5</b>", "it is 5", True),
        ("when<b>x > 5</b>", "when x > 5", True),
        ("it is<b>x<sup>2</sup></b>", "it is x<sup>2</sup>", True),
        ("1<b>2, <b>5</b>", "1, 2, 5", False),
        ("5<b>", "5", True),
        ("5元", "5", True),
        ("5 小时", "5", True),
        ("5元", "5天", False),
        ("5小时30分", "5", False),
        ("5万", "5", False),
        ("“A”, “B”", "A, B", True),
        ("the word “MATH”", "the word MATH", True),
        ("5 “apples”", "5", True),
        ("“5” cm", "5 cm", True),
        (r"5 \quad 678", "5678", False),
        (r"5 \quad 678", "5, 678", True),
        ("5 ~ 678", "5678", False),
        ("5~cm", "5 cm", True),
        ("5。", "5", True),
        ("5㎝", "5 cm", True),
        ("5％", r"5\%", True),
        ("1⁄2", "½", True),
        (r"\[1\]\[234\]", "1, 234", True),
    ],
)
def test_an_answer_line_is_read_likewise(given: str, truth: str, right: bool) -> None:
    assert accuracy("math_dapo", f"Answer: {given}", truth) is right
