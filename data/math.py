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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from data.math_reading import (
    COMMAND,
    LIST,
    LONGEST_CHARS,
    Reading,
    closed_up,
    expression_problem,
    number_in_words,
    read,
    read_words,
)
from data.written_numbers import Number, read_number
from rlcore.score import Score

# Units are read here: math-verify takes 6m for 6.
_LATEX = LatexExtractionConfig(
    normalization_config=replace(LatexExtractionConfig().normalization_config, units=False, boxed="none")
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its time limit is off


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """1 where the answer equals the reference, else 0. `format` is 1 for an answer in `\\boxed{}`, else 0."""
    wanted = str(ground_truth["answer"])
    gold = _reference(wanted)
    has_box = _BOX.search(response) is not None
    stated = _boxed(response) if has_box else _statement(response[-LONGEST_CHARS:])
    answer = None if stated is None else gold if stated == wanted else read(stated)
    # The reference itself may be a whole solution with a box.
    correct = answer is not None and gold.problem is None and (answer is gold or _equal(gold, answer))
    # All correct answers have the vote of the reference.
    said = wanted if correct else None if answer is None else _vote(answer, gold)
    return Score(float(correct), {"correct": float(correct), "format": float(has_box)}, said)


def reference_problem(reference: str) -> str | None:
    r"""Why a reference cannot be read wholly; None where it can, and then the same text in a box scores 1.

    >>> reference_problem(r"12\frac12\%"), reference_problem(r"\approx 3")
    (None, 'the command \\approx is not known')
    """
    return _reference(reference).problem


# A name and what it is of: `f(-1)`, `\angle ABC`. An equation, such as x + y = 5, has none on its left.
_OF = re.compile(r"(?<=[a-zA-Z])(?: ?\( ?-?[a-zA-Z0-9., ]*\)|\^\{?-1\}?)")
_NAME = re.compile(r"[^-+*/^<>!,;|]*[a-zA-Z][^-+*/^<>!,;|]*")


@lru_cache(maxsize=65_536)
def _reference(answer: str) -> Reading:
    stated = _boxed(answer) if _BOX.search(answer) else answer
    if stated is None:
        return Reading(answer, problem="its box is not closed")
    said = read(stated)
    if all(_NAME.fullmatch(_OF.sub("", side)) for side in said.left):
        return said
    return Reading(said.plain, problem=expression_problem(said.plain))


# ---------------------------------------------------------------------- what a response states

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
# A box, with or without braces (`\boxed 5`), or what opens and closes others.
_BRACE = re.compile(
    rf"{_BOX.pattern}\s*(?:(\{{)|([-0-9.\\A-Z](?:[^${{}}\n]|\{{[^{{}}]*\}}){{0,60}}?)(?=[$\n}}]|\\[)\]]|[.,;!?](?:\s|$)|$))|\\.|[{{}}]",
    re.DOTALL,
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


# ---------------------------------------------------------------------- equal or not


def _equal(gold: Reading, answer: Reading) -> bool:
    if gold.number is not None:
        return _states_number(gold.number, gold.left, answer)
    if gold.based is not None:
        return gold.based == answer.based or answer.plain == gold.based[0]
    if gold.words is not None:
        return _same_words(gold.words, answer.words or read_words(f'"{answer.plain}"'))
    if (answer.problem or answer.words or answer.based) is not None:
        return False
    if closed_up(gold.plain) == closed_up(answer.plain):
        return True
    if gold.entries and (answer.entries or expression_problem(gold.plain)):
        return _same_entries(gold, answer)
    return _equal_expressions(gold, answer)


def _same_entries(gold: Reading, answer: Reading) -> bool:
    """Whether the entries are the same, each by the rule of its kind: by name, by place, or in any order."""
    open_or_round = {"", "()"}
    if len(gold.entries) != len(answer.entries) or (gold.name and answer.name and gold.name != answer.name):
        return False
    if gold.brackets != answer.brackets and not {gold.brackets, answer.brackets} <= open_or_round:
        return False
    wanted, left = list(gold.entries), list(answer.entries)
    if is_named := _names_each(wanted) and _names_each(left):
        wanted.sort(key=_own_name)
        left.sort(key=_own_name)
        if list(map(_own_name, wanted)) != list(map(_own_name, left)):
            return False
    is_ordered = bool(gold.brackets) or is_named or _names_each(wanted)
    for entry in wanted:
        found = next(
            (place for place, said in enumerate(left[:1] if is_ordered else left) if _equal(entry, said)), None
        )
        if found is None:
            return False
        del left[found]
    return True


def _own_name(entry: Reading) -> str:
    return entry.name


def _names_each(entries: Sequence[Reading]) -> bool:
    """Whether each entry has a name of its own: `x = 1, y = 2`, but not `x = 1, x = 2`."""
    names = {entry.name for entry in entries}
    return "" not in names and len(names) == len(entries)


def _states_number(wanted: Number, names: tuple[str, ...], answer: Reading) -> bool:
    """Whether the answer is the number, under no other name, and so is every number in a chain (`x = 9 + 9 = 18`)."""
    number = answer.number or number_in_words(answer.plain)
    if number is None or not wanted.matches(number):
        return False
    left = list(answer.left) if answer.number else answer.plain.split("=")[:-1]
    own, said = _name(names), _name(left)
    if own and said and own != said:
        return False
    return all(
        wanted.matches(step) if (step := read_number(side.strip())) else _verified(_parsed(str(wanted.value)), side)
        for side in left
        if not _has_letters(side)
    )


def _name(left: Sequence[str]) -> str:
    """What stands left of the first `=`, if that is a name: `x`, `f(2)`, `\\angle ABC`."""
    return re.sub(r"[\s{}\"]", "", left[0]) if left and _has_letters(left[0]) else ""


def _has_letters(side: str) -> bool:
    return re.search(r'[a-zA-Z"]', COMMAND.sub("", side)) is not None


def _same_words(wanted: tuple[str, ...], stated: tuple[str, ...] | None) -> bool:
    """Whether the words are the same; a choice's letter may stand alone, in the reference or the answer."""
    if stated is None or not wanted[0].startswith("("):
        return wanted == stated
    return wanted[0] == stated[0] and (wanted[1] == stated[1] or not (wanted[1] and stated[1]))


def _equal_expressions(gold: Reading, answer: Reading) -> bool:
    """Whether math-verify finds the answer equal, and every number in a chain of equations too."""
    text = answer.plain
    if answer.number is not None and answer.number.value.denominator == 1 and not answer.left:
        text = str(answer.number)
    chain = "=" not in gold.plain and not LIST.search(text)
    *left, last = text.split("=") if chain else [text]
    sides = [last, *(side for side in left if re.search("[0-9]", side) and not _has_letters(side))]
    return all(_verified(_parsed_reference(gold.plain), side) for side in sides)


def _verified(gold: list[Any], text: str) -> bool:
    plain = text.strip()
    return expression_problem(plain) is None and bool(verify(gold, _parsed(plain), timeout_seconds=None))


def _parsed(plain: str) -> list[Any]:
    latex = re.sub('"([^"]*)"', r"\\text{\1}", plain)
    found: list[Any] = parse(f"${latex}$", [_LATEX], extraction_mode="first_match", parsing_timeout=None)
    return found


_parsed_reference = lru_cache(maxsize=4_096)(_parsed)


def _vote(answer: Reading, gold: Reading) -> str | None:
    """The same text for equal answers: 1/2 for 0.5. A huge expression stays as it was written."""
    if number := answer.number or (number_in_words(answer.plain) if gold.number else None):
        return str(number)
    if answer.problem is not None:
        return None
    if answer.entries:
        said = [f"{entry.name}={_vote(entry, entry)}".removeprefix("=") for entry in answer.entries]
        return ", ".join(said if answer.brackets else sorted(said))
    if answer.words or gold.words or gold.number or gold.based:
        return " ".join(answer.words or (answer.plain,)).strip()
    found = _parsed(answer.plain)
    try:
        return str(found[0]) if found else None
    except (ValueError, RecursionError):
        return str(found[-1])
