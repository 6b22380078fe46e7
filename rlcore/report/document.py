"""A report before it is HTML or JSON: sections of tables, pictures, texts and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from rlcore.evaluation import Answer, Interval
from rlcore.report import numbers

Tone = Literal["", "good", "bad", "watch", "muted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: `text` for people, `value` for programs."""

    text: str
    value: JsonValue = None
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. Numbers are set to the right, code in its own type."""

    title: str
    kind: Literal["text", "number", "code"] = "text"


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
    """A drawn chart: SVG to be put into a page, and the name of its files (`figures/<name>.png`)."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side. `absent` has the titles of those with nothing to show."""

    pictures: tuple[Picture, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """Something to copy into a terminal."""

    text: str


@dataclass(frozen=True, slots=True)
class SamplePair:
    """The answers to one problem before and after training."""

    label: str
    tone: Tone
    prompt: str
    truth: str
    before: Answer
    after: Answer
    solved_before: str
    solved_after: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Problems with their answers before and after."""

    pairs: tuple[SamplePair, ...]


Block = Table | Gallery | Prose | Code | Samples


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter. `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A key figure."""

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
    numbers: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. `genre` is its kind: run report or comparison."""

    genre: str
    title: str
    subtitle: str
    state: str
    state_tone: Tone
    tiles: tuple[Tile, ...]
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]
    sections: tuple[Section, ...]

    def tables(self) -> Sequence[Table]:
        """All tables, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Table)]


def text(value: str, tone: Tone = "") -> Cell:
    """A cell of words."""
    return Cell(value, value, tone)


def number(value: float | None, unit: str = "") -> Cell:
    """A cell with a number and, if it has one, its unit."""
    if value is None:
        return Cell(numbers.NOTHING, None, "muted")
    shown = numbers.compact(value)
    return Cell(f"{shown} {unit}" if unit else shown, value)


def score(value: float | None) -> Cell:
    """A cell with a score."""
    return Cell(numbers.fixed(value), value)


def share(value: float | None, decimals: int = 0) -> Cell:
    """A cell with a share as per cent."""
    return Cell(numbers.percent(value, decimals), value)


def seconds(value: float | None) -> Cell:
    """A cell with a duration."""
    return Cell(numbers.duration(value), value)


def interval(found: Interval | None) -> Cell:
    """A cell with a score and its interval."""
    if found is None:
        return Cell(numbers.NOTHING, None, "muted")
    return Cell(numbers.interval(found), interval_value(found))


def difference(found: Interval) -> Cell:
    """A cell with a gain or loss and its interval; toned where the interval excludes 0."""
    tone: Tone = "" if not found.excludes_zero else "good" if found.value > 0 else "bad"
    return Cell(numbers.signed_interval(found), interval_value(found), tone)


def interval_value(found: Interval) -> dict[str, JsonValue]:
    """An interval as JSON."""
    return {"value": found.value, "low": found.low, "high": found.high}
