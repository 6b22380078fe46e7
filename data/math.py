r"""Scorer for mathematics of any kind. The last `\boxed{}` counts, as in the field's graders of MATH; without one the
text after the last "answer is" or "answer:", or the last line, if nothing mathematical comes after it.

Reference and answer are read by the same rules, each wholly or not at all:

    a number      as it is written (`data.written_numbers`): equal as a number, whatever its form, unit or currency
    words         `\text{Sunday}`, `B`, `\textbf{(B)}\ 36`, `5\text{ ft }2\text{ in}`: the same words in the same order
    a base        `1011_2`: the same digits; the answer may leave the base out
    expressions   all else that the math-verify library reads wholly: equal for the library

math-verify ignores a part of many texts (`\approx 18`, `x'`, `1011_2`, units), reads `1 234` as 235, and takes
`36 \div 2` or `\binom{5}{2}` for the number, so it sees no numbers and no text with a part that it ignores.

The library computes the answer, which for some never ends (`9^{9^{9}}`), so it needs scoring processes with a deadline:
`reward.num_processes` of 1 or more. Its own time limit is off, since it uses signals, which do not work in a thread.
"""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Rational

from data.written_numbers import UNIT, Number, is_unit, makes_another, read_number, typeset
from rlcore.score import Score

# A longer statement is none; a longer end of a text without a box costs the parser minutes.
_LONGEST_CHARS = 2_000

# Units are read here: math-verify takes 6m for 6.
_LATEX = LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its time limit is off


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """1 where the answer equals the reference, else 0. `format` is 1 for an answer in `\\boxed{}`, else 0."""
    wanted = str(ground_truth["answer"])
    gold = _reference(wanted)
    has_box = _BOX.search(response) is not None
    stated = _boxed(response) if has_box else _statement(response[-_LONGEST_CHARS:])
    answer = None if stated is None else _read(stated)
    correct = answer is not None and gold.problem is None and _equal(gold, answer)
    # All correct answers have the vote of the reference.
    said = wanted if correct else None if answer is None else _vote(answer, gold)
    return Score(float(correct), {"correct": float(correct), "format": float(has_box)}, said)


def reference_problem(reference: str) -> str | None:
    r"""Why a reference cannot be read wholly; None where it can, and then the same text in a box scores 1.

    >>> reference_problem(r"12\frac12\%"), reference_problem(r"\approx 3")
    (None, 'the command \\approx is not known')
    """
    return _reference(reference).problem


# ---------------------------------------------------------------------- what a response states

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
# A box, with or without braces (`\boxed 5`), or what opens and closes others.
_BRACE = re.compile(
    rf"{_BOX.pattern}\s*(?:(\{{)|([-0-9.\\A-Z][^$\n]*?)(?=\$|\n|\\[)\]]|[.,;!?](?:\s|$)|$))|\\.|[{{}}]", re.DOTALL
)
_JOINT = re.compile(r"[\s$\\()\[\]]*(?:[,;]|,?\s*(?:\\text\{)?\s*\b(?:and|or)\b\s*\}?)[\s$\\()\[\]]*")
_LONGEST_JOINT = 30


def _boxed(text: str) -> str | None:
    r"""Content of the last box, or of the last ones where only a comma, `and` or `or` is between; None if it is open.

    >>> _boxed(r"\boxed{1} so \boxed{\frac{1}{2}}."), _boxed(r"$\fbox{3}$ or $\boxed 5$"), _boxed(r"\boxed{18")
    ('\\frac{1}{2}', '3, 5', None)
    """
    opened: list[tuple[int, int] | None] = []
    closed: list[tuple[int, int, str]] = []  # boxes in no other one: start, end, content
    for found in _BRACE.finditer(text):
        if found[2] is not None:
            closed.append((found.start(), found.end(), found[2]))
        elif found[0].endswith("{") and found[0] != "\\{":
            opened.append((found.start(), found.end()) if found[1] else None)
        elif found[0] == "}" and opened and (box := opened.pop()) is not None:
            while closed and closed[-1][0] > box[0]:
                closed.pop()
            closed.append((box[0], found.end(), text[box[1] : found.start()]))
    if not closed or any(box is not None and box[0] > closed[-1][0] for box in opened):
        return None
    contents = [closed[-1][2]]
    for (_, end, content), (start, _, _) in zip(closed[-2::-1], closed[:0:-1], strict=True):
        if start - end > _LONGEST_JOINT or not _JOINT.fullmatch(text, end, start):
            break
        if content not in contents:
            contents.insert(0, content)
    return ", ".join(contents)


_ANCHOR = re.compile(r"(?i)\banswer(?:\s+is\b)?\s*:?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n")
_MATHEMATICAL = re.compile(r"[\d$\\]")
_INLINE = re.compile(r"\\?\$\$?([^$]+)\$\$?|\\[(\[](.+?)\\[)\]]")


def _statement(text: str) -> str | None:
    r"""The statement at the end of an answer without a box; None where something else mathematical follows it.

    Without "answer is" it is the last line, which has to be mathematical.

    >>> _statement("Twice nine. The answer is $18$."), _statement("The answer is 18. No, 19."), _statement("Hm.\n18")
    ('18', None, '18')
    """
    anchors = list(_ANCHOR.finditer(text))
    last_line = text.strip().rpartition("\n")[2]
    rest = (text[anchors[-1].end() :] if anchors else last_line).strip()
    ends = _SENTENCE_END.search(rest)
    said, after = (rest, "") if ends is None else (rest[: ends.start()], rest[ends.end() :])
    if _MATHEMATICAL.search(after) or not (anchors or _MATHEMATICAL.search(said)):
        return None
    inline = [one or other for one, other in _INLINE.findall(said)]
    if inline and _MATHEMATICAL.search(_INLINE.sub("", said)):
        return None
    return inline[0] if len(inline) == 1 else None if inline else said.strip(" *:")


# ---------------------------------------------------------------------- what a statement says


class _Said(NamedTuple):
    """A statement, read. `problem` says why it cannot be read wholly."""

    plain: str
    """Without typesetting, and without a unit behind a constant."""
    left: tuple[str, ...] = ()
    """What stands left of each `=` before a number."""
    number: Number | None = None
    words: tuple[str, ...] | None = None
    based: tuple[str, str] | None = None
    """Digits and base."""
    problem: str | None = None


_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
# What makes an approximation or a bound of the number that follows, beside the words that make another one of any.
_BOUND = re.compile(r"than|least|most|about|approximately|approx|around|nearly|almost|roughly|under|above|below|between|to")
_INTRODUCTION = re.compile(r"""(?:(?:"[^"()]*[a-zA-Z]{2}[^"()]*"|[a-zA-Z']{2,}):?\ ?)+(?=[-+0-9.\\])""")
_NAME = re.compile(r"(?:[^-+*/^<>!,;|]|\^\{?-1\}?)*[a-zA-Z](?:[^-+*/^<>!,;|])*")
_NO_SIDE = re.compile(r"[<>;,]|\\(?:[lg]eq?|[lg]t|neq?|in)(?![a-zA-Z])")
_BASED = re.compile(r'([0-9A-F]*[0-9][0-9A-F]*) ?_ ?(?:\{ ?|(?="))?"?([0-9]+|[a-z]+)"?(?: ?\})?')
_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J])[.:)](?= |$)) ?(.*)")
_ONLY_WORDS = re.compile(r"[a-zA-Z0-9 .,:;()'!?-]+")
_IS_WORDS = re.compile(r'"|(?<![a-zA-Z])(?:[a-zA-Z\']{4,}|[A-J](?= ?\)?$))')
_TOKEN = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?|:")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b")


def _read(stated: str) -> _Said:
    plain = typeset(stated)
    if not plain or len(plain) > _LONGEST_CHARS:
        return _Said(plain[:_LONGEST_CHARS], problem=f"it has {len(plain):,} characters")
    *left, last = plain.split("=")
    number = _stated_number(last)
    if number is not None and not any(_NO_SIDE.search(side) for side in left):
        return _Said(plain, tuple(left), number)
    if based := _BASED.fullmatch(plain):
        return _Said(plain, based=(based[1], based[2]))
    if words := _words(plain):
        return _Said(plain, words=words)
    plain = _without_unit(plain)
    return _Said(plain, problem=_expression_problem(plain))


def _stated_number(text: str) -> Number | None:
    """The number of a text that may begin with words: `It is 18`."""
    introduction = _INTRODUCTION.match(text.strip())
    if introduction is None:
        return read_number(text.strip())
    words = _WORD.findall(introduction[0])
    if any(makes_another(word) or _BOUND.fullmatch(word.lower()) for word in words):
        return None
    return read_number(text.strip()[introduction.end() :])


def _words(plain: str) -> tuple[str, ...] | None:
    """A choice's letter and the text behind it, or words and the numbers between them; None where it is no such text."""
    bare = plain.replace('"', " ").strip()
    if choice := _CHOICE.fullmatch(bare):
        return ((choice[1] or choice[2]).lower(), choice[3].replace(" ", ""))
    if not _ONLY_WORDS.fullmatch(bare) or not _IS_WORDS.search(plain):
        return None
    if _LIST.search(bare) and any(letter.isdigit() for letter in bare):
        return None
    tokens = tuple(_TOKEN.findall(bare.lower()))
    return (*tokens, "") if len(tokens) == 1 and len(tokens[0]) == 1 else tokens


def _without_unit(plain: str) -> str:
    """A text without the unit behind it, if what is left has no letters: `4\\pi cm`, but not `2ab`."""
    unit = re.search(rf"(?:(?<![\\a-zA-Z])|(?=\")){UNIT}$", plain)
    rest = plain[: unit.start()].rstrip() if unit else ""
    has_letters = re.search("[a-zA-Z]", _COMMAND.sub(" ", rest))
    return rest if unit and rest and not has_letters and is_unit(unit[0]) else plain


# ---------------------------------------------------------------------- expressions

# Commands that math-verify reads. It ignores some others, whatever they mean.
_KNOWN = re.compile(
    r"[dtc]?frac|sqrt|cdot|times|div|pm|mp|circ|degree|pi|infty|emptyset|varnothing|in|cup|cap|setminus|math(?:bb|cal)"
    r"|begin|end|leq?|geq?|lt|gt|neq?|[dt]?binom|choose|over|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|log|ln"
    r"|exp|[lr]floor|[lr]ceil|[lr]?vert|[lr]angle|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega"
    r"|Delta|Gamma|Omega|sum|prod|int|lim|to|overline|overrightarrow|vec|hat|bar|angle|triangle|max|min|gcd|operatorname"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:[pbv]?matrix|array|cases)\}|\\operatorname\{[a-z]+\}|\\mathbb\{[A-Z]\}")
_FUNCTION = re.compile("and|or|sqrt|infinity|sin|cos|tan|log|ln|gcd|lcm|max|min|abs")
_UNREAD = (
    (re.compile(r"[^a-zA-Z0-9 +\-*/^_=<>|!.,;:(){}\[\]&\\\"]"), "is not read"),
    (re.compile(r"[0-9})\]] ?_"), "is a base or an index of a number"),
    (re.compile(r"[0-9.] (?=[0-9.])"), "has two numbers side by side"),
    (re.compile(r'"[^"]*" ?[0-9]'), "has words between numbers"),
    (re.compile(r"\.\.|^[*/^_=,;&!]|[-+*/^_=<>,;&\\]$"), "is not whole"),
)


def _expression_problem(plain: str) -> str | None:
    """Why math-verify would read only a part of a text, or nothing; None where it reads it."""
    for command in _COMMAND.findall(plain):
        if not _KNOWN.fullmatch(command):
            return f"the command \\{command} is not known"
    for pattern, told in _UNREAD:
        if found := pattern.search(plain):
            return f"{found[0]!r} {told}"
    for word in _WORD.findall(re.sub('"[^"]*"', "", _ENVIRONMENT.sub(" ", plain))):
        if len(word) > 3 and not _FUNCTION.fullmatch(word):
            return f"{word!r} is a word among mathematics"
    braces = re.sub(r"\\[{}]", "", plain)
    if braces.count("{") != braces.count("}") or sum(map(plain.count, "([")) != sum(map(plain.count, ")]")):
        return "its brackets do not match"
    return None


def _parsed(plain: str) -> list[Any]:
    latex = re.sub('"([^"]*)"', r"\\text{\1}", plain)
    found: list[Any] = parse(f"${latex}$", [_LATEX], extraction_mode="first_match", parsing_timeout=None)
    return found


_parsed_reference = lru_cache(maxsize=4_096)(_parsed)


@lru_cache(maxsize=65_536)
def _reference(answer: str) -> _Said:
    stated = _boxed(answer) if _BOX.search(answer) else answer
    if stated is None:
        return _Said(answer, problem="its box is not closed")
    said = _read(stated)
    if any(not _NAME.fullmatch(side) for side in said.left):  # an equation, such as x + y = 5
        return _Said(said.plain, problem=_expression_problem(said.plain))
    return said


# ---------------------------------------------------------------------- equal or not


def _equal(gold: _Said, answer: _Said) -> bool:
    if gold.plain.replace(" ", "") == answer.plain.replace(" ", ""):
        return True
    if gold.number is not None:
        return _states_number(gold.number, gold.left, answer)
    if gold.based is not None:
        return gold.based == answer.based or (answer.based is None and answer.plain == gold.based[0])
    if gold.words is not None:
        return _same_words(gold.words, answer.words or _words(f'"{answer.plain}"'))
    if answer.problem is not None or answer.words is not None or answer.based is not None:
        return False
    return _equal_expressions(gold, answer)


def _states_number(wanted: Number, names: tuple[str, ...], answer: _Said) -> bool:
    """Whether the answer is the number, under no other name, and so is every number in a chain (`x = 9 + 9 = 18`)."""
    number = answer.number
    if number is None and answer.problem is None:  # a unit of one letter, which for math-verify is one too
        number = read_number(re.sub(r"(?<=[0-9}]) ?[mghsl]$", "", answer.plain))
    if number is None or not wanted.says(number):
        return False
    own, said = _name(names), _name(answer.left)
    if own and said and own != said:
        return False
    steps = [side for side in answer.left if not _has_letters(side)]
    gold = [Rational(wanted.value.numerator, wanted.value.denominator)]
    return all(
        wanted.says(step)
        if (step := read_number(side.strip()))
        else _expression_problem(side) is None and verify(gold, _parsed(side), timeout_seconds=None)
        for side in steps
    )


def _name(left: tuple[str, ...]) -> str:
    """What stands left of the first `=`, if that is a name: `x`, `f(2)`, `\\angle ABC`."""
    return re.sub(r"[\s{}\"]", "", left[0]) if left and _has_letters(left[0]) else ""


def _has_letters(side: str) -> bool:
    return re.search(r'[a-zA-Z"]', _COMMAND.sub("", side)) is not None or "angle" in side


def _same_words(wanted: tuple[str, ...], said: tuple[str, ...] | None) -> bool:
    """Whether the words are the same; for a choice its letter may stand alone, in the reference or the answer."""
    if said is None or len(wanted) != len(said) or wanted[0] != said[0]:
        return False
    is_choice = len(wanted) == 2 and len(wanted[0]) == 1
    return wanted == said or (is_choice and not (wanted[1] and said[1]))


def _equal_expressions(gold: _Said, answer: _Said) -> bool:
    """Whether math-verify finds the answer equal, and every number in a chain of equations too."""
    text = answer.plain
    if answer.number is not None and answer.number.value.denominator == 1 and not answer.left:
        text = str(answer.number)
    chain = "=" not in gold.plain and not _LIST.search(text)
    *left, last = text.split("=") if chain else [text]
    sides = [last, *(side for side in left if re.search("[0-9]", side) and not _has_letters(side))]
    wanted = _parsed_reference(gold.plain)
    return all(
        _expression_problem(side.strip()) is None and verify(wanted, _parsed(side.strip()), timeout_seconds=None)
        for side in sides
    )


def _vote(answer: _Said, gold: _Said) -> str | None:
    """The same text for equal answers: 1/2 for 0.5. A number of thousands of digits stays as it was written."""
    if answer.number is not None:
        return str(answer.number)
    if answer.words or gold.number or answer.problem:
        return None if answer.problem else " ".join(answer.words or (answer.plain,)).strip()
    found = _parsed(answer.plain)
    try:
        return str(found[0]) if found else None
    except ValueError:
        return str(found[-1])
