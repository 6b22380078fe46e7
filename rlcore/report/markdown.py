"""The head of a report as Markdown, for Prefect's artifacts and the description of a run in MLflow."""

import re
from collections.abc import Iterable

from rlcore.report.document import Cell, Column, Report, Table

_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def escape(text: str) -> str:
    """Text that no Markdown reader takes for markup, HTML or a link, on one line.

    >>> escape("a|b\\n<img src=x> ![x](y)")
    'a\\\\|b ⏎ &lt;img src=x&gt; \\\\!\\\\[x\\\\](y)'
    """
    text = text.replace("\r\n", "\n").replace("\n", " ⏎ ")
    text = _CONTROL.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))
    # A bare address becomes a link in most readers: the colon is written so that it is none.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def code(text: str) -> str:
    """A code span that its content cannot end; without the bar that would end a table's cell.

    >>> code("mean@4"), code("a`b|c")
    ('`mean@4`', '`` a`b¦c ``')
    """
    text = _CONTROL.sub(" ", text).replace("|", "¦")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`"


def summary(report: Report, tables: Iterable[Table]) -> str:
    """A report's title, key figures and conclusions, then these tables."""
    lines = [f"# {escape(report.title)}", "", f"{escape(report.subtitle)} · **{escape(report.state)}**", ""]
    lines += _head_lines(report)
    for table in tables:
        lines += _table_lines(table)
    return "\n".join(lines).rstrip() + "\n"


def _head_lines(report: Report) -> list[str]:
    """Key figures, what is missing, and the conclusions."""
    lines = _rows(("", "", ""), [(tile.label, f"**{tile.text}**", tile.detail) for tile in report.tiles])
    if report.missing:
        lines += ["**Missing**", "", *(f"- {escape(text)}" for text in report.missing), ""]
    lines += ["## What was learned", ""]
    for finding in report.findings:
        lines.append(f"- **{escape(finding.topic)}: {escape(finding.verdict)}.** {escape(finding.statement)}")
        lines.append(f"  <br><sub>Rule: {escape(finding.rule)}</sub>")
    return [*lines, ""]


def _rows(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of words that are safe already or made of numbers."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *body, ""] if body else []


def _table_lines(table: Table) -> list[str]:
    """A table with its title and note."""
    lines = [f"### {escape(table.title)}", ""]
    if not table.rows:
        return [*lines, "Nothing here.", ""]
    lines.append(f"| {' | '.join(escape(column.title) for column in table.columns)} |")
    lines.append("|" + "".join("---:|" if column.kind == "number" else "---|" for column in table.columns))
    lines += [
        "| " + " | ".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)) + " |"
        for row in table.rows
    ]
    lines.append("")
    return [*lines, f"{escape(table.note)}", ""] if table.note else lines


def _cell(cell: Cell, column: Column) -> str:
    if column.kind == "code" and cell.text:
        return code(cell.text)
    return escape(cell.text)
