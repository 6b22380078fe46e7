"""The model of step 0: its metrics and its display line."""

from pathlib import Path
from types import MappingProxyType

import pytest

from rlcore.config import ModelConfig, PathsConfig, RunConfig
from rlcore.run.initial_policy import (
    REFERENCE,
    InitialPolicy,
    known_initial_policy,
    planned_initial_policy,
    remove_leftovers,
    stage_layout,
)
from rlcore.run.layout import RunInputs
from rlcore.storage.locks import RunLock
from rlcore.storage.manifest import Manifest
from tests.helpers.published import publish


def manifest(**values: object) -> Manifest:
    return Manifest(MappingProxyType(values), ())


def test_other_model_has_no_metrics() -> None:
    found = InitialPolicy.of(Path("m"), None, cached=True)
    assert (found.directory, found.cached, found.steps, dict(found.figures)) == (Path("m"), True, 0, {})
    assert str(found) == "no supervised steps: training starts from m"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"reward": 0.25, "held_out_loss": 1.23456, "loss": 9}, "reward 0.250, held-out-loss 1.235 after 7 steps"),
        ({"held_out_loss": 2, "accuracy": 0.5, "reward": None}, "held-out-loss 2.000 after 7 steps"),
    ],
)
def test_text_shows_reward_and_held_out_loss(values: dict[str, object], shown: str) -> None:
    for cached, skipped in ((True, ", skipped: done before"), (False, "")):
        found = InitialPolicy.of(Path("m"), manifest(steps=7, kind="model", **values), cached=cached)
        assert str(found) == f"{shown}{skipped} (m)"
        assert found.figures == {name: value for name, value in values.items() if value is not None}


def of_model(root: Path, path: Path | None, *, warm: bool) -> RunConfig:
    config = RunConfig(model=ModelConfig(path=None if path is None else str(path)), paths=PathsConfig(root=str(root)))
    return config.model_copy(update={"warm_start": config.warm_start.model_copy(update={"enabled": warm})})


def test_configured_and_built_policies_are_known(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    inputs = RunInputs(tmp_path / "f", tmp_path / "t")
    given = known_initial_policy(of_model(tmp_path, tmp_path / "given", warm=False), inputs)
    assert given == InitialPolicy(tmp_path / "given", cached=True)
    assert given.steps == 0
    for warm in (False, True):
        config = of_model(tmp_path, None, warm=warm)
        assert known_initial_policy(config, inputs) is None
        planned = planned_initial_policy(config, inputs.filtered_directory)
        publish(planned, fingerprint=planned.name, steps=7, loss=0.5)
        assert known_initial_policy(config, inputs) == InitialPolicy(planned, True, 7, {"loss": 0.5})


def test_leftovers_of_a_warm_start_are_removed(tmp_path: Path) -> None:
    config, inputs = of_model(tmp_path, None, warm=True), RunInputs(tmp_path / "f", tmp_path / "t")
    stage = stage_layout(config, inputs.filtered_directory)
    for folder in (stage.checkpoints, stage.run_dir / REFERENCE):
        folder.mkdir(parents=True)
        (folder / "file").touch()
        remove_leftovers(config, inputs)
        assert folder.is_dir()
    stage.journal.touch()
    publish(planned_initial_policy(config, inputs.filtered_directory), steps=7)
    with RunLock(stage.run_dir):
        remove_leftovers(config, inputs)
        assert stage.checkpoints.is_dir(), "it is in use"
    remove_leftovers(config, inputs)
    assert sorted(path.name for path in stage.run_dir.iterdir()) == ["metrics.jsonl", "run.lock"]
    (stage.run_dir / REFERENCE).mkdir()  # a kill between the two removals
    remove_leftovers(config, inputs)
    assert sorted(path.name for path in stage.run_dir.iterdir()) == ["metrics.jsonl", "run.lock"]
