"""metrics.md: each of its rows is read, and the reference log is covered."""

import re

from rlcore.tracking.catalog import METRICS_FILE, REFERENCE_HEADING, ROW, describe, metric_docs


def reference_log() -> dict[str, str]:
    """The metrics of a published veRL run's last step, each with its row here, or `not logged: ` and the reason."""
    return dict(ROW.findall(METRICS_FILE.read_text().partition(REFERENCE_HEADING)[2]))


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
