"""A plan's disk needs in bytes, and the wait for room."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.config import CheckpointConfig, ModelConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.config.model import SMOLLM2
from rlcore.config.trainer import PathsConfig
from rlcore.errors import DiskSpaceError, StopRequestedError
from rlcore.run.layout import RunLayout, configured_model, disk_needs
from rlcore.storage import disk
from rlcore.storage.disk import DiskRoom, RoomReport, free_bytes
from tests.storage.small_disk import fill, mounted

BASE = (
    "answers.every_steps=2", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=8",
    "filter.max_prompt_tokens=32", "trainer.batch_size=8", "warm_start.enabled=false", "tracking.enabled=false",
)  # fmt: skip


def needs_of(root: Path, *words: str, has_initial_policy: bool = True) -> dict[str, tuple[Path, int]]:
    given = {word.partition("=")[0] for word in words}
    base = [word for word in BASE if word.partition("=")[0] not in given]
    config = load_config(["experiment=debug", f"paths.root={root}", *base, *words])
    sizes = {"checkpoints_bytes": 7, "num_weights": 1000, "steps_left": 11}
    needs = disk_needs(config, RunLayout.of(config), has_initial_policy=has_initial_policy, **sizes)
    assert len({need.what for need in needs}) == len(needs)
    run_dir = RunLayout.of(config).run_dir
    return {
        need.what: (Path("run") / need.path.relative_to(run_dir), need.size_bytes)
        if need.path.is_relative_to(run_dir)
        else (need.path.relative_to(root) if need.path.is_relative_to(root) else need.path, need.size_bytes)
        for need in needs
    }


def test_needs_of_weights_and_responses(tmp_path: Path) -> None:
    assert needs_of(tmp_path) == {
        "checkpoints": (Path("run/checkpoints"), 7),
        "weights for others": (Path("run/model"), 4 * 1000),
        "answers": (Path("run/answers"), 5 * 8 * 4 * (500 + 20 * (8 + 32))),
    }


def test_needs_of_stages_and_tracking(tmp_path: Path) -> None:
    words = ("warm_start.enabled=true", "tracking.enabled=true", "runtime=ray")
    found = needs_of(tmp_path, *words, has_initial_policy=False)
    besides = {what: need for what, need in found.items() if what not in needs_of(tmp_path)}
    assert besides.pop("Ray's object store")[1] >= 2**20
    assert besides == {
        "initial policy": (Path("models"), 4 * 1000),
        "checkpoints of the warm start": (Path("warm-starts"), int(1000 * 12 * 1.01) + 4 * 2**20),
        "MLflow's artifacts": (Path(), 4 * 1000),
    }
    assert "Ray's object store" not in needs_of(tmp_path, "runtime=ray", "runtime.ray_address=ray-head:6379")


@pytest.mark.parametrize(
    ("word", "size_bytes"),
    [("answers.max_gb=0.0001", 100_000), ("answers.every_steps=0", 0), ("answers.every_steps=12", 0)],
)
def test_needs_of_responses_follow_their_settings(tmp_path: Path, word: str, size_bytes: int) -> None:
    assert needs_of(tmp_path, word)["answers"][1] == size_bytes


def test_needs_of_smollm2_until_it_exists(tmp_path: Path) -> None:
    def planned(model: str) -> dict[str, int]:
        config = RunConfig(model=ModelConfig(path=model), paths=PathsConfig(root=str(tmp_path)))
        sizes = {"checkpoints_bytes": 0, "num_weights": 1000, "steps_left": 1}
        needs = disk_needs(config, RunLayout.of(config), has_initial_policy=False, **sizes)
        return {need.what: need.size_bytes for need in needs}

    assert planned(SMOLLM2)["SmolLM2's weights"] == 4 * 1000
    assert "initial policy" not in planned(SMOLLM2)
    assert "SmolLM2's weights" not in planned(str(tmp_path))
    model = RunConfig(model=ModelConfig(path=SMOLLM2), paths=PathsConfig(root=str(tmp_path)))
    configured_model(model).mkdir(parents=True)
    assert "SmolLM2's weights" not in planned(SMOLLM2)


Events = list[tuple[str, int, Mapping[str, object]]]


def room_of(
    path: Path,
    events: Events,
    *,
    stop: Callable[[], bool] = lambda: False,
    prune: Callable[[], object] = lambda: None,
    wait_for_room_s: float = 3600.0,
    reserve_gb: float = 0.0,
) -> DiskRoom:
    config = CheckpointConfig(reserve_gb=reserve_gb, wait_for_room_s=wait_for_room_s)
    return DiskRoom(path, config, log_event=lambda *one: events.append(one), stop=stop, prune=prune)


def test_pause_names_missing_bytes_with_the_reserve(small_disk: Path) -> None:
    events: Events = []
    fill(small_disk, leave_bytes=8192)
    room = room_of(small_disk, events, reserve_gb=0.001, stop=lambda: bool(events))
    with pytest.raises(StopRequestedError) as stopped:
        room.wait(5_000, 3)
    ((name, step, data),) = events
    assert (name, step, data["path"]) == ("paused_for_disk", 3, str(small_disk))
    lacks = f"{small_disk}: 1.0 MB are missing: 5.0 kB to write and 1.0 MB in reserve (checkpoint.reserve_gb)"
    assert str(data["text"]).startswith(f"paused: 1.0 MB are missing at {small_disk}: {lacks}, and 8.2 kB are")
    figures = {name: data[name] for name in ("missing_bytes", "needed_bytes", "free_bytes")}
    assert figures == {"missing_bytes": 996_808, "needed_bytes": 1_005_000, "free_bytes": 8192}
    assert str(stopped.value).startswith(f"stopped while the run waited for room on a disk: {lacks}")


def test_pause_names_missing_inodes(tmp_path: Path) -> None:
    events: Events = []
    with mounted(tmp_path / "few", options="nr_inodes=1") as folder:
        with pytest.raises(StopRequestedError):
            room_of(folder, events, stop=lambda: bool(events)).wait(5, 3)
        assert str(events[0][2]["text"]).startswith(f"paused: inodes are missing at {folder}: {folder}: that file")


def test_wait_prunes_before_a_pause(small_disk: Path) -> None:
    events: Events = []
    ballast = fill(small_disk, leave_bytes=8192)
    room_of(small_disk, events, prune=ballast.unlink, stop=lambda: bool(events)).wait(8193, 3)
    assert free_bytes(small_disk) > 8192
    assert events == []


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep, on a fake clock."""
    found: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(found), sleep=found.append)
    monkeypatch.setattr(disk, "time", clock)
    return found


def test_pause_ends_when_there_is_room(small_disk: Path, sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = fill(small_disk, leave_bytes=8192)
    events: Events = []
    check = DiskRoom.check

    def checked(room: DiskRoom, needed_bytes: int) -> RoomReport:
        if len(sleeps) == 3:
            ballast.unlink(missing_ok=True)
        return check(room, needed_bytes)

    monkeypatch.setattr(DiskRoom, "check", checked)
    room_of(small_disk, events).wait(8193, 3)
    assert sleeps == [1, 1, 1]
    assert [(name, step) for name, step, _ in events] == [("paused_for_disk", 3), ("disk_room", 3)]
    assert events[1][2] == {"text": f"{small_disk}: there is room again, the run continues", "path": str(small_disk)}


@pytest.mark.parametrize(("wait_for_room_s", "slept"), [(0, []), (2, [1, 1]), (2.5, [1, 1, 0.5])])
def test_pause_without_room_in_time_is_an_error(
    small_disk: Path, sleeps: list[float], wait_for_room_s: float, slept: list[float]
) -> None:
    fill(small_disk, leave_bytes=8192)
    events: Events = []
    with pytest.raises(DiskSpaceError, match=" are missing") as failed:
        room_of(small_disk, events, wait_for_room_s=wait_for_room_s).wait(8193, 3)
    assert f" Waited {wait_for_room_s:.0f} s for room (checkpoint.wait_for_room_s). " in str(failed.value)
    assert sleeps == slept
    assert [name for name, _, _ in events] == ["paused_for_disk"]
