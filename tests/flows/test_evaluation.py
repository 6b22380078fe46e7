"""Suites in training, and `millrace eval` with paired differences."""

import json
import shutil
from pathlib import Path

import pytest

from flows.evaluation import evaluation_settings
from rlcore.checkpoint.catalog import list_checkpoints
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.report.held_out import suite_table
from rlcore.report.record import read_run
from rlcore.tracking.journal import load_journal, read_journal
from tests.flows.conftest import in_this_process
from tests.helpers.sessions import session_of, train_in_chunks
from tests.helpers.small_run import SmallRun, prepare

TASK = (
    "data: {task: countdown, template: bare, train_size: 1, validation_size: %d, min_numbers: 3, max_numbers: 3, "
    "number_high: 20, target_high: 40, operations: %s}\nsamples_per_problem: 2\nnum_resamples: 1000\n"
)


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("suites")
    (folder / "often.yaml").write_text(TASK % (12, "['+', '-']") + "every_steps: 1\nmax_problems: 5\n")
    (folder / "ends.yaml").write_text(TASK % (6, "['+']") + "every_steps: 0\ngreedy: false\nseed: 7\n")
    return [str(folder / "often.yaml"), str(folder / "ends.yaml")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, suites: list[str]) -> SmallRun:
    """Three steps, evaluated before, during and after training."""
    root = tmp_path_factory.mktemp("artifacts")
    more = ("tracking.enabled=false", "warm_start.max_steps=60", "trainer.total_steps=3", "optim.lr=3e-3")
    made = prepare(root, f"validation.suites=[{','.join(suites)}]", "validation.every_steps=2", *more)
    with session_of(made) as session:
        train_in_chunks(session, 1, 2, 3)
        session.validate("start", "before")
        session.validate("last", "after")
    return made


def result(run: SmallRun, suite: str, name: str) -> ValidationResult:
    return ValidationResult.read(run.layout.suites / suite / f"{name}.json")


def test_suite_is_validated_at_its_steps(run):
    steps = {record.step: record.metrics for record in read_journal(run.layout.journal)}
    evaluated = {
        name: [step for step, metrics in steps.items() if f"val-core/{name}/reward/mean_at_2" in metrics]
        for name in ("countdown", "often", "ends")
    }
    assert evaluated == {"countdown": [0, 2, 3], "often": [0, 1, 2, 3], "ends": [0, 3]}
    assert [len(result(run, "often", name).problems) for name in ("step-000001", "before", "after")] == [5, 12, 12]
    assert "val-core/ends/reward/greedy" not in steps[0]
    saved = list_checkpoints(run.layout.checkpoints, verify_hashes=False)[-1].metrics
    assert {name.split("/")[1] for name in saved if name.startswith("val-core/")} == {"countdown"}
    shown = suite_table(read_run(run.layout.run_dir))
    assert {row[0].text for row in shown.rows} == {"often", "ends"}
    assert sorted(file.name for file in run.inputs.suites["often"].glob("*.parquet")) == ["validation.parquet"]


def test_evaluation_matches_the_run_and_pairs_results(run, suites, capsys):
    folder = str(run.layout.run_dir)
    words = (f"{folder}@start", folder, "--suite", suites[0], "--suite", suites[1])
    done = in_this_process(capsys, "eval", *words, "--json", code=0)
    message = json.loads(done.out)
    own_results = ({"often": "step-000000", "ends": "before"}, {"often": "step-000003", "ends": "after"})
    for one, names in zip(message["evaluations"], own_results, strict=True):
        for suite, num_problems in (("often", 5), ("ends", 6)):
            own = result(run, suite, names[suite])
            assert one["suites"][suite]["num_problems"] == len(own.problems) == num_problems
            expected = {f: {"value": i.value, "low": i.low, "high": i.high} for f, i in own.intervals.items()}
            assert one["suites"][suite]["figures"] == expected
    before, after = (
        [sum(answer.score for answer in problem.samples) / 2 for problem in result(run, "often", name).problems]
        for name in ("step-000000", "step-000003")
    )
    gains = [late - early for early, late in zip(before, after, strict=True)]
    mean = next(row for row in message["paired"][0]["suites"]["often"] if row["figure"] == "reward/mean_at_2")
    assert mean["difference"]["value"] == pytest.approx(sum(gains) / len(gains))
    assert (mean["better"], mean["worse"]) == (sum(g > 0 for g in gains), sum(g < 0 for g in gains))
    files = sorted(Path(message["evaluations"][0]["folder"]).glob("suites/*/before.json"))
    written = [file.stat().st_mtime_ns for file in files]
    again = in_this_process(capsys, "eval", *words, code=0)
    assert [file.stat().st_mtime_ns for file in files] == written
    assert "paired:" in again.out
    assert "worker(s) on" not in again.out + again.err


def test_models_are_evaluated_with_equal_reward_weights(run, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(run.config.paths.root, root)
    folder = root / "runs" / run.layout.run_dir.name
    record = json.loads((folder / "run.json").read_text())
    settings = record["settings"]
    settings["paths"]["root"] = str(root)
    settings["model"]["path"], settings["warm_start"]["enabled"] = str(run.model_directory), False
    settings["reward"] |= {"weights": {"correct": 1.0, "format": 0.2}, "deadline_s": 7.0}
    (folder / "run.json").write_text(json.dumps(record))
    models = (str(folder), str(run.model_directory))
    short = ["filter.max_prompt_tokens=40", "rollout.max_response_tokens=16"]
    trained, base = (evaluation_settings(model, ["countdown"], short, root) for model in models)
    assert trained.reward.weights == base.reward.weights == {}
    assert trained.reward.deadline_s == 7.0
    given = [*short, "reward.weights={correct: 2.0}"]
    weights = [evaluation_settings(model, ["countdown"], given, root).reward.weights for model in models]
    assert weights == [{"correct": 2.0}] * 2


def test_silent_judge_is_an_error_without_result(run, tmp_path, capsys):
    suite = tmp_path / "evaluated.yaml"
    one = (TASK % (1, "['+']")).replace("samples_per_problem: 2", "samples_per_problem: 1\ngreedy: false")
    suite.write_text(one.replace("{", "{scorer: data.judge:score, ", 1))
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "tries": 1, "deadline_s": 4}
    words = ("reward.num_processes=1", *(f"reward.judge.{name}={value}" for name, value in judge.items()), "--json")
    done = in_this_process(capsys, "eval", str(run.layout.run_dir), "--suite", str(suite), *words)
    assert (done.code, done.out) == (1, "")
    assert "suite evaluated: has no metrics, for 1 responses have no score; data.judge:score failed, the la" in done.err
    assert "no verdict of http://127.0.0.1:9/v1 (reward.judge.url)" in done.err
    assert "Traceback" not in done.err
    assert [*run.layout.run_dir.parent.glob("eval-*/metrics.jsonl")]
    assert not [*run.layout.run_dir.parent.glob("eval-*/suites/evaluated/*")]


def test_evaluation_journal_reports_responses_without_score(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fails_at_times.py").write_text("def score(response, truth):\n    return 1 / (len(response) % 2)\n")
    suite = tmp_path / "fails.yaml"
    suite.write_text((TASK % (12, "['+']")).replace("{", "{scorer: 'fails_at_times:score', ", 1))
    words = (f"validation.suites=[{suite}]", "tracking.enabled=false", "warm_start.max_steps=60", "name=evaluation")
    made = prepare(Path(run.config.paths.root), *words, "reward.max_unmet_references=1")
    with session_of(made) as session:
        session.evaluate()
    journal = load_journal(made.layout.journal)
    assert [record.step for record in journal.steps] == [0]
    (message,) = [event.data for event in journal.events if event.name == "scorer_failed"]
    failures = ValidationResult.read(made.layout.suites / "fails" / "before.json").failures
    assert (message["suite"], message["num_answers"]) == ("fails", len(failures))
    assert failures


def test_wrong_names_are_reported(run, suites, tmp_path):
    with pytest.raises(DataError, match=r"neither the folder nor the id of a run.*A model is a folder"):
        evaluation_settings("no-such-run", suites, [], tmp_path)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("data: {task: countdown, trian_size: 3}")
    with pytest.raises(ConfigError, match=r"--suite: wrong: data.trian_size: there is no such setting"):
        evaluation_settings(str(run.layout.run_dir), [str(wrong)], [], None)
    with pytest.raises(ConfigError, match=r"cannot be chosen over settings"):
        evaluation_settings(str(run.layout.run_dir), suites, ["algo=ppo"], None)
