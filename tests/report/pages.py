"""Pages taken apart by Python's own HTML parser, and tables of a report's JSON."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser

from rlcore.report.build import ReportFiles

VOID = {"meta", "br", "img", "link", "input", "hr", "base"}


@dataclass
class Page(HTMLParser):
    """Tags, attributes, text and tables of a page."""

    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    _table: str = ""
    _cell: list[str] | None = None

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        if str(found.get("id", "")).startswith("t-"):
            self._table = str(found["id"])[2:]
        if tag == "tr":
            self.tables.setdefault(self._table, []).append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._table][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data):
        self.text.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def words(self) -> str:
        return "".join(self.text)


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == [], f"never closed: {page.open}"
    return page


def table(files: ReportFiles, name: str) -> list[dict[str, object]]:
    """Rows of a table of the JSON, by column title."""
    found = json.loads(files.json.read_text())["tables"][name]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
