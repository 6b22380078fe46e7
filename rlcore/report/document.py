"""A report before it is HTML or JSON: sections of tables, pictures and texts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

from markupsafe import Markup
from pydantic import JsonValue

from rlcore.evaluation.stats import Interval
from rlcore.report import numbers

Tone = Literal["", "good", "bad", "watch", "muted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: `text` for people, `value` for programs."""

    text: str
    value: JsonValue = None
    tone: Tone = ""


Kind = Literal["text", "code", "number", "score", "share", "percent", "seconds", "signed", "difference"]
Value = Cell | Interval | str | float | None
"""What a row has in a column."""
Row = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. `kind` says how its values are shown; a `difference` is an interval that is toned."""

    title: str
    kind: Kind = "text"

    @property
    def style(self) -> str:
        """Numbers are set to the right, code in its own type."""
        return self.kind if self.kind in ("text", "code") else "number"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. `name` is its key in the JSON; `folded` hides it behind its title."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn chart: markup to be put into a page, and the name of its files (`figures/<name>.png`)."""

    name: str
    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side. `absent` has the titles of those with nothing to show, `flat` of those that are 0."""

    pictures: tuple[Picture, ...]
    absent: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph, or something to copy into a terminal."""

    text: str
    is_code: bool = False


Block = Table | Gallery | Prose


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter. `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A key figure with its label."""

    label: str
    text: str
    detail: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion, the rule by which it was drawn, and the numbers that went into the rule."""

    topic: str
    verdict: str
    tone: Tone
    statement: str
    rule: str
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. `genre` is its kind: run report or comparison."""

    genre: str
    title: str
    subtitle: str
    state: str
    state_tone: Tone
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    """When and on what it ran, each in a few words."""
    failure: str = ""
    """How the run failed; '' where it did not."""

    def tables(self) -> Sequence[Table]:
        """All tables, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Table)]


def table(
    name: str,
    title: str,
    columns: Mapping[str, Kind],
    rows: Iterable[Sequence[Value]],
    note: str = "",
    *,
    folded: bool = False,
) -> Table:
    """A table whose values are shown as their columns say: kinds by title."""
    cells = tuple(tuple(cell(value, kind) for value, kind in zip(row, columns.values(), strict=True)) for row in rows)
    return Table(name, title, tuple(Column(*column) for column in columns.items()), cells, note, folded)


def cell(value: Value, kind: Kind = "number", unit: str = "") -> Cell:
    """A value as a cell: words and cells as they are, others by the kind, None as a dash.

    >>> cell(0.25, "share"), cell(3.0, unit="GB").text, cell(None).text
    (Cell(text='25%', value=0.25, tone=''), '3 GB', '–')
    """
    match value:
        case Cell():
            return value
        case str():
            return Cell(value, value)
        case None:
            return Cell(numbers.NOTHING, None, "muted")
        case Interval() if kind == "difference":
            tone: Tone = "" if not value.excludes_zero else "good" if value.value > 0 else "bad"
            return Cell(numbers.signed_interval(value), asdict(value), tone)
        case Interval():
            return Cell(numbers.interval(value), asdict(value))
    shown = _SHOWN.get(kind, numbers.compact)(value)
    return Cell(f"{shown} {unit}" if unit else shown, value)


_SHOWN: Mapping[Kind, Callable[[float], str]] = {
    "score": numbers.fixed,
    "share": numbers.percent,
    "percent": partial(numbers.percent, decimals=2),
    "seconds": numbers.duration,
    "signed": numbers.signed,
}
