"""What a sweep leaves in MLflow: its run has a description and links, its runs are found, reused ones too."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from prefect.logging import disable_run_logger

from flows.progress import display_for_console, shown_on
from flows.sweep.record import PointRecord, members_of, sweep_directory
from flows.sweep.result import (
    SweepResult,
    are_alike,
    begin_in_mlflow,
    finish_in_mlflow,
    summary_of,
    write_comparison,
)
from rlcore.config.sweep_load import Sweep, load_sweep
from rlcore.tracking.delivery import ensure_mlflow_run
from rlcore.tracking.journal import JOURNAL_FILE, Journal
from rlcore.tracking.mlflow_store import NOTE_TAG, PARENT_TAG, MlflowStore
from tests.helpers.mlflow import Server, running_server
from tests.helpers.reports import write_run

pytestmark = [pytest.mark.slow]
LEARNING_RATES = [1e-4, 2e-4, 3e-4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), empty_store) as server:
        yield server


@pytest.fixture
def sweep(server: Server, tmp_path: Path) -> Sweep:
    file = tmp_path / "rates.yaml"
    settings = f"overrides: [tracking.uri={server.uri!r}, paths.root={tmp_path}]"
    file.write_text(f"name: rates\nexperiment: debug\n{settings}\ngrid: {{optim.lr: {LEARNING_RATES}}}\n")
    return load_sweep(str(file))


def finished(sweep: Sweep) -> list[PointRecord]:
    """Points whose runs have a page in MLflow and a score."""
    points = []
    for number, settings in enumerate(sweep.points, 1):
        point = PointRecord(number, settings, members_of(sweep, settings)[0], "finished", {2: 0.1 * number})
        for member in point.members:
            member.run_dir.mkdir(parents=True)
        points.append(point)
    return points


def test_a_sweeps_run_describes_it_and_has_all_its_runs_reused_ones_too(sweep: Sweep) -> None:
    store = MlflowStore(sweep.base.tracking, Path(sweep.base.paths.root))
    points = finished(sweep)
    # The first was made by `millrace run`, the second by another sweep, the third by this one.
    parents = {"another": store.create_run("another", {})}
    with disable_run_logger():
        own = begin_in_mlflow(sweep)
    assert own is not None
    begun = store.client.get_run(own).data.tags[NOTE_TAG]
    assert "Varies `optim.lr` of debug by grid" in begun
    assert "Maximizes reward/mean@2" in begun
    pages = [
        ensure_mlflow_run(point.members[0].run_dir, point.members[0].config, tags)
        for point, tags in zip(points, ({}, {PARENT_TAG: parents["another"]}, {PARENT_TAG: own}), strict=True)
    ]
    result = SweepResult(
        sweep.sweep_id, sweep_directory(sweep), 3, 3, 0, [], 0, "", 3, 6, 3, points[2].label, 0.3, None, None, own
    )
    (result.folder / "sweep.json").write_text("{}")
    with disable_run_logger():
        finish_in_mlflow(sweep, own, points, result)

    tags = [store.client.get_run(page).data.tags for page in pages]
    assert [one[PARENT_TAG] for one in tags] == [own, parents["another"], own]
    assert [one[f"millrace.sweep.{sweep.sweep_id}"] for one in tags] == ["1", "2", "3"]
    query = f"tags.`millrace.sweep.{sweep.sweep_id}` != ''"
    found = store.client.search_runs([store.experiment_id], query)
    assert {run.info.run_id for run in found} == set(pages)

    run = store.client.get_run(own)
    assert run.info.status == "FINISHED"
    text = run.data.tags[NOTE_TAG]
    assert "3 of 3 points finished" in text
    rows = [line for line in text.splitlines() if line.endswith("| finished |")]
    assert [row.split("|")[1].strip() for row in rows] == ["3", "2", "1"], "the best first"
    (link,) = [line for line in text.splitlines() if "side by side" in line]
    url = unquote(link.partition("](")[2].removesuffix(")"))
    assert url.startswith(f"{store.uri}/#/compare-runs?runs=")
    assert url.endswith("&workflowType=machine_learning"), "the training view, not that of traces"
    assert [url.index(page) for page in (pages[2], pages[1], pages[0])] == sorted(url.index(page) for page in pages)

    with disable_run_logger():
        assert begin_in_mlflow(sweep) == own, "the sweep goes on in its run"
    assert store.client.get_run(own).info.status == "RUNNING"


def test_points_without_a_difference_are_said_to_be_equal(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text("name: rates\nexperiment: debug\ngrid: {algo.clip_high: [7, 8, 9]}\n")
    points = finished(load_sweep(str(file), [f"paths.root={tmp_path}"]))
    for point in points:
        write_run(point.members[0].run_dir, experiment="debug", num_steps=2, num_problems=4)
    assert are_alike(points)
    assert not are_alike(points[:1]), "of one point nothing is said"
    result = SweepResult("rates-1", tmp_path, 3, 3, 0, [], 0, "", 3, 6, 1, "", 0.3, file, None, None, is_alike=True)
    assert summary_of(result)[1:] == [
        "no difference: all metrics of the 3 finished points are equal",
        f"settings of the first one: {file}",
    ]
    shutil.rmtree(points[2].members[0].run_dir)
    write_run(points[2].members[0].run_dir, experiment="debug", num_steps=2, num_problems=4, gain=0.36)
    assert not are_alike(points)


def test_a_comparison_is_written_anew_once_its_runs_are_others_or_have_gone_on(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text("name: rates\nexperiment: debug\ngrid: {optim.lr: [1, 2, 3]}\n")
    points = finished(load_sweep(str(file), [f"paths.root={tmp_path}"]))
    one, two, three = (point.members[0].run_dir for point in points)

    def compared() -> tuple[list[str], int]:
        page = write_comparison(tmp_path, points)
        assert page is not None
        rows = json.loads(page.with_suffix(".json").read_text())["tables"]["runs"]["rows"]
        return [row[0] for row in rows], page.stat().st_mtime_ns

    write_run(one, num_steps=2)
    assert write_comparison(tmp_path, points) is None, "the others' folders are empty"
    write_run(two, num_steps=2, seed=2)
    names, written = compared()
    assert names == [one.name, two.name]
    assert compared() == (names, written), "nothing is new"
    write_run(three, num_steps=2, seed=3)
    os.utime(three / JOURNAL_FILE, ns=(0, 0))
    names, with_three = compared()
    assert names == [one.name, two.name, three.name]
    assert with_three > written
    with Journal(two / JOURNAL_FILE) as journal:
        journal.append_step(3, {"val-core/countdown/reward/mean@2": 0.5})
    assert compared()[1] > with_three


def test_a_page_that_nothing_serves_is_told_with_the_command_that_does(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    file = tmp_path / "rates.yaml"
    file.write_text(f"name: rates\nexperiment: debug\noverrides: [paths.root={tmp_path}]\ngrid: {{optim.lr: [1e-4]}}\n")
    sweep = load_sweep(str(file))
    with disable_run_logger(), shown_on(display_for_console()):
        own = begin_in_mlflow(sweep)
        result = SweepResult(
            sweep.sweep_id, sweep_directory(sweep), 1, 1, 0, [], 0, "", 0, 0, None, "", None, None, None, own
        )
        (result.folder / "sweep.json").write_text("{}")
        finish_in_mlflow(sweep, own, finished(sweep), result)
    *_, page, after = capsys.readouterr().out.splitlines()
    assert page.startswith("in MLflow: http://127.0.0.1:5000/#/")
    assert after.strip().startswith("after ")
    assert after.endswith(f"millrace ui --root {tmp_path} --port 5000")
