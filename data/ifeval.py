"""Scorer for IFEval: the share of a prompt's instructions that a response follows, by the benchmark's strict rules.

This scorer differs from the published scorer in two points. It finds sentences and capitalized words by regular
expressions instead of NLTK. It searches for keywords as plain text, not as regular expressions.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.errors import ConfigError, DataError
from rlcore.score import Score

_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE = re.compile(r"\A```(?:json)?|```\Z", re.IGNORECASE)
_BULLET = re.compile(r"^[^\S\n]*(?:-|\*(?!\*))", re.MULTILINE)
_HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
_PLACEHOLDER = re.compile(r"\[[^\]\n]*(\]?)")  # without a closing bracket, the rest of the line is no second start
_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w[\w./-]*")
_SENTENCE_END = re.compile(r"(?<![\s(][A-Z])(?<!\b(?i:Mr|Ms|Dr|St|vs))(?<!\b(?i:Mrs|U\.S))[.!?]+[\"')\]*]*(?=\s)")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_END_OF_WORD = re.compile("[.,?!'\"]")


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the share of instructions that it follows. The part `correct` is 1 if it follows all of
    them."""
    names, settings = (json.loads(str(ground_truth[name])) for name in ("instruction_id_list", "kwargs"))
    followed = [_follows(response, *pair) for pair in zip(names, settings, strict=True)]
    parts = {"correct": all(followed), "num_followed": sum(followed), "num_instructions": len(followed)}
    return Score(sum(followed) / len(followed), {name: float(value) for name, value in parts.items()})


def _follows(response: str, name: str, settings: Mapping[str, Any]) -> bool:
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return bool(response.strip()) and bool(RULES[name](response, **given))
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"instruction_id_list: must name instructions of IFEval, and kwargs their settings; got {name!r} with "
            f"{given} ({type(error).__name__}: {error}); repair or remove the row"
        ) from error


def _compare(count: int, relation: str, bound: int) -> bool:
    return {"less than": count < bound, "at least": count >= bound}[relation]


def _occurrences(keyword: str, text: str) -> int:
    return text.lower().count(keyword.strip().lower())


def _separated(text: str, mark: str) -> list[str]:
    """Split a text at a mark. An empty first or last part is dropped. Return [] if any other part is empty."""
    parts = [part.strip() for part in text.split(mark)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    if sum(map(bool, map(str.strip, paragraphs))) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = paragraphs[int(nth_paragraph) - 1].split()  # an empty paragraph has an index, but does not count
    return bool(words) and _END_OF_WORD.split(words[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def _is_json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    lines = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(title.lstrip("<").rstrip(">").strip() for title in lines)


def _is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in the language, or True if its language cannot be identified."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise ConfigError(
            "data.scorer: data.ifeval:score identifies languages with the package langdetect, which is missing; "
            "pip install -c constraints.txt -e '.[ifeval]' in the checkout"
        ) from error
    DetectorFactory.seed = 0  # otherwise the language found for a text may vary
    try:
        return bool(detect(text) == language)
    except LangDetectException:
        return True


RULES: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": lambda text, capital_relation, capital_frequency: _compare(
        sum(map(str.isupper, _TOKEN.findall(text))), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and _is_in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_in_language(text, "en"),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": lambda text: len(set(both := _separated(text, "*" * 6))) == len(both) == 2,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum(map(bool, _PLACEHOLDER.findall(text))) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: (
        re.search(_POSTSCRIPTS.get(postscript_marker) or re.escape(postscript_marker.lower()), text.lower()) is not None
    ),
    "detectable_format:constrained_response": lambda text: any(choice in text for choice in _CHOICES),
    "detectable_format:json_format": _is_json,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(_BULLET.findall(text)) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(inside.strip()) for form in _HIGHLIGHTS for inside in form.findall(text)) >= num_highlights
    ),
    "detectable_format:title": _has_title,
    "keywords:existence": lambda text, keywords: all(_occurrences(word, text) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, relation, frequency: _compare(
        _occurrences(keyword, text), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_relation, let_frequency: _compare(
        _occurrences(letter, text), let_relation, let_frequency
    ),
    "language:response_language": _is_in_language,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(_separated(text, "***")) == num_paragraphs,
    "length_constraints:number_sentences": lambda text, relation, num_sentences: _compare(
        len(_SENTENCE_END.findall(f"\n{text.strip()}")) + 1, relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, relation, num_words: _compare(
        len(_WORD.findall(text)), relation, num_words
    ),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
}  # the rule of each kind of instruction: a function of the response and the values in `kwargs`
