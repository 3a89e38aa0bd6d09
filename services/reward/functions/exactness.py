r"""Takes back equalities that math-verify finds only because its tolerance is absolute.

The library calls two numbers equal whose difference is below 1e-15, or, if one is a decimal, whose first six
decimals are equal. So 2^{-99} equals 2^{-98} there. Here the tolerance is a share of the numbers' size.
"""

from __future__ import annotations

from typing import Any

DIGITS = 30
ZERO = 1e-60  # evaluation of an exact zero, such as a difference of roots, may leave less than this
SHARE = 1e-12  # of the larger number, by which two exact expressions may differ after evaluation
SHARE_OF_DECIMALS = 2e-6  # the same if one is a decimal: 0.333333 is 1/3
LARGE = 1e6  # from here on a library that compares six decimals asks for more digits than a decimal has


def still_equal(gold: Any, given: Any) -> bool:
    """Whether two parts that math-verify calls equal are equal relative to their size.

    Args:
        gold: a sympy expression, a set, tuple, matrix or relation of these, or text.
        given: likewise.

    Returns:
        False if two numbers differ, or two expressions at a point, or two members at the same place. True if
        they agree, or cannot be evaluated: then the library's result stands.
    """
    from sympy import Expr, FiniteSet, MatrixBase  # type: ignore[import-untyped]

    if isinstance(gold, FiniteSet) and isinstance(given, FiniteSet):
        return len(gold) == len(given) and all(any(still_equal(one, other) for other in given) for one in gold)
    if isinstance(gold, MatrixBase) and isinstance(given, MatrixBase):
        return all(map(still_equal, gold.flat(), given.flat()))
    if isinstance(gold, Expr) and isinstance(given, Expr):
        return _near(gold, given, SHARE)
    members = _members(gold)
    others = _members(given)
    return len(members) != len(others) or all(map(still_equal, members, others))


def equal_though_large(gold: Any, given: Any) -> bool:
    """Whether a large decimal is an irrational number's value, up to the digits that a decimal has."""
    from sympy import Expr, Float

    if not (isinstance(gold, Expr) and isinstance(given, Expr) and gold.is_number and given.is_number):
        return False
    exact = [number for number in (gold, given) if not number.has(Float)]
    if len(exact) != 1 or exact[0].is_rational:
        return False
    value = _evaluated(exact[0])
    return value is not None and bool(abs(value) > LARGE) and _near(gold, given, SHARE, SHARE)


def _members(part: Any) -> list[Any]:
    """Return the parts of a tuple, interval, union, or relation of a symbol, in the order of comparison."""
    from sympy import Interval, Rel, Tuple, Union

    if isinstance(part, Interval):
        return [part.start, part.end]
    if isinstance(part, Rel):
        return [part.lhs, part.rhs] if part.lhs.is_Symbol else []
    return list(part.args) if isinstance(part, Tuple | Union) else []


def _near(gold: Any, given: Any, share: float, share_of_decimals: float = SHARE_OF_DECIMALS) -> bool:
    """Compare two expressions at one point, which is no root or pole of an expression that people write."""
    from sympy import Float, Rational

    if gold == given:
        return True
    symbols = sorted(gold.free_symbols | given.free_symbols, key=str)
    point = {symbol: Rational(1009 + 2 * at, 613) for at, symbol in enumerate(symbols)}
    one, other = (_evaluated(expression.subs(point)) for expression in (gold, given))
    if one is None or other is None:
        return True
    size = max(abs(one), abs(other))
    least = share_of_decimals if gold.has(Float) or given.has(Float) else share
    return bool(size < ZERO or abs(one - other) <= least * size)


def _evaluated(expression: Any) -> Any:
    """Evaluate an expression without variables, to 30 digits of any size; None if it has no finite value."""
    value = expression.evalf(DIGITS)
    return value if value.is_number and value.is_finite else None
