"""Pass rates of the training rows: the table, the selected rows, and training on them."""

from pathlib import Path

import pytest

from flows.work.plan import make_plan
from rlcore.errors import DataError, StopRequestedError
from rlcore.run.pass_rates import TABLE, find_pass_rates, planned_pass_rates, read_table
from tests.helpers.running import disturb, output_of, steps_of, weights_of
from tests.helpers.sessions import Event, elsewhere, run_to_the_end, session_of
from tests.helpers.small_run import SmallRun, prepare

COARSE = ("data.train_size=48", "pass_rates.samples=4", "tracking.enabled=false")
BASE = (*COARSE, "pass_rates.rows_per_part=20")
DRAWN = (
    *BASE, "pass_rates.keep=[0,0.9]", "pass_rates.draw=band", "pass_rates.band=[0.2,0.8]",
    "algo.dynamic_sampling.enabled=true", "algo.overlong.enabled=true", "algo.overlong.buffer_tokens=4",
    "trainer.steps_per_chunk=2", "trainer.total_steps=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = prepare(tmp_path_factory.mktemp("measured"), *BASE)
    with session_of(run) as session:
        session.measure_pass_rates()
    return run


def table_of(run: SmallRun) -> Path:
    return planned_pass_rates(run.config, run.inputs.filtered_directory) / TABLE


def test_stopped_stage_resumes_to_the_same_bytes(measured: SmallRun, tmp_path: Path) -> None:
    stops: list[int] = []
    run = elsewhere(measured, tmp_path, *BASE)

    def on_event(event: Event) -> None:
        if event["event"] == "progress":
            stops.append(1)

    stopped = session_of(run, on_event, lambda: bool(stops))
    with stopped as session, pytest.raises(StopRequestedError, match="20 of 48 rows are saved"):
        session.measure_pass_rates()
    assert find_pass_rates(run.config, run.inputs) is None
    shown: list[Event] = []
    run = elsewhere(measured, tmp_path, *COARSE, "pass_rates.rows_per_part=16")
    with session_of(run, shown.append) as session:
        session.measure_pass_rates()
    shown = [event for event in shown if event["event"] == "progress"]
    assert [event["step"] for event in shown] == [36, 48], "the first twenty are not sampled again"
    assert all(0 < event["tokens_per_s"] < 1e8 for event in shown), "each by its own seconds"
    assert table_of(run).read_bytes() == table_of(measured).read_bytes()
    assert [path.name for path in table_of(run).parents[1].glob("measuring-*/rows-*")] == []


def test_table_counts_equal_those_of_validation(measured: SmallRun) -> None:
    with session_of(measured) as session:
        workers = session._workers
        workers.load("start")
        answers = workers.training_responses(workers.problems.train[0][20:22], 4, 20)
    lines = read_table(table_of(measured)).slice(20, 2).to_pylist()
    for line, mine in zip(lines, (answers[:4], answers[4:]), strict=True):
        assert line["passes"] == sum(answer.solved for answer in mine)
        assert line["samples"] == 4
        assert line["mean_score"] == sum(answer.score for answer in mine) / 4
        assert dict(line["mean_parts"])["correct"] == sum(answer.parts["correct"] for answer in mine) / 4
        assert line["mean_tokens"] == sum(answer.num_tokens for answer in mine) / 4
        assert line["truncated"] == sum(answer.finish_reason == "length" for answer in mine)


def test_rows_are_selected_by_their_rate(measured: SmallRun, tmp_path: Path) -> None:
    rates = [row["passes"] / row["samples"] for row in read_table(table_of(measured)).to_pylist()]
    root = Path(measured.config.paths.root)
    run = prepare(root, *BASE, "pass_rates.keep=[0.2,0.8]", "trainer.batch_size=2", "trainer.mini_batch_size=2")
    with session_of(run) as session:
        session.measure_pass_rates()
        problems = session._workers.problems
        kept = [prompt.prompt_id for prompt in problems.selected[0]]
    assert kept == [row for row, rate in enumerate(rates) if 0.2 <= rate <= 0.8]
    assert 2 <= len(kept) < 48
    (plan,) = [stage for stage in make_plan(run.config).stages if stage.name == "pass-rates"]
    assert (plan.cached, plan.detail) == (True, f"kept {len(kept)} of 48 rows")
    few = prepare(root, *BASE, "pass_rates.keep=[0.99,1]")
    with session_of(few) as session, pytest.raises(DataError, match=r"keep: must leave trainer\.batch_size=8 rows"):
        session.measure_pass_rates()


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_killed_run_draws_by_the_same_counts(measured: SmallRun, tmp_path: Path) -> None:
    whole = elsewhere(measured, tmp_path / "whole", *DRAWN)
    with session_of(whole) as session:
        session.measure_pass_rates()
    run_to_the_end(whole)
    killed = elsewhere(measured, tmp_path / "killed", *DRAWN)
    kills = [{"at": at, "nth": nth, "signals": ["SIGKILL"]} for at, nth in (("pass-rates", 2), ("update_actor", 4))]
    found = disturb(killed, *kills, None)
    assert [one["code"] for one in found] == [-9, -9, 0], output_of(killed)
    assert table_of(killed).read_bytes() == table_of(whole).read_bytes()
    steps = steps_of(whole)
    assert steps_of(killed) == steps
    assert weights_of(killed) == weights_of(whole)
    assert steps[0]["pass_rates/rows_kept"] <= 48
    assert {"pass_rates/retired_share", "pass_rates/mean", "pass_rates/rows_revived"} <= steps[3].keys()
