"""What a run has cost: totals over attempts, each line counted once; the GPU's counter through a stand-in for NVML."""

import sys
from types import ModuleType

import pytest

from rlcore.tracking.cost import ENERGY_WH, GPU_SECONDS, PRICE, CostMeter, GpuUse, Spent, spent
from rlcore.tracking.journal import JOURNAL_FILE, Journal
from rlcore.workers.measure import GpuUseMeter


def use(seconds: float, joules: float | None = 0.0, began: float = 1.0) -> GpuUse:
    return GpuUse(began, seconds, joules)


def test_ranks_are_added_and_their_last_use_counts(tmp_path):
    meter = CostMeter(tmp_path / JOURNAL_FILE, price_per_gpu_hour=2.0)
    assert meter.metrics([use(10, 3_600), use(11, 7_200)]) == {GPU_SECONDS: 21, ENERGY_WH: 3, PRICE: 21 / 1_800}
    assert meter.metrics([use(20, 7_200), use(21, 7_200)]) == {GPU_SECONDS: 41, ENERGY_WH: 4, PRICE: 41 / 1_800}
    # The group was lost and started anew: what the ranks before it used stays.
    began_anew = meter.metrics([use(50, 3_600, began=2.0), use(50, 0, began=2.0)])
    assert began_anew == {GPU_SECONDS: 141, ENERGY_WH: 5, PRICE: 141 / 1_800}


def test_a_cpu_costs_nothing_that_is_told(tmp_path):
    assert CostMeter(tmp_path / JOURNAL_FILE, price_per_gpu_hour=2.0).metrics([]) == {}
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(1, {"actor/lr": 0.1})
    assert spent(tmp_path / JOURNAL_FILE) is None


def test_a_resume_adds_its_attempt_and_counts_no_line_twice(tmp_path):
    """Each attempt goes on from the first step's checkpoint, and takes the second step again."""
    file = tmp_path / JOURNAL_FILE

    def attempt(checkpoint_bytes: int, *uses: GpuUse) -> int:
        with Journal(file) as journal:
            journal.truncate(checkpoint_bytes)
            meter = CostMeter(file, None)
            for place, one in enumerate(uses):
                journal.append_step(place + (checkpoint_bytes > 0), meter.metrics([one]))
            return journal.size_bytes

    checkpoint = attempt(0, use(10, 36_000))
    attempt(checkpoint, use(5, 3_600), use(8, 7_200))
    assert spent(file) == Spent(18, 12)
    attempt(checkpoint, use(2, 3_600), use(4, 3_600))
    assert spent(file) == Spent(22, 13)
    attempt(checkpoint)
    assert spent(file) == Spent(22, 13), "killed before its first line: what was cut off counts all the same"
    attempt(checkpoint, use(3, None))
    assert spent(file) == Spent(25, None), "an energy that is known in part is none"
    assert len(list(tmp_path.glob("metrics.abandoned-*.jsonl"))) == 2


class Counter(ModuleType):
    """NVML of a machine with one GPU, whose counter the test sets."""

    class NVMLError(Exception):
        pass

    millijoules: int | None = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:  # noqa: N802
        if self.millijoules is None:
            raise self.NVMLError("not supported")
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Counter:
    found = Counter("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_energy_is_the_rise_of_the_counter(nvml):
    nvml.millijoules = 5_000_000
    meter = GpuUseMeter("GPU-1")
    nvml.millijoules = 5_042_000
    found = meter.use()
    assert found.joules == 42.0
    assert found.seconds >= 0
    assert meter.use().began == found.began


def test_a_gpu_without_a_counter_has_seconds_alone(nvml):
    assert GpuUseMeter("GPU-2").use().joules is None
    nvml.millijoules = None
    assert GpuUseMeter("GPU-1").use().joules is None
    assert GpuUseMeter(None).use() is None
