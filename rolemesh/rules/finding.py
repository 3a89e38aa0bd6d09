r"""Finds the answer in a response: after "####", on an "Answer:" line, or in the last \boxed{}.

The last answer counts, even if it is malformed: a right answer that is taken back is none.
"""

from __future__ import annotations

import re
from unicodedata import category, normalize, numeric

from rolemesh.rules.boxed import TAG, last_boxed, last_of_neighbours
from rolemesh.rules.notation import FRACTIONS, FULL_WIDTH, OTHER_SCRIPT, RAISED, with_plain_digits
from rolemesh.rules.units import QUANTITY, words_of

# --------------------------------------------------------- what joins the number before it with the next one

SIGNS = "".join(FRACTIONS) + RAISED
LETTER = r"[^\W\d_]"
JOINING_WORD = r"(?i:x|or|and|to|vs\.?|point)"
# A bracket that touches a number is a remark if it has a letter, a product or an equals sign: "18(9×2)".
# "3(1/2)" and "5(6+1)" are products.
SUM = rf"[\d_{SIGNS}]|[^\w\n=×÷*"
ROUND = rf"\((?!(?:(?:{SUM}()])|\((?:{SUM}()])*+\))*+\))(?:[^()\n]++|\([^()\n]*+\))++\)"
SQUARE = rf"\[(?!(?:{SUM}\[\]])*+\])[^\[\]\n]++\]"
FOOTNOTE = r"\^?\[\^?[0-9]{1,2}\]"
REMARK = rf"(?:{ROUND}|{SQUARE}|{FOOTNOTE})(?![0-9])|∵[-+0-9.,/ ()]*+[=×÷*]"
# A unit and a smaller one, which may follow it with a number of its own: "5 hours 30 minutes".
PARTS = (
    "year month, month week, month day, week day, day h, h min, min s, ft in, yd ft, mi ft, lb oz, $ cent, "
    "euro cent, km m, m cm, cm mm, kg g, L ml"
)
WORDS_OF = {unit: rf"(?:{'|'.join(words_of(unit))})(?!{LETTER})" for unit in re.split(",? ", PARTS)}
COMPOUND = "|".join(
    rf"{WORDS_OF[large]}\.?,?(?:[ \t]++and)?[ \t]++(?=[0-9][0-9.,]*+[ \t]*+{WORDS_OF[small]})"
    for large, small in map(str.split, PARTS.split(", "))
)
# Two numbers with one of these between them are one answer. No two neighbours in these expressions share a
# character, or the first is possessive. So nothing backtracks over a text without a match.
JOINTS = (
    # signs and words: "3 1/2", "5 or 6", "5 \times 10^3"
    r"(?<!\.)(?:\{,\}|[ \t$,*_+/^×·⋅÷√&:;={}!`\"<>|±\u2190-\u2233\u2236-\u22ff\u2013-]"
    rf"|\\[A-Za-z]+|\\[,!;: ()\[\]]|[eE](?=[-+]?[0-9])|{JOINING_WORD})++",
    # signs without a blank, "5;6", but not "18(9×2=18)" and "18[1]"
    rf"(?!(?:[*_`\"$%€°}}”’']|\\[%)\]])*+(?:{REMARK}))(?:[^\w\s#]|_|#(?!###))++(?=[0-9{SIGNS}])",
    # a letter without a blank: "5a6"
    rf"(?<![.,])[^\W0-9_](?:[-+*/×÷∼]|{JOINING_WORD})?(?=[0-9])",
    rf"(?<![.,])[ \t]*+(?:{COMPOUND})",
    # a label or a closing mark, and a comma or a word: "5%, 6%", "(5) or (6)"
    rf"[ \t]?(?:\\?%|[)\]'”’»€£¥¢₹°])++[ \t]*+(?:(?:[,;]|{JOINING_WORD})[ \t]*+)++[(\['‘“«$€£¥-]*+",
)
JOINED = rf"(?:(?:{'|'.join(JOINTS)})[.,]?[0-9{SIGNS}][0-9.,{SIGNS}]*)*"

# ------------------------------------------------------------------------ what changes the number beside it

# A word that begins another one, or a label such as "two-liter bottles", is no multiple: "5 pieces", "20 M&Ms".
NUMBER_WORD = rf"{QUANTITY}(?!{LETTER})"
LARGE = "hundred|thousand|million|billion|trillion|dozen"
MULTIPLE = (
    rf"π|(?:\\?pi|bn)(?!{LETTER}|-[A-Za-z])|[kKMB](?!{LETTER}|['’&-]{LETTER})"
    rf"|(?:-(?=(?i:{LARGE})))?{NUMBER_WORD}(?:-{NUMBER_WORD})*+(?!-(?!plus|odd|ish|fold)[A-Za-z])"
    rf"|quarters? of (?:an?|the|one)(?!{LETTER})"
)
CLOSING = r"[*_`$}\"”’)\]]|\\[)\]]"
CHANGED = (
    rf"(?:{CLOSING}|\\?[ ]|\\[,;:!])*+(?:\\text\{{ ?)?"
    rf"(?:and (?:an?|one|two|three) (?:quarters?(?!{LETTER})|{MULTIPLE})|{MULTIPLE})"
    rf"|[A-Za-z](?!{LETTER}|&{LETTER})|\+"
)
TOUCHING = re.compile(f"^(?:{CLOSING})+")
CLOSING_OR_SPACE = re.compile(f"^(?:{CLOSING}|[ ])+")
SHARES = "‰‱؉؊′″‴‵‶‷⁗"  # punctuation that changes the number before it
HARMLESS = "\u20e3∼∵ºª"  # "5~" ends a friendly sentence; before a number it makes a range. "∵" gives a reason
LEADING = "*_`\"'\\:=•→⇒⟶⟹∴"  # signs before an answer
SYMBOL = re.compile("[\u0370-\u03bb\u03bd-\u03ff\U0001d400-\U0001d7ff]")  # but μ, which begins a unit

# ------------------------------------------------------------------------------------- where the answer is

WORDS = re.compile(
    r"[bf]?box(?:ed)?|text(?:bf|rm|it|sf)?|math(?:bf|rm|sf)"
    r"|\\(?:therefore|implies|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])"
)
ARROW = re.compile("(?<![-=])[-=]++>")
FRACTION = r"\\[cdt]?frac\s*(?:\{[0-9]+\}|[0-9])\s*(?:\{[0-9]+\}|[0-9])"
MARKED = re.compile(
    rf"####((?:{WORDS.pattern}|(?!{FRACTION})[^\w#.,⁻]|_)*+)"
    rf"((?:{FRACTION}[0-9.,{SIGNS}]*|[0-9.,{SIGNS}]+){JOINED})({CHANGED})?"
)
SCRIPT = re.compile("<su[pb]>")
# In TeX "~" is a blank. In a text "5~6" is a range.
ONE_WIDTH = FULL_WIDTH | str.maketrans("～〜~＾＊＿％、⁄∕٫٬", "∼∼∼^*_%,//.,")
ONE_WIDTH |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2796\ufe58\ufe63"), "-")
ONE_WIDTH |= dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
DASH = re.compile("(?<=[A-Za-z])[\u2013\u2014\u2015](?=[A-Za-z])")  # in a sentence; a hyphen is part of a word
BULLET = re.compile(r"\n[ \t]*[-+*][ \t]")
LABEL = re.compile(r"answer[\s*_}]*[:：]", re.IGNORECASE)
# A sentence whose formula is the answer: "The sum is $5$.", "\\boxed{5}, because …".
FORMULA = r"\$[^$]+\$|\\\((?:(?!\\[()]).)+\\\)|\\boxed ?\{[^{}]*+(?:\{[^{}]*\}[^{}]*+)*+\}"
SENTENCE = re.compile(
    rf"(?:[A-Za-z]+(?: [A-Za-z]+){{0,9}} (?:is|are|equals):? )?({FORMULA})"
    r"(?:[.,;]? (?:because|since|as(?! +well +as(?![A-Za-z])))(?![A-Za-z]).*|\.(?: [^$\\0-9]*)?)?"
)
DISPLAYED = re.compile(r"(?:(?:\\\[.*?\\\]|\$\$.*?\$\$)[ \t]*+)+", re.DOTALL)


def marked_number(text: str) -> str | None:
    """Return the number after the last "####" that one follows, with its sign and all that changes it.

    Emphasis, currency, bullets and delimiters before the number are left out. What changes the number is part
    of it: "12/5", "5 or 6", "5 million", "5x". So is a letter of another script on its line. None if no mark
    has a number.
    """
    parts = DASH.sub(" - ", with_plain_digits(text)).translate(ONE_WIDTH).split("####")
    text = TAG.sub("*", SCRIPT.sub("^", "####".join(map(last_of_neighbours, parts))))
    marked = list(MARKED.finditer(text))
    if not marked:
        return None
    found = marked[-1]
    before = ARROW.sub("", WORDS.sub("", BULLET.sub("", found[1])))
    changed = "".join(character for character in before if _changes_next(character))
    return changed + found[2].rstrip(",.") + (found[3] or _changing(text, found.end()))


def _changing(text: str, end: int) -> str:
    """Return the character that changes the number which ends before `end`; "" if none does.

    Closing marks may part them, and a blank, as in "5 ⅒". After a comma a clause begins.
    """
    line = text[end:].partition("\n")[0]
    if found := OTHER_SCRIPT.search(line):
        return found[0]
    after = line[:16]
    apart = CLOSING_OR_SPACE.sub("", after)
    in_clause = text[end - 1] in ".,"
    if not apart or (in_clause and apart[0].isalpha()):
        return ""
    changes = _changes_before(TOUCHING.sub("", after)) or (not in_clause and category(apart[0]) in ("No", "Nl"))
    return apart[0] if changes else ""


def _has_value(character: str) -> bool:
    """Whether a character is a number, or begins with one if it is written out: ⅒, Ⅷ, ⒊, ㏠."""
    return any(numeric(each, None) is not None for each in (character, normalize("NFKC", character)[0]))


def _changes_next(character: str) -> bool:
    """Whether a character, not a letter, makes another answer of the number after it, as in -5, ≈5 and √5."""
    if character.isspace() or character in LEADING:
        return False
    kind = category(character)
    return _has_value(character) if kind == "So" else kind not in ("Sc", "Ps", "Pi", "Pf")


def _changes_before(text: str) -> bool:
    """Whether the first character of a text makes another answer of the number that it touches: 5ⁿ, 5‰, 5α.

    Words, punctuation and ornaments do not. ASCII is not looked at here.
    """
    character = text[0]
    kind = category(character)
    if character.isascii() or character.isspace() or character in HARMLESS:
        return False
    if _has_value(character) or character in SHARES:
        return True
    if kind.startswith("L"):
        return kind == "Lm" or SYMBOL.match(character) is not None or not text[1:2].isalpha()
    return not (kind in ("Sc", "So") or kind.startswith("P"))


def answer_line(text: str) -> str | None:
    r"""Return the rest of the line after the last "Answer:" that anything follows; None if there is none.

    If displayed formulas begin there ("\[" or "$$"), return all of them.
    """
    for found in reversed(list(LABEL.finditer(text))):
        rest = text[found.end() :].lstrip().removeprefix("}")
        if closing := re.match(r"(?:\*{1,3}|_{1,2})(?=\s|$)", rest):
            rest = rest[closing.end() :]
        rest = rest.lstrip()
        if formulas := DISPLAYED.match(rest):
            return formulas[0].rstrip()
        if rest:
            return rest.partition("\n")[0].strip()
    return None


def answer_of_line_or_box(text: str) -> str | None:
    r"""Return the answer of the last "Answer:" line, or, if there is none, of the last \boxed{}.

    Of a line that is a sentence it is the formula: "The sum is $5$.", "\boxed{5} because 2 + 3 = 5".
    """
    line = answer_line(text)
    if line is None:
        return last_boxed(text)
    found = SENTENCE.fullmatch(line)
    return found[1] if found else line
