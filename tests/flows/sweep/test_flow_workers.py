"""Children of a sweep on workers in Prefect's API, without a worker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed, Crashed, Failed

from flows.sweep.flow import DEPLOYMENT, SweepWorker, work_on_workers
from rlcore.config.sweep import Budget, Sweep, load_sweep
from rlcore.errors import MillraceError
from tests.helpers.sweeps import RunWriter

pytestmark = pytest.mark.prefect
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


def load(folder: Path, budget: Budget | None = None) -> Sweep:
    file = folder / "a.yaml"
    file.write_text("name: a\nexperiment: debug\ngrid: {optim.lr: [1e-4, 2e-4, 3e-4]}\n")
    return load_sweep(str(file), [f"paths.root={folder}", "tracking.enabled=false"], budget=budget)


def test_children_finish_points_and_lost_ones_are_replaced(
    on_workers: Callable[..., list[FlowRun]], tmp_path: Path
) -> None:
    sweep, trainer = load(tmp_path), RunWriter(fails={2: ValueError("the scorer raised")})
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


def test_exhausted_budget_starts_no_children(on_workers: Callable[..., list[FlowRun]], tmp_path: Path) -> None:
    sweep, trainer = load(tmp_path, Budget(runs=1)), RunWriter()
    drive = SweepWorker(sweep, trainer, "call")

    def play(client: SyncPrefectClient, child: FlowRun) -> None:
        SweepWorker(sweep, trainer, "call").run(whole=False)
        client.set_flow_run_state(child.id, Completed(), force=True)

    assert len(on_workers(drive, sweep, play)) == 3
    assert len(trainer.trained) == 1
    assert drive.spending.read()["ended_by"] == "1 runs"


def test_children_without_work_end_the_sweep_with_an_error(
    on_workers: Callable[..., list[FlowRun]], tmp_path: Path
) -> None:
    sweep = load(tmp_path)
    with pytest.raises(MillraceError, match="its runs end without working on a point"):
        on_workers(
            SweepWorker(sweep, RunWriter(), "call"),
            sweep,
            lambda client, child: client.set_flow_run_state(child.id, Failed(message="no such file"), force=True),
        )


def test_missing_deployment_is_an_error_with_remedy(client: SyncPrefectClient, tmp_path: Path) -> None:
    drive = SweepWorker(load(tmp_path), RunWriter(), "call")
    with pytest.raises(MillraceError, match=r"has no deployment sweep-child/sweep-point\. `millrace up`"):
        around(drive, load(tmp_path))
