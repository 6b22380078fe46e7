"""Charts as parts of a page and as files, and series."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from rlcore.report.plots import CYCLE, LIGHT, SETTINGS, STYLES, legend, plot_group, series_of, smooth, thin, window_of
from tests.helpers.reports import page_of

pytestmark = pytest.mark.slow


def test_ids_are_unique_and_references_resolve(ppo_report):
    page = page_of(ppo_report)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for tag, name, value in page.attributes if tag == "use" and name == "href"}
    clips = {match for _, _, value in page.attributes for match in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert clips
    assert used | clips <= set(ids)


def test_pictures_use_page_colors(grpo_report):
    html = grpo_report.html.read_text()
    svgs = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(svgs) >= 10
    for svg in svgs:
        assert "var(--" in svg
        assert not re.search(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", svg), "a color that no dark page can change"
    assert "prefers-color-scheme: dark" in html


def test_pictures_are_written_as_files(grpo_report):
    folder = grpo_report.html.parent / "figures"
    names = re.findall(r'id="f-(\w+)"', grpo_report.html.read_text())
    assert {"reward", "validation", "entropy", "ppo_kl", "grad_norm", "lengths", "phases", "throughput"} <= set(names)
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_legends_fit_the_figure():
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 2.7), layout="constrained")
        axes = figure.subplots()
        for place in range(3):
            axes.plot([0, 1], [0, place], label=f"algo.setting={'x' * 40 * (place + 1)}, optim.lr=0.0003 (3 seeds)")
        legend(axes)
        figure.draw_without_rendering()
    box = axes.get_legend().get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1


def test_curves_that_coincide_are_all_visible():
    colors = CYCLE[: len(STYLES)]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.4, 2.7), dpi=160)
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        for place in range(len(STYLES)):
            plot_group(axes, [series_of(enumerate(np.linspace(0, 1, 100)))], place, f"run {place}")
        axes.set_axis_off()
        canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    shown = {color: int((np.abs(pixels - 255 * np.array(to_rgb(LIGHT[color]))) < 2).all(1).sum()) for color in colors}
    assert min(shown.values()) > 100, shown


def test_smooth_is_centred_mean():
    values = np.random.default_rng(0).random(100)
    series = series_of(enumerate(values))
    assert window_of(series) == 7  # 100 // 15 = 6, and the step itself
    naive = [values[max(0, i - 3) : i + 4].mean() for i in range(100)]
    assert smooth(series).tolist() == pytest.approx(naive)
    assert smooth(series_of([(1, 2.0), (2, 4.0)])).tolist() == [3.0, 3.0]


def test_thin_keeps_means():
    values = np.random.default_rng(0).random(1_000)
    points = thin(series_of(enumerate(values)), 100)
    assert points.index.tolist() == [10 * place + 4 for place in range(100)]
    assert points.tolist() == pytest.approx(values.reshape(100, 10).mean(axis=1))
    assert len(thin(series_of(enumerate(values[:950])), 400)) == 400


def test_series_are_sorted_by_step():
    series = series_of([(2, 5.0), (1, 3.0)])
    assert (series.tolist(), series.index.tolist()) == ([3.0, 5.0], [1, 2])
    assert series_of([]) is None
