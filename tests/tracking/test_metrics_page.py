"""docs/metrics.md is what the catalog says."""

from pathlib import Path

from rlcore.tracking.catalog import ABSENT, METRICS, METRICS_FILE, REFERENCE_METRICS, metrics_page, write_metrics_page


def test_the_page_is_up_to_date():
    assert METRICS_FILE.read_text() == metrics_page(), "run: python -m rlcore.tracking.catalog"


def test_it_lists_every_metric_and_the_whole_reference_log(tmp_path: Path):
    rows = write_metrics_page(tmp_path / "metrics.md").read_text().splitlines()
    for doc in METRICS:
        assert len([row for row in rows if row.startswith(f"| `{doc.name}` | {doc.unit} |")]) == 1
    start = rows.index("| veRL | here |")
    listed = [row.split("`")[1] for row in rows[start + 2 :] if row.startswith("| `")]
    assert listed == list(REFERENCE_METRICS)
    absent = [row for row in rows[start:] if "not logged" in row]
    assert len(absent) == len(ABSENT)
    assert all(row.count("|") == row.replace("\\|", "").count("|") == 3 for row in rows[start:])
