"""Pages and pictures: colours, type, templates, export; the head of a report as Markdown.

matplotlib is imported inside functions, so that nothing else loads it.

A picture is drawn once, in the light colours. In a page each colour becomes a CSS variable, so that the page's dark
side recolours it; in the files beside it stays as drawn.
"""

import base64
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from rlcore.report import numbers
from rlcore.report.document import Cell, Column, Gallery, Picture, Report, Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: Mapping[str, tuple[str, str]] = {
    "surface": ("#ffffff", "#12161c"),
    "ink": ("#1b1f26", "#e8ecf2"),
    "muted": ("#5c6675", "#9ba6b6"),
    "grid": ("#e5e8ed", "#2a313c"),
    "blue": ("#2b6cd9", "#74a9ff"),
    "orange": ("#d4690f", "#f2a25c"),
    "green": ("#1d8a5a", "#50c893"),
    "purple": ("#7a4fd0", "#b598f7"),
    "red": ("#c8372d", "#ff7d73"),
    "teal": ("#0f8b96", "#52c7d2"),
    "pink": ("#bf3f8a", "#ef8fc8"),
    "sand": ("#a8842c", "#d9b45f"),
    "grey": ("#8b95a5", "#7d8898"),
}
"""Colours by role, on a light and on a dark page. Each light one occurs once: the page finds a role by it."""

LIGHT, DARK = ({role: pair[side] for role, pair in _COLOURS.items()} for side in (0, 1))

CYCLE = ("blue", "orange", "green", "purple", "red", "teal", "pink", "sand")
"""Colours of lines, in order."""

WIDTH_IN = 6.4
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9,
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["grey"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["grey"],
    "ytick.color": LIGHT["grey"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": LIGHT["ink"],
    "text.color": LIGHT["ink"],
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "millrace",  # the same picture gives the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
}
_TEMPLATES = Path(__file__).with_name("templates")
_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
_PNG_DPI = 160
_LEGEND_CHARACTERS, _KEY_CHARACTERS = 84, 6
"""Characters of a legend's line, and how many of them the drawn sample of a line with its gaps takes."""
_PAGE_FONT = "var(--font-text)"


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture that can be drawn: `draw` fills an empty figure. `flat`: why it may be 0 at every step."""

    name: str
    title: str
    caption: str
    draw: "Callable[[Figure], object]"
    height_in: float = 2.7
    flat: str = ""


@contextmanager
def house_style() -> Iterator[None]:
    """matplotlib set to the report's look inside the block."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def gallery_of(charts: Iterable[Chart], folder: Path) -> Gallery:
    """The pictures, written into the folder; in words those that would be empty, or one line at 0."""
    pictures, absent, flat = [], [], []
    for chart in charts:
        match _render(chart, folder):
            case Picture() as picture:
                pictures.append(picture)
            case "flat":
                flat.append(f"{chart.title} ({chart.flat})" if chart.flat else chart.title)
            case _:
                absent.append(chart.title)
    return Gallery(tuple(pictures), tuple(absent), tuple(flat))


def _render(chart: Chart, folder: Path) -> Picture | Literal["empty", "flat"]:
    """Draw a chart, write `<name>.svg` and `<name>.png` into the folder, and return it for a page."""
    from matplotlib.figure import Figure

    with house_style():
        figure = Figure(figsize=(WIDTH_IN, chart.height_in), layout="constrained")
        chart.draw(figure)
        if not any(axes.has_data() for axes in figure.axes):
            return "empty"
        if not any(axes.dataLim.intervaly.any() for axes in figure.axes):
            return "flat"
        svg = _svg(figure)
        figure.set_layout_engine("none")  # it stays as laid out for the SVG
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{chart.name}.svg").write_text(svg, encoding="utf-8")
        figure.savefig(folder / f"{chart.name}.png", dpi=_PNG_DPI, facecolor=LIGHT["surface"], metadata={})
    return Picture(chart.name, chart.title, chart.caption, for_page(svg, chart.name, chart.title))


def _svg(figure: "Figure") -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def for_page(svg: str, name: str, title: str) -> str:
    """An SVG file as an element of a page: no prolog, no address, ids of its own, colours and font of the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    for role, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{role})")
    body = re.sub(r"(font:[^;\"]*?px) [^;\"]*", rf"\1 {_PAGE_FONT}", body)
    size = re.search(r'viewBox="[^"]+"', body)
    assert size is not None, "matplotlib writes a viewBox"
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = f'<svg class="chart" role="img" aria-label="{label}" {size[0]}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, body, count=1)


def tidy(axes: "Axes", *, x: str = "training step", y: str = "", steps: bool = True) -> None:
    """Labels with units, whole steps on the x axis, short numbers on both."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=steps, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.tick(value)))


def legend(axes: "Axes") -> None:
    """Above the axes, on the left, where no line runs, in as many columns as are whole; only if there is something to
    tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    longest = max(map(len, labels)) + _KEY_CHARACTERS
    axes.legend(
        handles,
        [fill(label, _LEGEND_CHARACTERS - _KEY_CHARACTERS) for label in labels],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=max(1, min(4, _LEGEND_CHARACTERS // longest)),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=1.4,
        handletextpad=0.5,
    )


def page(template: str, **values: Any) -> str:
    """A template of `templates/` filled in."""
    return _environment().get_template(template).render(light=LIGHT, dark=DARK, **values)


def scripted_page(template: str, script: str, **values: Any) -> str:
    """A template with a script of ours, the only one that the page's policy lets run."""
    text = _environment().get_template(script).render()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return page(template, script=trusted(text), digest=digest, **values)


def answers_page() -> str:
    """The page that asks its server for kept answers."""
    return scripted_page("answers.html.j2", "answers.js.j2")


def live_page() -> str:
    """The page that asks its server, again and again, how a run stands."""
    return scripted_page("live.html.j2", "live.js.j2")


def trusted(text: str) -> "Markup":
    """Text that goes into a page as it is. Only for what this package wrote itself and made safe for its place."""
    from markupsafe import Markup

    return Markup(text)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["kind"] = lambda block: type(block).__name__
    environment.globals["parts"] = numbers.score_parts
    # Markdown: a page's own escaping is not for it.
    environment.filters["md"] = lambda text: trusted(escape(text))
    environment.globals["md_cell"] = lambda cell, column: trusted(_cell(cell, column))
    # Only what `for_page` made of matplotlib's own output goes through here.
    environment.globals["svg_of"] = lambda picture: trusted(picture.svg)
    return environment


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


def markdown_of(report: Report, tables: Iterable[Table]) -> str:
    """A report's title, key figures and conclusions, then these tables."""
    return page("summary.md.j2", report=report, tables=list(tables)).rstrip() + "\n"


def _cell(cell: Cell, column: Column) -> str:
    if column.style == "code" and cell.text:
        return code(cell.text)
    return escape(cell.text)
