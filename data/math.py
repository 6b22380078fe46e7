r"""Scorer for mathematics of any kind. The last `\boxed{}` counts, as in the usual graders of MATH.

Reference and response are read by the same rules, as a whole or not at all. The rules of equality by kind:

    numbers       written numbers (`data.written_numbers`) have equal values; form, unit and currency do not matter
    words         `\text{Sunday}`, `B`, `\textbf{(B)}\ 36`, `5\text{ ft }2\text{ in}` have the same words in order
    bases         `1011_2` has the same digits; the response may omit the base
    expressions   other texts that the math-verify library reads as a whole are equal if the library says so

math-verify ignores a part of many texts (`\approx 18`, units), reads `1 234` as 235, and computes `36 \div 2`. Such
texts never reach the library. Some computations (`9^{9^{9}}`) never end, so this scorer needs processes with a
deadline.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
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

# math-verify reads 6m as 6, so units are read here.
_LATEX = LatexExtractionConfig(
    normalization_config=replace(LatexExtractionConfig().normalization_config, units=False, boxed="none")
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # the library warns at each call that its time limit is off
# A name with its argument: `f(-1)`, `\angle ABC`. An equation such as x + y = 5 has no name on its left.
_OF = re.compile(r"(?<=[a-zA-Z])(?: ?\( ?-?[a-zA-Z0-9., ]*\)|\^\{?-1\}?)")
_NAME = re.compile(r"[^-+*/^<>!,;|]*[a-zA-Z][^-+*/^<>!,;|]*")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
# A box with or without braces (`\boxed 5`), or any other brace.
_BRACE = re.compile(
    rf"{_BOX.pattern}\s*(?:(\{{)|([-0-9.\\A-Z](?:[^${{}}\n]|\{{[^{{}}]*\}}){{0,60}}?)(?=[$\n}}]|\\[)\]]|[.,;!?](?:\s|$)|$))|\\.|[{{}}]",
    re.DOTALL,
)
_JOINT = re.compile(r"[\s$\\()\[\]]*(?:[,;]|,?\s*(?:\\text\{)?\s*\b(?:and|or)\b\s*\}?)[\s$\\()\[\]]*")
_LONGEST_JOINT = 30
_ANCHOR = re.compile(r"(?i)\banswer(?:\s+is\b)?\s*:?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n")
_MATHEMATICAL = re.compile(r"[\d$\\]")
_INLINE = re.compile(r"\\?\$\$?([^$]+)\$\$?|\\[(\[](.+?)\\[)\]]")


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    r"""Score 1 if the response equals the reference, otherwise 0. The part `format` is 1 if there is a `\boxed{}`."""
    wanted = str(ground_truth["answer"])
    gold = read_reference(wanted)
    has_box = _BOX.search(response) is not None
    stated = _boxed(response) if has_box else _statement(response[-LONGEST_CHARS:])
    answer = None if stated is None else gold if stated == wanted else read(stated)
    # A reference may be a whole solution with a box.
    correct = answer is not None and gold.problem is None and (answer is gold or _equal(gold, answer))
    # All correct responses have the vote of the reference.
    vote = wanted if correct else None if answer is None else _vote(answer, gold)
    return Score(float(correct), {"correct": float(correct), "format": float(has_box)}, vote)


@lru_cache(maxsize=65_536)
def read_reference(answer: str) -> Reading:
    """Read a reference. If it cannot be read as a whole, the `problem` of the result is the reason."""
    stated = _boxed(answer) if _BOX.search(answer) else answer
    if stated is None:
        return Reading(answer, problem="its box is not closed")
    found = read(stated)
    if all(_NAME.fullmatch(_OF.sub("", side)) for side in found.left):
        return found
    return Reading(found.plain, problem=expression_problem(found.plain))


def _boxed(text: str) -> str | None:
    """Return the contents of the last closed box and of boxes joined to it by `,`, `and` or `or`.

    Return None if the text has no closed box, or if a later box is not closed.
    """
    opened: list[tuple[int, int] | None] = []
    closed: list[tuple[int, int, str]] = []  # outermost boxes: start, end, content
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


def _statement(text: str) -> str | None:
    r"""Return the statement after "answer is" or in the last line, or None if more mathematics follows the statement.

    >>> _statement("Twice nine. The answer is $18$."), _statement("The answer is 18. No, 19."), _statement("Hm.\n18")
    ('18', None, '18')
    """
    anchors = list(_ANCHOR.finditer(text))
    last_line = text.strip().rpartition("\n")[2]
    rest = (text[anchors[-1].end() :] if anchors else last_line).strip()
    ends = _SENTENCE_END.search(rest)
    statement, after = (rest, "") if ends is None else (rest[: ends.start()], rest[ends.end() :])
    if _MATHEMATICAL.search(after) or not (anchors or _MATHEMATICAL.search(statement)):
        return None
    inline = [one or other for one, other in _INLINE.findall(statement)]
    if inline and _MATHEMATICAL.search(_INLINE.sub("", statement)):
        return None
    return inline[0] if len(inline) == 1 else None if inline else statement.strip(" *:")


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
    """Return whether two lists have equal entries. If all entries have names, entries with equal names are compared.
    Otherwise, entries at equal positions are compared if the list is ordered. If it is not, any order is accepted."""
    open_or_round = {"", "()"}
    if len(gold.entries) != len(answer.entries) or (gold.name and answer.name and gold.name != answer.name):
        return False
    if gold.brackets != answer.brackets and not {gold.brackets, answer.brackets} <= open_or_round:
        return False
    wanted, left = list(gold.entries), list(answer.entries)
    if is_named := _names_each(wanted) and _names_each(left):
        wanted.sort(key=attrgetter("name"))
        left.sort(key=attrgetter("name"))
        if [entry.name for entry in wanted] != [entry.name for entry in left]:
            return False
    is_ordered = bool(gold.brackets) or is_named or _names_each(wanted)
    for entry in wanted:
        candidates = left[:1] if is_ordered else left
        match = next((place for place, other in enumerate(candidates) if _equal(entry, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _names_each(entries: Sequence[Reading]) -> bool:
    names = {entry.name for entry in entries}
    return "" not in names and len(names) == len(entries)


def _states_number(wanted: Number, names: tuple[str, ...], answer: Reading) -> bool:
    """Return whether the response equals the number. In a chain of equations, each numeric side must equal the number.

    `names`: the left sides of the reference, such as `x` in `x = 18`. The response must not use another name."""
    number = answer.number or number_in_words(answer.plain)
    if number is None or not wanted.matches(number):
        return False
    left = list(answer.left) if answer.number else answer.plain.split("=")[:-1]
    name, other_name = _name(names), _name(left)
    if name and other_name and name != other_name:
        return False
    return all(
        wanted.matches(step) if (step := read_number(side.strip())) else _verified(_parsed(str(wanted.value)), side)
        for side in left
        if not _has_letters(side)
    )


def _name(left: Sequence[str]) -> str:
    r"""Return the text left of the first `=` if it is a name (`x`, `f(2)`, `\angle ABC`), otherwise ''."""
    return re.sub(r"[\s{}\"]", "", left[0]) if left and _has_letters(left[0]) else ""


def _has_letters(side: str) -> bool:
    return re.search(r'[a-zA-Z"]', COMMAND.sub("", side)) is not None


def _same_words(wanted: tuple[str, ...], stated: tuple[str, ...] | None) -> bool:
    """Return whether the words are equal. Either text may give only the letter of a multiple-choice answer."""
    if stated is None or not wanted[0].startswith("("):
        return wanted == stated
    return wanted[0] == stated[0] and (wanted[1] == stated[1] or not (wanted[1] and stated[1]))


def _equal_expressions(gold: Reading, answer: Reading) -> bool:
    """Return whether math-verify accepts the response as equal to the reference. In a chain of equations, math-verify
    must accept the last side and every other numeric side."""
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
    """Return the key of a response for majority votes, or None if the response cannot be read. Equal responses have the
    same key, such as 1/2 for 0.5."""
    if number := answer.number or (number_in_words(answer.plain) if gold.number else None):
        return str(number)
    if answer.problem is not None:
        return None
    if answer.entries:
        votes = [f"{entry.name}={_vote(entry, entry)}".removeprefix("=") for entry in answer.entries]
        return ", ".join(votes if answer.brackets else sorted(votes))
    if answer.words or gold.words or gold.number or gold.based:
        return " ".join(answer.words or (answer.plain,)).strip()
    found = _parsed(answer.plain)
    try:
        return str(found[0]) if found else None
    except (ValueError, RecursionError):
        return str(found[-1])
