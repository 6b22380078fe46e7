r"""Scorer for mathematics of any kind: the math-verify library decides whether two expressions are equal.

What is compared is chosen here: the last `\boxed{}`, as in the field's graders of MATH; without one the text after the
last "answer is" or "answer:", or the last line, if nothing mathematical comes after it. math-verify alone takes the
first of `The answer is 18. No, 19.`, and ignores unknown commands (`\neg 18`, `\approx 18`), words (`18 million`) and
the first side of `19 = 18`. Where the reference is a number the answer must be one: `12 * 12` is no answer to 12 * 12.

The library computes the answer, which for some never ends (`9^{9^{9}}`), so it needs scoring processes with a deadline:
`reward.num_processes` of 1 or more. Its own time limit is off, since it uses signals, which do not work in a thread.
"""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from data.gsm8k import makes_another
from rlcore.score import Score

# The answer stands near the end; a long text costs the parser minutes.
_LONGEST_CHARS = 2_000

_BOX = "\\boxed{"
_ANCHOR = re.compile(r"(?i)\banswer(?:\s+is\b)?\s*:?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n")
_MATHEMATICAL = re.compile(r"[\d$\\]")
_INLINE = re.compile(r"\\?\$\$?([^$]+)\$\$?|\\[(\[](.+?)\\[)\]]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_COMMAND_OR_TEXT = re.compile(rf"{_TEXT.pattern}|{_COMMAND.pattern}")
_LETTER = re.compile("[a-zA-Z]")
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z']{2,}(?:[ -]+[a-zA-Z']{2,})*")
_INTRODUCTION = re.compile(r"^(?:[a-zA-Z']{2,}\s+)+(?=[-0-9])")
# A base (18_8), minutes (18'); in a number also a relation (> 18) and one of several equations (x=19, x=18).
_MARKED_DIGITS = re.compile(r"[0-9}]\s*[_']")
_ODD_IN_A_NUMBER = re.compile(rf"{_MARKED_DIGITS.pattern}|[<>;]|\\(?:[lg]eq?|[lg]t|neq?|in)\b|=[^=]*,[^=]*=")
# Commands that math-verify reads or that only set type. It ignores all others, whatever they mean.
_KNOWN = re.compile(
    r"[dtc]?frac|sqrt|cdot|times|div|pm|mp|left|right|big|Big|text(?:bf)?|math(?:rm|bf|bb|cal|it)|mbox|boldsymbol|boxed"
    r"|operatorname|displaystyle|q?quad|circ|degree|pi|infty|emptyset|varnothing|in|cup|cap|setminus|subset|begin|end"
    r"|leq?|geq?|lt|gt|neq?|d?binom|choose|over|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|log|ln|exp|[lr]floor"
    r"|[lr]ceil|[lr]?vert|[lr]angle|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|sum|prod|int"
    r"|lim|to|overline|vec|hat|bar|angle|triangle|p?mod"
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its time limit is off


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """1 where the answer equals the reference, else 0. `format` is 1 for an answer in `\\boxed{}`, else 0."""
    wanted = str(ground_truth["answer"])
    gold = _reference(wanted)
    end = response[-_LONGEST_CHARS:]
    stated = _last_box(end) if _BOX in end else _statement(end)
    content = None if stated is None else _readable(stated, wanted, is_number=_is_number(gold))
    correct = content is not None and _equal(content, gold, wanted)
    # All correct answers have the vote of the reference, others that of the parsed expression.
    said = wanted if correct else _written(_parsed(content)) if content is not None else None
    return Score(float(correct), {"correct": float(correct), "format": float(_BOX in response)}, said)


def _last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{}`; None where it is not closed.

    >>> _last_box(r"\boxed{1} or \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind(_BOX) + len(_BOX)
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
    return None


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


def _readable(stated: str, wanted: str, *, is_number: bool) -> str | None:
    """The stated text as LaTeX that math-verify reads completely; None where it would ignore a part of it.

    Parts that the reference has too are allowed.
    """
    content = stated.strip().rstrip(".").replace("\\$", "").replace("\n", " ")
    own = _COMMAND.findall(wanted)
    if any(command not in own and not _KNOWN.fullmatch(command) for command in _COMMAND.findall(content)):
        return None
    words = " ".join(_TEXT.findall(content)) if not is_number else _COMMAND.sub(" ", content)
    if any(makes_another(word) and word not in wanted.lower() for word in re.findall(r"[a-z]+", words.lower())):
        return None
    odd = _ODD_IN_A_NUMBER if is_number else _MARKED_DIGITS
    if odd.search(content) and not odd.search(wanted):
        return None
    if is_number:
        content = re.sub(r"\s*\\?%$", "", content)  # 18% of something is 18, as in the references
    if is_number and not _TEXT.search(content):  # plain words are an introduction or a unit, no variables
        content = _WORDS.sub(lambda words: rf"\text{{ {words[0]} }}", _INTRODUCTION.sub("", content))
    return content or None


def _equal(content: str, gold: list[Any], wanted: str) -> bool:
    """Whether the stated text is the reference, and so is every number in a chain of equations (`x = 9 + 9 = 18`)."""
    *others, last = [content] if "=" in wanted else content.split("=")
    found = _parsed(last)
    if _is_number(gold) and not _is_number(found):
        return False
    if _is_number(gold) and gold[0].is_Integer and "frac" in found[-1]:
        return False  # 36/2 is the question, not the answer
    numbers = [
        side for side in others if _MATHEMATICAL.search(side) and not _LETTER.search(_COMMAND_OR_TEXT.sub("", side))
    ]
    return all(verify(gold, one, timeout_seconds=None) for one in (found, *map(_parsed, numbers)))


def _is_number(parsed: list[Any]) -> bool:
    """Whether the first reading is a plain number, not arithmetic that is still to be done."""
    return bool(parsed) and getattr(parsed[0], "is_Number", False) is True


def _parsed(content: str) -> list[Any]:
    found: list[Any] = parse(f"${content}$", [LatexExtractionConfig()], parsing_timeout=None)
    return found


def _written(found: list[Any]) -> str | None:
    """The parsed answer as text: 1/2 for 0.5. A number of thousands of digits stays as it was written."""
    try:
        return str(found[0]) if found else None
    except ValueError:
        return str(found[-1])


@lru_cache(maxsize=4_096)
def _reference(answer: str) -> Any:
    """The reference parsed; a bare expression is taken as LaTeX mathematics."""
    marked = answer if _BOX in answer or "$" in answer else f"${answer}$"
    return parse(marked, parsing_timeout=None)
