"""The journal: written and read."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.tracking.journal import Journal, load_journal, missing_steps, read_journal
from tests.helpers.imports import loaded_by


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_import_loads_neither_mlflow_nor_torch():
    assert not {"mlflow", "torch", "pandas"} & loaded_by(
        "import rlcore.tracking.attempts, rlcore.tracking.mlflow_store, rlcore.tracking.delivery"
    )


def test_values_round_trip(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 0.1 + 0.2, "b": 1e-300, "c": 3})
        journal.append_event("out_of_memory", 1, {"tokens": 8192, "why": "größer", "path": Path("x")})
    contents = load_journal(path)
    assert contents.steps[0].metrics == {"a": 0.1 + 0.2, "b": 1e-300, "c": 3.0}
    assert contents.events[0].name == "out_of_memory"
    assert contents.events[0].data == {"tokens": 8192, "why": "größer", "path": "x"}
    assert (contents.torn_bytes, contents.num_damaged_lines) == (0, 0)


def test_event_data_is_converted_to_json(path: Path):
    data = {"loss": math.nan, "limit": 1.5, "each": [1, math.inf, (True, None)], "by rank": {3: Path("x")}}
    with Journal(path) as journal:
        journal.append_event("alarm", 1, data)
    (event,) = load_journal(path).events
    assert event.data == {"loss": "nan", "limit": 1.5, "each": [1, "inf", [True, None]], "by rank": {"3": "x"}}


def test_empty_journal_is_complete(path: Path, caplog: pytest.LogCaptureFixture):
    with Journal(path), Journal(path) as again:
        again.close()
        again.close()
    contents = load_journal(path)
    assert (contents.steps, contents.events, contents.torn_bytes, contents.num_damaged_lines) == ((), (), 0, 0)
    assert read_journal(path) == []
    assert caplog.messages == []
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


def test_times_are_rounded_to_milliseconds(path: Path):
    with Journal(path) as journal:
        for step in range(50):
            journal.append_step(step, {"a": 1.0})
    for record in read_journal(path):
        assert record.time == round(record.time * 1e3) / 1e3


def test_lines_of_one_step_are_merged(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"a": 1.0, "b": math.nan})
        journal.append_step(2, {"a": 2.0})
        journal.append_step(1, {"b": 5.0, "c": math.inf})
    first, second = read_journal(path)
    assert (first.step, first.metrics, first.nonfinite) == (1, {"a": 1.0, "b": 5.0}, ("c",))
    assert second.metrics == {"a": 2.0}


def test_nonfinite_values_are_null_and_named(path: Path):
    with Journal(path) as journal:
        journal.append_step(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "fine": 1.0})
    line = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert line["metrics"] == {"nan": None, "inf": None, "minus": None, "fine": 1.0}
    assert line["nonfinite"] == ["nan", "inf", "minus"]
    (record,) = read_journal(path)
    assert record.metrics == {"fine": 1.0}
    assert record.nonfinite == ("nan", "inf", "minus")


def test_non_numbers_are_rejected(path: Path):
    with Journal(path) as journal:
        with pytest.raises(TypeError):
            journal.append_step(1, {"a": None})  # type: ignore[dict-item]
        assert journal.size_bytes == 0


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_torn_last_line_is_skipped_and_reported(path: Path, caplog: pytest.LogCaptureFixture, cut: int):
    with Journal(path) as journal:
        for step in (1, 2):
            journal.append_step(step, {"a": 1.0})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [record.step for record in read_journal(path)] == [1]
    assert load_journal(path).torn_bytes == len(whole.splitlines(keepends=True)[1]) - cut
    torn = load_journal(path).torn_bytes
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
