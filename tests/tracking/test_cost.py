"""GPU-seconds of a run: totals over ranks and attempts, each line counted once."""

from rlcore.tracking.cost import GPU_SECONDS, CostMeter, GpuUse, gpu_seconds
from rlcore.tracking.journal import JOURNAL_FILE, Journal


def test_seconds_of_ranks_are_added(tmp_path):
    meter = CostMeter(tmp_path / JOURNAL_FILE)
    assert meter.metrics([GpuUse(1, 10), GpuUse(1, 11)]) == {GPU_SECONDS: 21}
    assert meter.metrics([GpuUse(1, 20), GpuUse(1, 21)]) == {GPU_SECONDS: 41}
    # The group was lost and started again: the seconds of the ranks before it stay.
    assert meter.metrics([GpuUse(2, 50), GpuUse(2, 50)]) == {GPU_SECONDS: 141}


def test_a_cpu_has_no_gpu_seconds(tmp_path):
    assert CostMeter(tmp_path / JOURNAL_FILE).metrics([]) == {}
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(1, {"actor/lr": 0.1})
    assert gpu_seconds(tmp_path / JOURNAL_FILE) is None


def test_a_resume_adds_its_attempt_and_counts_no_line_twice(tmp_path):
    """Each attempt goes on from the first step's checkpoint, and takes the second step again."""
    file = tmp_path / JOURNAL_FILE

    def attempt(checkpoint_bytes: int, *seconds: float) -> int:
        with Journal(file) as journal:
            journal.truncate(checkpoint_bytes)
            meter = CostMeter(file)
            for place, one in enumerate(seconds):
                journal.append_step(place + (checkpoint_bytes > 0), meter.metrics([GpuUse(1.0, one)]))
            return journal.size_bytes

    checkpoint = attempt(0, 10)
    attempt(checkpoint, 5, 8)
    assert gpu_seconds(file) == 18
    attempt(checkpoint, 2, 4)
    assert gpu_seconds(file) == 22
    attempt(checkpoint)
    assert gpu_seconds(file) == 22, "killed before its first line: what was cut off counts all the same"
    assert len(list(tmp_path.glob("metrics.abandoned-*.jsonl"))) == 2
