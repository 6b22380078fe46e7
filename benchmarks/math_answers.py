"""Compare the scores of `data.math` with plain math-verify, on answers that are generated from references by edits.

    python -m benchmarks.math_answers 20000        # prints JSON; exit code 1 if a difference has no rule

One edit repeats the reference in another form, which is right by construction. The other edits change a number, write a
computation instead of its result, keep only a part, or write two answers. If math-verify refuses an answer, `data.math`
may accept it only if it is right. If math-verify accepts an answer, `data.math` may refuse it only by a rule of
docs/data.md.
"""

import json
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from math_verify import parse, verify

from data.math import reference_problem, score
from data.math_reading import Reading, number_in_words, read

REFERENCES = Path(__file__).parents[1] / "tests" / "data" / "math_references.txt"
_NUMBER = re.compile(r"[0-9]+")
# Solutions with a box are left out, and references that an edit turns into a computation of minutes.
_LEFT_OUT = re.compile(r"boxed|!(?!:)|\^\{?[0-9]{2}|\\binom|\\dbinom|e\+|\^\{?n")


class Answer(NamedTuple):
    """A generated answer without its box. `is_right` is True if it equals the reference by construction."""

    edit: str
    text: str
    is_right: bool


@lru_cache(maxsize=1)
def readings() -> dict[str, str]:
    """Return each reference and its reading: `number 25/2%`, `words sunday`, `base 1011 2`, `expression`, `refused`."""
    rows = (line.partition("\t") for line in REFERENCES.read_text().splitlines())
    return {reference: reading for reference, _, reading in rows}


def answers(count: int, seed: int) -> Iterator[tuple[str, Answer]]:
    """Yield `count` pairs of a reference and a generated answer. References and edits are drawn uniformly."""
    rng = random.Random(seed)
    references = [text for text, reading in readings().items() if reading != "refused" and not _LEFT_OUT.search(text)]
    for _ in range(count):
        reference, edit = rng.choice(references), rng.choice((_other_number, _question, _part, _two_answers, _again))
        yield reference, edit(reference, rng)


def _again(reference: str, rng: random.Random) -> Answer:
    forms: list[Callable[[str], str]] = [
        lambda text: text,
        lambda text: f" {text} ",
        lambda text: f"{text.removesuffix('.')}.",
        lambda text: f"\\displaystyle {text}",
        lambda text: text.replace("\\frac", "\\dfrac"),
        lambda text: re.sub(r"(?<!\\) ", r"\\ ", text),
        lambda text: text.replace(" ", "  "),
        lambda text: f"\\fbox{{{text}}}",
    ]
    if "$" not in reference and "\\(" not in reference and "\\[" not in reference:
        forms += [lambda text: f"${text}$", lambda text: f"{{{text}}}"]
    return Answer("again", rng.choice(forms)(reference), is_right=True)


def _other_number(reference: str, rng: random.Random) -> Answer:
    found = list(_NUMBER.finditer(reference))
    if not found:
        return Answer("other number", str(rng.randrange(100)), is_right=False)
    digits = rng.choice(found)
    other = str(int(digits[0]) + rng.choice((-2, -1, 1, 2, 3)))
    return Answer("other number", reference[: digits.start()] + other + reference[digits.end() :], is_right=False)


def _question(reference: str, rng: random.Random) -> Answer:
    reading = read(reference)
    if (number := reading.number) is None or number.percent or number.value.denominator > 1:
        plain = reading.plain
        if reading.words or reading.based or re.search(r"[,;<>=]|\b(?:and|or|in)\b", plain):
            return _other_number(reference, rng)
        return Answer("question", rng.choice((f"{plain} + 0", f"1 \\cdot {plain}", f"\\frac{{{plain}}}{{1}}")), False)
    value = number.value.numerator
    forms = (
        "{v} + 0", "{p} + 1", "{v} \\times 1", "1 \\cdot {v}", "{d} \\div 2", "{d}/2", "\\frac{{{d}}}{{2}}",
        "({d})/(2)",
        "-(-{v})", "--{v}", "({v})(1)", "{v}^1", "\\binom{{{v}}}{{1}}", "{{{v} \\choose 1}}", "\\sqrt{{{s}}}", "{v}e^0",
        "|{v}|", "\\max({v}, {p})", "\\log_2 2^{{{v}}}", "{v}\\cdot 10^0", "\\text{{{d}/2}}", "\\mathbf{{{p} + 1}}",
    )  # fmt: skip
    small = abs(value) < 1_000
    form = rng.choice(forms if small else forms[:11])
    return Answer("question", form.format(v=value, p=value - 1, d=2 * value, s=value * value), is_right=False)


def _part(reference: str, rng: random.Random) -> Answer:
    places = [match.start() for match in re.finditer(r"(?<=.)(?:[\\ ,=+\-^/._]|(?<=[0-9])(?![0-9]))", reference)]
    place = rng.choice(places) if places else len(reference) // 2
    return Answer("part", rng.choice((reference[:place], reference[place:].lstrip(" ,=^/_"))), is_right=False)


def _two_answers(reference: str, rng: random.Random) -> Answer:
    other = _other_number(reference, rng).text
    pair = rng.sample((reference, other), 2)
    joints = (" or ", ", ", "\\text{ or }", " and ", *([] if "=" in reference else [" "]))
    return Answer("two answers", rng.choice(joints).join(pair), is_right=False)


@lru_cache(maxsize=1_024)
def _plain_gold(reference: str) -> Any:
    return parse(f"\\boxed{{{reference}}}", parsing_timeout=None)


def math_verify_pays(reference: str, answer: str) -> bool:
    """Return whether unmodified math-verify accepts the boxed answer for the boxed reference."""
    return bool(
        verify(_plain_gold(reference), parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None)
    )


def rule(reference: str, answer: str) -> str | None:
    """Return the rule of docs/data.md that refuses an answer although math-verify accepts it, or None."""
    gold, reading = read(reference), read(answer)
    if gold.number is not None:
        return _number_rule(gold, reading)
    if gold.words is not None or gold.based is not None:
        return "words and digits of a base are compared as written"
    if gold.entries and reading.entries:
        return "a list has as many entries, each by the rule of its kind, and those with names by name"
    if reading.problem is not None or reading.words is not None or reading.based is not None:
        return "an answer is read wholly or not at all"
    return "a letter is a variable, no unit" if _has_letter_more(gold, reading) else None


def _number_rule(gold: Reading, reading: Reading) -> str | None:
    number = reading.number or number_in_words(reading.plain)
    if number is None:
        return "an answer to a number is one written number"
    if gold.left and reading.left and gold.left[0] != reading.left[0]:
        return "a name on the left of = is the same one, or left out"
    if gold.number != number and Fraction(number.value) != Fraction(gold.number.value if gold.number else 0):
        return "numbers are equal exactly, or to six places for a fraction that no decimal writes"
    return None


def _has_letter_more(gold: Reading, reading: Reading) -> bool:
    letters = [set(re.findall("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", each.plain))) for each in (gold, reading)]
    return letters[0] != letters[1]


def _paid_by(reference: str, answer: str) -> str | None:
    """Return the rule that accepts an answer although math-verify refuses it, or None. The listed reading and a naive
    reading decide.
    """
    kind, _, reading = readings()[reference].partition(" ")
    same = answer.rstrip("\\% ") == reference.rstrip("\\% ")
    if kind == "number" and (same or _naive_number(answer) == Fraction(reading.rstrip("%"))):
        return "units, currencies, percent signs and names count for nothing"
    if (
        kind == "words"
        and re.findall("[A-J]", answer)[:1] == [reading[1:2].upper()]
        and not re.search(r",|\bor\b", answer)
    ):
        return "the letter of a choice counts without or with its text"
    return "a letter is a variable, no unit" if re.fullmatch("[0-9]*[a-z]+", reference) else None


def _naive_number(answer: str) -> Fraction | None:
    kept = re.sub(r"\\text\{[^}0-9]*\}(\^[0-9])?|\^\\circ|\\d?frac|.*=|[^-0-9./]", "", answer.replace("}{", "/"))
    try:
        return Fraction(kept)
    except (ValueError, ZeroDivisionError):
        return None


def compared(count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Return the statistics of `count` answers, and the differences that no rule explains."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    figures: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    unexplained = []
    for reference, answer in answers(count, seed):
        paid = score(f"\\boxed{{{answer.text}}}", {"answer": reference}).total == 1.0
        expected = math_verify_pays(reference, answer.text)
        figures[f"{answer.edit}: {'paid' if paid else 'refused'}, math-verify {'pays' if expected else 'refuses'}"] += 1
        case = f"{answer.edit}: reference {reference!r}, answer {answer.text!r}"
        if answer.is_right and not paid:
            unexplained.append(f"a right answer is refused; {case}")
        elif paid and not expected and not answer.is_right:
            if (name := _paid_by(reference, answer.text)) is None:
                unexplained.append(f"paid beyond math-verify; {case}")
            else:
                rules[f"paid: {name}"] += 1
        elif expected and not paid:
            if (name := rule(reference, answer.text)) is None:
                unexplained.append(f"refused by no rule; {case}")
            else:
                rules[name] += 1
    return {"answers": count, "seed": seed, **dict(sorted(figures.items())), "rules": dict(rules)}, unexplained


def main() -> None:
    """Print the statistics. Print the differences that no rule explains to stderr."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    figures, unexplained = compared(count, seed=1)
    figures["references"] = sum(reference_problem(text) is None for text in readings())
    print(json.dumps({**figures, "unexplained": len(unexplained)}, indent=1))
    print("\n".join(unexplained), file=sys.stderr)
    raise SystemExit(bool(unexplained))


if __name__ == "__main__":
    main()
