"""TensorBoard and Weights & Biases as readers of a journal, with their real packages."""

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from rlcore.config import RunConfig, TrackingConfig
from rlcore.errors import ConfigError
from rlcore.tracking import sinks
from rlcore.tracking.delivery import sync_run
from rlcore.tracking.journal import RunJournal
from tests.helpers.mlflow import client_of, main_run, points

BOTH = ("tensorboard", "wandb")


def begin(offline: RunConfig, run_dir: Path, *report_to: str) -> RunJournal:
    tracking = offline.tracking.model_copy(update={"report_to": report_to})
    return RunJournal(run_dir, offline.model_copy(update={"tracking": tracking}), tags={})


def tensorboard_values(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run_dir / sinks.TENSORBOARD_FOLDER), size_guidance={"tensors": 0})
    events.Reload()
    return {
        name: [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }


def wandb_records(content: bytes) -> Iterator[Record]:
    """Records of an offline file: a LevelDB log with a header of 7 bytes, in blocks of 32 KiB."""
    start, joined = 7, b""
    while start + 7 <= len(content):
        if (room := 32_768 - start % 32_768) < 7:
            start += room
            continue
        length, kind = struct.unpack("<HB", content[start + 4 : start + 7])
        joined += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(joined)
            joined = b""


def wandb_values(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Values of all offline files in the order of their creation."""
    wandb.teardown()  # its own process has written the files
    found = defaultdict(list)
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file.read_bytes()):
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            for name in row.keys() - {"_step", "_timestamp", "_runtime"}:
                found[name].append((record.history.step.num, float(row[name])))
    return dict(found)


@pytest.fixture(autouse=True)
def _wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_trackers_have_each_value_once_after_resume(offline: RunConfig, run_dir: Path) -> None:
    first = begin(offline, run_dir, *BOTH)
    first.append_step(1, {"actor/lr": 0.25, "reward": 1.5})
    saved = first.sync()
    first.append_step(2, {"reward": 9.0})
    first.finish("KILLED")
    sync_run(run_dir)
    second = begin(offline, run_dir, *BOTH)
    second.resume_at(1, saved)
    second.append_step(2, {"reward": 2.5, "actor/loss": float("nan")})
    second.append_event("alarm", 2, {})
    second.finish("FINISHED")
    sync_run(run_dir)
    expected = {"actor/lr": [(1, 0.25)], "reward": [(1, 1.5), (2, 2.5)]}
    assert tensorboard_values(run_dir) == expected
    files = wandb_values(run_dir)  # one file for each process; the server joins them by step
    assert files["reward"] == [(1, 1.5), (2, 9.0), (1, 1.5), (2, 2.5)]
    assert main_run(client_of(Path(offline.paths.root))).info.status == "FINISHED"


def test_failing_tracker_is_reported_once_and_stops_no_other(
    offline: RunConfig, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = begin(offline, run_dir, *BOTH)
    for step in (1, 2):
        journal.append_step(step, {"reward": float(step)})
    journal.finish("FINISHED")
    (run_dir / sinks.TENSORBOARD_FOLDER).touch()  # a file where the folder belongs
    sync_run(run_dir)
    (warning,) = [line for line in caplog.messages if "receives no more metrics" in line]
    assert warning.startswith("tensorboard receives")
    assert f"millrace sync {run_dir}" in warning
    assert wandb_values(run_dir) == {"reward": [(1, 1.0), (2, 2.0)]}
    client = client_of(Path(offline.paths.root))
    assert points(client, main_run(client), "reward") == [(1, 1.0), (2, 2.0)]


def test_unreachable_tracker_is_reported_after_mlflow_has_the_run(
    offline: RunConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "INIT_TIMEOUT_S", 1.0)
    for name, value in (("MODE", "online"), ("BASE_URL", "http://127.0.0.1:9"), ("API_KEY", "0" * 40)):
        monkeypatch.setenv(f"WANDB_{name}", value)
    journal = begin(offline, run_dir, "wandb")
    journal.append_step(1, {"reward": 1.0})
    journal.finish("FINISHED")
    client, seen, init = client_of(Path(offline.paths.root)), [], sinks.WandbSink.__init__

    def look(*arguments: Any) -> None:
        seen.append((main_run(client).info.status, points(client, main_run(client), "reward")))
        init(*arguments)

    monkeypatch.setattr(sinks.WandbSink, "__init__", look)
    sync_run(run_dir)
    assert seen == [("FINISHED", [(1, 1.0)])]
    (warning,) = [line for line in caplog.messages if "receives no more metrics" in line]
    assert warning.startswith("wandb receives")


def test_missing_login_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrackingConfig(report_to=("wandb",))
    monkeypatch.setenv("HOME", str(tmp_path))  # without a stored login
    sinks.require_trackers(settings)
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"tracking\.report_to: wandb needs a login.*WANDB_MODE=offline"):
        sinks.require_trackers(settings)
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    sinks.require_trackers(settings)
    wandb.teardown()


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrackingConfig(report_to=("tensorboard",))
    sinks.require_trackers(settings)
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking\.report_to: .* tensorboard, .*not installed.*pip install"):
        sinks.require_trackers(settings)
