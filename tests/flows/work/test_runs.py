"""Runs by name, and operations on them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.work.open_run import with_absolute_paths
from flows.work.runs import Outcome, all_runs, find_named_runs, find_run, find_runs, read_settings, sync
from rlcore.config import TrackingConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.run.layout import RunLayout
from rlcore.tracking.lineage import Origin

Made = Callable[..., RunLayout]


@pytest.fixture
def make_run(tmp_path: Path) -> Made:

    def make(run_id: str, *overrides: str) -> RunLayout:
        config = load_config([f"paths.root={tmp_path}", f"run_id={run_id}", *overrides], experiment="debug")
        layout = RunLayout.of(config)
        layout.run_dir.mkdir(parents=True)
        Origin(with_absolute_paths(config, layout)).write(layout.run_dir)
        return layout

    return make


def test_run_is_named_by_folder_id_or_prefix(make_run: Made, tmp_path: Path) -> None:
    one, two, long = (make_run(name).run_dir for name in ("sum-1", "sum-2", "sum-10"))
    (tmp_path / "runs" / "empty").mkdir()
    assert all_runs(tmp_path) == [one, long, two]
    assert find_named_runs([str(one), "sum-1", "sum-10", "sum-2"], tmp_path) == [one, one, long, two]
    only = tmp_path / "other" / "runs" / "div-7"
    only.mkdir(parents=True)
    (only / "run.json").touch()
    assert find_named_runs(["d", "div-"], tmp_path / "other") == [only, only]
    runs = tmp_path / "runs"
    for name, problem in (
        ("sum", "sum: is a prefix of several run ids"),
        ("div", "div: is neither the folder nor the id of a run"),
        ("", "'': is neither the folder nor the id of a run"),
    ):
        message = (
            f"{problem}; {runs} has: sum-1, sum-10, sum-2. Name one of them, or another root (--root or paths.root)."
        )
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            find_named_runs([name], tmp_path)
    for root, count, named in (
        (tmp_path / "nothing", 0, r"none\. Name"),
        (tmp_path, 5, r"run-0, .*, run-4, .*, sum-2\. Name"),
        (tmp_path, 8, r"run-0, .*, run-7 and 3 more \(millrace runs lists them\)\. Name"),
    ):
        for number in range(count):
            (runs / f"run-{number}").mkdir(exist_ok=True)
            (runs / f"run-{number}" / "run.json").touch()
        with pytest.raises(DataError, match=rf"{root}/runs has: {named}"):
            find_named_runs(["other"], root)


def test_run_is_found_by_name_or_settings(make_run: Made, tmp_path: Path) -> None:
    layout = make_run("sum-1")
    for words in (["sum-1"], [str(layout.run_dir)], ["experiment=debug", "run_id=sum-1"]):
        config, found = find_run(words, tmp_path)
        assert (config.run_id, found.run_dir, found.root) == ("sum-1", layout.run_dir, tmp_path)
    for words in (["sum-1", "sum-2"], ["experiment=debug", "sum-1"]):
        with pytest.raises(ConfigError, match=f"^RUN: must be one run, .*; got {' '.join(words)}$"):
            find_run(words, tmp_path)
    with pytest.raises(DataError, match=r"runs/sum-3: there is no such run with these settings"):
        find_run(["experiment=debug", "run_id=sum-3"], tmp_path)
    odd = shutil.copytree(layout.run_dir, tmp_path / "runs" / "seed=1")
    assert find_run([str(odd)], None)[1].run_dir == odd


def test_settings_of_another_version_are_reported_with_file(make_run: Made) -> None:
    layout = make_run("sum-1")
    layout.run_json.write_text('{"settings": {"from_tomorrow": 1}}')
    message = rf"^{layout.run_json}: cannot be read \(.*\); use the version of Millrace that wrote it"
    with pytest.raises(DataError, match=message):
        read_settings(layout.run_dir)


def test_run_that_has_not_begun_is_not_delivered(make_run: Made) -> None:
    assert sync(make_run("sum-1").run_dir, None) == Outcome("sum-1", "has not begun", ok=True)


def test_root_without_store(make_run: Made, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    make_run("sum-1")
    message = f"--search 'x': there is no MLflow store ({uri}) to search; name another --root"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        find_runs([], "x", tmp_path, TrackingConfig())
    assert find_runs(["sum-1", "sum-1"], "", tmp_path, TrackingConfig()) == [tmp_path / "runs" / "sum-1"]
    assert not (tmp_path / "mlflow.db").exists()
