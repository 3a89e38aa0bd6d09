"""A label after a number leaves the number as it is, whatever the label begins with. A multiple does not."""

from __future__ import annotations

import pytest

from rolemesh.rules.gsm8k import compute_score
from rolemesh.rules.normal_form import agrees, read_answer

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


def test_a_thing_that_is_counted_is_no_multiple_even_if_it_begins_like_one() -> None:
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
