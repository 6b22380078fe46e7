"""The GPU-seconds of a run over all its attempts. Each journal line has the GPU-seconds of the run so far. A resume
moves journal lines to other files. The cost is therefore the largest number in the journal and these files. Steps that
are repeated after a resume count twice. The time of a killed process after its last journal line does not count."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlcore.tracking.journal import load_journal

GPU_SECONDS = "cost/gpu_seconds"


class GpuUse(NamedTuple):
    """The seconds since a rank began to use its GPU. `began`: the monotonic time of that moment. It identifies the
    rank's process."""

    began: float
    seconds: float


def gpu_seconds(journal: Path) -> float | None:
    """Return the GPU-seconds of a run so far, or None if no journal line has the metric."""
    files = [journal, *journal.parent.glob(f"{journal.stem}.abandoned-*{journal.suffix}")]
    lines = [record.metrics for file in files if file.is_file() for record in load_journal(file).steps]
    return max((line[GPU_SECONDS] for line in lines if GPU_SECONDS in line), default=None)


class CostMeter:
    """A meter that adds the GPU use of this process's ranks to the GPU-seconds in the journal."""

    def __init__(self, journal: Path) -> None:
        self._before = gpu_seconds(journal) or 0.0
        self._seconds: dict[tuple[int, float], float] = {}
        """The seconds of each rank, by the rank's number and start time."""

    def metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """Return the run's GPU-seconds so far as a metric, or {} without GPUs. `uses`: the GPU use of each rank."""
        if not uses:
            return {}
        self._seconds |= {(rank, use.began): use.seconds for rank, use in enumerate(uses)}
        return {GPU_SECONDS: self._before + sum(self._seconds.values())}
