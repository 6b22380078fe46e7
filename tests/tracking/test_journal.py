"""The journal: whole lines or none, nothing lost, everything read back."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import DiskSpaceError, TrackingError
from rlcore.storage import line_file
from rlcore.tracking.journal import Journal, iter_lines, load_journal, missing_steps, read_journal
from tests.storage.small_disk import fill, small_disk
from tests.test_imports import loaded_by

__all__ = ["small_disk"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_importing_it_loads_neither_mlflow_nor_torch():
    assert not {"mlflow", "torch", "pandas"} & loaded_by(
        "import rlcore.tracking.companion, rlcore.tracking.mlflow_store, rlcore.tracking.delivery"
    )


def test_values_come_back_as_they_were(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 0.1 + 0.2, "b": 1e-300, "c": 3})
        journal.append_event("out_of_memory", 1, {"tokens": 8192, "why": "größer", "path": Path("x")})
    contents = load_journal(path)
    assert contents.steps[0].metrics == {"a": 0.1 + 0.2, "b": 1e-300, "c": 3.0}
    assert contents.events[0].name == "out_of_memory"
    assert contents.events[0].data == {"tokens": 8192, "why": "größer", "path": "x"}
    assert (contents.torn_bytes, contents.num_damaged_lines) == (0, 0)


def test_the_data_of_an_event_is_what_json_can_hold(path: Path):
    data = {"loss": math.nan, "limit": 1.5, "each": [1, math.inf, (True, None)], "by rank": {3: Path("x")}}
    with Journal(path) as journal:
        journal.append_event("alarm", 1, data)
    (event,) = load_journal(path).events
    assert event.data == {"loss": "nan", "limit": 1.5, "each": [1, "inf", [True, None]], "by rank": {"3": "x"}}


def test_a_journal_without_a_line_is_whole(path: Path, caplog: pytest.LogCaptureFixture):
    with Journal(path), Journal(path) as again:
        again.close()
        again.close()
    contents = load_journal(path)
    assert (contents.steps, contents.events, contents.torn_bytes, contents.num_damaged_lines) == ((), (), 0, 0)
    assert read_journal(path) == []
    assert caplog.messages == []
    assert path.stat().st_mode & 0o133 == 0, "nobody but its owner writes to it, nobody executes it"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (range(1, 11), ""),
        ((1, 2, 4, 5, 6, 7, 8, 9, 10), "step 3"),
        ((2, 3, 7, 8, 10), "steps 1, 4-6, 9"),
        ((1, 2, 3, 11), "steps 4-10"),
        ((), "steps 1-10"),
    ],
)
def test_the_steps_without_a_line_are_told_as_spans(path: Path, steps: Sequence[int], told: str):
    with Journal(path) as journal:
        for step in steps:
            journal.append_step(step, {"a": 1.0})
    assert missing_steps(load_journal(path), 10) == told


def test_a_time_is_whole_milliseconds_so_that_a_replay_makes_the_same_time_stamp(path: Path):
    with Journal(path) as journal:
        for step in range(50):
            journal.append_step(step, {"a": 1.0})
    for record in read_journal(path):
        assert record.time == round(record.time * 1e3) / 1e3


def test_lines_of_one_step_are_one_record(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0, "b": math.nan})
        journal.append_step(2, {"a": 2.0})
        journal.append_step(1, {"b": 5.0, "c": math.inf})
    first, second = read_journal(path)
    assert (first.step, first.metrics, first.nonfinite) == (1, {"a": 1.0, "b": 5.0}, ("c",))
    assert second.metrics == {"a": 2.0}


def test_what_is_not_finite_is_null_in_the_file_and_named(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "fine": 1.0})
    line = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert line["metrics"] == {"nan": None, "inf": None, "minus": None, "fine": 1.0}
    assert line["nonfinite"] == ["nan", "inf", "minus"]
    (record,) = read_journal(path)
    assert record.metrics == {"fine": 1.0}
    assert record.nonfinite == ("nan", "inf", "minus")


def test_a_value_that_is_no_number_is_refused_and_nothing_is_written(path: Path):
    with Journal(path) as journal:
        with pytest.raises(TypeError):
            journal.append_step(1, {"a": None})  # type: ignore[dict-item]
        assert journal.size_bytes == 0


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_left_out_and_told(path: Path, caplog: pytest.LogCaptureFixture, cut: int):
    with Journal(path) as journal:
        for step in (1, 2):
            journal.append_step(step, {"a": 1.0})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [record.step for record in read_journal(path)] == [1]
    assert load_journal(path).torn_bytes == len(whole.splitlines(keepends=True)[1]) - cut
    torn = load_journal(path).torn_bytes
    assert caplog.messages == [f"{path}: left out {torn} bytes of an unfinished last line and 0 unreadable lines"]


@pytest.mark.parametrize("before", [[1], []], ids=["after a whole one", "alone"])
@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_a_writer_cuts_the_torn_line_that_it_finds(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, before: list[int], block_bytes: int
):
    monkeypatch.setattr(line_file, "READ_BLOCK_BYTES", block_bytes)
    with Journal(path) as journal:
        for step in before:
            journal.append_step(step, {"a": 1.0})
    with path.open("ab") as file:
        file.write(b'{"step":2,"time":1.0,"metr')
    with Journal(path) as journal:
        journal.append_step(3, {"a": 3.0})
    assert caplog.messages == [f"{path}: cut 26 bytes of a line that was never finished"]
    contents = load_journal(path)
    assert [record.step for record in contents.steps] == [*before, 3]
    assert (contents.torn_bytes, contents.num_damaged_lines) == (0, 0)


def test_damaged_lines_are_counted_and_the_others_read(path: Path):
    lines = [b'{"step":1,"time":1.0,"metrics":{"a":1.0}}', b"\0\0\0", b"[]", b'{"step":"x","time":1,"metrics":{}}']
    lines += [b'{"step":2,"time":1.0,"metrics":{"a":"text"}}', b'{"step":3,"time":2.0,"metrics":{"a":2.0}}', b""]
    path.write_bytes(b"\n".join(lines))
    contents = load_journal(path)
    assert [record.step for record in contents.steps] == [1, 3]
    assert contents.num_damaged_lines == 4


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_what_is_cut_off_is_kept_beside(path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int):
    monkeypatch.setattr(line_file, "READ_BLOCK_BYTES", block_bytes)
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        at_checkpoint = journal.sync()
        journal.append_step(2, {"a": 2.0})
        head, tail = path.read_bytes()[:at_checkpoint], path.read_bytes()[at_checkpoint:]
        first = journal.truncate(at_checkpoint)
        journal.append_step(2, {"a": 2.5})
        second = journal.truncate(at_checkpoint)
        assert path.read_bytes() == head
        journal.append_step(2, {"a": 2.75})
    assert first is not None
    assert first.name == "metrics.abandoned-1.jsonl"
    assert first.read_bytes() == tail
    assert second is not None
    assert second.name == "metrics.abandoned-2.jsonl"
    assert [record.metrics["a"] for record in read_journal(path)] == [1.0, 2.75]


def test_going_back_on_a_full_disk_changes_nothing_and_leaves_nothing(small_disk: Path):
    with Journal(small_disk / "metrics.jsonl") as journal:
        journal.append_step(0, {"a": 1.0})
        at_checkpoint = journal.size_bytes
        for step in range(1, 40):
            journal.append_step(step, {f"m{number}": 1.0 for number in range(100)})
        whole = journal.sync()
        ballast = fill(small_disk, leave_bytes=4096)
        with pytest.raises(DiskSpaceError, match=r"metrics\.jsonl: no room"):
            journal.truncate(at_checkpoint)
        assert sorted(small_disk.iterdir()) == [ballast, journal.path]
        assert journal.size_bytes == whole
        ballast.unlink()
        assert journal.truncate(at_checkpoint) is not None
        assert [record.step for record in read_journal(journal.path)] == [0]


def test_going_back_is_forced_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    forced: list[tuple[bool, int]] = []

    def watched(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        forced.append((stat.st_ino == path.parent.stat().st_ino, stat.st_size))
        fsync(descriptor)

    fsync = os.fsync
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        kept = journal.size_bytes
        journal.append_step(2, {"a": 2.0, "b": 3.0})
        whole = journal.size_bytes
        monkeypatch.setattr(os, "fsync", watched)
        journal.truncate(kept)
    assert [size for is_folder, size in forced if not is_folder] == [whole - kept, kept], "both files, when whole"
    assert [is_folder for is_folder, _ in forced] == [False, False, True]


def test_going_back_to_where_it_is_cuts_nothing(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        assert journal.truncate(journal.size_bytes) is None
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("offset", [1, -1])
def test_a_place_where_no_line_ends_is_refused(path: Path, offset: int):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        before = path.read_bytes()
        with pytest.raises(TrackingError, match=r"metrics\.jsonl: asked to go back to byte"):
            journal.truncate(journal.size_bytes + offset)
    assert path.read_bytes() == before


def test_a_reader_that_has_the_old_journal_open_reads_on_undisturbed(path: Path):
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.append_step(step, {"a": float(step)})
        with path.open("rb") as reader:
            _, end = next(iter_lines(reader.fileno(), 0))
            journal.truncate(end)
            journal.append_step(9, {"a": 9.0})
            seen = [record for record, _ in iter_lines(reader.fileno(), end)]
    assert [record.step for record in seen if record is not None] == [2, 3]
    assert [record.step for record in read_journal(path)] == [1, 9]


def test_two_threads_never_mix_their_lines(path: Path):
    with Journal(path) as journal:

        def write(thread: int) -> None:
            for step in range(200):
                journal.append_step(step, {f"thread/{thread}/{i}": 1.0 for i in range(20)})

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    contents = load_journal(path)
    assert contents.num_damaged_lines == 0
    assert len(contents.steps) == 200
    assert all(len(record.metrics) == 80 for record in contents.steps)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from rlcore.errors import DiskSpaceError
from rlcore.tracking.journal import Journal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write over the limit fails as on a full disk
journal = Journal(Path(sys.argv[1]))
journal.append_step(1, {"a": 1.0})
limit = journal.size_bytes + 20                # room for half of the next line
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
journal.append_step(2, {"a": 2.0})
assert b'"step":2' not in Path(sys.argv[1]).read_bytes(), "half a line is on disk"
try:
    journal.sync()
except DiskSpaceError as error:
    print(error)
    assert error.needed_bytes == int(str(error).partition("metrics.jsonl: ")[2].split()[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append_step(3, {"a": 3.0})
assert journal.sync() == Path(sys.argv[1]).stat().st_size
"""


WENT_BACK = """
import resource, signal, sys
from pathlib import Path
from rlcore.tracking.journal import Journal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write over the limit fails as on a full disk
journal = Journal(Path(sys.argv[1]))
journal.append_step(1, {"a": 1.0})
saved = journal.sync()
resource.setrlimit(resource.RLIMIT_FSIZE, (saved, resource.RLIM_INFINITY))
journal.append_step(2, {"a": 2.0, "of the way that was left": 2.0})
assert journal.truncate(saved) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append_step(2, {"a": 3.0})
kept = journal.sync()
journal.append_step(3, {"a": 4.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (journal.sync(), resource.RLIM_INFINITY))
journal.append_step(4, {"a": 4.0})
assert journal.truncate(kept) is not None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append_step(3, {"a": 5.0})  # its time may have a digit more
"""


def test_lines_that_found_no_room_are_not_written_after_going_back(path: Path):
    subprocess.run([sys.executable, "-c", WENT_BACK, str(path)], check=True)
    assert [record.metrics for record in read_journal(path)] == [{"a": 1.0}, {"a": 3.0}, {"a": 5.0}]


def test_a_full_disk_costs_no_value_and_leaves_no_half_line(path: Path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    second = path.read_bytes().splitlines(keepends=True)[1]
    assert f"{path}: {len(second)} bytes could not be written" in done.stdout
    assert "make room" in done.stdout
    assert [record.step for record in read_journal(path)] == [1, 2, 3]


KILLED = """
import sys
from pathlib import Path
from rlcore.tracking.journal import Journal

journal = Journal(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    journal.append_step(step, {f"m{i}": step / 7 for i in range(100)})
    print(step, flush=True)
"""


def test_every_line_that_was_written_survives_kill_9(path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 300:
                break
        process.send_signal(signal.SIGKILL)
        said = [int(line), *(int(each) for each in process.stdout)]
    steps = [record.step for record in read_journal(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= said[-1] >= 300


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.dictionaries(st.text(min_size=1), st.floats(allow_nan=True), max_size=4)),
        max_size=15,
    )
)
def test_any_values_under_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, lines):
    path = tmp_path_factory.mktemp("journal") / "metrics.jsonl"
    wanted: dict[int, dict[str, float]] = {}
    with Journal(path) as journal:
        for step, metrics in lines:
            journal.append_step(step, metrics)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            wanted.setdefault(step, {}).update(finite)
    assert {record.step: dict(record.metrics) for record in read_journal(path)} == wanted


def test_it_grows_in_single_writes_at_its_end(path: Path):
    """Two writers (a run that is validated while it trains) never overwrite each other."""
    with Journal(path) as first, Journal(path) as second:
        first.append_step(1, {"a": 1.0})
        second.append_step(2, {"a": 2.0})
        first.append_step(3, {"a": 3.0})
        assert first.size_bytes == second.size_bytes == path.stat().st_size
    assert [record.step for record in read_journal(path)] == [1, 2, 3]


def test_a_sync_forces_what_was_written_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0})
        monkeypatch.setattr(os, "fsync", watched)
        assert sizes == []
        assert [journal.sync()] == sizes == [path.stat().st_size]
