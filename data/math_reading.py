r"""What a statement of mathematics says: a number, words, digits of a base or an expression, each read wholly.

Reference and answer are read by the same rules. What math-verify would read in part only is told as a problem: it
ignores `\approx`, primes, bases and units, and reads `2 3` as 5.
"""

import re
from typing import NamedTuple

from data.written_numbers import UNIT, Number, is_unit, makes_another, read_number, typeset

LONGEST_CHARS = 2_000


class Said(NamedTuple):
    """A statement, read. One of `number`, `words` and `based` is set, or none of an expression."""

    plain: str
    """Without typesetting, and without a unit behind a constant."""
    left: tuple[str, ...] = ()
    """What stands left of each `=` before a number."""
    number: Number | None = None
    words: tuple[str, ...] | None = None
    """Of a choice the letter in brackets, and the text behind it."""
    based: tuple[str, str] | None = None
    """Digits and base."""
    problem: str | None = None
    """Why it cannot be read wholly."""


COMMAND = re.compile(r"\\([a-zA-Z]+)")
LIST = re.compile(r"[,;]|\b(?:and|or)\b")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_QUOTED = re.compile('"[^"]*"')


def read(stated: str) -> Said:
    r"""What a text with or without LaTeX says.

    >>> read(r"x = \$36").number, read(r"\textbf{(B)}\ 36").words, read("1011_2").based, read(r"x \approx 3").problem
    (Number(value=Fraction(36, 1), percent=False), ('(b)', '36'), ('1011', '2'), 'the command \\approx is not known')
    """
    if len(stated) > LONGEST_CHARS:
        return Said("", problem=f"it has more than {LONGEST_CHARS:,} characters")
    plain = typeset(stated)
    if not plain:
        return Said("", problem="it is empty")
    *left, last = plain.split("=")
    number = read_number(last.strip())
    if number is not None and _are_sides(left):
        return Said(plain, tuple(left), number)
    if based := _BASED.fullmatch(plain):
        return Said(plain, based=(based[1], based[2]))
    if words := read_words(plain):
        return Said(plain, words=words)
    if ", " in plain or _AND.search(plain):
        plain = _THOUSANDS.sub("", plain)
    plain = _without_unit(plain)
    return Said(plain, problem=expression_problem(plain))


_NO_SIDE = re.compile(r"[<>;]|(?<![0-9)])! ?$|\b(?:and|or)\b|\\(?:[lg]eq?|[lg]t|neq?|in|pm)(?![a-zA-Z])")
_BASED = re.compile(r'([0-9A-F]*[0-9][0-9A-F]*) ?_ ?(?:\{ ?|(?="))?"?([0-9]+|[a-z]+)"?(?: ?\})?')
_AND = re.compile(r"\b(?:and|or)\b")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def _are_sides(left: list[str]) -> bool:
    """Whether these are names and terms that a number can be equal to: no relation, no second equation."""
    if any(_NO_SIDE.search(side) or _unknown(side) for side in left) or (len(left) > 1 and any("," in s for s in left)):
        return False
    return not any(makes_another(word) for side in left for word in _WORD.findall(side))


# What makes an approximation or a bound of the number that follows, beside the words that make another one of any.
_BOUND = re.compile(
    r"than|least|most|about|approximately|approx|around|nearly|almost|roughly|under|above|below|between|to"
)
_INTRODUCTION = re.compile(r"""(?:(?:"[^"()]*[a-zA-Z]{2}[^"()]*"|[a-zA-Z']{2,}(?![a-zA-Z'])):?\ ?)+(?=[-+0-9.\\])""")
_LETTER_UNIT = re.compile(r"(?<=[0-9}]) ?[mghsl]$")
_SHORT_WORD = re.compile("(?<= )[a-zA-Z]{2,3}(?![a-zA-Z])")


def number_in_words(plain: str) -> Number | None:
    """The number of an answer whose reference is a number, with words before it or after it: `It is 18`, `18 m`."""
    text = plain.rpartition("=")[2].strip()
    if introduction := _INTRODUCTION.match(text):
        if any(makes_another(word) or _BOUND.fullmatch(word.lower()) for word in _WORD.findall(introduction[0])):
            return None
        text = text[introduction.end() :]
    text = _SHORT_WORD.sub(r'"\g<0>"', _LETTER_UNIT.sub("", text))
    return read_number(text) if _are_sides(plain.split("=")[:-1]) else None


_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J])[.:)](?= |$))(?! ?[-+*/^=,;<>&]) ?(.*)")
_ONLY_WORDS = re.compile(r"(?:[a-zA-Z0-9 .,:;()?-]|(?<=[a-zA-Z])')+")
_IS_WORDS = re.compile(r'"|(?<![a-zA-Z])(?:[a-zA-Z]{4,}|[yY]es$|[nN]o$|odd$|[aApP]\.?[mM]$)|^[A-J]$')
_DOT = re.compile(r"(?<=[a-z])\.")
_TOKEN = re.compile(r"[a-z']+|[0-9]+(?:\.[0-9]+)?|:|(?<![a-z])-|-(?![a-z])")


def read_words(plain: str) -> tuple[str, ...] | None:
    """Words and the numbers between them, or a choice's letter and the text behind it; None where it is no such text.

    >>> read_words('5" ft "2" in"'), read_words("36 and 48"), read_words("infinity"), read_words("C, D")
    (('5', 'ft', '2', 'in'), None, None, None)
    """
    bare = plain.replace('"', " ").strip()
    if (choice := _CHOICE.fullmatch(bare)) and not _AND.search(choice[3]):
        return (f"({choice[1] or choice[2]})".lower(), choice[3].replace(" ", ""))
    if not _ONLY_WORDS.fullmatch(bare) or not _IS_WORDS.search(plain) or _FUNCTION.fullmatch(bare):
        return None
    tokens = tuple(token for token in _TOKEN.findall(_DOT.sub("", bare.lower())) if token != "and")
    if len(tokens) == 1 and len(tokens[0]) == 1 and tokens[0].isalpha():
        return (f"({tokens[0]})", "")
    return tokens or None


def _without_unit(plain: str) -> str:
    """A constant without the unit behind it: `4\\pi cm`, but not `2ab`."""
    unit = _UNIT.search(plain)
    rest = plain[: unit.start()].rstrip() if unit else ""
    is_constant = _CONSTANT.search(rest) and not re.search("[a-zA-Z]", COMMAND.sub(" ", rest))
    return rest if unit and is_constant and is_unit(unit[0]) else plain


_CONSTANT = re.compile(r"\\(?:pi|sqrt)(?![a-zA-Z])")
_UNIT = re.compile(rf'(?:(?<![\\a-zA-Z])|(?=")){UNIT}$', re.VERBOSE)

# ---------------------------------------------------------------------- expressions

# Commands that math-verify reads. It ignores some others, whatever they mean.
_KNOWN = re.compile(
    r"frac|sqrt|cdot|times|div|pm|mp|circ|degree|pi|infty|emptyset|varnothing|in|cup|cap|setminus|math(?:bb|cal)"
    r"|begin|end|leq?|geq?|lt|gt|neq?|[dt]?binom|choose|over|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|log|ln"
    r"|exp|[lr]floor|[lr]ceil|[lr]?vert|[lr]angle|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega"
    r"|Delta|Gamma|Omega|sum|prod|int|lim|to|overline|overrightarrow|vec|hat|bar|angle|triangle|max|min|gcd|operatorname"
)
_NAMES = re.compile(r"\\(?:begin|end)\{(?:[pbv]?matrix|array)\}|\\operatorname\{[a-z]+\}|\\mathbb\{[A-Z]\}")
_FUNCTION = re.compile("and|or|sqrt|infinity|sin|cos|tan|log|ln|gcd|lcm|max|min")
_UNREAD = (
    (re.compile(r"[^a-zA-Z0-9 +\-*/^_=<>|!.,;:(){}\[\]&\\\"]"), "is not read"),
    (re.compile(r"[0-9})\]] ?_"), "is a base or an index of a number"),
    (re.compile(r"(?<![_0-9.])[0-9.]+ [0-9.]"), "has two numbers side by side"),
    (re.compile(r'"[^"]*" ?[0-9]'), "has words between numbers"),
    (re.compile(r"[0-9.] ?\\(?:overline|bar|dot)"), "is a recurring decimal among others"),
    (re.compile(r"[0-9] ?\\frac ?\{[0-9]+\} ?\{[0-9]+\} ?[a-zA-Z\"\\(]"), "is a mixed number as a factor"),
    (re.compile(r"[({\[]{9}"), "is nested too deep"),
    (re.compile(r"\.\.|^[*/^_=,;&!]|[-+*/^_=<>,;&\\]$"), "is not whole"),
)


def expression_problem(plain: str) -> str | None:
    """Why math-verify would read only a part of a text, or nothing; None where it reads it.

    >>> expression_problem("2 3"), expression_problem("x'"), expression_problem("1011_2 + 1")[:3]
    ("'2 3' has two numbers side by side", '"\\'" is not read', "'1_")
    """
    if command := _unknown(plain):
        return f"the command \\{command} is not known"
    for pattern, told in _UNREAD:
        if found := pattern.search(plain):
            return f"{found[0]!r} {told}"
    for word in _WORD.findall(_QUOTED.sub("", _NAMES.sub(" ", plain))):
        if len(word) > 3 and not _FUNCTION.fullmatch(word):
            return f"{word!r} is a word among mathematics"
    braces = re.sub(r"\\[{}]", "", plain)
    if braces.count("{") != braces.count("}") or sum(map(plain.count, "([")) != sum(map(plain.count, ")]")):
        return "its brackets do not match"
    return None


def _unknown(plain: str) -> str | None:
    return next((command for command in COMMAND.findall(plain) if not _KNOWN.fullmatch(command)), None)
