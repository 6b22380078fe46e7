"""Points of a sweep in one process, and children on workers: finished, pruned, failed, resumed, within a budget."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.logging import disable_run_logger
from prefect.states import Completed, Crashed, Failed

from flows.sweep.flow import DEPLOYMENT, SweepWorker, work_on_workers
from flows.sweep.result import rows_of
from rlcore.config.sweep import Budget, Sweep, load_sweep
from rlcore.errors import MillraceError, StopRequestedError
from tests.helpers.sweeps import RunWriter

HEAD = "name: a\nexperiment: debug\noverrides: [validation.every_steps=1, tracking.enabled=false]\n"
RATES = "grid: {optim.lr: [1e-4, 2e-4, 3e-4, 4e-4]}\n"
THREE = "grid: {optim.lr: [1e-4, 2e-4, 3e-4]}\n"
PRUNED = "pruning: {every_steps: 1, confidence: 0.5}\n"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("flows.sweep.flow.POLL_S", 0)
    with disable_run_logger():
        yield


def load(folder: Path, text: str, budget: Budget | None = None) -> Sweep:
    (folder / "a.yaml").write_text(HEAD + text)
    return load_sweep(str(folder / "a.yaml"), [f"paths.root={folder}"], budget=budget)


def states(drive: SweepWorker, sweep: Sweep) -> list[str]:
    rows = rows_of(sweep, drive.study.points())
    return [row["state"] for row in sorted(rows, key=lambda row: int(row["point"]))]


def test_points_are_compared_with_earlier_ones(tmp_path):
    sweep, trainer = load(tmp_path, RATES + PRUNED), RunWriter()
    drive = SweepWorker(sweep, trainer, "call")
    assert drive.run() == ""
    assert states(drive, sweep) == ["finished", "stopped early", "finished", "stopped early"]
    trained = ((1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1))
    assert trainer.trained == [(f"optim.lr=0.000{point} seed=1", step) for point, step in trained]
    best, second, *_ = rows_of(sweep, drive.study.points())
    assert (best["point"], second["point"]) == (3, 1)
    assert best["scores"].keys() == {"1", "2"}
    assert best["score"] == best["scores"]["2"] == best["runs"][0]["score"]
    assert drive.spending.read()["steps"] == 6


def test_stopped_sweep_resumes_to_equal_results(tmp_path):
    def stopped_and_resumed(root: Path, at: int | None) -> tuple[list[str], list[object]]:
        root.mkdir()
        sweep = load(root, RATES + PRUNED)
        trainer = RunWriter(fails={} if at is None else {at: StopRequestedError("requested to stop")})
        if at is not None:
            with pytest.raises(StopRequestedError):
                SweepWorker(sweep, trainer, "first").run()
            trainer.trained.pop()
        drive = SweepWorker(sweep, trainer, "then")
        drive.run()
        rows = rows_of(sweep, drive.study.points())
        assert len(set(trainer.trained)) == len(trainer.trained), "no step is trained twice"
        return states(drive, sweep), [(row["point"], row["scores"]) for row in rows]

    undisturbed = stopped_and_resumed(tmp_path / "whole", None)
    for at in range(1, 7):
        assert stopped_and_resumed(tmp_path / f"stopped-{at}", at) == undisturbed, at


def test_score_is_mean_over_seeds_and_failed_seed_fails_point(tmp_path):
    text = "seeds: [1, 2]\n" + RATES
    sweep, trainer = load(tmp_path, text), RunWriter(fails={2: ValueError("the scorer raised\nhere")})
    drive = SweepWorker(sweep, trainer, "first")
    drive.run()
    assert len(trainer.trained) == 8
    assert states(drive, sweep) == ["failed", *["finished"] * 3]
    failed = rows_of(sweep, drive.study.points())[-1]
    assert (failed["error"], failed["score"]) == ("the scorer raised\nhere", None)
    assert [run["step"] for run in failed["runs"]] == [2, 0]
    assert drive.spending.read()["steps"] == 14
    again = SweepWorker(sweep, trainer, "second")
    again.study.retry_failed()
    again.run()
    assert trainer.trained[8:] == [("optim.lr=0.0001 seed=2", 2)]
    assert states(again, sweep) == ["finished"] * 4
    for row in rows_of(sweep, again.study.points()):
        assert row["score"] == pytest.approx(sum(run["score"] for run in row["runs"]) / 2)


def test_finished_run_is_not_trained(tmp_path):
    trainer = RunWriter()
    SweepWorker(load(tmp_path, RATES), trainer, "call").run()
    listed = "objective: {direction: minimize}\nlist: [{optim.lr: 2e-4}, {optim.lr: 1e-4}]\n"
    sweep = load(tmp_path, listed)
    drive = SweepWorker(sweep, trainer, "call")
    drive.run()
    assert len(trainer.trained) == 4
    assert [row["point"] for row in rows_of(sweep, drive.study.points())] == [1, 2]
    assert drive.spending.read()["runs"] == []


def test_budget_ends_call_and_next_one_continues(tmp_path):
    sweep, trainer = load(tmp_path, "seeds: [1, 2]\n" + RATES, Budget(steps=6)), RunWriter()
    first = SweepWorker(sweep, trainer, "first")
    first.run()
    assert len(trainer.trained) == 3
    assert first.spending.read()["ended_by"] == "6 steps"
    assert states(first, sweep) == ["finished", "to do"]
    again = SweepWorker(load(tmp_path, "seeds: [1, 2]\n" + RATES), trainer, "again")
    again.run()
    assert len(set(trainer.trained)) == len(trainer.trained) == 8
    assert states(again, sweep) == ["finished"] * 4


def test_point_with_refused_settings_fails_alone(tmp_path):
    """Each value is valid with the first one of the other key, but a mini-batch of 16 needs more than 8 prompts."""
    space = "{optim.lr: [1e-4], trainer.batch_size: [16, 8], trainer.mini_batch_size: [8, 16]}"
    sweep = load(tmp_path, f"optuna: {{num_points: 12, startup_points: 12, space: {space}}}\n")
    drive = SweepWorker(sweep, RunWriter(), "call")
    drive.run()
    rows = rows_of(sweep, drive.study.points())
    refused = {"optim.lr": 1e-4, "trainer.batch_size": 8, "trainer.mini_batch_size": 16}
    assert {row["state"] for row in rows} == {"failed", "finished"}
    for row in rows:
        assert (row["state"] == "failed") == (row["settings"] == refused)
        assert ("trainer.mini_batch_size" in row["error"]) == (row["state"] == "failed")


def test_run_without_score_at_the_step_is_an_error(tmp_path):
    sweep = load(tmp_path, "list: [{optim.lr: 1e-4}]\n")
    drive = SweepWorker(sweep, lambda *_: None, "call")
    assert "has no reward/mean_at_2 at step 2, since it was trained before" in drive.run()


def test_process_waits_for_point_of_another(tmp_path, monkeypatch):
    """The other process may wait for the slot that a trainer would hold."""
    sweep, trainer = load(tmp_path, "list: [{optim.lr: 1e-4}]\n"), RunWriter()
    other = SweepWorker(sweep, trainer, "another")
    taken = other.study.ask()
    waits: list[int] = []

    def paused() -> None:
        waits.append(len(trainer.trained))
        other.study.release(taken)

    monkeypatch.setattr("flows.sweep.flow.wait_for_others", paused)
    SweepWorker(sweep, trainer, "call").run()
    assert (waits, len(trainer.trained)) == ([0], 1)


Play = Callable[[SyncPrefectClient, FlowRun], None]
"""Action of a worker on a waiting child."""


def around(drive: SweepWorker, sweep: Sweep) -> None:
    @flow
    def sweep_flow() -> None:
        work_on_workers(drive, sweep, {})

    sweep_flow()


@pytest.fixture
def on_workers(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[FlowRun]]]:
    """Return a function that runs a sweep and returns its children."""
    name, _, deployed = DEPLOYMENT.partition("/")
    deployment = client.create_deployment(client.create_flow_from_name(name), deployed)
    children: list[FlowRun] = []
    of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))

    def run(drive: SweepWorker, sweep: Sweep, play: Play) -> list[FlowRun]:
        def paused() -> None:
            for child in client.read_flow_runs(flow_run_filter=of_it):
                if child.state is not None and not child.state.is_final():
                    children.append(child)
                    play(client, child)

        monkeypatch.setattr("flows.sweep.flow.wait_for_others", paused)
        around(drive, sweep)
        return children

    yield run
    client.delete_deployment(deployment)


@pytest.mark.prefect
def test_children_finish_points_and_lost_ones_are_replaced(on_workers, tmp_path):
    sweep, trainer = load(tmp_path, THREE), RunWriter(fails={2: ValueError("the scorer raised")})
    drive, num_children = SweepWorker(sweep, trainer, "call"), 0

    def play(client: SyncPrefectClient, child: FlowRun) -> None:
        nonlocal num_children
        num_children += 1
        if num_children == 1:
            client.delete_flow_run(child.id)
        elif num_children == 2:
            client.set_flow_run_state(child.id, Crashed(), force=True)
        else:
            error = SweepWorker(sweep, trainer, "call").run(whole=False)
            client.set_flow_run_state(child.id, Failed(message=error) if error else Completed(), force=True)

    on_workers(drive, sweep, play)
    assert num_children >= 5
    assert len(trainer.trained) == len(set(trainer.trained)) == 3
    assert [trial.state.name for trial in drive.study.points().values()] == ["COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.prefect
def test_exhausted_budget_starts_no_children(on_workers, tmp_path):
    sweep, trainer = load(tmp_path, THREE, Budget(runs=1)), RunWriter()
    drive = SweepWorker(sweep, trainer, "call")

    def play(client: SyncPrefectClient, child: FlowRun) -> None:
        SweepWorker(sweep, trainer, "call").run(whole=False)
        client.set_flow_run_state(child.id, Completed(), force=True)

    assert len(on_workers(drive, sweep, play)) == 3
    assert len(trainer.trained) == 1
    assert drive.spending.read()["ended_by"] == "1 runs"


@pytest.mark.prefect
def test_children_without_work_end_the_sweep_with_an_error(on_workers, tmp_path):
    sweep = load(tmp_path, THREE)

    def play(client: SyncPrefectClient, child: FlowRun) -> None:
        client.set_flow_run_state(child.id, Failed(message="no such file"), force=True)

    with pytest.raises(MillraceError, match="its runs end without working on a point"):
        on_workers(SweepWorker(sweep, RunWriter(), "call"), sweep, play)


@pytest.mark.prefect
def test_missing_deployment_is_an_error_with_remedy(client, tmp_path):
    drive = SweepWorker(load(tmp_path, THREE), RunWriter(), "call")
    with pytest.raises(MillraceError, match=r"has no deployment sweep-child/sweep-point\. `millrace up`"):
        around(drive, load(tmp_path, THREE))
