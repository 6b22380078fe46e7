"""Rows of metrics.md, documented names and the reference log."""

import re
from pathlib import Path

from rlcore.tracking.catalog import METRICS_FILE, describe, metric_docs
from rlcore.tracking.connection import mlflow_name
from tests.helpers.pages import reference_log


def test_documented_names_match_their_row_first():
    for doc in metric_docs():
        concrete = re.sub(r"\{([^,}]+)[^}]*\}", r"\1", doc.name)
        concrete = re.sub(r"<\w+>", "7", concrete)
        assert describe(concrete) is doc, f"{concrete} matches another metric"
        mlflow_name(concrete)
        assert doc.unit
        assert doc.definition.endswith(".")
        assert "<" not in doc.definition


def test_undocumented_names_are_not_described():
    assert describe("actor/pg_losses") is None
    assert describe("xactor/pg_loss") is None


SOURCE = Path(__file__).parents[2] / "rlcore"
GROUPS = "actor|critic|training|perf|prompt_length|response_length|global_seqlen|reward|system"


def test_names_in_source_are_documented():
    """Check literal names in the source; the trainer's test checks those of a real step."""
    pattern = re.compile(rf'"((?:{GROUPS})/[\w/@-]+)"\s*[:\]]')
    found = {
        name
        for folder in ("algos", "trainer", "tracking")
        for file in (SOURCE / folder).rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    assert len(found) > 20
    assert {name for name in found if describe(name) is None} == set()


def test_reference_log_is_covered():
    log = reference_log()
    assert len(log) == 62
    for name, here in log.items():
        doc = describe(name)
        assert here == f"`{doc.name}`" if doc is not None else re.fullmatch("not logged: .{20,}", here), name
    said = re.search(
        r"(\d+) have the same name and meaning in Millrace, and (\d+) have no counterpart", METRICS_FILE.read_text()
    )
    absent = sum(describe(name) is None for name in log)
    assert said.groups() == (str(62 - absent), str(absent))


def test_all_rows_are_read():
    rows = [line for line in METRICS_FILE.read_text().splitlines() if line.startswith("| `")]
    assert all(row.replace("\\|", "").count("|") in (3, 4) for row in rows)
    others = [row for row in rows if "metrics." in row]  # header rows
    names = [doc.name for doc in metric_docs()] + list(reference_log())
    assert len(rows) - len(others) == len(names)
    assert len(metric_docs()) == len({doc.name for doc in metric_docs()}) > 70
