"""Names: what MLflow takes, and that each is documented."""

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

import rlcore.tracking.catalog
import rlcore.tracking.connection
from rlcore.errors import TrackingError
from rlcore.tracking.catalog import describe, metric_docs
from rlcore.tracking.connection import mlflow_name


@pytest.mark.parametrize(
    "module",
    [rlcore.tracking.connection, rlcore.tracking.catalog],
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_at_sign_is_spelled_out():
    assert mlflow_name("val-core/countdown/reward/mean@8") == "val-core/countdown/reward/mean_at_8"
    assert mlflow_name("timing_s/old_log_prob") == "timing_s/old_log_prob"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pass^4", r"not '\^'"),
        ("50%", "not '%'"),
        ("größe", "not 'ß' 'ö'"),
        ("a\n", r"not '\\n'"),
        ("", "has 0 characters"),
        ("a" * 251, "has 251 characters, MLflow takes 1 to 250"),
        ("a@" * 80, "has 400 characters"),
        ("/a", "no `/` at either end"),
        ("a/", "no `/` at either end"),
        ("a//b", "no `//`"),
        ("a/../b", "`..`"),
        ("..", "`..`"),
    ],
)
def test_a_name_that_mlflow_refuses_is_refused_here_with_the_reason(name: str, message: str):
    with pytest.raises(TrackingError, match=message):
        mlflow_name(name)


@settings(deadline=None)
@given(st.text(alphabet="ab1_-. :/@%\n", max_size=12) | st.text(max_size=6))
def test_whatever_passes_here_passes_mlflows_own_check(name: str):
    try:
        mapped = mlflow_name(name)
    except TrackingError:
        return
    _validate_metric_name(mapped)


def test_each_documented_name_describes_itself_first():
    for doc in metric_docs():
        concrete = re.sub(r"\{([^,}]+)[^}]*\}", r"\1", doc.name)
        concrete = re.sub(r"<\w+>", "7", concrete)
        assert describe(concrete) is doc, f"{concrete} is taken for another metric"
        mlflow_name(concrete)
        assert doc.unit
        assert doc.definition.endswith(".")


def test_what_is_not_documented_is_not_described():
    assert describe("actor/pg_losses") is None
    assert describe("xactor/pg_loss") is None


SOURCE = Path(__file__).parents[2] / "rlcore"
GROUPS = (
    "actor",
    "critic",
    "training",
    "perf",
    "prompt_length",
    "response_length",
    "global_seqlen",
    "reward",
    "system",
)


def test_every_name_in_the_source_is_documented():
    """Names that stand as literals in the code that measures; the trainer's test checks those of a real step."""
    pattern = re.compile(rf'"((?:{"|".join(GROUPS)})/[\w/@-]+)"\s*[:\]]')
    found = {
        name
        for folder in ("algos", "trainer", "tracking")
        for file in (SOURCE / folder).rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    assert len(found) > 20
    assert {name for name in found if describe(name) is None} == set()
