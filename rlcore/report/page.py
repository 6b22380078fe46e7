"""Pages rendered from templates, the Markdown summary of a report, and a table of sample responses."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as html_escape

from rlcore.evaluation.result import Response
from rlcore.report.document import Cell, Kind, Report, Row, Table, Tone, compact, table
from rlcore.report.plots import DARK, LIGHT
from rlcore.report.record import RunRecord

_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_MAIL = re.compile(r"(@[\w-]+)\.(?=\w)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def page(template: str, **values: Any) -> str:
    """Render a template of the folder `templates/`."""
    return _TEMPLATES.get_template(template).render(light=LIGHT, dark=DARK, **values)


def responses_page() -> str:
    """Return the page that shows recorded responses. The content security policy allows only the page's own script."""
    script = _TEMPLATES.get_template("answers.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page("answers.html.j2", script=Markup(script), digest=digest)


def markdown_of(report: Report) -> str:
    """Return the title, the key metrics and the findings of a report as Markdown."""
    lines = [f"# {escape(report.title)}", escape(report.subtitle)]
    lines += [f"**{escape(text)}**" for text in (report.state, report.failure) if text]
    lines += [escape(" · ".join(report.facts))] if report.facts else []
    lines += [f"- {escape(tile.label)}: **{escape(tile.text)}** {escape(tile.detail)}" for tile in report.tiles]
    lines += [f"- Missing: {escape(text)}" for text in report.missing]
    lines.append("## Findings")
    for found in report.findings:
        lines.append(f"- **{escape(found.topic)}: {escape(found.verdict)}.** {escape(found.statement)}")
        lines.append(f"  Rule: {escape(found.rule)}")
    return "\n\n".join(lines) + "\n"


def escape(text: str) -> str:
    r"""Escape a text so that Markdown shows it literally in one line, without markup, HTML or links.

    >>> escape("a|b\n<img src=x> ![x](y)")
    'a\\|b ⏎ &lt;img src=x&gt; \\!\\[x\\](y)'
    """
    text = text.replace("\r\n", "\n").replace("\n", " ⏎ ")
    text = _CONTROL.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))
    # Most readers link bare addresses. Prefect's page shows numeric entities literally, so none are used.
    return _MAIL.sub(r"\1\\.", text.replace("://", "\\://").replace("www.", "www\\."))


def prose(text: str) -> Markup:
    """Convert a text to HTML. Text in backticks becomes code.

    >>> prose("over all, as `val-core/all` <b>")
    Markup('over all, as <code>val-core/all</code> &lt;b&gt;')
    """
    return Markup(_CODE_SPAN.sub(r"<code>\1</code>", str(html_escape(text))))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["prose"] = prose
_TEMPLATES.filters["kind"] = lambda block: type(block).__name__
SAMPLES_OF_A_KIND = 3
"""The maximum number of problems in the table of sample responses for each kind of change, such as `newly solved`."""
_KINDS: Mapping[tuple[bool, bool], tuple[str, Tone]] = {
    (False, True): ("newly solved", "good"),
    (True, False): ("lost", "bad"),
    (False, False): ("still unsolved", ""),
    (True, True): ("solved both times", ""),
}


def sample_table(record: RunRecord) -> Table:
    """Return a table with one row per problem: a response before training and a response after training. The rows are
    grouped by kind of change, such as `newly solved`. Each kind has at most `SAMPLES_OF_A_KIND` rows."""
    rows: dict[str, list[Row]] = {kind: [] for kind, _ in _KINDS.values()}
    later = {problem.prompt_id: problem for problem in record.after.problems} if record.after is not None else {}
    before = record.before.problems if record.before is not None else ()
    for problem in sorted(before, key=lambda problem: problem.prompt_id):
        if (other := later.get(problem.prompt_id)) is None:
            continue
        # the greedy response, or the first sample without one
        was, became = (each.greedy or each.samples[0] for each in (problem, other))
        if was.failure is not None or became.failure is not None:
            continue
        kind, tone = _KINDS[was.solved, became.solved]
        if len(rows[kind]) < SAMPLES_OF_A_KIND:
            truth = truth_text(problem.ground_truth_json)
            shown = (f"{each.text}\n({_words(each)})" for each in (was, became))
            rows[kind].append((Cell(kind, kind, tone), problem.prompt_text, truth, *shown))
    columns: dict[str, Kind] = {"": "text", "Problem": "code", "Reference": "code", "Before": "code", "After": "code"}
    note = "The greedy response or the first sample. `millrace ui` shows every response."
    return table("samples", "Responses before and after", columns, chain.from_iterable(rows.values()), note)


def _words(answer: Response) -> str:
    parts = "".join(f", {name} {compact(value, 3)}" for name, value in answer.parts.items())
    cut = ", truncated" if answer.finish_reason == "length" else ""
    return f"score {answer.score:.3g}{parts}, {answer.num_tokens} tokens{cut}"


def truth_text(ground_truth_json: str) -> str:
    """Return a ground truth in one line.

    >>> truth_text('{"target": 7, "numbers": [3, 4]}')
    'target 7, numbers 3 4'
    """
    try:
        truth = json.loads(ground_truth_json)
    except ValueError:
        return ground_truth_json
    if not isinstance(truth, dict):
        return str(truth)
    plain = {key: " ".join(map(str, each)) if isinstance(each, list) else each for key, each in truth.items()}
    return ", ".join(f"{key} {value}" for key, value in plain.items())
