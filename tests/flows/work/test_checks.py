"""Checks before the start of a run."""

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from flows.work import checks
from flows.work.checks import check_before_plan, check_before_start, check_evaluation, require_root
from flows.work.plan import make_plan
from flows.work.slots import Slots
from rlcore.config import SuiteConfig
from rlcore.errors import ConfigError, DiskSpaceError
from rlcore.storage.disk import RoomReport
from tests.flows.conftest import changed


def test_unwritable_root_is_reported_with_existing_folder(tmp_path):
    require_root(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    message = "paths.root: must be writable, and /proc is not (for /proc/no/such). Make it writable, or choose another "
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}paths.root.$"):
        require_root(Path("/proc/no/such"))


def test_missing_space_is_reported_for_each_disk(config):
    plan = make_plan(config)
    enough, other = RoomReport(Path("/a"), 5, 5, 10), RoomReport(Path("/c"), 1, 0, 9, free_files=0)
    short = RoomReport(Path("/b"), 5_000, 6, 10)
    disk = replace(plan.disk, num_checkpoints=3, file_systems=(enough, short, other))
    with pytest.raises(DiskSpaceError) as message:
        check_before_start(config, replace(plan, disk=disk))
    assert str(message.value) == (
        f"{short.problem}; {other.problem}. The run needs space for 3 checkpoints and other files (see --dry-run). "
        "Free some space, lower checkpoint.keep_last, or set paths.root to a larger disk."
    )
    check_before_start(config, replace(plan, disk=replace(disk, file_systems=(enough,))))


def test_more_ranks_than_slots_are_refused(config):
    Slots(Path(config.paths.root)).set_devices([""])
    check_before_start(config, make_plan(config))
    wide = changed(config, "runtime", num_workers=2)
    with pytest.raises(
        ConfigError, match=r"^runtime\.num_workers: must be at most the slots of .*, which has 1; got 2"
    ):
        check_before_start(wide, make_plan(config))


def test_device_file_counts_as_gpu(config, monkeypatch):
    def require(**more: object) -> None:
        checks.require_device(changed(config, "runtime", **{"device": "cuda", **more}))

    names = ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "dxg", "kfd", "sda"]
    seen = [name for name in names if any(fnmatch(name, pattern) for pattern in checks.GPU_FILES)]
    assert seen == ["nvidia0", "nvidia12", "dxg", "kfd"]
    monkeypatch.setattr(checks, "first_gpu", lambda: None)
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*",))
    require(device="auto")
    require(ray_address="10.0.0.1:6379")
    with pytest.raises(ConfigError, match="got cuda, and this machine has none"):
        require()
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*", "nul[l]"))
    require()


def test_custom_functions_are_checked_before_the_plan(config):
    check_before_plan(config)
    absent = "no_such_module:function"
    for section, key, value in (
        ("data", "scorer", absent),
        ("data", "environment", absent),
        ("episode", "tools", (absent,)),
    ):
        with pytest.raises(ConfigError, match=rf"^{section}\.{key}: "):
            check_before_plan(changed(config, section, **{key: value}))


def test_evaluation_needs_device_and_suite_functions(config, monkeypatch):
    check_evaluation(config)
    suite = SuiteConfig(name="sums", data=changed(config, "data", scorer="no_such_module:score").data)
    with pytest.raises(ConfigError, match=r"^data\.scorer: "):
        check_evaluation(changed(config, "validation", suites=(suite,)))
    monkeypatch.setattr(checks, "first_gpu", lambda: None)
    monkeypatch.setattr(checks, "GPU_FILES", ("no-such-device*",))
    with pytest.raises(ConfigError, match="got cuda, and this machine has none"):
        check_evaluation(changed(config, "runtime", device="cuda"))


def test_only_ray_runs_check_the_cluster(config):
    def require(backend: str) -> None:
        checks.require_machine(changed(config, "runtime", backend=backend, ray_address="127.0.0.1:9"))

    require("local")
    with pytest.raises(ConfigError, match=r"runtime\.ray_address"):
        require("ray")
