"""Text in pages and in Markdown, the table of sample responses, and the report in a browser."""

import re

import pytest
from markdown_it import MarkdownIt

from rlcore.evaluation.result import ValidationResult
from rlcore.report.document import Finding, Report, Tile
from rlcore.report.page import escape, markdown_of, sample_table
from rlcore.report.record import read_run
from tests.helpers.chromium import open_tab
from tests.helpers.reports import HOSTILE, parse


def test_hostile_text_stays_text_in_markdown():
    """The summary goes into Prefect's and MLflow's pages, which render Markdown."""
    tile = Tile(HOSTILE[1], HOSTILE[0], HOSTILE[1])
    finding = Finding(HOSTILE[0], HOSTILE[1], "", HOSTILE[0], HOSTILE[1])
    report = Report("run report", HOSTILE[0], HOSTILE[1], HOSTILE[0], "", (), tiles=(tile,), findings=(finding,),
                    missing=HOSTILE, facts=HOSTILE, failure=HOSTILE[1])  # fmt: skip
    text = markdown_of(report)
    page = parse(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert set(page.tags) <= {"h1", "h2", "p", "strong", "ul", "li"}
    assert page.attributes == []
    assert HOSTILE[0] in page.words
    assert r"http\://evil" in text, "readers that make links of bare addresses find none"
    assert "http://" not in text
    assert "&#" not in text, "Prefect's page shows such an entity as it is written"


def test_backticks_become_code(grpo_report):
    page = grpo_report.html.read_text()
    assert "<code>val-core/all</code>" in page
    assert "`" not in re.sub(r"<(script|style|svg|pre)\b.*?</\1>", "", page, flags=re.DOTALL)


LINK = re.compile(r"https?://|www\.|[\w.+-]+@[\w-]+(\.\w)+")
"""An address that GFM shows as a link."""


@pytest.mark.parametrize(
    "text",
    [
        *("- a", "1. a", "1) a", "123456789. a", "1.", "# a", "+ a", "= a", "a\n- b"),
        *("http://a.example", "see www.a.example", "me@a.b.example"),
        *("0.3359", "2,303", "1.5 of 3", "\u22120.5", "mean_at_4", "val-core/x/acc/mean_at_16."),
    ],
)
def test_escaped_text_is_shown_as_it_is(text):
    shown = text.replace("\n", " ⏎ ")
    assert MarkdownIt("commonmark").render(escape(text)) == f"<p>{shown}</p>\n"
    assert "&" not in escape(text)  # Prefect's page shows an entity by number as it is written
    assert not LINK.search(escape(text))


@pytest.mark.program("chromium")
def test_report_opens_without_browser_errors(grpo_report, tmp_path):
    with open_tab(tmp_path / "profile") as tab:
        tab.open(grpo_report.html)
        tab.click('nav a[href="#configuration"]')
        tab.wait("location.hash === '#configuration'")
        assert tab.value("document.documentElement.scrollWidth <= window.innerWidth")
        drawn = tab.value(
            "[...document.querySelectorAll('svg.chart')].map((svg) => svg.getBoundingClientRect().height)"
        )
        assert len(drawn) >= 10
        assert min(drawn) > 100
        tab.click("#t-metrics summary")
        assert tab.value("document.querySelector('#t-metrics').open")
        light = tab.value("getComputedStyle(document.querySelector('svg.chart text')).fill")
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert tab.value("getComputedStyle(document.querySelector('svg.chart text')).fill") != light
        assert tab.problems == []


def test_samples_answer_the_same_problem(grpo_run):
    before, after = (ValidationResult.read(grpo_run / "validation" / f"{name}.json") for name in ("before", "after"))
    first, *_ = sample_table(read_run(grpo_run)).rows
    was, became = next(
        (a, b) for a, b in zip(before.problems, after.problems, strict=True) if not a.greedy.solved and b.greedy.solved
    )
    assert [cell.text.partition("\n")[0] for cell in first] == [
        "newly solved", was.prompt_text, first[2].text, was.greedy.text, became.greedy.text
    ]  # fmt: skip
