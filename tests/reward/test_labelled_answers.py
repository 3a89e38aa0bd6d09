"""A label after a number leaves the number as it is, whatever the label begins with. A multiple does not."""

from __future__ import annotations

import pytest

from rolemesh.rules.gsm8k import compute_score
from rolemesh.rules.normal_form import agrees, read_answer
from rolemesh.services.reward.functions import dapo_math, math_verify

THINGS = (
    "apples, acres, bags, balls, balloons, beads, billboards, bins, birds, books, bottles, boys, bricks, "
    "bundles, cakes, cards, cars, cents, centimeters, chairs, children, coins, cookies, crayons, cups, days, "
    "degrees, dogs, dollars, donuts, eggs, elevators, elephants, euros, families, feet, fences, fish, "
    "flowers, forks, forts, friends, gallons, games, girls, goats, grams, guests, halters, hats, hens, hours, "
    "houses, inches, kids, kilograms, kilometers, kites, lakes, lambs, leaves, letters, liters, marbles, "
    "meals, men, meters, miles, millimeters, millipedes, minutes, months, muffins, nails, ninjas, notebooks, "
    "onesies, onions, ounces, oxen, packs, pages, parts, pencils, pennies, people, percent, photos, pianos, "
    "pickles, pictures, pieces, pies, pigeons, pigs, piles, pillows, pills, pilots, pinecones, pineapples, "
    "pink roses, pins, pints, pipes, pirates, pitchers, pizzas, plates, points, pounds, quarters, questions, "
    "rabbits, ribbons, rooms, rows, shirts, sixpacks, slices, songs, squares, stamps, stars, stickers, "
    "stories, students, teenagers, tennis balls, tents, tickets, tons, tours, toys, trees, trips, twigs, "
    "twins, units, weeks, windows, women, words, x-rays, yards, years, zebras, zones, B's, K-cups, M&Ms, "
    "M&M’s, Bücher, Bälle, Kč, Küken, Mädchen, Männer, one-dollar bills, two-liter bottles, three-pointers, "
    "five-dollar bills, half-gallon jugs, hundred-dollar bills, third-graders, seven-year-olds, "
    "twenty-five-cent stamps, eighteen-wheelers, pi-shaped cakes"
)
MULTIPLES = (
    r"pi, \pi, \pi r, pi r, π, k, K, M, B, bn, half, halves, third, tenths, dozen, hundred, thousand, "
    "thousands, million, million apples, million—so it is, million-plus, twenty-fifths, one-half, two-thirds, "
    "one-hundredths, one-half cups, crore, lakhs, quarters of an hour, and a half, M-6 M"
)


def right(answer: str, truth: str = "5") -> bool:
    return compute_score(f"#### {answer}", truth)["score"] == 1.0


def test_a_counted_thing_that_begins_like_a_multiple_is_none() -> None:
    forms = ("5 {}", "**5** {}", "$5$ {}", r"5\text{{ {}}}", "5 {}.", "5 *{}*")
    assert not [
        form.format(each) for form in forms for each in THINGS.split(", ") if not right(form.format(each))
    ]
    assert all(right(f"5{each}") for each in ("Bücher", "M&Ms", "pieces", "pixels"))


def test_a_multiple_is_not_its_number() -> None:
    forms = ("5 {}", "**5** {}", "$5$ {}", r"5\text{{ {}}}", r"\boxed{{5}} {}")
    assert not [
        form.format(each) for form in forms for each in MULTIPLES.split(", ") if right(form.format(each))
    ]


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        (r"\frac{1}{2}小时", "0.5", True),
        (r"2\sqrt{3}厘米", r"2\sqrt{3}", True),
        (r"5\pi米", r"5\pi", True),
        (r"$\frac12$ 元", r"\frac{1}{2}", True),
        (r"$\frac{1}{2}$ 元", "1/2", True),
        ("5种", "5", True),
        ("5通り", "5", True),
        ("5 가지", "5", True),
        ("5平方厘米", "5", True),
        ("5辆", "5", True),
        ("5个", "5個", True),
        ("5小时", "5時間", True),
        ("5小時", "5 hours", True),
        ("5岁", "5歳", True),
        ("5分钟", "5分鐘", True),
        ("5元", "5圓", True),
        ("5千米", "5 km", True),
        ("5千米", "5米", False),
        ("5元", "5美元", False),
        ("5张", "5辆", False),
        ("5分", "5分钟", False),
        ("5元5角", "5", False),
    ],
)
def test_counting_words_are_labels_in_each_of_their_spellings(given: str, truth: str, same: bool) -> None:
    assert agrees(read_answer(given), read_answer(truth)) is same


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        (r"5\mathrm{m}^2", "5", True),
        (r"5\text{ V}", r"5\text{ volts}", True),
        ("60 km/h", r"60\text{ km/h}", True),
        (r"\text{60 km/h}", "60", True),
        ("5 m/s", "5", True),
        ("60 km/h", "60 m/s", False),
        ("5a/b", "5", False),
        ("12 años", "12", True),
        ("12 рублей", "12", True),
        # No label: Euler's number, the imaginary unit, a variable, a multiple
        (r"2\mathrm{i}", "2", False),
        (r"1+2\mathrm{i}", "1+2i", True),
        (r"2\mathrm{e}", "2e", True),
        (r"2\mathrm{e}^2", "2", False),
        (r"5\mathrm{x}", "5", False),
        (r"5\text{k}", "5", False),
        (r"5\text{ M}", "5", False),
        ("5 millones", "5", False),
        ("5 Millionen", "5", False),
        ("5 milliards", "5", False),
        ("5 mil", "5", False),
        ("5 тысяч", "5", False),
        ("5 Dutzend", "5", False),
        ("5 miles", "5", True),
    ],
)
def test_a_letter_or_word_is_a_label_only_outside_the_number(given: str, truth: str, same: bool) -> None:
    assert agrees(read_answer(given), read_answer(truth)) is same


def test_a_quantity_of_two_units_is_not_its_first_number() -> None:
    both = "5 hours 30 minutes; 5 hours and 30 minutes; 5 hours, 30 minutes; 5 h 30 min; 5 ft. 6 in."
    both += "; 5 dollars and 30 cents; 5 m 20 cm"
    assert not [each for each in both.split("; ") if right(each)]
    parts = ("5 and a quarter", "5 and three quarters", "5 and one half", "5 millones", "5 млн")
    assert not [each for each in parts if right(each)]
    one = "5 hours per 30 minutes; 5 minutes, so 6 dollars; 5 miles; 5 hours for 3 days; 5 dollars for 3 cents"
    assert all(right(each) for each in one.split("; "))


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        (r"\textbf{(A)}\ 5", "A", True),
        (r"\textbf{(A) } 5", "5", True),
        ("A", r"\textbf{(A)}\ 5", True),
        ("5", r"\textbf{(A)}\ 5", True),
        ("(A) x = 5", "5", True),
        ("B", r"\textbf{(A)}\ 5", False),
        ("(A) 6", r"\textbf{(A)}\ 5", False),
        ("(B) 5", "A", False),
        ("(A), (B)", "A", False),
        ("(A) or (B)", "A", False),
        ("(A) or 5", "A", False),
        ("(A) 5, (B) 6", "A", False),
        ("(A)(B)", "A", False),
        ("(A)^2", "A", False),
        ("(A)+1", "A", False),
        (r"(A) \cap B", "A", False),
        ("(A) -5", "A", True),
        ("(A) B", "A", True),
        ("(A) B", "B", False),
        ("(A) x = B", "B", False),
        (r"\textbf{(B)}\ (2,3)", "(2,3)", True),
        (r"\textbf{(D)}\ \text{rhombus}", "rhombus", True),
        ("(D) Thursday", "D", True),
    ],
)
def test_a_choice_is_its_letter_and_what_stands_beside_it(given: str, truth: str, same: bool) -> None:
    assert agrees(read_answer(given), read_answer(truth)) is same


@pytest.mark.parametrize(
    ("given", "truth", "same"),
    [
        ("a_{2023} = 5", "5", True),
        ("a_{n+1} = 5", "5", True),
        (r"x_{\max} = 5", "5", True),
        (r"S_{\triangle ABC} = 5", "5", True),
        ("a_{2023} = 5", "a_{2024} = 5", False),
        ("3 1/2", "3.5", True),
        (r"-3\frac12", r"-\frac{7}{2}", True),
        (r"3\frac{4}{3}", "4", False),
        ("31/2", "3.5", False),
        (r"{\bf 5}", "5", True),
        (r"\text{Answer: } 5", "5", True),
        (r"x \lt 5", "x < 5", True),
        (r"1 \text{ or } 2", "1, 2", True),
        ("1 or 2", "2", False),
    ],
)
def test_long_indices_mixed_numbers_and_lists_in_words_are_read(given: str, truth: str, same: bool) -> None:
    assert agrees(read_answer(given), read_answer(truth)) is same


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{5} … Wait, it is \boxed{6", "5", 0.0),
        (r"\boxed{50\text{ cents}}", r"50\text{ dollars}", 0.0),
        (r"\boxed{5\text{ million}}", "5", 0.0),
        (r"\boxed{\frac{10}{2}}", "5", 1.0),
    ],
)
def test_math_verify_skips_a_cut_off_box_and_compares_labels(response: str, truth: str, score: float) -> None:
    assert math_verify.compute_score(response, truth) == score


@pytest.mark.parametrize(
    ("line", "accuracy"),
    [
        ("The final answer is $5$. I hope it is correct.", 1),
        ("The sum is $5$", 1),
        (r"The value is \(5\).", 1),
        (r"\boxed{5} because 2+3", 1),
        (r"\boxed{5} or \boxed{6}", 0),
        (r"-\boxed{5}", 0),
        ("$5$ million", 0),
        ("The sum is not $5$", 0),
        ("The sum is less than $5$", 0),
        ("The sums are $5$ and $6$", 0),
        ("The answer is $5$. Or 6.", 0),
    ],
)
def test_the_formula_of_a_sentence_is_its_answer(line: str, accuracy: int) -> None:
    assert dapo_math.compute_score(f"Answer: {line}", "5")["acc"] == accuracy
