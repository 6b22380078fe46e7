"""The reference log of metrics.md."""

from rlcore.tracking.catalog import METRICS_FILE, REFERENCE_HEADING, ROW


def reference_log() -> dict[str, str]:
    return dict(ROW.findall(METRICS_FILE.read_text().partition(REFERENCE_HEADING)[2]))
