r"""What follows a number: more of the same answer, what changes the number, or the end of the answer.

A clause after a comma ("5, so 6"), a remark in brackets, a label and a footnote end it.
"""

from __future__ import annotations

from rolemesh.rules.characters import CHANGING_WORD, FRACTIONS, changes_after, multiplies
from rolemesh.rules.notation import RAISED
from rolemesh.rules.units import QUANTITY

SIGNS = "".join(FRACTIONS) + RAISED
JOINING_WORD = r"(?i:x|or|and|to|vs\.?|point)|或者?|[还還]是|[乘除]以?|[和与與至到加减減又]"
FOOTNOTE = r"\^?\[\^?[0-9]{1,2}\]"
REMARK = rf"(?:\((?![0-9.,]++\))[^()\n]++\)|{FOOTNOTE})(?![0-9])"
# Two numbers with one of these between them are one answer. No two neighbours in these expressions share a
# character, or the first is possessive. So nothing backtracks over a text without a match.
JOINTS = (
    # signs and words: "3 1/2", "5 or 6", "5 \times 10^3"
    r"(?<!\.)(?:\{,\}|[ \t$,*_+/^×·⋅÷√&:;={}!`\"<>|±\u2190-\u2233\u2236-\u22ff\u2013-]"
    rf"|\\[A-Za-z]+|\\[,!;: ()\[\]]|[eE](?=[-+]?[0-9])|{JOINING_WORD})++",
    # signs without a blank, "5;6", but not "18(9×2=18)" and "18[1]"
    rf"(?!(?:[*_`\"$%€°}}]|\\%)*+{REMARK})(?:[^\w\s#。]|_|#(?!###))++(?=[0-9])",
    # a letter of ASCII or a word of others, without a blank: "5a6", "5小时30分钟", "5元×6", but not "5，共6天"
    r"(?<![.,])(?:[A-Za-z]|[^\W0-9A-Za-z_]++[-+*/×÷∼]?)(?=[0-9])",
    # a label or a closing mark, and a comma or a word: "5%, 6%", "(5) or (6)"
    rf"[ \t]?(?:\\?%|[)\]'’”»€£¥¢₹°])++[ \t]*+(?:(?:[,;]|{JOINING_WORD})[ \t]*+)++[(\['‘“«$€£¥-]*+",
)
JOINED = rf"(?:(?:{'|'.join(JOINTS)})[.,]?[0-9{SIGNS}][0-9.,{SIGNS}]*)*"
MULTIPLE = rf"\\?pi|π|(?:{QUANTITY}|[kKMB]|bn)(?![A-Za-z])"
CHANGED = rf"[ *_]*+(?:\\text\{{ ?)?(?:and an? )?(?:{MULTIPLE})|[A-Za-z](?![A-Za-z])|\+"


def changing(text: str, end: int) -> str:
    """Return the character or word that changes the number which ends before `end`; "" if none does.

    A blank may part them, as in "5 万". After a comma a clause begins, as in "5，一共5元".
    """
    touching = text[end : end + 8].lstrip("*_")
    apart = touching.lstrip(" *_")
    if not apart or (text[end - 1] in ".," and apart[0].isalpha()):
        return ""
    if found := CHANGING_WORD.match(apart):
        return found[0]
    changes = changes_after(touching) or (text[end - 1] not in ".," and multiplies(apart))
    return apart[0] if changes else ""
