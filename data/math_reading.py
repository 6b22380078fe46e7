r"""Readers for mathematical statements: numbers, words, digits in a base, lists and expressions.

A text has a `problem` if math-verify would ignore a part of the text, such as `\approx`, a prime mark, the base of
a number, or a unit."""

import re
from typing import NamedTuple

from data.written_numbers import UNIT, Number, is_counted, is_unit, makes_another, read_number, typeset

LONGEST_CHARS = 2_000
COMMAND = re.compile(r"\\([a-zA-Z]+)")
LIST = re.compile(r"[,;]|\b(?:and|or)\b")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_QUOTED = re.compile('"[^"]*"')
_IS_NAME = re.compile(r" ?(?:\\?[a-zA-Z]|\\[a-z]+) ?")
_NO_VALUE = re.compile(r'[-+]?"? ?(?:nan|inf|infinity|null) ?"?', re.IGNORECASE)
_SPACE = re.compile("(?<![0-9.]) | (?![0-9.])")
_NO_SIDE = re.compile(r"[<>;]|(?<![0-9)])! ?$|\b(?:and|or)\b|\\(?:[lg]eq?|[lg]t|neq?|in|pm)(?![a-zA-Z])")
_BASED = re.compile(r'([0-9A-F]*[0-9][0-9A-F]*) ?_ ?(?:\{ ?|(?="))?"?([0-9]+|[a-z]+)"?(?: ?\})?')
_AND = re.compile(r"\b(?:and|or)\b")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_INTRODUCTION = re.compile(
    r"""(?:(?:"[^"()0-9]*[a-zA-Z]{2}[^"()0-9]*"|[a-zA-Z']{2,}(?![a-zA-Z'])):?\.?\ ?)+(?=[-+0-9.\\])"""
)
_INTRODUCES = re.compile(
    r"(?:(?:the|a|our|final|correct|exactly|so|thus|hence|then|therefore|it|there|he|she|they|we|is|are|was|were|be"
    r"|will|would|has|have|gets?|equals?|equal to|answer|result|solution|value|total|number|amount|area|perimeter"
    r"|volume|length|width|height|distance|speed|time|cost|price|age|probability|average|mean|median|usd|eur|gbp|inr|rs)"
    r"(?:[ .:,]+|$))+",
    re.IGNORECASE,
)
_LETTER_UNIT = re.compile(r"(?<=[0-9}]) ?[mghsl]$")
_PART = re.compile(
    r'(?P<open>\\\{|[({\[])|(?P<close>\\\}|[)}\]])|(?P<joint>[,;]? ?\b(?:and|or)\b|[,;])|\\[a-zA-Z]+|"[^"]*"'
)
_DEEPEST = 8
_OUTER = re.compile(r"(?:\\\{|([(\[]))(.*)(?:\\\}|([)\]]))")
_OF_LIST = re.compile(r"(?P<name>[a-zA-Z]|\([a-zA-Z\\, ]*\)) ?(?:=|\\in) ?(?=\\\{|[(\[])")
_BOTH = re.compile(r"([a-zA-Z] ?= ?)?\\pm ?([^-+]*)")
_IS_LETTER = re.compile(r'\(?"?[A-Z]"?\)?')
_NAME = re.compile(r"\\?[a-zA-Z]+(?: ?_ ?(?:[0-9a-z]|\{[^{}]*\}))?(?: ?\([^()]*\))? ?")
_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J])[.:)](?= |$))(?! ?[-+*/^=,;<>&]) ?(.*)")
_ONLY_WORDS = re.compile(r"(?:[a-zA-Z0-9 .,:;()?-]|(?<=[a-zA-Z])')+")
_IS_WORDS = re.compile(r'"|(?<![a-zA-Z])(?:[a-zA-Z]{4,}|[yY]es$|[nN]o$|odd$|[aApP]\.?[mM]$)|^[A-J]$')
_DOT = re.compile(r"(?<=[a-z])\.")
_TOKEN = re.compile(r"[a-z']+|[0-9]+(?:\.[0-9]+)?|:|(?<![a-z])-|-(?![a-z])")
# Words that change the meaning of a number next to them: a day, a side, another number.
_MEANINGFUL = re.compile(
    r"(?:jan|febr)uary|march|april|may|june|july|august|(?:septem|octo|novem|decem)ber|(?:mon|tues|wednes|thurs|fri|satur|sun)day"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|[ap]m|noon|midnight|o'clock|bc|ad|b?ce|ago|before|after|north|south|east|west"
    r"|(?:north|south)(?:east|west)|left|right|up|down|above|below|(?:counter|anti)?clockwise|[a-z]*wards?|profits?|loss(?:es)?"
    r"|gains?|increased?|decreased?|more|less|fewer|older|younger|remainder|out|crores?|lakhs?|grand|bn|mn|score"
    r"|and|of|to|at|on|the|an|per|by|from|choice|option"
)
_CONSTANT = re.compile(r"\\(?:pi|sqrt)(?![a-zA-Z])")
_UNIT = re.compile(rf'(?:(?<![\\a-zA-Z])|(?=")){UNIT}$', re.VERBOSE)
# Commands that math-verify reads. The library silently ignores some other commands.
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
    (
        re.compile(r'^[-+0-9., /]*(?:\\frac ?\{[-+0-9, ]+\} ?\{[-+0-9, ]+\})? ?"[^"]*"$'),
        "is a number with an unknown word",
    ),
    (re.compile(r"[0-9.] ?\\(?:overline|bar|dot)"), "is a recurring decimal among others"),
    (re.compile(r"[0-9] ?\\frac ?\{[0-9]+\} ?\{[0-9]+\} ?[a-zA-Z\"\\(]"), "is a mixed number as a factor"),
    (re.compile(r"[({\[]{9}"), "is nested too deep"),
    (re.compile(r"\.\.|^[*/^_=,;&!]|[-+*/^_=<>,;&\\]$"), "is not whole"),
)


class Reading(NamedTuple):
    """A parsed statement. At most one of `number`, `words`, `based` and `entries` is set. If none is set, the statement
    is an expression.
    """

    plain: str  # without typesetting, and without a unit after a constant
    # sides of a chain of equations before the last number: `x` and `9 + 9` in `x = 9 + 9 = 18`
    left: tuple[str, ...] = ()
    number: Number | None = None
    # words and numbers; for a multiple choice, the letter in brackets and the text of the choice
    words: tuple[str, ...] | None = None
    based: tuple[str, str] | None = None  # digits and base, as in `1011_2`
    entries: tuple["Reading", ...] = ()  # of a list; an entry may be a list
    brackets: str = ""  # around an ordered list, otherwise ''
    name: str = ""  # of a list or an entry, such as `x` in `x = 1`
    problem: str | None = None  # the reason why the text cannot be read as a whole


def read(stated: str) -> Reading:
    """Read a statement with or without LaTeX."""
    if len(stated) > LONGEST_CHARS:
        return Reading("", problem=f"it has more than {LONGEST_CHARS:,} characters")
    plain = typeset(stated)
    if not plain:
        return Reading("", problem="it is empty")
    return _read(plain)


def _read(plain: str) -> Reading:
    *left, last = plain.split("=")
    if len(left) == 1 and _IS_NAME.fullmatch(last) and read_number(left[0].strip()):
        left, last = [last], left[0]
    number = read_number(without_introduction(last.strip()))
    if number is not None and _are_sides(left):
        return Reading(plain, tuple(left), number)
    if based := _BASED.fullmatch(plain):
        return Reading(plain, based=(based[1], based[2]))
    if _NO_VALUE.fullmatch(plain):
        return Reading(plain, problem=f"{plain!r} is no value")
    if listed := _read_list(plain):
        return listed
    if words := read_words(plain):
        return Reading(plain, words=words, problem=_unknown_word(plain, words))
    if ", " in plain or _AND.search(plain):
        plain = _THOUSANDS.sub("", plain)
    plain = _without_unit(plain)
    return Reading(plain, problem=expression_problem(plain))


def closed_up(plain: str) -> str:
    """Remove all spaces, except spaces between digits, because `1 2` is not 12."""
    return _SPACE.sub("", plain)


def _are_sides(left: list[str]) -> bool:
    """Return whether each text can be the left side of `= 18`: a name or a term without relations."""
    if any(_NO_SIDE.search(side) or _unknown(side) for side in left) or (len(left) > 1 and any("," in s for s in left)):
        return False
    return not any(makes_another(word) for side in left for word in _WORD.findall(side))


def without_introduction(text: str) -> str:
    """Remove words that introduce a number, as in `The answer is 18`, `Area: 18` or `USD 18`."""
    found = _INTRODUCTION.match(text)
    is_known = found is not None and _INTRODUCES.fullmatch(found[0].replace('"', " ").strip())
    return text[found.end() :] if found and is_known else text


def number_in_words(plain: str) -> Number | None:
    """Read the number in a response such as `Area: 18` or `x = 18`, or return None.

    Call this function only if the reference is a number, because a letter after the number is read as a unit (`18 m`),
    not as a variable."""
    *left, last = plain.split("=")
    text = _LETTER_UNIT.sub("", without_introduction(last.strip()))
    return read_number(text) if _are_sides(left) else None


def _split(text: str) -> list[str]:
    depth, start, found = 0, 0, []
    for part in _PART.finditer(text):
        depth += (part["open"] is not None) - (part["close"] is not None)
        if not 0 <= depth <= _DEEPEST:
            return []
        if part["joint"] and depth == 0:
            found.append(text[start : part.start()].strip())
            start = part.end()
    found.append(text[start:].strip())
    return found if depth == 0 and all(found) else []


def _read_list(plain: str) -> Reading | None:
    name = _OF_LIST.match(plain)
    text = plain[name.end() :] if name else plain
    brackets, texts = "", []
    if ", " in text or _AND.search(text):
        text = _THOUSANDS.sub("", text)
    if (outer := _OUTER.fullmatch(text)) and len(_split(text)) == 1:
        brackets = f"{outer[1] or ''}{outer[3] or ''}"
        texts = [] if len(brackets) == 1 else _split(outer[2].strip())
    elif not name:
        texts = _split(text)
    if len(texts) == 1 and (both := _BOTH.fullmatch(texts[0])):
        texts = [f"{both[1] or ''}{both[2]}", f"{both[1] or ''}-{both[2]}"]
    if len(texts) < 2:
        return None
    entries = [_read_entry(text) for text in texts]
    if not brackets and any(entry.words for entry in entries) and not all(_IS_LETTER.fullmatch(text) for text in texts):
        return None
    if len({unit for text in texts if (unit := _unit_of(text))}) > 1:
        return None
    problem = next((entry.problem for entry in entries if entry.problem), None)
    return Reading(
        plain, entries=tuple(entries), brackets=brackets, name=closed_up(name["name"]) if name else "", problem=problem
    )


def _read_entry(text: str) -> Reading:
    name, equals, value = text.rpartition("=")
    if equals and _NAME.fullmatch(name):
        return _read(value.strip())._replace(name=re.sub(r"[\s{}]", "", name))
    return _read(text)


def _unit_of(entry: str) -> str:
    found = re.search(r'[0-9)}] ?("[^"]*"|[a-zA-Z]{2,})', entry)
    return found[1].strip('" ') if found and read_number(entry) else ""


def read_words(plain: str) -> tuple[str, ...] | None:
    """Read a text of words and numbers. A multiple-choice answer is read as its letter and its text."""
    bare = plain.replace('"', " ").strip()
    if (choice := _CHOICE.fullmatch(bare)) and not _AND.search(choice[3]):
        return (f"({choice[1] or choice[2]})".lower(), closed_up(choice[3]))
    if not _ONLY_WORDS.fullmatch(bare) or not _IS_WORDS.search(plain) or _FUNCTION.fullmatch(bare):
        return None
    tokens = tuple(token for token in _TOKEN.findall(_DOT.sub("", bare.lower())) if token != "and")
    if len(tokens) == 1 and len(tokens[0]) == 1 and tokens[0].isalpha():
        return (f"({tokens[0]})", "")
    return tokens or None


def _unknown_word(plain: str, words: tuple[str, ...]) -> str | None:
    """Return a message if a word next to a number is unknown, because such words cannot be compared."""
    if words[0].startswith("(") or not re.search("[0-9]", plain):
        return None
    denials = ("or", "nor", "not", "wrong", "incorrect")
    unknown = (
        word
        for word in words
        if len(word) > 1 and word.isalpha()
        if not (_MEANINGFUL.fullmatch(word) or is_counted(word) or (makes_another(word) and word not in denials))
    )
    return next((f"{word!r} next to a number is no known unit or word" for word in unknown), None)


def _without_unit(plain: str) -> str:
    r"""Remove the unit after a constant, as in `4\pi cm`, but not the variables of `2ab`."""
    unit = _UNIT.search(plain)
    rest = plain[: unit.start()].rstrip() if unit else ""
    is_constant = _CONSTANT.search(rest) and not re.search("[a-zA-Z]", COMMAND.sub(" ", rest))
    return rest if unit and is_constant and is_unit(unit[0]) else plain


def expression_problem(plain: str) -> str | None:
    """Return the reason why math-verify would read only a part of a text, or None if it would read the whole text."""
    if command := _unknown(plain):
        return f"the command \\{command} is not known"
    for pattern, problem in _UNREAD:
        if found := pattern.search(plain):
            return f"{found[0]!r} {problem}"
    for word in _WORD.findall(_QUOTED.sub("", _NAMES.sub(" ", plain))):
        if len(word) > 3 and not _FUNCTION.fullmatch(word):
            return f"{word!r} is a word among mathematics"
    braces = re.sub(r"\\[{}]", "", plain)
    if braces.count("{") != braces.count("}") or sum(map(plain.count, "([")) != sum(map(plain.count, ")]")):
        return "its brackets do not match"
    return None


def _unknown(plain: str) -> str | None:
    return next((command for command in COMMAND.findall(plain) if not _KNOWN.fullmatch(command)), None)
