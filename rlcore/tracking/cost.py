"""GPU-seconds of a run, over all its attempts.

Each step's line has the total so far. The largest total in the journal, or in what a resume cut off it, is the cost of
the run: repeated steps are counted twice, and no line is. The time of a killed process after its last line is not
known. Without a GPU there is no such metric.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlcore.tracking.journal import load_journal

GPU_SECONDS = "cost/gpu_seconds"


class GpuUse(NamedTuple):
    """Seconds for which a rank has held its GPU since it `began` (monotonic seconds), which identifies the rank's
    process."""

    began: float
    seconds: float


def gpu_seconds(journal: Path) -> float | None:
    """GPU-seconds of a run so far; None where it has held no GPU, or has written no line."""
    files = [journal, *journal.parent.glob(f"{journal.stem}.abandoned-*{journal.suffix}")]
    lines = [record.metrics for file in files if file.is_file() for record in load_journal(file).steps]
    return max((line[GPU_SECONDS] for line in lines if GPU_SECONDS in line), default=None)


class CostMeter:
    """Adds the use of the ranks of one process to what the run had used before."""

    def __init__(self, journal: Path) -> None:
        self._before = gpu_seconds(journal) or 0.0
        self._seconds: dict[tuple[int, float], float] = {}
        """Seconds of each rank, by its number and the time at which it began."""

    def metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """The total after these uses, one a rank; nothing without ranks on GPUs."""
        if not uses:
            return {}
        self._seconds |= {(rank, use.began): use.seconds for rank, use in enumerate(uses)}
        return {GPU_SECONDS: self._before + sum(self._seconds.values())}
