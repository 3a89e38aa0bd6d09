r"""What follows a number: more of the same answer, what changes the number, or the end of the answer.

A clause after a comma ("5, so 6"), a remark in brackets, a label and a footnote end it.
"""

from __future__ import annotations

import re

from rolemesh.rules.characters import CHANGING_WORD, FRACTIONS, changes_after, multiplies
from rolemesh.rules.notation import RAISED
from rolemesh.rules.units import COUNTERS, QUANTITY, UNITS

SIGNS = "".join(FRACTIONS) + RAISED
LETTER = r"[^\W\d_]"
UNIT = rf"(?:{'|'.join(sorted((*COUNTERS, *'点點时時度'), key=len, reverse=True))})"
JOINING_WORD = (
    r"(?:(?i:x|or|and|to|vs\.?|point)|或者?|[还還]是|[乘除]以?|分[之の]|[和与與至到加減减又]"
    "|または|もしくは|あるいは|から|[かとや]|또는|혹은|이나|에서|부터|분의|[나와과])"
)
JOINING = rf"(?:[-+*/×÷∼]|{JOINING_WORD})"
# A bracket that touches a number is a remark if it has a letter, a product or an equals sign, or is full-width:
# "18(9×2)", "18（6+12）". "3(1/2)" and "5(6+1)" are products.
SUM = rf"[\d_{SIGNS}]|[^\w\n=×÷*"
ROUND = (
    rf"(?:\((?!(?:(?:{SUM}()（）])++|[(（](?:{SUM}()（）])*+[)）])*+[)）])|（(?![0-9.,]++[)）]))"
    r"(?:[^()（）\n]++|[(（][^()（）\n]*+[)）])++[)）]"
)
SQUARE = rf"\[(?!(?:{SUM}\[\]])*+\])[^\[\]\n]++\]|【[^【】\n]++】"
FOOTNOTE = r"\^?\[\^?[0-9]{1,2}\]"
REMARK = rf"(?:{ROUND}|{SQUARE}|{FOOTNOTE})(?![0-9])|∵[-+0-9.,/ ()]*+[=×÷*]"
# A unit and a smaller one, which may follow it with a number of its own: "5 hours 30 minutes".
PARTS = (
    "year month",
    "month week",
    "month day",
    "week day",
    "day h",
    "h min",
    "min s",
    "ft in",
    "yd ft",
    "mi ft",
    "lb oz",
    "$ cent",
    "euro cent",
    "km m",
    "m cm",
    "cm mm",
    "kg g",
    "l ml",
)


def _words(unit: str) -> str:
    return rf"(?:{'|'.join(word for word, of in UNITS.items() if of == unit and word.isascii())})(?!{LETTER})"


COMPOUND = "|".join(
    rf"{_words(large)}\.?,?(?:[ \t]++and)?[ \t]++(?=[0-9][0-9.,]*+[ \t]*+{_words(small)})"
    for large, small in map(str.split, PARTS)
)
# Two numbers with one of these between them are one answer. No two neighbours in these expressions share a
# character, or the first is possessive. So nothing backtracks over a text without a match.
JOINTS = (
    # signs and words: "3 1/2", "5 or 6", "5 \times 10^3"
    r"(?<!\.)(?:\{,\}|[ \t$,*_+/^×·⋅÷√&:;={}!`\"<>|±\u2190-\u2233\u2236-\u22ff\u2013-]"
    rf"|\\[A-Za-z]+|\\[,!;: ()\[\]]|[eE](?=[-+]?[0-9])|{JOINING_WORD})++",
    # signs without a blank, "5;6", but not "18(9×2=18)" and "18[1]"
    rf"(?!(?:[*_`\"$%€°}}”’']|\\[%)\]])*+(?:{REMARK}))(?:[^\w\s#。]|_|#(?!###))++(?=[0-9{SIGNS}])",
    # a letter or a unit, without a blank: "5a6", "5小时30分钟", "5元×6", but not "5，共6天" and "18元因为9×2"
    rf"(?<![.,])(?:{UNIT}|[^\W0-9_]){JOINING}?(?=[0-9])",
    # a unit and blanks, if another unit follows: "5 小时 30 分钟", "5 元 × 6", but not "18 元 9×2"
    rf"(?<![.,])[ \t]*+{UNIT}[ \t]*+(?:{JOINING}[ \t]*+(?=[0-9])|(?=[0-9][0-9.,]*+[ \t]*+{UNIT}))",
    rf"(?<![.,])[ \t]*+(?:{COMPOUND})",
    # a label or a closing mark, and a comma or a word: "5%, 6%", "(5) or (6)"
    rf"[ \t]?(?:\\?%|[)）\]'”’»€£¥¢₹°])++[ \t]*+(?:(?:[,;]|{JOINING_WORD})[ \t]*+)++[(（\['‘“«$€£¥-]*+",
)
JOINED = rf"(?:(?:{'|'.join(JOINTS)})[.,]?[0-9{SIGNS}][0-9.,{SIGNS}]*)*"
# A word that begins another one, or a label such as "two-liter bottles", is no multiple: "5 pieces", "20 M&Ms".
NUMBER_WORD = rf"{QUANTITY}(?!{LETTER})"
LARGE = "hundred|thousand|million|billion|trillion|dozen"
MULTIPLE = (
    rf"π|(?:\\?pi|bn)(?!{LETTER}|-[A-Za-z])|[kKMB](?!{LETTER}|['’&-]{LETTER})"
    rf"|(?:-(?=(?i:{LARGE})))?{NUMBER_WORD}(?:-{NUMBER_WORD})*+(?!-(?!plus|odd|ish|fold)[A-Za-z])"
    rf"|quarters? of (?:an?|the|one)(?!{LETTER})"
)
CLOSING = r"[*_`$}\"”’)）\]]|\\[)\]]"
CHANGED = (
    rf"(?:{CLOSING}|\\?[ ]|\\[,;:!])*+(?:\\text\{{ ?)?"
    rf"(?:and (?:an?|one|two|three) (?:quarters?(?!{LETTER})|{MULTIPLE})|{MULTIPLE})"
    rf"|[A-Za-z](?!{LETTER}|&{LETTER})|\+"
)
TOUCHING = re.compile(f"^(?:{CLOSING})+")
CLOSING_OR_SPACE = re.compile(f"^(?:{CLOSING}|[ ])+")


def changing(text: str, end: int) -> str:
    """Return the character or word that changes the number which ends before `end`; "" if none does.

    Closing marks may part them, as in "$5$万", and a blank, as in "5 万". After a comma a clause begins, as in
    "5，一共5元".
    """
    after = text[end : end + 16]
    touching = TOUCHING.sub("", after)
    apart = CLOSING_OR_SPACE.sub("", after)
    if not apart or (text[end - 1] in ".," and apart[0].isalpha()):
        return ""
    if found := CHANGING_WORD.match(apart):
        return found[0]
    changes = changes_after(touching) or (text[end - 1] not in ".," and multiplies(apart))
    return apart[0] if changes else ""
