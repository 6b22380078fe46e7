"""The journal, written and read, and the GPU-seconds in it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.tracking.journal import (
    GPU_SECONDS,
    CostMeter,
    GpuUse,
    Journal,
    gpu_seconds,
    load_journal,
    missing_steps,
    read_journal,
)
from tests.helpers.forked import loaded_by


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_import_loads_neither_mlflow_nor_torch():
    assert not {"mlflow", "torch", "pandas"} & loaded_by(
        "import rlcore.tracking.attempts, rlcore.tracking.mlflow_store, rlcore.tracking.delivery"
    )


def test_event_data_is_converted_to_json(path: Path):
    data = {"loss": math.nan, "limit": 1.5, "each": [1, math.inf, (True, None)], "by rank": {3: Path("größer")}}
    with Journal(path) as journal:
        journal.append_event("alarm", 1, data)
    (event,) = load_journal(path).events
    assert event.data == {"loss": "nan", "limit": 1.5, "each": [1, "inf", [True, None]], "by rank": {"3": "größer"}}


def test_empty_journal_is_complete(path: Path, caplog: pytest.LogCaptureFixture):
    with Journal(path) as journal:
        journal.close()
    contents = load_journal(path)
    assert (contents.steps, contents.events, contents.torn_bytes, contents.num_damaged_lines) == ((), (), 0, 0)
    assert (read_journal(path), caplog.messages) == ([], [])
    assert path.stat().st_mode & 0o133 == 0, "only its owner writes it, and it is not executable"


@pytest.mark.parametrize(
    ("steps", "spans"),
    [
        (range(1, 11), ""),
        ((1, 2, 4, 5, 6, 7, 8, 9, 10), "step 3"),
        ((2, 3, 7, 8, 10), "steps 1, 4-6, 9"),
        ((1, 2, 3, 11), "steps 4-10"),
        ((), "steps 1-10"),
    ],
)
def test_missing_steps_are_reported_as_spans(path: Path, steps: Sequence[int], spans: str):
    with Journal(path) as journal:
        for step in steps:
            journal.append_step(step, {"a": 1.0})
    assert missing_steps(load_journal(path), 10) == spans


def test_lines_of_one_step_are_merged_and_nonfinite_values_named(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0, "b": math.nan, "d": -math.inf})
        journal.append_step(2, {"a": 2.0})
        journal.append_step(1, {"b": 5.0, "c": math.inf})
    line = json.loads(path.read_text().splitlines()[0], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (line["metrics"], line["nonfinite"]) == ({"a": 1.0, "b": None, "d": None}, ["b", "d"])
    first, second = read_journal(path)
    assert (first.step, first.metrics, first.nonfinite) == (1, {"a": 1.0, "b": 5.0}, ("d", "c"))
    assert (second.metrics, second.nonfinite) == ({"a": 2.0}, ())


def test_non_numbers_are_rejected(path: Path):
    with Journal(path) as journal, pytest.raises(TypeError):
        journal.append_step(1, {"a": None})  # type: ignore[dict-item]
    assert path.stat().st_size == 0


@pytest.mark.parametrize("cut", [1, 30])
def test_torn_last_line_is_skipped_and_reported(path: Path, caplog: pytest.LogCaptureFixture, cut: int):
    with Journal(path) as journal:
        for step in (1, 2):
            journal.append_step(step, {"a": 1.0})
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-cut])
    assert [record.step for record in read_journal(path)] == [1]
    torn = len(second) - cut
    assert load_journal(path).torn_bytes == torn
    assert caplog.messages == [f"{path}: skipped {torn} bytes of an unfinished last line and 0 unreadable lines"]


def test_damaged_lines_are_counted(path: Path):
    lines = [b'{"step":1,"time":1.0,"metrics":{"a":1.0}}', b"\0\0\0", b"[]", b'{"step":"x","time":1,"metrics":{}}']
    lines += [b'{"step":2,"time":1.0,"metrics":{"a":"text"}}', b'{"step":3,"time":2.0,"metrics":{"a":2.0}}', b""]
    path.write_bytes(b"\n".join(lines))
    contents = load_journal(path)
    assert [record.step for record in contents.steps] == [1, 3]
    assert contents.num_damaged_lines == 4


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.dictionaries(st.text(min_size=1), st.floats(allow_nan=True), max_size=4)),
        max_size=15,
    )
)
def test_any_names_and_values_round_trip(tmp_path_factory: pytest.TempPathFactory, lines):
    path = tmp_path_factory.mktemp("journal") / "metrics.jsonl"
    wanted: dict[int, dict[str, float]] = {}
    with Journal(path) as journal:
        for step, metrics in lines:
            journal.append_step(step, metrics)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            wanted.setdefault(step, {}).update(finite)
    assert {record.step: dict(record.metrics) for record in read_journal(path)} == wanted


def test_seconds_of_ranks_are_summed(path: Path):
    meter = CostMeter(path)
    assert meter.metrics([GpuUse(1, 10), GpuUse(1, 11)]) == {GPU_SECONDS: 21}
    assert meter.metrics([GpuUse(1, 20), GpuUse(1, 21)]) == {GPU_SECONDS: 41}
    # after a restart of the group, the seconds of its previous ranks count
    assert meter.metrics([GpuUse(2, 50), GpuUse(2, 50)]) == {GPU_SECONDS: 141}


def test_cpu_has_no_gpu_seconds(path: Path):
    assert CostMeter(path).metrics([]) == {}
    with Journal(path) as journal:
        journal.append_step(1, {"actor/lr": 0.1})
    assert gpu_seconds(path) is None


def test_resume_adds_attempts_without_double_counting(path: Path):
    """Each attempt resumes from the first step and repeats the second."""

    def attempt(checkpoint_bytes: int, *seconds: float) -> int:
        with Journal(path) as journal:
            journal.truncate(checkpoint_bytes)
            meter = CostMeter(path)
            for place, one in enumerate(seconds):
                journal.append_step(place + (checkpoint_bytes > 0), meter.metrics([GpuUse(1.0, one)]))
            return journal.size_bytes

    checkpoint = attempt(0, 10)
    attempt(checkpoint, 5, 8)
    assert gpu_seconds(path) == 18
    attempt(checkpoint, 2, 4)
    assert gpu_seconds(path) == 22
    attempt(checkpoint)
    assert gpu_seconds(path) == 22, "the removed lines count, also without a new line"
    assert len(list(path.parent.glob("metrics.abandoned-*.jsonl"))) == 2
