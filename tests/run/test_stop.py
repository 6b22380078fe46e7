"""Signals that request a stop or end the process; waiting for a run's lock."""

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.errors import RunInUseError, StopRequestedError
from rlcore.run import stop
from rlcore.run.stop import StopFlag, locked_run
from rlcore.storage.locks import RunLock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Parts of a fake clock's time, to which sleeps and the test add."""
    passed = [100.0]
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append))
    return passed


@pytest.mark.parametrize(("signals", "ends"), [
    ([(signal.SIGTERM, 0.0)], 0),
    ([(signal.SIGINT, 0.0)], 0),
    ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 5.0)], 0),
    ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 5.25)], 1),
    ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 3.0), (signal.SIGTERM, 3.0)], 1),
    ([(signal.SIGTERM, 0.0), (signal.SIGINT, 0.0)], 1),
    ([(signal.SIGINT, 0.0), (signal.SIGTERM, 1.0)], 0),
])  # fmt: skip
def test_first_signal_requests_and_later_ones_end(now, signals, ends) -> None:
    ended: list[bool] = []
    flag = StopFlag(lambda: ended.append(True))
    assert (flag(), flag.seconds_since_request()) == (False, None)
    for number, after_s in signals:
        now.append(after_s)
        flag._handle(number, None)
    now.append(2.0)
    assert flag()
    assert flag.seconds_since_request() == 2.0 + sum(after_s for _, after_s in signals)
    assert len(ended) == ends


def test_signal_of_a_parents_end_is_not_a_request(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    flag = StopFlag(lambda: ended.append(True))
    flag._handle(signal.SIGTERM, None)
    now.append(60.0)
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    flag._handle(signal.SIGTERM, None)
    assert ended == []
    flag._handle(signal.SIGTERM, None)
    assert ended == [True], "one that comes after it is"


@pytest.mark.parametrize(("wait_s", "words", "num_waits"), [(0.5, "0.5 s", 3), (stop.LOCK_WAIT_S, "90 s", 450)])
def test_held_lock_is_reported_once_and_waited_for(tmp_path, now, monkeypatch, caplog, wait_s, words, num_waits):
    monkeypatch.setattr("rlcore.storage.locks.POLL_S", 0.0)
    reported: list[object] = []
    with RunLock(tmp_path):
        with pytest.raises(RunInUseError) as failed, locked_run(tmp_path, reported.append, lambda: False, wait_s):
            pytest.fail("the lock is held")
        text = f"{failed.value}. Waiting up to {words}: it may be saving"
        assert reported == [{"event": "note", "text": text}]
        assert abs(len(now) - 1 - num_waits) <= 1, "a fifth of a second each"
        assert f"Waiting up to {words}: it may be saving" in caplog.text
        reported.clear()
        error = "stopped while waiting for the run's lock; nothing was started"
        with (
            pytest.raises(StopRequestedError, match=error),
            locked_run(tmp_path, reported.append, lambda: True, math.inf),
        ):
            pytest.fail("the lock is held")
        assert str(reported).endswith(". Waiting until it ends'}]")


def test_locking_removes_stale_temporaries(tmp_path: Path) -> None:
    left = tmp_path / f".tmp-x-{2**22 + 1}-0123abcd"
    left.mkdir()
    reported: list[object] = []
    with locked_run(tmp_path, reported.append, lambda: True):
        assert not left.exists()
        with pytest.raises(RunInUseError), RunLock(tmp_path):
            pytest.fail("it is not held")
    with RunLock(tmp_path):
        assert reported == []
