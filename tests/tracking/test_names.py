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
from rlcore.tracking.connection import explain, mlflow_name


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
        (".", "no `//`, `.` or"),
        ("b" * 300, "metric name 'b{80}': has 300 characters"),
    ],
)
def test_a_name_that_mlflow_refuses_is_refused_here_with_the_reason(name: str, message: str):
    with pytest.raises(TrackingError, match=message):
        mlflow_name(name)


def test_the_longest_name_that_mlflow_takes_passes():
    assert mlflow_name("a" * 250) == "a" * 250


@settings(deadline=None)
@given(st.text(alphabet="ab1_-. :/@%\n", max_size=12) | st.text(max_size=6))
def test_whatever_passes_here_passes_mlflows_own_check(name: str):
    try:
        mapped = mlflow_name(name)
    except TrackingError:
        return
    _validate_metric_name(mapped)


BEHIND = "mysql://me:SECRET@host/db"
SHOWN = "tracking.uri mysql://me:***@host/db"
UNREACHABLE = "the server cannot be reached or does not answer"
LOGIN = (
    "the server asks for a login, which is another one or none. Set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD; that of `millrace up` is in stack-secret under its root"
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TrackingError("a: told\nalready"), "a: told\nalready"),
        (ValueError("two\n  lines at http://you:SECRET@b"), f"{SHOWN}: ValueError: two lines at http://you:***@b"),
        (ValueError("x" * 301), f"{SHOWN}: ValueError: {'x' * 300}"),
        (
            ValueError("Can't locate revision" + "x" * 180),
            f"{SHOWN}: the store was made by another MLflow version (Can't locate revision{'x' * 179}). If the store "
            "is older, back it up and run `mlflow db upgrade mysql://me:***@host/db`; if newer, use the MLflow that "
            "made it, or set another tracking.uri",
        ),
        (
            ValueError("must be in the 'active' state" + "x" * 180),
            f"{SHOWN}: the run or its experiment was deleted there (must be in the 'active' state{'x' * 171}). Restore "
            "it (`mlflow runs restore`, `mlflow experiments restore`), or set another tracking.experiment",
        ),
        (OSError("database is locked"), f"{SHOWN}: the database is locked by another process for longer than 20 s"),
        (OSError("Max retries exceeded"), f"{SHOWN}: {UNREACHABLE} (OSError)"),
        (ConnectionError("Connection refused"), f"{SHOWN}: {UNREACHABLE} (ConnectionError)"),
        (TimeoutError("read timed out"), f"{SHOWN}: {UNREACHABLE} (TimeoutError)"),
        (ValueError("failed with error code 401"), f"{SHOWN}: {LOGIN}"),
    ],
)
def test_why_mlflow_refused_is_one_line_with_the_remedy_and_no_password(error: Exception, line: str):
    assert explain(error, BEHIND) == line


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
