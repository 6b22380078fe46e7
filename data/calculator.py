"""Exact arithmetic for the model: a tool and two environments.

An environment computes the expression that the model writes in a turn. These commands use tool and environments:

    millrace run ... data.environment=rlcore.rollout.tools:Tools episode.tools=[data.calculator:calculate]
    millrace run experiment=countdown_calculator
    python -m data.calculator gsm8k/train.jsonl demonstrations.jsonl     # GSM8K in turns, see docs/environments.md
"""

import json
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from data import gsm8k
from data.arithmetic import evaluate
from data.countdown import COMPUTED, score
from rlcore.rollout.environment import Turn

_REQUEST = re.compile(r"<<([^<>=]{1,200})=$")
_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]{0,20})\.([0-9]{1,20})(?![0-9.])")
_WHOLE = re.compile(r"(?<![0-9.])0+(?=[0-9])")
_PLACES = 4


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of whole numbers.

    Args:
        expression: Whole numbers with + - * / and parentheses, such as (3 + 4) * 5.

    >>> calculate("(3 + 4) * 5"), calculate("7 / 2")
    ('35', '7/2')
    """
    found = evaluate(expression)
    if found is None:
        raise ValueError("an expression is whole numbers with + - * / and parentheses")
    return "division by zero" if found.value is None else str(found.value)


class Countdown:
    """A countdown environment with a calculator. A turn is an equation. The reply is its value in the form `> VALUE =`,
    or `: =` if the equation is invalid.

    The tokenizer of a randomly initialized model has all words of these replies. A correct equation ends the episode.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the problem of the episode."""
        self._row = row

    def step(self, text: str) -> Turn:
        """Reply with the value of an equation, and score the equation."""
        found = score(text, self._row)
        reply = COMPUTED.format(value=calculate(text)) if evaluate(text) else ": ="
        return Turn(reply, done=found.parts["correct"] == 1.0, reward=found.parts["correct"], parts=found.parts)


class WordProblems:
    """A GSM8K environment with a calculator. If a turn ends with a request such as `<<48/2=`, the reply is the value.

    Any other turn ends the episode. The reward is the strict score of all turns together.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the ground truth and reset the counters."""
        self._row, self._calls, self._failed = row, 0, 0
        self._texts: list[str] = []

    def step(self, text: str) -> Turn:
        """Reply with the requested value, or end the episode with the score of the response."""
        self._texts.append(text)
        request = _REQUEST.search(text.rstrip())
        reply = calculator_line(request[1]) if request else None
        self._calls += request is not None
        self._failed += request is not None and reply is None
        found = gsm8k.score("\n".join(self._texts), self._row)
        parts = {**found.parts, "calls": self._calls, "calls_failed": self._failed}
        if request:
            return Turn(reply or "?", parts=parts)
        return Turn("", done=True, reward=found.total, parts=parts)


def calculator_line(expression: str) -> str | None:
    """Return the value of an expression, rounded to four decimal places. The expression may contain decimals.

    Return None if the expression is invalid or divides by zero.

    >>> calculator_line("0.5*30"), calculator_line("100/3"), calculator_line("-2"), calculator_line("1/0")
    ('15', '33.3333', None, None)
    """
    whole = _DECIMAL.sub(lambda found: f"({int(found[1] + found[2])}/{10 ** len(found[2])})", expression)
    found = evaluate(_WHOLE.sub("", whole).strip())
    if found is None or found.value is None:
        return None
    whole, rest = divmod(abs(scaled := round(found.value * 10**_PLACES)), 10**_PLACES)
    return f"{'-' if scaled < 0 else ''}{whole}.{rest:0{_PLACES}}".rstrip("0").rstrip(".")


def episode(answer: str) -> list[dict[str, str]] | None:
    r"""Convert a published solution to the messages of an episode.

    Return None if a value in the solution differs from the calculator's result.

    >>> [message["content"] for message in episode("He has 48/2 = <<48/2=24>>24 clips.\n#### 24")]
    ['He has 48/2 = <<48/2=', '24', '24 clips.\n#### 24']
    """
    messages, end = [], 0
    for call in _ANNOTATION.finditer(answer):
        value = calculator_line(call[1])
        try:
            stated = Fraction(call[2])
        except ValueError:
            return None
        if value is None or Fraction(value) != stated:
            return None
        messages.append({"role": "assistant", "content": answer[end : call.start()] + f"<<{call[1]}="})
        messages.append({"role": "user", "content": value})
        end = call.end()
    return [*messages, {"role": "assistant", "content": answer[end:]}]


def main(source: Path, target: Path) -> None:
    """Convert a published GSM8K file to demonstrations, and print the number of omitted solutions."""
    from data.records import records_of

    left_out, lines = 0, []
    for record in records_of(source):
        messages = episode(record.text("answer"))
        if messages is None:
            left_out += 1
            continue
        prompt = {"role": "user", "content": gsm8k.prompt_of(record.text("question"))}
        lines.append(json.dumps({"messages": [prompt, *messages]}))
    target.write_text("\n".join(lines) + "\n")
    print(f"{target}: {len(lines):,} demonstrations; {left_out:,} solutions state a value that is not the calculator's")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
