"""Kinds of failures by their errors, and their lines in the run's folder."""

from pathlib import Path

import pytest
import torch

from rlcore.errors import (
    DataError,
    DeviceMemoryError,
    DiskSpaceError,
    HangError,
    HostMemoryError,
    NonFiniteError,
    RankMemoryError,
    WorkerLostError,
)
from rlcore.run.watchdog import (
    FAILURES_FILE,
    Failure,
    append_failure,
    as_known_error,
    failure_from,
    num_oom_kills,
    read_failures,
)

ERRORS = {
    "host out of memory": MemoryError("no room for a copy"),
    "GPU out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "GPU out of memory, by CUDA": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
    "rank out of memory": RankMemoryError("a pass on one of 2 ranks (DefaultCPUAllocator: can't allocate memory)"),
    "lost worker": WorkerLostError("rank 1 has ended"),
    "hang": HangError("no end after 60 s"),
    "disk": DiskSpaceError("no room"),
    "data": DataError("a row breaks the schema"),
    "numbers": NonFiniteError("the loss is nan"),
    "error": KeyError("a bug"),
}


@pytest.mark.parametrize("kind", list(ERRORS))
def test_failure_kind_and_phase_of_each_error(kind: str) -> None:
    found = failure_from(as_known_error(ERRORS[kind], "gen"), "gen", 7)
    assert str(found) == f"{kind.partition(',')[0]} in gen after step 7"


def test_failure_text_is_short() -> None:
    found = failure_from(KeyError("x" * 2000), "", 3)
    assert (str(found), len(found.message), found.stacks) == ("error after step 3", 1000, None)
    assert round(found.time, 3) == found.time > 1.7e9


def test_damaged_line_loses_one_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = [failure_from(as_known_error(error, "gen"), "gen", step) for step, error in enumerate(ERRORS.values())]
    assert read_failures(tmp_path) == []
    for failure in failures[:2]:
        append_failure(tmp_path, failure)
    with (tmp_path / FAILURES_FILE).open("ab") as file:
        file.write(b'{"kind": "\xff", "phase": "a bit has flipped"}\n{"kind": "ha')  # and a full disk
    for failure in failures[2:]:
        append_failure(tmp_path, failure)
    assert read_failures(tmp_path) == failures
    assert caplog.text.count(f"{tmp_path}/{FAILURES_FILE}: a line is damaged and skipped: b'") == 2
    assert (tmp_path / FAILURES_FILE).read_bytes().count(b"\n") == len(failures) + 2


def test_unwritable_failure_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append_failure(tmp_path / "absent", Failure("hang", "", 3, "no end"))
    assert f"{tmp_path}/absent/{FAILURES_FILE}: cannot be written: [Errno 2] No such file" in caplog.text
    assert not (tmp_path / "absent").exists()


def test_memory_errors_have_a_remedy() -> None:
    on_device = as_known_error(RuntimeError("CUDA out of memory. Tried to"), "gen")
    assert isinstance(on_device, DeviceMemoryError)
    assert str(on_device) == (
        "GPU out of memory in gen: RuntimeError: CUDA out of memory. Tried to\nLower "
        "trainer.max_tokens_per_micro_batch or rollout.memory_share; neither changes the numbers."
    )
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    remedy = "Free memory on this host, or lower runtime.num_workers or reward.num_processes."
    for error in (MemoryError("no"), refused.value):
        on_host = as_known_error(error, "")
        assert isinstance(on_host, HostMemoryError)
        assert str(on_host) == f"host out of memory: {type(error).__name__}: {error}\n{remedy}"
    assert isinstance(as_known_error(DeviceMemoryError("a worker: std::bad_alloc"), "gen"), HostMemoryError)
    for error in (on_device, DataError("MemoryError"), ValueError("no")):
        assert as_known_error(error, "gen") is error


def test_oom_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "events", tmp_path / "vmstat"
    monkeypatch.setattr("rlcore.run.watchdog.OOM_COUNTERS", files)
    assert num_oom_kills() == 0
    files[1].write_text("pgfault 9\noom_kill 7\n")
    assert num_oom_kills() == 7
    files[0].write_text("low 1\noom 2\noom_kill 3\noom_group_kill 4\n")
    assert num_oom_kills() == 3
    files[0].write_text("oom_kill many\n")
    assert num_oom_kills() == 7
    files[0].write_text("low 1\n")
    assert num_oom_kills() == 7
