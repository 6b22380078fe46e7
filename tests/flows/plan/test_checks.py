"""What is checked before a run starts, by the words that it is told in."""

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from flows.plan import checks
from flows.plan.checks import check_before_plan, check_before_start, check_evaluation, require_root
from flows.plan.plan import make_plan
from flows.work.slots import Slots
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError, DiskSpaceError
from rlcore.storage.disk import RoomReport


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(["experiment=debug", f"paths.root={tmp_path / 'root'}"])


def test_a_root_that_cannot_be_written_is_told_with_the_folder_that_is_there(tmp_path: Path) -> None:
    require_root(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    told = "paths.root: must be writable, and /proc is not (for /proc/no/such). Make it "
    with pytest.raises(DataError, match=f"^{re.escape(told)}writable, or choose another paths.root.$"):
        require_root(Path("/proc/no/such"))


def test_what_lacks_room_is_told_for_each_disk_with_the_number_of_checkpoints(config: RunConfig) -> None:
    plan = make_plan(config)
    enough, other = RoomReport(Path("/a"), 5, 5, 10), RoomReport(Path("/c"), 1, 0, 9, free_files=0)
    short = RoomReport(Path("/b"), 5_000, 6, 10)
    disk = replace(plan.disk, num_checkpoints=3, file_systems=(enough, short, other))
    with pytest.raises(DiskSpaceError) as told:
        check_before_start(config, replace(plan, disk=disk))
    assert str(told.value) == (
        f"{short.problem}; {other.problem}. The run needs room for 3 checkpoints, among others (--dry-run shows it). "
        "Free some room, lower checkpoint.keep_last, or set paths.root to a larger disk."
    )
    check_before_start(config, replace(plan, disk=replace(disk, file_systems=(enough,))))


def test_a_run_of_more_ranks_than_slots_is_refused_before_its_start(config: RunConfig) -> None:
    Slots(Path(config.paths.root)).set_devices([""])
    check_before_start(config, make_plan(config))
    wide = config.model_copy(update={"runtime": config.runtime.model_copy(update={"num_workers": 2})})
    with pytest.raises(
        ConfigError, match=r"^runtime\.num_workers: must be at most the slots of .*, which are 1; got 2"
    ):
        check_before_start(wide, make_plan(config))


def test_a_device_file_counts_as_a_gpu_and_another_machine_may_have_one(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(**more: object) -> None:
        runtime = config.runtime.model_copy(update={"device": "cuda", **more})
        checks.require_device(config.model_copy(update={"runtime": runtime}))

    names = ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "dxg", "kfd", "sda"]
    seen = [name for name in names if any(fnmatch(name, pattern) for pattern in checks.GPU_FILES)]
    assert seen == ["nvidia0", "nvidia12", "dxg", "kfd"]
    monkeypatch.setattr(checks, "first_gpu", lambda: None)
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*",))
    require(device="auto")
    require(ray_address="10.0.0.1:6379")
    with pytest.raises(ConfigError, match="got cuda, and this machine shows none"):
        require()
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*", "nul[l]"))
    require()


def test_the_users_functions_are_looked_for_before_the_plan(config: RunConfig) -> None:
    check_before_plan(config)
    for key, told in (("scorer", r"^data\.scorer: "), ("environment", r"^data\.environment: ")):
        data = config.data.model_copy(update={key: "no_such_module:function"})
        with pytest.raises(ConfigError, match=told):
            check_before_plan(config.model_copy(update={"data": data}))
    episode = config.episode.model_copy(update={"tools": ("no_such_module:tool",)})
    with pytest.raises(ConfigError, match=r"^episode\.tools: "):
        check_before_plan(config.model_copy(update={"episode": episode}))


def test_an_evaluation_needs_a_device_and_the_functions_of_its_suites(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_evaluation(config)
    data = config.data.model_copy(update={"scorer": "no_such_module:score"})
    validation = config.validation.model_copy(update={"suites": (SuiteConfig(name="sums", data=data),)})
    with pytest.raises(ConfigError, match=r"^data\.scorer: "):
        check_evaluation(config.model_copy(update={"validation": validation}))
    monkeypatch.setattr(checks, "first_gpu", lambda: None)
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*",))
    runtime = config.runtime.model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match="got cuda, and this machine shows none"):
        check_evaluation(config.model_copy(update={"runtime": runtime}))


def test_a_cluster_is_asked_for_by_runs_of_the_cluster_alone(config: RunConfig) -> None:
    def require(backend: str) -> None:
        runtime = config.runtime.model_copy(update={"backend": backend, "ray_address": "127.0.0.1:9"})
        checks.require_machine(config.model_copy(update={"runtime": runtime}))

    require("local")
    with pytest.raises(ConfigError, match=r"runtime\.ray_address"):
        require("ray")
