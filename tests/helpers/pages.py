"""Blocks of the pages of the documentation, and the reference log of metrics.md."""

import re

from rlcore.tracking.catalog import METRICS_FILE, REFERENCE_HEADING, ROW

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # language and text of a block


def reference_log() -> dict[str, str]:
    return dict(ROW.findall(METRICS_FILE.read_text().partition(REFERENCE_HEADING)[2]))
