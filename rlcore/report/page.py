"""Pages from templates: reports as HTML and their heads as Markdown, the samples browser, the pages of a server."""

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as html_escape

from rlcore.report import numbers
from rlcore.report.document import Report, Table
from rlcore.report.plots import DARK, LIGHT

_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_MAIL = re.compile(r"(@[\w-]+)\.(?=\w)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def page(template: str, **values: Any) -> str:
    """A template of `templates/` filled in."""
    return _TEMPLATES.get_template(template).render(light=LIGHT, dark=DARK, **values)


def scripted_page(template: str, **values: Any) -> str:
    """A template `<name>.html.j2` with our script `<name>.js.j2`, the only one that the page's policy lets run."""
    script = _TEMPLATES.get_template(template.replace(".html.", ".js.")).render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page(template, script=Markup(script), digest=digest, **values)


def markdown_of(report: Report, tables: Iterable[Table]) -> str:
    """A report's title, key figures and conclusions, then these tables."""
    return page("summary.md.j2", report=report, tables=list(tables)).rstrip() + "\n"


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


def code(text: str) -> str:
    """A code span that its content cannot end; without the bar that would end a table's cell.

    >>> code("mean@4"), code("a`b|c"), code("")
    ('`mean@4`', '`` a`b¦c ``', '')
    """
    text = _CONTROL.sub(" ", text).replace("|", "¦")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`" if text else ""


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
_TEMPLATES.filters |= {"parts": numbers.score_parts, "md": escape, "code": code, "prose": prose}
_TEMPLATES.filters["kind"] = lambda block: type(block).__name__
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
