"""Rules of the language checker."""

import pytest

from tests.language.__main__ import page_findings, source_findings


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('"""Weights lie in memory."""', "write is stored in"),
        ("def hand_over(): ...", "hand_over: 'hand over'"),
        ("class StartModel: ...", "StartModel: 'Start Model'"),
        ("def told(): ...", "name a function by a verb"),
        ('"""Whether it is so."""', "a docstring begins with 'Whether'"),
        ('LIMIT = 1\n"""Of a file."""', "a docstring begins with 'Of'"),
    ],
)
def test_source_breaking_a_rule_is_found(source: str, finding: str) -> None:
    assert any(finding in message for _, message in source_findings(source))


@pytest.mark.parametrize("source", ['"""Set `action=tell`."""', "x = study.tell(1)", 'FILE = "told.json"'])
def test_literals_are_exempt(source: str) -> None:
    assert list(source_findings(source)) == []


def test_long_sentence_is_found_with_its_line() -> None:
    ((line, message),) = page_findings(f"# Title\n\nShort.\n\n{'word ' * 31}\n")
    assert line == 5
    assert message.startswith("31 words: word word")


def test_table_cells_are_separate_sentences() -> None:
    assert list(page_findings(f"| {'word ' * 20}| {'word ' * 20}|")) == []
