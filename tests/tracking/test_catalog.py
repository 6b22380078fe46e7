"""metrics.md: each row is read, each name is documented, and the reference log is covered."""

import re
from pathlib import Path

from rlcore.tracking.catalog import METRICS_FILE, describe, metric_docs
from rlcore.tracking.connection import (
    mlflow_name,
)
from tests.helpers.metrics_page import reference_log


def test_each_documented_name_describes_itself_first():
    for doc in metric_docs():
        concrete = re.sub(r"\{([^,}]+)[^}]*\}", r"\1", doc.name)
        concrete = re.sub(r"<\w+>", "7", concrete)
        assert describe(concrete) is doc, f"{concrete} is taken for another metric"
        mlflow_name(concrete)
        assert doc.unit
        assert doc.definition.endswith(".")
        assert "<" not in doc.definition


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


def test_the_reference_log_is_covered():
    log = reference_log()
    assert len(log) == 62
    for name, here in log.items():
        doc = describe(name)
        assert here == f"`{doc.name}`" if doc is not None else re.fullmatch("not logged: .{20,}", here), name
    said = re.search(r"(\d+) have the same name and meaning here, (\d+) have none", METRICS_FILE.read_text())
    absent = sum(describe(name) is None for name in log)
    assert said.groups() == (str(62 - absent), str(absent))


def test_every_row_of_the_page_is_read():
    rows = [line for line in METRICS_FILE.read_text().splitlines() if line.startswith("| `")]
    assert all(row.replace("\\|", "").count("|") in (3, 4) for row in rows)
    others = [row for row in rows if "metrics." in row]  # where they are
    names = [doc.name for doc in metric_docs()] + list(reference_log())
    assert len(rows) - len(others) == len(names)
    assert len(metric_docs()) == len({doc.name for doc in metric_docs()}) > 70
