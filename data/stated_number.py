"""Reads the one number that a text states as its answer.

A number may have brackets, emphasis, a currency or a unit around it. A second number (`18 or 19`, `18/19`, `18*10`), an
exponent (`18e5`), a magnitude (`18 million`) or a sign in words (`minus 18`) makes it another one.
"""

import re
from fractions import Fraction

# Bounded repeats: no text makes the search slow.
_NUMBER = re.compile(r"-?[$\u20ac\u00a3]?((?:[0-9]{1,3}(?:,[0-9]{3}){1,8}|[0-9]{1,40})(?:\.[0-9]{1,20})?)([a-zA-Z]*)")
# What stands between numbers without joining them, and LaTeX that only sets type.
_SEPARATOR = re.compile(r"[=<>|~\"`\u2248]|(?<![0-9]):|:(?![0-9])")
_TYPESETTING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|left|right)\b|\\[()\[\],;! ]")
_LEADING, _TRAILING = "([{*_'\\$\u20ac\u00a3+", ")]}*_'\\$\u20ac\u00a3%\u00b0.,;!?"
_OPERATORS = "-+*/^\u00d7\u00f7\u00b7\u2212\u2013\u2014"
_MAGNITUDE = re.compile(r"[kmbtex]|mm|mn|mil|bn|bil|tn", re.IGNORECASE)
_MAKES_THE_NEXT_ANOTHER = re.compile(r"not|minus|negative|n?or|plus|times|over|under|than|point")
_MAKES_ANOTHER = re.compile(
    r"not|n?or|minus|negative|plus|point|over|squared|cubed|factorial|wrong|incorrect|half|halves|thirds?|quarter|tenths?"
    r"|(?:dozen|hundred|thousand|million|billion|trillion)s?|(?:hundred|thousand)ths?"
    r"|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)


def only_number(line: str) -> Fraction | None:
    """The number of a text that holds one.

    >>> only_number("**$1,018.50** a day")
    Fraction(2037, 2)
    >>> [only_number(text) for text in ("18 or 19", "18/19", "18e5", "18 million", "1,8", "eighteen")]
    [None, None, None, None, None, None]
    """
    words = _words(line)
    places = [place for place, word in enumerate(words) if _has_digit(word)]
    return _stated(words, places[0], words) if len(places) == 1 else None


def final_number(text: str, within: int) -> Fraction | None:
    """The last number of a text, looked for in its last `within` characters.

    >>> final_number("9 * 2 = 18, so it is 18.", 300), final_number("it is 17 or 18", 300)
    (Fraction(18, 1), None)
    """
    end = text[-within - 1 :]
    # The first word of a longer text may be cut: 118 would be read as 18.
    words = _words(end if len(end) <= within else end.partition(" ")[2])
    place = max((place for place, word in enumerate(words) if _has_digit(word)), default=None)
    if place is None:
        return None
    sentence = words[place:]
    ends = (number for number, word in enumerate(sentence, start=1) if word[-1] in ".!?")
    return _stated(words, place, sentence[: next(ends, None)])


def makes_another(word: str) -> bool:
    """Whether a word beside a number makes it another one, or no answer: `million`, `half`, `or`, `nineteen`, `not`."""
    return _MAKES_ANOTHER.fullmatch(word.strip("()[]{}.,;!?*'").lower()) is not None


def _words(text: str) -> list[str]:
    return _SEPARATOR.sub(" = ", _TYPESETTING.sub(" ", text)).split()


def _has_digit(word: str) -> bool:
    """Digits of any script, superscripts and fractions too: none of them may stand beside the number unseen."""
    return any(letter.isnumeric() for letter in word)


def _stated(words: list[str], place: int, context: list[str]) -> Fraction | None:
    """The number in the word at `place`; None where it is none, or the words around it make it another one.

    `context`: the words that are looked through for such.
    """
    word = words[place].lstrip(_LEADING).rstrip(_TRAILING)
    found = _NUMBER.fullmatch(word)
    if found is None or _MAGNITUDE.fullmatch(found.group(2)) or any(map(makes_another, context)):
        return None
    before = [word.lower() for word in words[max(0, place - 2) : place]]
    if before and (_MAKES_THE_NEXT_ANOTHER.fullmatch(before[-1]) or _joins(before)):
        return None
    if place + 1 < len(words) and not words[place + 1].strip("+*/^\u00d7\u00f7"):
        return None
    return Fraction(re.sub(r"[,$\u20ac\u00a3]", "", word.removesuffix(found.group(2))))


def _joins(before: list[str]) -> bool:
    """Whether the one or two words before a number join it to another one: `9 *`, `9*`, `9`, `= -`."""
    if _has_digit(before[-1]):
        return before[-1][-1].isalnum() or before[-1][-1] in _OPERATORS
    if before[-1].strip(_OPERATORS):
        return False
    return len(before) == 1 or before[0] == "=" or _has_digit(before[0])
