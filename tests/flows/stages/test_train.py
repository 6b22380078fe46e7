"""The work of each stage where its result is there already, and what is noted beside it."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows import chain
from flows.progress import ValidationSummary
from flows.stages import train
from flows.stages.export import Export, ExportBest, ExportedWeights
from flows.stages.inputs import record_inputs, suite_datasets
from flows.stages.train import Chunk, Train
from flows.stages.validate import Evaluate, Validate
from flows.work.open_run import OpenRun, open_run
from rlcore.checkpoint.state import TrainerState
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config.compose import load_config
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.storage.publish import published_directory
from rlcore.user_code import code_for_run
from tests.helpers.validations import problem, result


@pytest.fixture
def run(artifacts_root: Path) -> Iterator[OpenRun]:
    """A run with a checkpoint of its first step; no trainer is started."""
    size = ["data.train_size=20", "data.validation_size=5", f"paths.root={artifacts_root}"]
    config = load_config(["experiment=debug", "warm_start.enabled=false", *size])
    with open_run(config, ("millrace", "run")) as run:
        state = TrainerState(
            step=1, policy_version=1, num_prompts_drawn=8, num_tokens=9, kl_coef=0.0,
            settings_fingerprint=settings_fingerprint(config),
        )  # fmt: skip
        with CheckpointStore(run.layout.checkpoints, config.checkpoint, config).writing(state, {}) as folder:
            (folder / "weights").write_text("x")
        yield run
        assert run.trainer.pid is None


@pytest.fixture
def rows(run: OpenRun) -> None:
    """The run's rows are made."""
    chain.make_rows(run, chain.run_quietly)
    record_inputs(run)


@pytest.mark.usefixtures("rows")
def test_what_is_there_is_not_made_again(run: OpenRun) -> None:
    layout = run.layout
    expected = Chunk(0, 1, layout.checkpoints / "step-000001", skipped=True, metrics={})
    assert Train(0, 1, is_last=False).find_or_make(run) == expected
    assert not run.origin.command
    judged = replace(result([problem(1, (1.0,))]), step=1, settings=run.config.validation.evaluation)
    judged.write(layout.validation / "after.json")
    known = ValidationSummary("after", 1, layout.validation / "after.json", cached=True, summary=judged.metrics())
    assert Validate("last").find_or_make(run) == known
    with published_directory(layout.exported_model, {"kind": "model", "step": 1}) as folder:
        (folder / "weights").write_text("x")
    last = ExportedWeights(layout.exported_model, 1, cached=True)
    assert Export().find_or_make(run) == last
    assert ExportBest().find_or_make(run) == last, "no checkpoint has a score"
    assert Evaluate().find_or_make(run) == []


@pytest.mark.usefixtures("rows")
def test_the_start_is_recorded_once_a_process(
    run: OpenRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "MAX_DIFF_CHARACTERS", 0)
    train.record_start(run)
    file = run.layout.run_json
    noted = json.loads(file.read_text())
    assert [stage["name"] for stage in noted["stages"]] == ["code", "dataset", "filtered", "tokenizer", "start model"]
    code = code_for_run(run.config)
    assert noted["stages"][0]["fingerprint"] == code.fingerprint
    assert ", ".join(code.sources) in json.dumps(noted["stages"][0])
    assert noted["command"] == ["millrace", "run"]
    assert (run.layout.run_dir / "code.diff").read_text() == ""
    file.unlink()
    train.record_start(run)
    assert not file.exists()
    run.is_origin_complete = False
    run.command = ("millrace", "train")
    file.mkdir()
    with caplog.at_level(logging.WARNING):
        train.record_start(run)
    (said,) = (one for one in caplog.messages if "how the training was started is not recorded" in one)
    assert said.startswith(f"{run.layout.run_dir}: how the training was started is not recorded: ")


def test_the_bounds_of_chunks(run: OpenRun) -> None:
    trainer = run.config.trainer.model_copy(update={"total_steps": 5, "steps_per_chunk": 2})
    config = run.config.model_copy(update={"trainer": trainer})
    assert Train.chunks(config) == [Train(0, 2, False), Train(2, 4, False), Train(4, 5, True)]
    assert Train.chunks(config, 4) == [Train(0, 2, False), Train(2, 4, True)]
    assert Train.chunks(config, 1) == [Train(0, 1, True)]


def test_datasets_of_suites_for_decontamination(run: OpenRun) -> None:
    assert suite_datasets(run.config) == {}
    suites = load_config(
        [
            "experiment=debug",
            f"paths.root={run.layout.root}",
            "filter.decontaminate=tell",
            "validation.suites=[{name: sums, data: {task: countdown, template: bare, max_numbers: 3, number_high: 20, "
            "target_high: 40, operations: ['+', '-'], train_size: 1, validation_size: 4}}]",
        ]
    )
    found = suite_datasets(suites)
    assert {name: folder.parent for name, folder in found.items()} == {"sums": run.layout.root / "datasets"}
    off = suites.model_copy(update={"filter": suites.filter.model_copy(update={"decontaminate": "off"})})
    assert suite_datasets(off) == {}
