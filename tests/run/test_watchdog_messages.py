"""Deadlines and messages of the watchdog, on a fake clock."""

import faulthandler
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config import RunConfig
from rlcore.config.trainer import DeadlineConfig, RuntimeConfig
from rlcore.errors import DataError, HangError, MillraceError, StopRequestedError, WorkerLostError
from rlcore.run import watchdog
from rlcore.run.layout import RunLayout
from rlcore.run.stop import StopFlag
from rlcore.run.watchdog import DEADLINE_OF, StepAbandonedError, Watchdog, read_failures


class FakeStop(StopFlag):
    """A stop that was requested the given number of seconds ago."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(lambda: None)
        self.seconds = seconds

    def seconds_since_request(self) -> float | None:
        return self.seconds


class Watch(Watchdog):
    """A watchdog whose thread does not run, with its events and errors."""

    def __init__(self, folder: Path, stop: StopFlag | None = None, **runtime: Any) -> None:
        self.events: list[Mapping[str, object]] = []
        self.errors: list[MillraceError] = []
        layout = RunLayout(folder, folder / "run")
        layout.run_dir.mkdir(exist_ok=True)
        config = RunConfig(runtime=RuntimeConfig(**runtime))
        named = {"report": self.events.append, "abandon": self.errors.append, "step": lambda: 7}
        super().__init__(config, layout, stop=stop or FakeStop(), **named)


def test_each_phase_has_the_deadline_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, armed = [100.0], list[float | None]()

    def arm(seconds: float, *, exit: bool, file: object) -> None:
        assert exit
        armed.append(seconds)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(None))
    keys = sorted(set(DEADLINE_OF.values()))
    limits = {key: 1000.0 + place for place, key in enumerate(keys)}
    watch = Watch(tmp_path, deadlines=DeadlineConfig(**limits))
    for phase, key in DEADLINE_OF.items():
        armed.clear()
        with watch.phase(phase):
            assert armed == [None, limits[key] + 60]
        assert armed == [None, limits[key] + 60, None], "no timer is left"
    with watch.phase("testing"):
        now[0] += 400.0
        with watch.phase("gen"):
            now[0] += 100.0
        assert armed[-1] == limits["validate_s"] - 500 + 60, "the outer phase has what is left of its time"
        with watch.phase("gen"):
            now[0] += 5000.0
        assert armed[-1] == 60


@pytest.mark.parametrize(
    ("phase", "requested_s_ago", "is_abandoned"),
    [("gen", 50.5, True), ("gen", 50.0, False), ("gen", None, False), ("update_actor", 99.0, False)],
)
def test_slow_step_is_abandoned_before_its_update(
    tmp_path: Path, phase: str, requested_s_ago: float | None, is_abandoned: bool
) -> None:
    watch = Watch(tmp_path, FakeStop(requested_s_ago), stop_deadline_s=100.0)
    if not is_abandoned:
        with watch.phase(phase):
            return
    with pytest.raises(StepAbandonedError) as caught, watch.phase(phase):
        pytest.fail("it was started")
    assert str(caught.value) == "the step was abandoned before gen: a stop was requested 50 s ago"


def test_hang_names_the_stage_of_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(tmp_path)
    watch.aside = lambda: "checkpoint of step 3: renaming x"
    watch._on_hang("commit", 61.4)
    (fault,) = read_failures(tmp_path / "run")
    message = f"runtime.deadlines.save_s: hang in commit after step 7: no end after 61 s; {watch.aside()}"
    assert (fault.kind, fault.phase, fault.step, fault.message) == ("hang", "commit", 7, message)
    assert str(fault.stacks).startswith(f"{tmp_path}/run/failures/stacks-20")
    assert Path(str(fault.stacks)).read_text().startswith(f"hang in commit after step 7\n{message}\n\n")
    (error,) = watch.errors
    assert isinstance(error, HangError)
    assert str(error) == f"{message}. Stacks of every process: {fault.stacks}"
    text = f"hang in commit after step 7; stacks: {fault.stacks}"
    assert watch.events == [{"event": "fault", "text": text, "kind": "hang", "phase": "commit", "step": 7}]
    assert f"failure: hang in commit after step 7: {message}" in caplog.text
    watch.record_failure(WorkerLostError("its rank was ended"))
    assert len(read_failures(tmp_path / "run")) == 1, "errors after a hang are its consequences"


def test_failure_names_its_phase(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    with watch.phase("gen"):
        pass
    error = DataError("no row")
    assert watch.record_failure(error) is error
    assert watch.events == [
        {"event": "fault", "text": "data in gen after step 7", "kind": "data", "phase": "gen", "step": 7}
    ]
    watch.record_failure(WorkerLostError("rank 1"))
    first, second = read_failures(tmp_path / "run")
    assert (first.kind, first.stacks) == ("data", None)
    assert second.kind == "lost worker"
    assert Path(str(second.stacks)).is_file()
    host = watch.record_failure(MemoryError("no"))
    assert str(host).startswith("host out of memory in gen: MemoryError: no\n")


@pytest.mark.parametrize("is_saving", [True, False])
def test_slow_stop_names_its_phase(tmp_path: Path, is_saving: bool) -> None:
    watch = Watch(tmp_path, stop_deadline_s=30.0)
    where = "its end"
    with ExitStack() as running:
        if is_saving:
            watch.aside = lambda: "checkpoint of step 3: renaming x"
            where = "gen; checkpoint of step 3: renaming x"
            for phase in ("testing", "gen"):
                running.enter_context(watch.phase(phase))
        watch._stop_takes_too_long()
    (error,) = watch.errors
    assert isinstance(error, StopRequestedError)
    text = f"runtime.stop_deadline_s: the run had not ended 30 s after a stop request (in {where}), and was killed."
    assert str(error).startswith(text)
