"""The content of a report, independent of HTML and JSON, and functions that format values."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

from markupsafe import Markup
from pydantic import JsonValue

from rlcore.evaluation.stats import Interval

Tone = Literal["", "good", "bad", "watch", "muted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. `text`: the formatted text in the page. `value`: the unformatted value in the JSON file."""

    text: str
    value: JsonValue = None
    tone: Tone = ""


Kind = Literal["text", "code", "number", "score", "share", "percent", "seconds", "signed", "difference"]
"""The kind of values in a column, which determines their format. An interval of the kind `difference` is marked as
good if it is above 0 and as bad if it is below 0."""
Value = Cell | Interval | str | float | None
"""The content of a cell before formatting."""
Row = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of cells. `name`: the key in the JSON file. `folded`: True if the table is collapsed at first."""

    name: str
    title: str
    columns: Mapping[str, Kind]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    folded: bool = False

    @property
    def styles(self) -> list[str]:
        """The CSS class of each column. Numbers are right-aligned, and code is monospaced."""
        return [kind if kind in ("text", "code") else "number" for kind in self.columns.values()]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn chart. `svg`: the image for the page. `name`: the name of the image files (`figures/<name>.png`)."""

    name: str
    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures in a row, and the titles of the charts that were not drawn."""

    pictures: tuple[Picture, ...]
    absent: tuple[str, ...] = ()  # without data
    flat: tuple[str, ...] = ()  # 0 everywhere


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph, or a command to copy."""

    text: str
    is_code: bool = False


Block = Table | Gallery | Prose


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a report. `name` is its anchor in the page."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A key metric with its label."""

    label: str
    text: str
    detail: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion about a run, the rule that led to the conclusion, and the numbers that support it."""

    topic: str
    verdict: str
    tone: Tone
    statement: str
    rule: str
    numbers: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one run, or the comparison of several runs. `genre` distinguishes the two."""

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
    failure: str = ""


NO_VALUE = "–"
"""The text of a missing value."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
# Smaller numbers are written with an exponent.
_SCIENTIFIC_BELOW = 1e-3


def compact(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` significant digits. Integers keep all digits, and thousands are separated.

    >>> [compact(value) for value in (0.61234, 12345.6, 0.00009, 3.0, 1484883.0, 0.0)]
    ['0.6123', '12,346', '9e-5', '3', '1,484,883', '0']
    """
    if value is None or math.isnan(value):
        return NO_VALUE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0 or (value == round(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    if abs(value) < _SCIENTIFIC_BELOW:
        return _scientific(value, min(digits, 3) - 1)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(value: float) -> str:
    """Format a number for an axis or a tile. Large numbers get three digits and a letter.

    >>> [short(value) for value in (0.25, 12345, 1500000, 3.1e9, 0.0002, -3, 9999.7, 999600)]
    ['0.25', '12.3k', '1.5M', '3.1G', '2e-4', '-3', '10k', '1M']
    """
    # A number below a limit is rounded to less than 1,000 of its unit.
    for limit, scale, letter in ((999.5e9, 1e12, "T"), (999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (9_999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.3g}{letter}"
    return _scientific(value, 1) if value and abs(value) < _SCIENTIFIC_BELOW else f"{value:.4g}"


def _scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def fixed(value: float | None) -> str:
    """Format a score with three decimals."""
    return NO_VALUE if value is None or math.isnan(value) else f"{value:,.3f}"


def signed(value: float) -> str:
    """Format a number with its sign, even if it is positive.

    >>> signed(0.25), signed(-0.25), signed(-0.0001)
    ('+0.250', '−0.250', '0.000')
    """
    return fixed(0.0) if abs(value) < 0.0005 else f"{value:+,.3f}".replace("-", "−")


def interval(found: Interval, shown: Callable[[float], str] = fixed) -> str:
    """Format a score and its interval.

    >>> interval(Interval(0.5, 0.41, 0.59))
    '0.500 [0.410, 0.590]'
    """
    return f"{shown(found.value)} [{shown(found.low)}, {shown(found.high)}]"


signed_interval = partial(interval, shown=signed)
"""A function that formats a difference and its interval, with signs."""


def percent(share: float | None, decimals: int = 0) -> str:
    """Format a share as a percentage.

    >>> percent(0.613), percent(0.0004)
    ('61%', '<1%')
    """
    if share is None or math.isnan(share):
        return NO_VALUE
    if 0 < share < 0.5 * 10 ** -(decimals + 2):
        return f"<{10**-decimals:g}%"
    return f"{share:.{decimals}%}"


def duration(seconds: float | None) -> str:
    """Format seconds in readable units.

    >>> [duration(value) for value in (0.032, 5.25, 165.0, 7800.0, 198000.0)]
    ['32 ms', '5.2 s', '2 min 45 s', '2 h 10 min', '2 d 7 h']
    """
    if seconds is None or math.isnan(seconds):
        return NO_VALUE
    for (unit_s, unit), (finer_s, finer) in itertools.pairwise(_UNITS):
        if seconds >= unit_s:
            whole, rest = divmod(round(seconds / finer_s), unit_s // finer_s)
            return f"{whole} {unit} {rest} {finer}" if rest else f"{whole} {unit}"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def table(
    name: str,
    title: str,
    columns: Mapping[str, Kind],
    rows: Iterable[Sequence[Value]],
    note: str = "",
    *,
    folded: bool = False,
) -> Table:
    """Build a table. `columns`: the title of each column and the kind of its values."""
    cells = tuple(tuple(cell(value, kind) for value, kind in zip(row, columns.values(), strict=True)) for row in rows)
    return Table(name, title, columns, cells, note, folded)


def cell(value: Value, kind: Kind = "number", unit: str = "") -> Cell:
    """Build a cell. Strings and cells stay unchanged, numbers are formatted by `kind`, and None becomes a dash.

    >>> cell(0.25, "share"), cell(3.0, unit="GB").text, cell(None).text
    (Cell(text='25%', value=0.25, tone=''), '3 GB', '–')
    """
    match value:
        case Cell():
            return value
        case str():
            return Cell(value, value)
        case None:
            return Cell(NO_VALUE, None, "muted")
        case Interval() if kind == "difference":
            tone: Tone = "" if not value.excludes_zero else "good" if value.value > 0 else "bad"
            return Cell(signed_interval(value), asdict(value), tone)
        case Interval():
            return Cell(interval(value), asdict(value))
    shown = _FORMATTERS.get(kind, compact)(value)
    return Cell(f"{shown} {unit}" if unit else shown, value)


_FORMATTERS: Mapping[Kind, Callable[[float], str]] = {
    "score": fixed,
    "share": percent,
    "percent": partial(percent, decimals=2),
    "seconds": duration,
    "signed": signed,
}
