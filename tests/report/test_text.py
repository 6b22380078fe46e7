"""Small parts: doctests, short numbers, series, imports."""

import doctest
import importlib
import pkgutil
import re

import numpy as np
import pytest
from markdown_it import MarkdownIt

import rlcore.evaluation
import rlcore.report
from rlcore.report import numbers
from rlcore.report.page import escape
from rlcore.report.series import series_of, smooth, thinned, window_of
from tests.test_imports import loaded_by

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (rlcore.evaluation, rlcore.report)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("statement", ["import rlcore.evaluation.result", "import rlcore.report"])
def test_nothing_heavy_is_loaded_before_it_is_needed(statement):
    heavy = {"torch", "transformers", "ray", "prefect", "vllm", "mlflow", "matplotlib", "jinja2", "hydra", "pyarrow"}
    assert not heavy & loaded_by(statement)


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "–"), (float("inf"), "∞"), (-0.00012345, "-1.23e-4"), (0.05, "0.05"), (9999.5, "10,000"),
     (1e20, "100,000,000,000,000,000,000"), (None, "–")],
)  # fmt: skip
def test_compact(value, text):
    assert numbers.compact(value) == text


def test_no_number_shows_as_nothing():
    nan = float("nan")
    assert numbers.fixed(nan) == numbers.percent(nan) == numbers.duration(nan) == "–"


def test_durations_carry_over():
    assert numbers.duration(59.7) == "60 s"
    assert numbers.duration(3_599.8) == "60 min"
    assert numbers.duration(86_399.0) == "24 h"


def test_smoothing_is_a_centred_mean():
    values = np.random.default_rng(0).random(100)
    series = series_of(enumerate(values))
    assert window_of(series) == 7  # 100 // 15 = 6, and the step itself
    naive = [values[max(0, i - 3) : i + 4].mean() for i in range(100)]
    assert smooth(series).tolist() == pytest.approx(naive)
    assert smooth(series_of([(1, 2.0), (2, 4.0)])).tolist() == [3.0, 3.0]


def test_thinning_keeps_the_mean():
    values = np.random.default_rng(0).random(1_000)
    thin = thinned(series_of(enumerate(values)), 100)
    assert thin.index.tolist() == [10 * place + 4 for place in range(100)]
    assert thin.tolist() == pytest.approx(values.reshape(100, 10).mean(axis=1))
    assert len(thinned(series_of(enumerate(values[:950])), 400)) == 400


def test_series_are_in_order_of_steps():
    series = series_of([(2, 5.0), (1, 3.0)])
    assert (series.tolist(), series.index.tolist()) == ([3.0, 5.0], [1, 2])
    assert series_of([]) is None


@pytest.mark.parametrize("text", ["- a", "1. a", "1) a", "123456789. a", "1.", "# a", "+ a", "= a", "a\n- b"])
def test_text_starts_no_list_or_heading(text):
    page = MarkdownIt("commonmark").render(escape(text))
    assert page.startswith("<p>")
    assert page.count("<") == 2
    assert "\n" not in escape(text)


@pytest.mark.parametrize("text", ["0.3359", "2,303", "1.5 of 3", "\u22120.5", "mean@4", "val-core/x/acc/mean@16."])
def test_numbers_and_names_are_shown_as_they_are(text):
    assert MarkdownIt("commonmark").render(escape(text)) == f"<p>{text}</p>\n"
    assert "&" not in escape(text)  # Prefect's page shows an entity by number as it is written


@pytest.mark.parametrize("text", ["http://a.example", "see www.a.example", "me@a.b.example"])
def test_an_address_is_text_and_no_link(text):
    as_a_link = re.compile(r"https?://|www\.|[\w.+-]+@[\w-]+(\.\w)+")  # GFM's autolinks
    assert as_a_link.search(text)
    assert not as_a_link.search(escape(text))
    assert MarkdownIt("commonmark").render(escape(text)) == f"<p>{text}</p>\n"
