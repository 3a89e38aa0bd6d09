"""The calculator: arithmetic with whole numbers and decimals. Expressions are parsed, and never run as code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from decimal import ROUND_FLOOR, Context, Decimal, DecimalException, DivisionByZero, InvalidOperation, Overflow

from rolemesh.agents.tools import WrongArguments
from rolemesh.rules.numbers import spelling

MAX_CHARACTERS = 2000
MAX_BITS = 10_000  # of a whole number; about 3,000 digits
DIGITS = 28  # significant ones of a decimal
CONTEXT = Context(prec=DIGITS, Emax=1000, Emin=-1000, traps=[DivisionByZero, InvalidOperation, Overflow])
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")

Number = int | Decimal


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, for example (17 + 4) * 1.5 ** 2.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    return computed(expression, lambda tree: tree)


def computed(expression: str, rewritten: Callable[[ast.expr], ast.expr]) -> str:
    """Compute an expression after its tree has been rewritten, and return the result as text.

    Args:
        expression: the expression; commas between thousands are ignored.
        rewritten: returns the tree to compute.

    Raises:
        WrongArguments: it is no arithmetic expression, or its result is too large or undefined.
    """
    if not isinstance(expression, str):  # a policy wrote it
        raise WrongArguments(f"expression should be a text; got {expression!r:.100}")
    if len(expression) > MAX_CHARACTERS:
        raise WrongArguments(
            f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are computed"
        )
    text = THOUSANDS.sub("", expression).strip()
    try:
        tree = ast.parse(text, mode="eval")
        return _spelling(_value(rewritten(tree.body), text))
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: parentheses in parentheses
        why = f" ({error.msg})" if isinstance(error, SyntaxError) else ", or nests too deep"
        raise WrongArguments(f"{expression[:100]!r} is no arithmetic expression{why}") from None
    except (ZeroDivisionError, DivisionByZero):
        raise WrongArguments("division by zero") from None
    except DecimalException as error:
        raise WrongArguments(f"the result is too large or undefined ({type(error).__name__})") from None
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Constant(value=float()):
            return CONTEXT.create_decimal((ast.get_source_segment(text, node) or "").replace("_", ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            positive = _value(operand, text)
            return -positive if isinstance(positive, int) else CONTEXT.minus(positive)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(left=left, op=operator, right=right):
            return _apply(operator, _value(left, text), _value(right, text))
        case _:
            part = ast.get_source_segment(text, node) or type(node).__name__
            raise ValueError(f"{part[:100]!r} is neither a number nor + - * / // % ** of numbers")


def _apply(operator: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int):
        found = _of_whole_numbers(operator, left, right)
        if found is not None:
            return _bounded(found)
    return _of_decimals(operator, CONTEXT.create_decimal(left), CONTEXT.create_decimal(right))


def _of_whole_numbers(operator: ast.operator, left: int, right: int) -> int | None:
    """Compute with whole numbers; None: the result is not a whole number."""
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Div():
            return left // right if left % right == 0 else None
        case ast.Pow() if right >= 0:
            if abs(left) > 1 and left.bit_length() * right > MAX_BITS:
                raise ValueError(f"{str(left)[:20]} ** {str(right)[:20]} is too large")
            return int(left**right)
        case ast.Pow():
            return None
        case _:
            raise ValueError("the operators are + - * / // % **")


def _of_decimals(operator: ast.operator, left: Decimal, right: Decimal) -> Decimal:
    match operator:
        case ast.Add():
            return CONTEXT.add(left, right)
        case ast.Sub():
            return CONTEXT.subtract(left, right)
        case ast.Mult():
            return CONTEXT.multiply(left, right)
        case ast.Div():
            return CONTEXT.divide(left, right)
        case ast.FloorDiv() | ast.Mod():
            whole = CONTEXT.divide(left, right).to_integral_value(ROUND_FLOOR, CONTEXT)
            return whole if isinstance(operator, ast.FloorDiv) else CONTEXT.fma(-whole, right, left)
        case ast.Pow():
            return CONTEXT.power(left, right)
        case _:
            raise ValueError("the operators are + - * / // % **")


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise ValueError(f"a number has {value.bit_length()} bits; at most {MAX_BITS} are computed")
    return value


def _spelling(value: Number) -> str:
    if isinstance(value, Decimal) and not value.is_finite():
        raise ValueError("the result is infinite or undefined")
    return str(value) if isinstance(value, int) else spelling(value)
