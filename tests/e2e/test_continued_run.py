"""A resumed run is the same run: at an epoch's end, after the last step, with other ranks or allowed settings."""

import itertools
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.errors import EXIT_RESUMABLE, CheckpointError, StopRequestedError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.process import run as run_process
from rlcore.storage.locks import RunLock
from rlcore.tracking.attempts import ATTEMPTS_FILE, read_attempts
from rlcore.tracking.delivery import read_state
from tests.helpers.running import assert_same, steps_of, weights_of, write_record
from tests.helpers.sessions import (
    OVERRIDES,
    QUIET,
    Asked,
    Event,
    elsewhere,
    run_to_the_end,
    session_of,
    steps,
    verified_steps,
)
from tests.helpers.small_run import SmallRun, prepare
from tests.helpers.whole_run import WholeRun


def test_a_new_process_at_every_step(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    for step in range(1, 7):
        with session_of(run) as session:
            assert session.train(step)["step"] >= step
    assert {steps_of(run)[step]["training/epoch"] for step in (1, 4, 6)} == {0.0, 1.0, 2.0}
    with session_of(run) as session:
        assert session.train(6)["skipped"] is True
        session.export("last")
    assert_same(run, undisturbed)


def test_critic_schedule_and_coefficient_go_on_too(undisturbed: SmallRun, tmp_path: Path) -> None:
    """These states do not exist in plain GRPO. (`test_pass_rates.py` tests dropped prompts.)"""
    more = (
        "algo=ppo", "algo.kl.where=reward", "algo.kl.adaptive=true", "algo.kl.horizon=50",
        "optim.schedule=cosine", "optim.warmup_steps=1",
        "algo.entropy_control.target=9", "algo.entropy_control.step=0.001",
    )  # fmt: skip
    whole = elsewhere(undisturbed, tmp_path / "whole", *steps(4), QUIET, *more)
    run_to_the_end(whole)
    run = elsewhere(undisturbed, tmp_path / "in_parts", *steps(4), QUIET, *more)
    for step in range(1, 5):
        with session_of(run) as session:
            session.train(step)
    with session_of(run) as session:
        session.export("last")
    expected = steps_of(whole)
    for name in ("actor/kl_coef", "actor/entropy_coef", "actor/lr", "critic/vf_loss"):
        assert len({expected[step][name] for step in range(1, 5)}) > 2, name
    assert_same(run, whole)


def test_a_stop_at_any_moment_saves_the_last_step(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *steps(6), QUIET)
    for requested in (1, 2, 3):  # the loop checks more than once a step: the request may come between two checks
        looks = itertools.chain([False] * (requested - 1), itertools.repeat(True))
        with (
            session_of(run, stop=looks.__next__) as session,
            pytest.raises(StopRequestedError, match=r"stopped after step \d, which is saved"),
        ):
            session.train(6)
        assert max(steps_of(run)) == verified_steps(run)[-1], f"requested at check {requested}"


def test_an_unsettled_checkpoint_is_committed_later_also_within_a_chunk(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    reported: list[Event] = []
    with session_of(run, reported.append) as session:
        session.train(2, settle=False)
        assert session.train(3, settle=False)["step"] == 3
        assert 2 in [event["step"] for event in reported if event["event"] == "checkpoint"]
    assert verified_steps(run)[-1] == 3


def test_a_run_with_its_last_checkpoint_is_finished(undisturbed: SmallRun, tmp_path: Path) -> None:
    """The trainer may have been killed after the last checkpoint. A flow that finds the checkpoint does not train."""
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    with session_of(run) as session:
        session.train(4)
        session.record_failure(KeyError("a bug"))
    with session_of(run) as session:
        session.train(6)
    attempts = run.layout.run_dir / ATTEMPTS_FILE
    *lines, finish = attempts.read_text().splitlines(keepends=True)
    assert "FINISHED" in finish
    attempts.write_text("".join(lines))
    with session_of(run) as session:
        session.validate("last", "after")
        session.export("last")
    assert re.findall(r'"status":"(\w+)"', attempts.read_text()) == ["FAILED", "FINISHED"]


def test_a_stop_while_waiting_for_the_lock(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    run_dir = write_record(run)
    with RunLock(run.layout.run_dir):
        assert run_process(run_dir, WholeRun(run_dir), Asked(lambda: True)) == EXIT_RESUMABLE


def test_training_continues_while_a_checkpoint_is_written(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    events: list[Event] = []
    with session_of(run, events.append) as session:
        for step in (2, 4, 6):
            result = session.train(step)
            assert result["step"] >= step
            assert Path(str(result["checkpoint"]), "manifest.json").is_file()
            session.validate("last", f"after-{step}")
        session.export("last")
    steps = [event["step"] for event in events if event["event"] == "progress"]
    assert steps[-1] == 6
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [2, 4, 6]
    assert_same(run, undisturbed)


def test_without_memory_for_a_copy_training_waits_for_the_save(
    undisturbed: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.checkpoint.save.SPARE_SHARE", 1e12)
    run = elsewhere(undisturbed, tmp_path, *OVERRIDES)
    events: list[Event] = []
    with session_of(run, events.append) as session:
        assert session.train(6)["step"] == 6
        session.export("last")
    reported = [(event["event"], event["step"]) for event in events if event["event"] in ("progress", "checkpoint")]
    assert reported == [
        *[("progress", 1), ("progress", 2), ("checkpoint", 2)],
        *[("progress", 3), ("progress", 4), ("checkpoint", 4)],
        *[("progress", 5), ("progress", 6), ("checkpoint", 6)],
    ]
    assert weights_of(run) == weights_of(undisturbed)


@pytest.mark.multiprocess
@pytest.mark.needs_ray
@pytest.mark.parametrize("ranks", [(1, 2, 1), pytest.param((8, 4, 1), marks=pytest.mark.lengthy)], ids=str)
def test_run_resumes_with_other_ranks(undisturbed: SmallRun, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The numbers equal those of one rank, which computes a prompt separately for each response."""
    for step, number in zip((2, 4, 6), ranks, strict=True):
        runtime = "runtime=local" if number == 1 else "runtime=ray"
        overrides = (QUIET, runtime, f"runtime.num_workers={number}", "model.share_prompts=true")
        run = elsewhere(undisturbed, tmp_path, *steps(step), *overrides)
        with session_of(run) as session:
            assert "skipped" not in session.train(step)
    found, expected = steps_of(run), steps_of(undisturbed)
    assert found.keys() == expected.keys()
    for step, metrics in expected.items():
        by_ranks = {name for name in metrics if name.startswith(("global_seqlen/", "perf/"))}
        assert found[step].keys() == metrics.keys()
        for name in metrics.keys() - by_ranks:
            assert found[step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), (step, name)


EASY = (
    "{task:countdown,train_size:30,validation_size:12,min_numbers:2,max_numbers:2,number_high:9,target_high:9,"
    "operations:[+,-],template:bare}"
)
MIXTURE = (
    "data=mixture", QUIET, "trainer.steps_per_chunk=1", "validation.every_steps=1", "warm_start.max_steps=20",
    "trainer.total_steps=2",
    f"data.parts=[{{weight:3,name:easy,data:{EASY}}},{{data:{{task:custom,train_size:80,validation_size:8}}}}]",
)  # fmt: skip


def test_a_mixture_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    whole, split = (prepare(tmp_path, *MIXTURE, f"run_id={name}") for name in ("whole", "split"))
    with session_of(whole) as session:
        session.train(2)
        session.validate("last", "after")
    for step in (1, 2):
        with session_of(split) as session:
            session.train(step)
    expected = steps_of(whole)
    assert steps_of(split) == expected
    sources = ("all", "easy", "sort_digits")
    assert all(f"val-core/{source}/reward/mean_at_2" in step for step in expected.values() for source in sources)
    result = ValidationResult.read(whole.layout.validation / "after.json")
    assert (result.data_source, len(result.problems)) == ("all", 20)
    summary = result.metrics()
    easy, times, both = (summary[f"val-core/{name}/reward/greedy"] for name in ("easy", "sort_digits", "all"))
    assert abs(both - (12 * easy + 8 * times) / 20) < 1e-12
    assert list(result.by_source()) == ["easy", "sort_digits"]


def test_settings_that_may_change_and_others(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = elsewhere(undisturbed, tmp_path, *steps(2), QUIET)
    with session_of(run) as session:
        session.train(2)
    run_id = run.layout.run_dir.name
    wrong = elsewhere(undisturbed, tmp_path, *OVERRIDES, f"run_id={run_id}", "optim.lr=1e-3", "algo.clip_low=0.1")
    with session_of(wrong) as session, pytest.raises(CheckpointError) as refused:
        session.train(4)
    for words in ("optim.lr: 0.0003 in the checkpoint, 0.001 now", "algo.clip_low: 0.2", f"--fork {run_id}@2"):
        assert words in str(refused.value)
    changed = ("checkpoint.keep_last=5", "trainer.max_tokens_per_micro_batch=4096")
    run = elsewhere(undisturbed, tmp_path, *steps(6, chunk=3), QUIET, *changed)
    assert run.layout.run_dir.name == run_id
    run_to_the_end(run)
    assert steps_of(run) == steps_of(undisturbed)


def test_a_resume_continues_the_mlflow_run(undisturbed: SmallRun, tmp_path: Path, empty_store: Path) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")  # on a busy machine its tables take longer than a run's end waits
    ids = []
    for step in (2, 6):
        run = elsewhere(undisturbed, tmp_path, *steps(step), "tracking.enabled=true")
        with session_of(run) as session:
            session.train(step)
        ids.append(read_state(run.layout.run_dir).mlflow_run_id)
    assert ids[0] is not None
    assert ids[0] == ids[1]
    assert [attempt.from_step for attempt, _ in read_attempts(run.layout.run_dir)] == [0, 2]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        known = "select step from metrics where run_uuid = ? and key = 'critic/score/mean' order by step"
        assert [step for (step,) in store.execute(known, (ids[0],))] == list(range(1, 7)), "each step once"
        assert store.execute("select status from runs where run_uuid = ?", (ids[0],)).fetchall() == [("FINISHED",)]
