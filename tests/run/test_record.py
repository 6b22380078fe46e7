"""Events of a run's steps, for its flow, log and journal."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.checkpoint.catalog import CheckpointInfo, LoopState
from rlcore.checkpoint.store import FoundCheckpoint
from rlcore.run.layout import RunLayout
from rlcore.run.record import Pace, RunRecord
from rlcore.run.watchdog import Failure, append_failure
from rlcore.tracking.journal import load_journal
from rlcore.trainer.metrics import Alarm
from rlcore.trainer.step import StepResult
from rlcore.workers.device import OomRetry
from tests.helpers.checkpoints import save
from tests.run.conftest import Reported


def journaled(record: RunRecord) -> list[tuple[str, int, Mapping[str, object]]]:
    record.journal.require_written()
    return [(event.name, event.step, event.data) for event in load_journal(record.layout.journal).events]


def test_pace_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rlcore.run.record.time.monotonic", lambda: now)
    pace = Pace(is_warm=False)
    now += 60.0  # it compiles
    pace.tick()
    assert math.isnan(pace.eta_s(9)), "nothing is known yet"
    assert pace.eta_s(0) == 0
    for seconds, steps_left, eta_s in ((2.0, 8, 16), (4.0, 7, 21)):
        now += seconds
        pace.tick()
        assert pace.eta_s(steps_left) == eta_s
    later = Pace(is_warm=True)  # the next chunk of the same process
    now += 3.0
    later.tick()
    assert later.eta_s(5) == 15


def test_progress_event_has_headline_metrics(record: RunRecord, reported: Reported) -> None:
    metrics = {"perf/throughput": 5.0, "critic/score/mean": 0.5, "actor/lr": 1.0}
    record.report_progress(StepResult(LoopState(3, 3, 24, 100, 0.1), metrics), 4, Pace(is_warm=False))
    (event,) = reported
    assert math.isnan(float(str(event["eta_s"])))
    assert {name: value for name, value in event.items() if name != "eta_s"} == {
        "event": "progress", "stage": "train", "step": 3, "to_step": 4, "total_steps": 9,
        "metrics": {"critic/score/mean": 0.5, "perf/throughput": 5.0}, "tokens_per_s": 5.0, "num_devices": 1,
        "may_end_early": False,
    }  # fmt: skip


@pytest.mark.parametrize(("stage", "rule", "may_end_early"), [
    ("warm-start", {"stop_at_reward": 0.5}, True), ("warm-start", {"patience": 2, "held_out_rows": 8}, True),
    ("warm-start", {}, False), ("train", {"stop_at_reward": 0.5}, False),
])  # fmt: skip
def test_supervised_steps_with_a_stop_rule_may_end_early(
    record: RunRecord, reported: Reported, tmp_path: Path, stage: str, rule: dict[str, Any], may_end_early: bool
) -> None:
    warm = {"stop_at_reward": None, "patience": None, "held_out_rows": 0} | rule
    config = record.config.model_copy(update={"warm_start": record.config.warm_start.model_copy(update=warm)})
    layout = RunLayout(tmp_path, tmp_path / "other")
    layout.run_dir.mkdir()
    other = RunRecord(config, layout, record.guard, stage=stage)
    other.report_progress(StepResult(LoopState(1, 1, 8, 100, 0.1), {"perf/throughput": 5.0}), 4, Pace(is_warm=False))
    other.finish(failed=False, is_over=False)
    assert [event["may_end_early"] for event in reported if event["event"] == "progress"] == [may_end_early]


def test_alarm_is_reported_once_while_it_lasts(record, reported, caplog) -> None:
    loud, other = Alarm("kl", "warn", "kl is 9"), Alarm("grad", "stop", "grad is 8")
    for step, alarms in ((1, [loud]), (2, [loud, other]), (3, []), (4, [loud])):
        record.record_alarms(step, alarms)
    assert [(event["step"], event["alarm"]) for event in reported] == [(1, "kl"), (2, "grad"), (4, "kl")]
    text = "alarm at step 2: grad is 8"
    assert reported[1] == {"event": "alarm", "step": 2, "alarm": "grad", "action": "stop", "text": text}
    assert text in caplog.text
    assert [(name, step) for name, step, _ in journaled(record)] == [("alarm", 1), ("alarm", 2), ("alarm", 4)]


def test_unscored_responses_are_reported_when_they_double(record: RunRecord, reported: Reported) -> None:
    for step, count in enumerate((0, 1, 1, 2, 3, 4, 1000, 1999, 2000)):
        record.record_unscored(step, count, "too late")
    assert [event["num_answers"] for event in reported] == [1, 2, 4, 1000, 2000]
    text = str(reported[3].pop("text"))
    assert re.fullmatch(r"data\.scorer failed on 1,000 response\(s\) so far.*; the last error: too late", text)
    assert reported[3] == {"event": "scorer_failed", "step": 6, "num_answers": 1000, "reason": "too late"}


def test_repeated_forward_pass_is_reported_with_its_budget(record: RunRecord, reported: Reported) -> None:
    shortages = [OomRetry("update", 2, 4, 2, "no room"), OomRetry("forward", 1, 8, 4000, "none")]
    record.record_shortages(3, shortages, 1001)
    assert [event["max_tokens_per_micro_batch"] for event in reported] == [500, 1]
    text = "step 3: update ran out of memory in 2 micro-batches and is repeated in 4: no room"
    expected = {"event": "out_of_memory", "step": 3, "factor": 2, "name": "update", "text": text}
    assert expected.items() <= reported[0].items()


def test_failures_are_in_the_journal_once(record: RunRecord) -> None:
    for number in (1, 2):
        append_failure(record.layout.run_dir, Failure("hang", "gen", number, "no end", time=float(number)))
    assert record.num_failures == 0
    for _ in range(2):
        record.restore_failures(4)
        assert record.num_failures == 2
        found = [(name, step, data["time"]) for name, step, data in journaled(record)]
        assert found == [("fault", 4, 1.0), ("fault", 4, 2.0)]


def test_resume_reports_refused_checkpoints(record: RunRecord, reported: Reported, tmp_path: Path) -> None:
    taken = CheckpointInfo(2, tmp_path / "step-000002")
    path, text = tmp_path / "step-000003", "resuming from step-000002: a flipped bit"
    refused = CheckpointInfo(3, path, verdict="broken", reason="a flipped bit")
    record.report_resume(2, FoundCheckpoint(taken, (refused,)))
    assert reported == [
        {"event": "checkpoint_refused", "step": 2, "text": text, "path": str(path)},
        {"event": "resumed", "step": 2, "text": "resuming from step 2"},
    ]
    record.report_resume(0, FoundCheckpoint(None, (refused,)))
    assert [event["text"] for event in reported[2:]] == ["resuming from the start: a flipped bit"]
    record.report_resume(2, FoundCheckpoint(taken, (), "it was cut"))
    assert reported[3]["event"] == "journal_mismatch"
    assert str(reported[3]["text"]).endswith("fits: it was cut; it lacks steps 1-2 permanently")


def test_next_size_and_end_follow_the_saves(record: RunRecord) -> None:
    assert (record.next_save_bytes, record._is_finished) == (0, False)
    record.first_save_bytes = 5
    assert record.next_save_bytes == 5
    for step, is_finished in ((3, False), (8, False), (9, True), (10, True)):
        save(record.store, step)
        assert record._is_finished == is_finished
        assert record.next_save_bytes == record.store.list()[-1].size_bytes


def test_unreadable_checkpoints_do_not_finish_a_run(record: RunRecord, caplog: pytest.LogCaptureFixture) -> None:
    record.layout.checkpoints.touch()
    assert not record._is_finished
    assert f"{record.layout.checkpoints}: cannot be read, so the run does not count as finished: " in caplog.text


def test_new_start_renames_results_and_resume_keeps_them(record: RunRecord) -> None:
    save(record.store, 1, 0.5)
    layout = record.layout
    for folder in (layout.validation, layout.suites / "s"):
        folder.mkdir(parents=True)
        for name in ("before", "step-000001", "step-000002", "after"):
            (folder / f"{name}.json").touch()
    layout.exported_model.mkdir()
    record.restore(1, 0)
    assert not list(layout.run_dir.rglob("*.left.*")), "the steps are repeated exactly"
    record.restore(0, 0)
    for folder in (layout.validation, layout.suites / "s"):
        kept = ["after.json.left.1", "before.json", "step-000001.json.left.1", "step-000002.json.left.1"]
        assert sorted(path.name for path in folder.iterdir()) == kept
    assert (layout.run_dir / "model.left.1").is_dir()
