"""Pictures: colours, look, lines and intervals over steps, and how a drawn chart becomes a part of a page.

matplotlib is imported inside functions, so that nothing else loads it.

A picture is drawn once, in the light colours. In a page each colour becomes a CSS variable, so that the page's dark
side recolours it; in the files beside it stays as drawn.
"""

import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from rlcore.evaluation.stats import Interval
from rlcore.report.document import Gallery, Picture, short
from rlcore.report.series import Series, band_of, smooth, thin, window_of

if TYPE_CHECKING:
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
    "lime": ("#6b8a12", "#b4d455"),
    "grey": ("#8b95a5", "#7d8898"),
}
"""Colours by role, on a light and on a dark page. Each light one occurs once: the page finds a role by it."""

LIGHT, DARK = ({role: pair[side] for role, pair in _COLOURS.items()} for side in (0, 1))

CYCLE = ("blue", "orange", "green", "purple", "red", "teal", "pink", "sand")
"""Colours of lines, in order."""

MAX_POINTS = 400
"""Points on a line at most: more cannot be seen."""

FEW_POINTS = 12
"""A line of so few points shows them."""

WIDTH_IN = 6.4
_PNG_DPI = 160
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
SETTINGS: Any = {
    "font.size": 8.5,
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["grey"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "xtick.color": LIGHT["grey"],
    "ytick.color": LIGHT["grey"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": LIGHT["ink"],
    "text.color": LIGHT["ink"],
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "millrace",  # the same picture gives the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
}
_LEGEND_CHARACTERS, _KEY_CHARACTERS = 84, 6
"""Characters of a legend's line, and how many of them the drawn sample of a line with its gaps takes."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture that can be drawn: `draw` fills an empty figure. `flat`: why it may be 0 at every step."""

    name: str
    title: str
    caption: str
    draw: "Callable[[Figure], object]"
    height_in: float = 2.7
    flat: str = ""


def gallery_of(charts: Iterable[Chart], folder: Path) -> Gallery:
    """The pictures, written into the folder; in words those that would be empty, or one line at 0."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    pictures, absent, flat = [], [], []
    with rc_context(SETTINGS):
        for chart in charts:
            figure = Figure(figsize=(WIDTH_IN, chart.height_in), dpi=_PNG_DPI)
            chart.draw(figure)
            if not any(axes.has_data() for axes in figure.axes):
                absent.append(chart.title)
            elif not any(axes.dataLim.intervaly.any() for axes in figure.axes):
                flat.append(f"{chart.title} ({chart.flat})" if chart.flat else chart.title)
            else:
                pictures.append(_write_chart(chart, figure, folder))
    return Gallery(tuple(pictures), tuple(absent), tuple(flat))


def _write_chart(chart: Chart, figure: "Figure", folder: Path) -> Picture:
    """Write `<name>.svg` and `<name>.png` into the folder, and return the picture for a page."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    for axes in figure.axes:
        legend(axes)
    # Laid out once for both files: a figure that has an engine of its own is drawn in vain before each.
    ConstrainedLayoutEngine().execute(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata=_NO_METADATA)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chart.name}.svg").write_text(buffer.getvalue(), encoding="utf-8")
    figure.savefig(folder / f"{chart.name}.png", dpi=_PNG_DPI, facecolor=LIGHT["surface"], metadata={})
    return Picture(chart.name, chart.title, chart.caption, _inline_svg(buffer.getvalue(), chart.name, chart.title))


def _inline_svg(svg: str, name: str, title: str) -> Markup:
    """matplotlib's SVG as an element of a page: no prolog, no address, ids of its own, colours and font of the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", body).replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", body)
    for role, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{role})")
    body = re.sub(r"(font:[^;\"]*?px) [^;\"]*", r"\1 var(--font-text)", body)
    size = re.search(r'viewBox="[^"]+"', body)
    assert size is not None, "matplotlib writes a viewBox"
    head = f'<svg class="chart" role="img" aria-label="{html.escape(title)}" {size[0]}>'
    return Markup(re.sub(r"<svg[^>]*>", lambda _: head, body, count=1))


# ------------------------------------------------------------------ what charts are drawn with


def plot_series(axes: "Axes", series: Series, colour: str, label: str, *, smoothed: bool = True) -> None:
    """The values faintly and their moving mean; the values alone where they are few or `smoothed` is off."""
    points = thin(series, MAX_POINTS)
    few = len(series) <= FEW_POINTS
    if few or not smoothed:
        marker = "o" if few else ""
        axes.plot(points.index, points, color=LIGHT[colour], marker=marker, markersize=3.5, label=label)
        return
    mean = thin(smooth(series), MAX_POINTS)
    axes.plot(points.index, points, color=LIGHT[colour], alpha=0.28, linewidth=0.9)
    axes.plot(mean.index, mean, color=LIGHT[colour], label=f"{label} (mean of {window_of(series)} steps)")


def plot_intervals(
    axes: "Axes", points: Iterable[tuple[float, Interval]], colour: str, label: str = "", **style: Any
) -> None:
    """Values with their intervals, each at its x; `style`: more of what `Axes.errorbar` takes."""
    x, found = zip(*points, strict=True)
    ends = np.array([(one.value - one.low, one.high - one.value) for one in found]).clip(0).T
    look = {"marker": "o", "markersize": 4, "capsize": 2.5, "elinewidth": 1.0, "color": LIGHT[colour], **style}
    axes.errorbar(x, [one.value for one in found], ends, label=label, **look)


def plot_group(axes: "Axes", curves: Sequence[Series], colour: str, label: str) -> None:
    """Curves of the runs of one setting: one alone as it is, several as their mean with a band over their range."""
    if len(curves) == 1:
        marker = "o" if len(curves[0]) <= FEW_POINTS else ""
        axes.plot(curves[0].index, curves[0], color=LIGHT[colour], marker=marker, markersize=3.5, label=label)
        return
    band = band_of(curves)
    if band.index[0] == band.index[-1]:  # one point each: a range has no width to be drawn over
        plot_intervals(axes, [(band.index[0], Interval(*band.iloc[0]))], colour, label)
        return
    axes.fill_between(band.index, band["min"], band["max"], color=LIGHT[colour], alpha=0.16, linewidth=0)
    axes.plot(band.index, band["mean"], color=LIGHT[colour], label=label)


def format_axes(axes: "Axes", *, x: str = "training step", y: str = "", steps: bool = True) -> None:
    """Labels with units, whole steps on the x axis, short numbers on both."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=steps, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


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
