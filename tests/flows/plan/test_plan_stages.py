"""Stages in the plan: status, dependencies, disk space."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flows import chain
from flows.plan import plan as plans
from flows.plan.plan import RunPlan, count_parameters, make_plan
from flows.stages.outputs import Report, report_fingerprint
from flows.stages.train import _stop_rule
from flows.work.open_run import OpenRun, open_run
from rlcore.config import RunConfig, WarmStartConfig
from rlcore.config.compose import load_config
from rlcore.errors import CheckpointError
from rlcore.run.layout import RunLayout
from rlcore.storage.disk import checkpoint_bytes
from rlcore.storage.publish import published_directory, write_json_atomically
from tests.flows.conftest import changed, commit, stage_of
from tests.helpers.validations import problem, result


def of_name(plan: RunPlan, name: str) -> list[tuple[str, bool]]:
    """Return details and status of the stages of a name."""
    return [(stage.detail, stage.cached) for stage in plan.stages if stage.name == name]


def load(root: Path, *overrides: str) -> RunConfig:
    return load_config(["experiment=debug", f"paths.root={root}", *overrides])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "7 steps"),
        ({"epochs": 2.5}, "to 2.5 epochs, at most 7 steps"),
        (
            {"epochs": 1, "stop_at_reward": 1, "patience": 2},
            "to 1 epochs or reward 1 or 2 measurements without a lower held-out loss, at most 7 steps",
        ),
    ],
)
def test_warm_start_stop_rule(settings: dict[str, object], message: str) -> None:
    none = {"epochs": None, "stop_at_reward": None, "patience": None, "max_steps": 7}
    assert _stop_rule(WarmStartConfig().model_copy(update=none | settings)) == message


def test_plan_of_empty_root_lists_all_stages(artifacts_root: Path) -> None:
    plan = make_plan(load(artifacts_root))
    assert [(stage.name, stage.detail) for stage in plan.stages] == [
        ("dataset", "countdown"),
        ("filter", "after its tokenizer is built"),
        ("warm-start", "after the filter"),
        ("train", "step 0-1"),
        ("train", "step 1-2"),
        ("export", ""),
        ("validate", "before"),
        ("validate", "after"),
        ("export-best", ""),
        ("report", "HTML, JSON and pictures"),
    ]
    assert (plan.committed_step, plan.total_steps, plan.warning) == (0, 2, "")
    assert plan.warm_start_memory is not None
    assert plan.published_model is None


def test_done_stages_need_no_disk_space(artifacts_root: Path) -> None:
    config = load(artifacts_root, "checkpoint.reserve_gb=0", "warm_start.enabled=false", "pass_rates.samples=4")
    layout = RunLayout.of(config)
    at_start = make_plan(config).disk
    with open_run(config):
        chain.make_rows(OpenRun(config), chain.run_quietly).write(config, layout)
    commit(config, 1, num_bytes=1_000)
    plan = make_plan(config)
    assert plan.warm_start_memory is None
    assert stage_of(plan, "dataset").detail == "countdown 512 train, 32 validation"
    assert stage_of(plan, "warm-start").detail == "model only"
    assert of_name(plan, "train") == [("step 0-1", True), ("step 1-2", False)]
    size = plan.disk.checkpoint_bytes
    assert size is not None
    assert 1_000 <= size < 10_000
    assert plan.disk.needed_bytes == (plan.disk.num_checkpoints - 1) * size
    assert at_start.checkpoint_bytes == checkpoint_bytes(count_parameters(config).trained)  # type: ignore[union-attr]
    assert at_start.needed_bytes == at_start.num_checkpoints * at_start.checkpoint_bytes

    commit(config, 2)
    for name, step in (("before", 0), ("after", 1)):
        evaluated = replace(result([problem(1, (1.0,))]), name=name, step=step, settings=config.validation.evaluation)
        evaluated.write(layout.validation / f"{name}.json")
    plan = make_plan(config)
    assert of_name(plan, "validate") == [("before", True), ("after", False)]
    assert of_name(plan, "train") == [("step 0-1", True), ("step 1-2", True)]
    assert of_name(plan, "export") == of_name(plan, "export-best") == [("", False)]
    assert plan.disk.needed_bytes == 0
    replace(evaluated, step=2).write(layout.validation / "after.json")
    with published_directory(layout.exported_model, {"kind": "model", "step": 2}) as folder:
        (folder / "weights").write_text("x")
    plan = make_plan(config)
    assert of_name(plan, "validate") == [("before", True), ("after", True)]
    assert of_name(plan, "export") == of_name(plan, "export-best") == [("", True)]
    assert not stage_of(plan, "report").cached
    (layout.exported_model / "weights").write_text("y")
    ((detail, is_done),) = of_name(make_plan(config), "export")
    assert detail.startswith(f"made again: {layout.exported_model}")
    assert not is_done
    assert (layout.exported_model / "weights").read_text() == "y"

    more = load(artifacts_root, "warm_start.enabled=false", "pass_rates.samples=4", "trainer.total_steps=3")
    plan = make_plan(more)
    assert of_name(plan, "train") == [("step 0-1", True), ("step 1-2", True), ("step 2-3", False)]
    assert of_name(plan, "validate") == [("before", False), ("after", False)]
    fewer = load(artifacts_root, "warm_start.enabled=false", "pass_rates.samples=4", "trainer.total_steps=1")
    run_id = layout.run_dir.name
    with pytest.raises(CheckpointError) as message:
        make_plan(fewer)
    assert str(message.value) == (
        f"trainer.total_steps: must be at least 2, the steps that run {run_id} already has; got 1. Set it to 2 or "
        f"more; for fewer steps start another run, from these weights (--fork {run_id}@1) or from step 0, with another "
        "name or run_id."
    )


def test_published_model_without_files_is_named(tmp_path: Path) -> None:
    config = load(tmp_path)

    def named(path: str | None) -> str | None:
        return plans.published_model_path(changed(config, "model", path=path))

    assert [named(path) for path in (None, "org/unknown", "Qwen/Qwen2.5-0.5B")] == [None, None, "Qwen/Qwen2.5-0.5B"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert named(str(tmp_path)) is None


def test_pass_rates_are_planned_after_the_filter(artifacts_root: Path) -> None:
    config = load(artifacts_root, "pass_rates.samples=4", "pass_rates.keep=[0,0.9]")
    stage = stage_of(make_plan(config), "pass-rates")
    assert (stage.detail, stage.fingerprint, stage.cached) == (
        "4 responses to each training row, after the filter", None, False,
    )  # fmt: skip
    chain.make_rows(OpenRun(config), chain.run_quietly)
    stage = stage_of(make_plan(config), "pass-rates")
    assert (stage.detail, stage.cached) == ("4 responses to each training row", False)
    assert stage.fingerprint is not None
    shutil.rmtree(artifacts_root / "filtered")
    stage = stage_of(make_plan(config), "pass-rates")
    assert (stage.detail, stage.fingerprint) == ("4 responses to each training row, after the filter", None)


def test_report_is_done_only_after_the_last_step(artifacts_root: Path) -> None:
    config = load(artifacts_root)
    layout = RunLayout.of(config)

    def write_report() -> str:
        (layout.run_dir / "report").mkdir(parents=True, exist_ok=True)
        (layout.run_dir / "report" / "report.html").touch()
        known = {"fingerprint": report_fingerprint(layout), "html": "report.html"}
        write_json_atomically(layout.run_dir / "report" / "source.json", known)
        return known["fingerprint"]

    write_report()
    assert not Report().status(OpenRun(config)).cached
    commit(config, 2)
    digest = write_report()
    done = Report().status(OpenRun(config))
    assert (done.cached, done.fingerprint) == (True, digest)
