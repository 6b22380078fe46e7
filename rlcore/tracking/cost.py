"""What a run has cost: seconds for which it has held GPUs, and their energy, over all its attempts.

Each step's line has the totals so far, so the largest ones that the run has ever written, in its journal or in what a
resume cut off it, are what it has cost: steps that were taken twice are paid twice, and no line is counted twice. What
a killed process used after its last line is not known. Without a GPU there are no such metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.tracking.journal import load_journal

GPU_SECONDS, ENERGY_WH, PRICE = "cost/gpu_seconds", "cost/energy_wh", "cost/price"
JOULES_PER_WH = SECONDS_PER_HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one rank has used since it began: seconds for which it has held its GPU, and the GPU's joules in them, None
    where they cannot be read. `began` (seconds since the epoch) tells the rank from an earlier one of its number."""

    began: float
    seconds: float
    joules: float | None


@dataclass(frozen=True, slots=True)
class Spent:
    """GPU-seconds, and watt-hours where all of them were measured."""

    gpu_seconds: float
    energy_wh: float | None

    def __add__(self, other: "Spent") -> "Spent":
        known = None if self.energy_wh is None or other.energy_wh is None else self.energy_wh + other.energy_wh
        return Spent(self.gpu_seconds + other.gpu_seconds, known)

    def price(self, per_gpu_hour: float | None) -> float | None:
        """What it cost in money; None without a price."""
        return None if per_gpu_hour is None else self.gpu_seconds / SECONDS_PER_HOUR * per_gpu_hour

    def metrics(self, price_per_gpu_hour: float | None) -> dict[str, float]:
        """The known values by metric name."""
        found = {GPU_SECONDS: self.gpu_seconds, ENERGY_WH: self.energy_wh, PRICE: self.price(price_per_gpu_hour)}
        return {name: value for name, value in found.items() if value is not None}


NOTHING = Spent(0.0, 0.0)


def spent(journal: Path) -> Spent | None:
    """What a run has written of its cost so far; None where it has held no GPU, or has written no line."""
    files = [journal, *journal.parent.glob(f"{journal.stem}.abandoned-*{journal.suffix}")]
    lines = [record.metrics for file in files if file.is_file() for record in load_journal(file).steps]
    last = max((line for line in lines if GPU_SECONDS in line), key=lambda line: line[GPU_SECONDS], default=None)
    return None if last is None else Spent(last[GPU_SECONDS], last.get(ENERGY_WH))


class CostMeter:
    """Adds up what the ranks of one process use to what the run had cost before. Without a price none is told."""

    def __init__(self, journal: Path, price_per_gpu_hour: float | None) -> None:
        self._before = spent(journal) or NOTHING
        self._price = price_per_gpu_hour
        self._uses: dict[tuple[int, float], Spent] = {}
        """Total use of each rank, by its number and the time at which it began."""

    def metrics(self, uses: Sequence[GpuUse]) -> dict[str, float]:
        """The totals, once each rank has used so much; nothing without ranks on GPUs."""
        if not uses:
            return {}
        for rank, use in enumerate(uses):
            energy_wh = None if use.joules is None else use.joules / JOULES_PER_WH
            self._uses[rank, use.began] = Spent(use.seconds, energy_wh)
        return sum(self._uses.values(), self._before).metrics(self._price)
