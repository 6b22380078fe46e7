"""GPU-seconds of a run: totals over ranks and attempts."""

from rlcore.tracking.journal import GPU_SECONDS, JOURNAL_FILE, CostMeter, GpuUse, Journal, gpu_seconds


def test_seconds_of_ranks_are_summed(tmp_path):
    meter = CostMeter(tmp_path / JOURNAL_FILE)
    assert meter.metrics([GpuUse(1, 10), GpuUse(1, 11)]) == {GPU_SECONDS: 21}
    assert meter.metrics([GpuUse(1, 20), GpuUse(1, 21)]) == {GPU_SECONDS: 41}
    # after a restart of the group, the seconds of its previous ranks count
    assert meter.metrics([GpuUse(2, 50), GpuUse(2, 50)]) == {GPU_SECONDS: 141}


def test_cpu_has_no_gpu_seconds(tmp_path):
    assert CostMeter(tmp_path / JOURNAL_FILE).metrics([]) == {}
    with Journal(tmp_path / JOURNAL_FILE) as journal:
        journal.append_step(1, {"actor/lr": 0.1})
    assert gpu_seconds(tmp_path / JOURNAL_FILE) is None


def test_resume_adds_attempts_without_double_counting(tmp_path):
    """Each attempt resumes from the first step and repeats the second."""
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
    assert gpu_seconds(file) == 22, "the removed lines count, also without a new line"
    assert len(list(tmp_path.glob("metrics.abandoned-*.jsonl"))) == 2
