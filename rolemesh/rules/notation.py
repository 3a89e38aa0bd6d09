r"""Steps to the normal form of an answer in mathematics: one spelling for each notation.

Every step takes time in proportion to its text.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import gcd
from unicodedata import decimal, normalize

from rolemesh.rules.boxed import closing_braces
from rolemesh.rules.numbers import spelling

FRACTIONS = {sign: normalize("NFKC", sign).split("\u2044") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒↉"}
DIGIT = re.compile(r"\d")
# Marks without width: joiners, marks of direction, soft hyphens, variation selectors.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060\u2061\u2066-\u206f\ufe00-\ufe0f\ufeff]"
)
# A letter that is neither Latin nor Greek, nor a sign of mathematics. No rule reads a number beside one.
OTHER_SCRIPT = re.compile(r"[^\W\d_\u0000-\u03ff\u1d00-\u2bff\ua720-\ua7ff\ufb00-\ufb06\U0001d400-\U0001d7ff]")
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
LOWERED = "₀₁₂₃₄₅₆₇₈₉₋"
# Full-width digits, letters and signs, as some keyboards write them.
FULL_WIDTH = str.maketrans(
    {chr(ord(plain) + 0xFEE0): plain for plain in map(chr, range(0x21, 0x7F)) if plain not in "$\\{}*_`^%#~\"'"}
)
# A sign, and the command that it stands for.
SIGNS = (
    "αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu ρrho σsigma φphi ωomega ΔDelta ΩOmega ×times ·cdot "
    "⋅cdot πpi ∞infty ≤le ≥ge ≠ne ±pm ∪cup ∈in √sqrt ∅emptyset ∠angle △triangle"
)
UNIT_SIGNS = ("mm", "cm", "km", "kg", "m", "m")  # powers of units are not compared
CHARACTERS = FULL_WIDTH | str.maketrans(
    {
        **{sign[0]: rf"\{sign[1:]} " for sign in SIGNS.split()},
        **{sign: rf"\frac{{{above}}}{{{below}}}" for sign, (above, below) in FRACTIONS.items()},
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u3000\t\n\r\u201c\u201d", " "),
        **{sign: rf"\text{{ {unit}}}" for sign, unit in zip("㎜㎝㎞㎏㎡㎥", UNIT_SIGNS, strict=True)},
        **dict(zip("\u2044\u2215％٫٬°", ("/", "/", "%", ".", ",", r"^\circ "), strict=True)),
    }
)
FONTS = ("bf", "rm", "it", "sf")  # "{\\bf 5}"; "\\bf{5}" is a wrapper
REMOVED = (
    "left right big Big bigg Bigg bigl bigr limits displaystyle textstyle "
    "small normalsize large Large LARGE huge Huge"
)
REPLACED = (
    r"dfrac\frac tfrac\frac cfrac\frac leq\le leqslant\le geq\ge geqslant\ge neq\ne lt< gt> "
    r"varnothing\emptyset degree^\circ lbrace\{ rbrace\}"
)
COMMANDS = {
    **dict.fromkeys((*REMOVED.split(), *FONTS), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace"), " "),
    **dict(re.findall(r"([a-z]+)(\S+)", REPLACED)),
}
COMMAND = re.compile(r"\\\\|\\([A-Za-z]+|[!,;: %$])|~")
# Between numbers a wide space makes a list, and "~", which is a blank in TeX, a range.
LIST = re.compile(r"(?<=[0-9])\s*\\(?:q?quad|enspace)(?![A-Za-z])\s*(?=[0-9])")
RANGE = re.compile(r"(?<=[0-9])\s*~\s*(?=[0-9])")
SPACING = {"!": "", ",": " ", ";": " ", ":": " ", " ": " ", "%": "%", "$": r"\$"}
SMALL = str.maketrans(RAISED + LOWERED, "0123456789-" * 2)
SMALL_DIGITS = re.compile(f"([{RAISED}]+)|[{LOWERED}]+")
RELATION = re.compile(r"(?<![<>=])([<>])=(?![<>=])")
PRODUCT = re.compile(r"(?<=[0-9})])\s*(?:\\(?:times|cdot)(?![A-Za-z])|\*)\s*(?=-?[0-9])")
THOUSANDS_SIGN = re.compile(r"(?:,\\!|\{,\})\s*(?=[0-9]{3}(?![0-9]))")
ROOT_OF_NUMBER = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*([0-9]+(?:\.[0-9]+)?)")
# Words that make a list, or another answer, of what stands on their two sides.
CONNECTIVE = r"(?i:or|and|but|not|nor|either|neither|unless|never|no)(?![A-Za-z])"
WRAPPER = re.compile(
    r"\\(?:boxed|fbox|text(?:bf|it|rm|sf)?|math(?:bf|rm|sf)|boldsymbol|bf|bm|mbox|emph"
    r"|(?:text)?color\s*\{[A-Za-z]+\})\s*\{"
)
UNDERLINE = re.compile(r"\\underline\s*\{")  # of a part it is a mark, as of the digit in 0.\underline{3}
ARGUMENT = re.compile(r" *(\{|\\[A-Za-z]+|[^\s}])")
ROOT = re.compile(r"\\sqrt\s*(\[[^\]{}\\]{1,8}\]\s*)?(?:([^\s{(\[\\])|\(([^()]*)\))")
ROOT_WORD = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?=[({0-9])")
SCRIPT = re.compile(r"([_^])\s*(-?[0-9]+|[A-Za-z])")
GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
SPACED = re.compile(r"(?<![0-9.,/}])(?<![0-9.,/}] )[0-9]{1,3}(?: [0-9]{3})+(?![0-9/]| [0-9\\])")
BARE_POINT = re.compile(r"(?<![0-9.])\.(?=[0-9])")
RECURRING = r"\s*(?:\(|\\(?:overline|bar|dot|ldots|dots|cdots))|…"
DECIMAL = re.compile(rf"(?<![\w.])([0-9]+)\.([0-9]+)(?![0-9.]|{RECURRING})")
BEGINS = r"(?:(?<=^)|(?<=[(\[,=] )|(?<=[(\[,=]))"  # here an answer, or a member of one, begins or ends
ENDS = r"(?=$|[)\],])"
# Digits after ":" or "{", and those in the brackets of 0.(03), begin no answer.
LEADING_ZEROS = re.compile(rf"(?:{BEGINS}|(?<=\\\{{)|(?<=\\\{{ ))(?<![0-9.]\()(?<![0-9.]\( )([-+]?)0+(?=[0-9])")
MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
WHOLE = re.compile(BEGINS + r"(-?)([0-9]{1,15}) ?\\frac\{([0-9]{1,15})\}\{([0-9]{1,15})\}" + ENDS)
# A quotient that is a member, a term of a sum, an exponent or a cell of a matrix: 1/2x and 3/4/5 are none.
SLASHED = re.compile(
    r"((?:^|[-+(\[,={&]|\\\\|matrix\}) ?-?)"
    r"(?:([0-9]+\\?[A-Za-z]*|[0-9]*\\sqrt\{[^{}]*\}|\\?[A-Za-z]+)|\(([^(),=]*)\))"
    r"/([0-9]+|\\?[A-Za-z]|\\[A-Za-z]{2,}|\\sqrt\{[^{}]*\})(?= ?(?:$|[-+)\],=}&]|\\\\|\\end))"
)
FUNCTION = re.compile(  # of one symbol, which needs no brackets: \ln(5), \sin(2x)
    r"(\\(?:ln|log|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc)(?:[_^]\{\w+\})? ?)"
    r"\( ?([0-9]*(?:\\[A-Za-z]+|[A-Za-z])?) ?\)(?= ?(?:$|[-+,)\]}=]))"
)
ARRAY = re.compile(
    r"[(\[] ?\\begin\{(?:array\} ?\{[clr]+|matrix)\}((?:(?!\\begin|\\end).)*)\\end\{(?:array|matrix)\} ?[)\]]"
)
LAST_ROW = re.compile(r"\\\\ ?(?=\\end\{(?:[a-z]?matrix|array)\})")  # a row's end before the matrix's
# The sign of one term is the fraction's: \frac{-x}{2}, but not \frac{-x+1}{2} and 3\frac{-x}{2}.
TERM = r"(?:[0-9A-Za-z]|[_^]\{[^{}]*\}|\\sqrt\{[^{}]*\}|\\pi(?![A-Za-z]) ?)+"
NEGATED = re.compile(BEGINS + rf"\\frac\{{-({TERM})\}}(\{{[^{{}}]*\}})" + ENDS)
FRACTION = re.compile(BEGINS + r"(-?)\\frac\{(-?)([0-9]{1,15})\}\{(-?)([0-9]{1,15})\}" + ENDS)
SIGN = re.compile(BEGINS + r"\+(?=[0-9\\.(A-Za-z])")
NO_ZERO = re.compile(BEGINS + "-0" + ENDS)
LABEL_IN_LIST = re.compile(r"(?:%|\^(?:\\circ|\{ ?\\circ ?\})) ?(?=,)")
AND = re.compile(r"(?<=[0-9})]),? (?:and|or) (?=[-0-9\\(])")
AND_TEXT = re.compile(r",?\s*\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}\s*")
COMMA = re.compile(r"\s*,\s*")
BLANK = re.compile(
    rf"( ?(?<![A-Za-z\\]){CONNECTIVE} ?)|(\\[A-Za-z]+ (?=[A-Za-z]))|(, )|((?<=[0-9]) (?=[0-9.]))| "
)
BLANKS = re.compile(r"\s+")


def with_plain_digits(text: str) -> str:
    """Write the digits of every script as 0 to 9, and leave out characters without width."""
    if text.isascii():
        return text
    return DIGIT.sub(lambda found: str(decimal(found[0])), INVISIBLE.sub("", text))


def in_one_spelling(text: str) -> str:
    r"""Write signs and commands in one way: "−" is "-", "\dfrac" is "\frac", and "\," is a blank."""
    text = ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", with_plain_digits(text).translate(FULL_WIDTH))
    text = SMALL_DIGITS.sub(_small, text).translate(CHARACTERS)
    if r"\begin" not in text:
        text = text.replace("\\\\", "\\")
    text = text.replace("{bmatrix}", "{pmatrix}")
    text = RELATION.sub(lambda found: r"\le " if found[1] == "<" else r"\ge ", text)
    text = THOUSANDS_SIGN.sub(",", text).replace("{,}", ",").replace(r",\!", ",")
    text = COMMAND.sub(_command, RANGE.sub("∼", LIST.sub(", ", text)))
    text = LAST_ROW.sub("", LABEL_IN_LIST.sub("", BLANKS.sub(" ", text)))
    text = ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    return PRODUCT.sub(r"\\cdot ", text).strip()


def _small(found: re.Match[str]) -> str:
    return f"{'^' if found[1] else '_'}{{{found[0].translate(SMALL)}}}"


def _command(found: re.Match[str]) -> str:
    name = found[1]
    if name is None:
        return " " if found[0] == "~" else found[0]  # a row of a matrix ends
    if not name[0].isalpha():
        return SPACING[name]
    written = COMMANDS.get(name, found[0])
    text, start, end = found.string, *found.span()
    if name in FONTS and text[end:].lstrip()[:1] == "{":
        return found[0]
    joins = text[max(start - 1, 0) : start].isdigit() and text[end : end + 1].isdigit()
    return found[0] if joins and not written.strip() else written


def without_outer_wrapper(text: str) -> str:
    r"""Remove a \boxed{} or the like around the whole answer, whose own unit may be in another \text{}."""
    while (found := WRAPPER.match(text) or UNDERLINE.match(text)) and closing_braces(text).get(
        found.end() - 1
    ) == len(text) - 1:
        text = text[found.end() : -1].strip()
    return text


def without_wrappers(text: str) -> str:
    r"""Remove \boxed{}, \text{}, \mathbf{} and their like, and keep what is in them."""
    if "{" not in text:
        return text
    text = AND_TEXT.sub(", ", text)
    closing = closing_braces(text)
    dropped: list[tuple[int, int]] = []
    for found in WRAPPER.finditer(text):
        if (end := closing.get(found.end() - 1)) is not None:
            dropped += [found.span(), (end, end + 1)]
    if text.startswith("{") and closing.get(0) == len(text) - 1:
        dropped += [(0, 1), (len(text) - 1, len(text))]
    kept = ""
    at = 0
    for start, end in [*sorted(dropped), (len(text), len(text))]:
        part = text[at:start]
        is_list = kept.rstrip()[-1:].isdigit() and part.lstrip()[:1].isdigit()
        kept += (", " if is_list else " ") + part
        at = end
    return kept.strip() if dropped else text


def with_braces(text: str) -> str:
    r"""Put braces around arguments: "\frac12" is "\frac{1}{2}", "\sqrt3" is "\sqrt{3}", "x^10" is "x^{10}"."""
    text = brace_fractions(text) if r"\frac" in text else text
    text = ROOT.sub(r"\\sqrt\1{\2\3}", ROOT_WORD.sub(r"\\sqrt", text))
    return FUNCTION.sub(r"\1 \2", SCRIPT.sub(r"\1{\2}", text))


def brace_fractions(text: str) -> str:
    r"""Put braces around the arguments of every \frac: "\frac12" and "\frac1{2}" become "\frac{1}{2}".

    A \frac without both arguments, or with an argument that is not closed, is left unchanged.
    """
    closing = closing_braces(text)
    characters = list(text)
    for command in re.finditer(r"\\frac", text):
        at = command.end()
        bare = []
        for _ in range(2):
            found = ARGUMENT.match(text, at)
            if found is None or (found[1] == "{" and found.start(1) not in closing):
                break
            if found[1] == "{":
                at = closing[found.start(1)] + 1
            else:
                at = found.end()
                bare.append(found.span(1))
        else:
            for start, end in bare:
                characters[start] = "{" + characters[start]
                characters[end - 1] += "}"
    return "".join(characters)


def with_plain_numbers(text: str) -> str:
    """Write the numbers in a text without thousands signs and redundant zeros.

    A comma between brackets separates: (1,234) is a pair. Digits of a recurring decimal stay. Leading zeros go
    only where a number begins an answer or a member of one.
    """
    if not any(bracket in text for bracket in ("(", "[", r"\{")):
        text = GROUPED.sub(lambda found: found[0].replace(",", ""), text)
        text = SPACED.sub(lambda found: found[0].replace(" ", ""), text)
    text = LEADING_ZEROS.sub(r"\1", DECIMAL.sub(_plain, BARE_POINT.sub("0.", text)))
    return NO_ZERO.sub("0", SIGN.sub("", text))


def _plain(found: re.Match[str]) -> str:
    part = found[2].rstrip("0")
    return f"{found[1]}.{part}" if part else found[1]


def with_fractions(text: str) -> str:
    r"""Write a/b as \frac{a}{b}, and a reduced fraction of integers as the decimal that is equal to it, if any.

    "1/2" and "0.5" are equal, and so are "3 1/2" and "7/2". "2/4" is another answer, where a
    question asks for lowest terms.
    """
    if "/" in text and (found := MIXED.fullmatch(text)):
        text = rf"{found[1]}\frac{{{found[2]}}}{{{found[3]}}}"
    if "/" in text:
        text = SLASHED.sub(lambda found: rf"{found[1]}\frac{{{found[2] or found[3]}}}{{{found[4]}}}", text)
    if r"\frac" not in text:
        return text
    return FRACTION.sub(_decimal, NEGATED.sub(r"-\\frac{\1}\2", WHOLE.sub(_improper, text)))


def _improper(found: re.Match[str]) -> str:
    r"""Write "3\frac{1}{2}" as "\frac{7}{2}"."""
    sign = found[1]
    whole, above, below = map(int, found.group(2, 3, 4))
    return rf"{sign}\frac{{{whole * below + above}}}{{{below}}}" if above < below else found[0]


def _decimal(found: re.Match[str]) -> str:
    above = int(found[3])
    below = int(found[5])
    sign = "-" if sum(mark == "-" for mark in found.group(1, 2, 4)) % 2 and above else ""
    plain = rf"{sign}\frac{{{above}}}{{{below}}}"
    if below == 0 or gcd(above, below) != 1 or 10**50 % below:  # below has at most 15 digits
        return plain
    return sign + spelling(Decimal(f"{above * 10**50 // below}e-50"))


def without_blanks(text: str) -> str:
    r"""Remove redundant blanks. They stay between digits ("3 1/2"), after a command before a letter, and
    beside words such as "or", and one stays after each comma."""
    text = COMMA.sub(", ", AND.sub(", ", BLANKS.sub(" ", text))).strip()
    return BLANK.sub(_blank, text).strip() if " " in text else text


def _blank(found: re.Match[str]) -> str:
    return f" {found[1].strip()} " if found[1] else found[2] or found[3] or found[4] or ""
