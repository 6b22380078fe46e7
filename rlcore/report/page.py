"""Pages from templates, and the head of a report as Markdown."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as html_escape
from pydantic import JsonValue

from rlcore.report.document import Report
from rlcore.report.plots import DARK, LIGHT

_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_MAIL = re.compile(r"(@[\w-]+)\.(?=\w)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def page(template: str, **values: Any) -> str:
    """A template of `templates/` filled in."""
    return _TEMPLATES.get_template(template).render(light=LIGHT, dark=DARK, **values)


def answers_page(title: str = "", data: JsonValue = None, num_left_out: int = 0) -> str:
    """The page of answers: of `data`, which it holds, or without them of the server that it comes from. Its policy lets
    no script run but our own."""
    script = _TEMPLATES.get_template("answers.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"title": title, "data": data, "num_left_out": num_left_out}
    return page("answers.html.j2", script=Markup(script), digest=digest, **values)


def markdown_of(report: Report) -> str:
    """A report's title, key figures and conclusions."""
    lines = [f"# {escape(report.title)}", escape(report.subtitle)]
    lines += [f"**{escape(text)}**" for text in (report.state, report.failure) if text]
    lines += [escape(" · ".join(report.facts))] if report.facts else []
    lines += [f"- {escape(tile.label)}: **{escape(tile.text)}** {escape(tile.detail)}" for tile in report.tiles]
    lines += [f"- Missing: {escape(text)}" for text in report.missing]
    lines.append("## What was learned")
    for found in report.findings:
        lines.append(f"- **{escape(found.topic)}: {escape(found.verdict)}.** {escape(found.statement)}")
        lines.append(f"  Rule: {escape(found.rule)}")
    return "\n\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text that no Markdown reader takes for markup, HTML or a link, on one line.

    >>> escape("a|b\\n<img src=x> ![x](y)")
    'a\\\\|b ⏎ &lt;img src=x&gt; \\\\!\\\\[x\\\\](y)'
    """
    text = text.replace("\r\n", "\n").replace("\n", " ⏎ ")
    text = _CONTROL.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))
    # A bare address becomes a link in most readers. No entity by number: Prefect's page shows those as written.
    return _MAIL.sub(r"\1\\.", text.replace("://", "\\://").replace("www.", "www\\."))


def prose(text: str) -> Markup:
    """Text of a page; what stands between backticks as code.

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
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
