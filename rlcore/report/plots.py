"""Colors, series over steps, and charts. matplotlib is imported only when a chart is drawn.

A chart is drawn once, in light colors. In a page each color becomes a CSS variable, which the dark mode changes."""

import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from markupsafe import Markup
from scipy.special import stdtrit

from rlcore.evaluation.stats import Interval
from rlcore.report.document import Gallery, Picture, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Series: TypeAlias = pd.Series[float]
else:
    Series = pd.Series  # not generic at runtime
"""The values of one metric, indexed by step in ascending order."""
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
"""The variants of each color for light and dark pages. All light variants must differ from each other, because
each of them is replaced by a different CSS variable in a chart's SVG text."""
LIGHT, DARK = ({role: pair[side] for role, pair in _COLOURS.items()} for side in (0, 1))
CYCLE = ("blue", "orange", "green", "purple", "red", "teal", "pink", "sand")
STYLES: tuple[Mapping[str, Any], ...] = (
    {"zorder": 2.0, "linewidth": 2.4, "linestyle": "-"},
    {"zorder": 2.1, "linewidth": 2.4, "linestyle": (0, (3, 3))},
    {"zorder": 2.2, "linewidth": 1.1, "linestyle": "-"},
    {"zorder": 2.3, "linewidth": 1.1, "linestyle": (0, (6, 6))},
)
"""The styles of the curves in a comparison. A curve with a later style is drawn over the earlier curves, and is
thinner or dashed. Even if four curves coincide, each is therefore visible."""
MAX_POINTS = 400  # of a line
FEW_POINTS = 12  # a line with more has no markers
WIDTH_IN = 6.4
_PNG_DPI = 160
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
SETTINGS: Any = {
    "font.size": 8.5,
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["muted"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["grey"]),
    **dict.fromkeys(("legend.labelcolor", "text.color"), LIGHT["ink"]),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "text.parse_math": False,  # a dollar in a name is no formula
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "millrace",  # reproducible bytes
}
_LEGEND_CHARACTERS, _KEY_CHARACTERS = 84, 8  # of a line of the legend, and of a line sample with its gaps
SMOOTHING_SHARE = 15  # a smoothed curve is the mean over 1/15 of the run, and over at least 3 steps
GRID_POINTS = 120  # at which curves of several seeds are averaged
MIN_STEPS = 10  # in the last third, for a trend


def series_of(points: Iterable[tuple[int, float]]) -> Series | None:
    """Build a series from pairs of step and value, or return None if there are no pairs."""
    found = dict(sorted(points))
    return pd.Series(found, dtype=float) if found else None


def window_of(series: Series) -> int:
    """Return the number of steps that the moving mean in `smooth` covers."""
    return min(len(series), max(3, len(series) // SMOOTHING_SHARE) | 1)  # odd, so that it is centered


def smooth(series: Series) -> Series:
    """Return the centered moving mean of a series. At both ends, the mean covers fewer steps."""
    return series.rolling(window_of(series) // 2 * 2 + 1, center=True, min_periods=1).mean()


def _num_steps(series: Series, share: float) -> int:
    return max(1, round(share * len(series)))


def first_tenth(series: Series) -> float:
    """Return the mean over the first tenth of the run (at least one step)."""
    return float(series.iloc[: _num_steps(series, 0.1)].mean())


def last_tenth(series: Series) -> float:
    """Return the mean over the last tenth of the run (at least one step)."""
    return float(series.iloc[-_num_steps(series, 0.1) :].mean())


def last_third(series: Series) -> Series:
    """Return the values of the last third of the steps (at least one step)."""
    return series.iloc[-_num_steps(series, 1 / 3) :]


def late_mean(series: Series) -> float:
    """Return the mean over the last third of the run."""
    return float(last_third(series).mean())


def without_first_step(series: Series) -> Series:
    """Return all steps except the first, which is a warm-up step. A series of one step is returned unchanged."""
    return series.iloc[min(1, len(series) - 1) :]


def thin(series: Series, most: int) -> Series:
    """Reduce a series to at most `most` points. Each point is the mean of the values and steps of neighboring
    points."""
    if len(series) <= most:
        return series
    stretch = np.arange(len(series)) * most // len(series)
    means = series.groupby(stretch).mean()
    return means.set_axis(series.index.to_series().groupby(stretch).mean().astype(int))


def trend_of(series: Series) -> Interval | None:
    """Fit a least-squares line to the last third of the run. Return the change along the line with a 95% Student-t
    interval, or None for fewer than `MIN_STEPS` steps. The interval assumes independent noise in different steps."""
    part = last_third(series)
    if len(part) < MIN_STEPS:
        return None
    steps = part.index.to_numpy(dtype=float)
    (slope, _), covariance = np.polyfit(steps - steps.mean(), part.to_numpy(), 1, cov=True)
    length = float(steps[-1] - steps[0])
    change = float(slope) * length
    half = float(stdtrit(len(part) - 2, 0.975) * np.sqrt(covariance[0, 0])) * length
    return Interval(change, change - half, change + half)


def series_over(series: Series, totals: Series | None) -> Series:
    """Return the series over the cumulative tokens or seconds in `totals`, or over steps if `totals` is None."""
    return series if totals is None else series.set_axis(totals.reindex(series.index, method="ffill").fillna(0.0))


def band_of(curves: Sequence[Series]) -> pd.DataFrame:
    """Return the columns `mean`, `min` and `max` over several curves at `GRID_POINTS` evenly spaced x values. The
    curves are interpolated, and the x values cover the range that all curves have in common."""
    low, high = max(curve.index[0] for curve in curves), min(curve.index[-1] for curve in curves)
    grid = np.linspace(low, max(low, high), GRID_POINTS)
    values = np.array([np.interp(grid, curve.index, curve) for curve in curves])
    return pd.DataFrame({"mean": values.mean(0), "min": values.min(0), "max": values.max(0)}, index=grid)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to be drawn. `flat`: an explanation that is shown if all values are 0."""

    name: str
    title: str
    caption: str
    draw: "Callable[[Figure], object]"
    height_in: float = 2.7
    flat: str = ""


def gallery_of(charts: Iterable[Chart], folder: Path) -> Gallery:
    """Draw charts into `folder`. If a chart has no data or only zeros, the gallery contains only the chart's title."""
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
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    for axes in figure.axes:
        legend(axes)
    # One layout serves both files. A figure with a layout engine is laid out again before each.
    ConstrainedLayoutEngine().execute(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata=_NO_METADATA)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chart.name}.svg").write_text(buffer.getvalue(), encoding="utf-8")
    figure.savefig(folder / f"{chart.name}.png", dpi=_PNG_DPI, facecolor=LIGHT["surface"], metadata={})
    return Picture(chart.name, chart.title, chart.caption, _inline_svg(buffer.getvalue(), chart.name, chart.title))


def _inline_svg(svg: str, name: str, title: str) -> Markup:
    """Convert matplotlib's SVG for use in a page. Remove the prolog and the namespaces, make the ids unique,
    and set the page's colors and font."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", body).replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", body)
    for role, color in LIGHT.items():
        body = body.replace(color, f"var(--{role})")
    body = re.sub(r"(font:[^;\"]*?px) [^;\"]*", r"\1 var(--font-text)", body)
    size = re.search(r'viewBox="[^"]+"', body)
    assert size is not None, "matplotlib writes a viewBox"
    head = f'<svg class="chart" role="img" aria-label="{html.escape(title)}" {size[0]}>'
    return Markup(re.sub(r"<svg[^>]*>", lambda _: head, body, count=1))


def plot_series(axes: "Axes", series: Series, color: str, label: str, *, smoothed: bool = True) -> None:
    """Plot values and their moving mean. If `smoothed` is false or there are few values, plot only the values."""
    points = thin(series, MAX_POINTS)
    if len(series) <= FEW_POINTS or not smoothed:
        _plot_points(axes, points, color, label)
        return
    mean = thin(smooth(series), MAX_POINTS)
    axes.plot(points.index, points, color=LIGHT[color], alpha=0.28, linewidth=0.9)
    axes.plot(mean.index, mean, color=LIGHT[color], label=f"{label} (mean of {window_of(series)} steps)")


def _plot_points(axes: "Axes", points: Series, color: str, label: str, **style: Any) -> None:
    marker = "o" if len(points) <= FEW_POINTS else ""
    axes.plot(points.index, points, color=LIGHT[color], marker=marker, markersize=3.5, label=label, **style)


def plot_intervals(axes: "Axes", points: Iterable[tuple[float, Interval]], color: str, label: str) -> None:
    """Plot values with their intervals."""
    x, found = zip(*points, strict=True)
    ends = np.array([(one.value - one.low, one.high - one.value) for one in found]).clip(0).T
    look: Any = {"marker": "o", "markersize": 4, "capsize": 2.5, "elinewidth": 1.0, "color": LIGHT[color]}
    axes.errorbar(x, [one.value for one in found], ends, label=label, **look)


def plot_group(axes: "Axes", curves: Sequence[Series], place: int, label: str) -> None:
    """Plot the curves of a group of runs. A single curve is plotted as it is. Several curves are plotted as their mean
    and a band from the lowest curve to the highest. `place`: the number of the group, which determines its style."""
    color, style = CYCLE[place % len(CYCLE)], STYLES[place % len(STYLES)]
    if len(curves) == 1:
        _plot_points(axes, curves[0], color, label, **style)
        return
    band = band_of(curves)
    if band.index[0] == band.index[-1]:  # with one point each, a band has no width
        plot_intervals(axes, [(band.index[0], Interval(*band.iloc[0]))], color, label)
        return
    axes.fill_between(band.index, band["min"], band["max"], color=LIGHT[color], alpha=0.16, linewidth=0)
    axes.plot(band.index, band["mean"], color=LIGHT[color], label=label, **style)


def format_axes(axes: "Axes", *, x: str = "training step", y: str = "", steps: bool = True) -> None:
    """Label both axes and format their numbers. `steps`: True if the ticks of the x axis must be whole
    numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=steps, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def legend(axes: "Axes") -> None:
    """Add a legend above the axes if there are at least two lines."""
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
        handlelength=2.4,
        handletextpad=0.5,
    )
