"""A stopped run saves, ends and leaves no process. When it resumes, it has the results of an undisturbed run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.runtime.cluster import ray_folder
from tests.helpers.mlflow import wait_until
from tests.helpers.running import WAIT_S, assert_same, at, disturb, output_of, small, steps_of, write_record
from tests.helpers.small_run import SmallRun

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(WAIT_S + 40)]

STEPS = 8
RESUMABLE = 75


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("undisturbed"), steps=STEPS)
    (done,) = disturb(run, None)
    assert done["code"] == 0, output_of(run)
    return run


def test_a_stop_in_each_phase_saves_and_leaves_nothing_behind(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, steps=STEPS)
    shutil.rmtree(run.model_directory)  # the trainer makes it again: the warm start is a phase too
    plan = [
        at("warm-start", "SIGTERM"),
        at("start", "SIGTERM", nth=2),  # the first is that of the warm start, which continues
        at("gen", "SIGTERM"),
        at("reward", "SIGINT"),
        at("testing", "SIGTERM"),
        at("update_actor", "SIGTERM", "SIGTERM"),  # the same request, arriving twice
        at("save_checkpoint", "SIGTERM"),
        at("update_weights", "SIGTERM", "SIGTERM", "SIGINT", nth=2),  # a second request: it ends immediately
        None,
    ]
    found = disturb(run, *plan)
    codes = [one["code"] for one in found]
    assert codes == [RESUMABLE] * 8 + [0], output_of(run)
    for one in found:
        assert one["left"] == [], one["plan"]
        assert one["temporaries"] in ([], [".writer.lock"]), one["plan"]
    assert found[0]["checkpoints"] == []
    saved = [one["checkpoints"][-1] for one in found[1:7]]
    assert saved == sorted(set(saved)), "each stop but the last has saved a step more"
    assert found[7]["checkpoints"][-1] == saved[-1], "a second signal ends the run immediately"
    assert_same(run, undisturbed)


KILLS = [at("update_actor", "SIGKILL", to="group"), at("publish", "SIGKILL")]


@pytest.mark.needs_ray
@pytest.mark.parametrize("kills", [[], pytest.param(KILLS, marks=pytest.mark.lengthy)])
def test_a_stop_and_kills_under_ray(undisturbed: SmallRun, tmp_path: Path, kills: list[dict[str, Any]]) -> None:
    run = small(tmp_path, "runtime=ray", steps=STEPS)
    earlier = set(ray_folder().glob("session_2*"))
    stopped, *killed = disturb(run, at("gen", "SIGTERM", nth=2), *kills)
    assert [one["code"] for one in (stopped, *killed)] == [RESUMABLE, -9, -9][: 1 + len(kills)], output_of(run)
    assert stopped["left"] == []
    assert stopped["checkpoints"] == ["step-000002"], "the finished step was not saved"
    left = {int(one.name.rpartition("_")[2]) for one in set(ray_folder().glob("session_2*")) - earlier}
    assert left >= {one["pid"] for one in killed}
    assert stopped["pid"] not in left, "a Ray session is left"
    run = small(tmp_path, steps=STEPS)
    assert disturb(run, None)[0]["code"] == 0, output_of(run)
    assert_same(run, undisturbed)


def test_slow_step_is_abandoned(undisturbed: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, "runtime.stop_deadline_s=200", steps=STEPS)
    (slow,) = disturb(run, at("gen", "SIGTERM", nth=2, late_s=101))
    assert slow["code"] == RESUMABLE, output_of(run)
    assert " before reward" in output_of(run)
    assert slow["checkpoints"] == ["step-000001"], "the step before was not saved"
    run = small(tmp_path, "runtime.stop_deadline_s=1", steps=STEPS)
    plan = [at("gen", "SIGTERM", nth=2, sleep_s=600), at("publish", "SIGTERM", sleep_s=600), None]
    found = disturb(run, *plan)
    assert [one["code"] for one in found] == [RESUMABLE, RESUMABLE, 0], output_of(run)
    assert [one["left"] for one in found] == [[], [], []]
    assert "runtime.stop_deadline_s: " in output_of(run)
    assert "; checkpoint of step " in output_of(run), "a publication that hangs is named"
    assert steps_of(run) == steps_of(undisturbed)


WAITING = """
import os, sys, time
import rlcore.run.stop
rlcore.run.stop.SAME_REQUEST_S = 0.0  # any later SIGTERM is a second request
stop = rlcore.run.stop.StopFlag(lambda: os._exit(9))
stop.install()
parent = os.getppid()
open(sys.argv[1] + "/ready", "w").close()
while not stop():
    time.sleep(0.01)
open(sys.argv[1] + "/asked", "w").close()
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.5)
open(sys.argv[1] + "/saved", "w").close()
"""


def test_a_dying_parent_is_no_second_signal(tmp_path: Path) -> None:
    code = f"import os, subprocess, sys; sys.path.insert(0, {str(Path.cwd())!r})\n"
    code += "from flows.server.launch import tethered_command\n"
    code += f"subprocess.Popen(tethered_command([sys.executable, '-c', {WAITING!r}, {str(tmp_path)!r}])).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: (tmp_path / "ready").exists())
    (trainer,) = psutil.Process(parent.pid).children()
    trainer.send_signal(signal.SIGTERM)
    wait_until(lambda: (tmp_path / "asked").exists())
    parent.kill()
    parent.wait()
    wait_until(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE)
    assert (tmp_path / "saved").exists()


def test_a_stop_between_commands_saves_the_last_step(undisturbed: SmallRun, tmp_path: Path) -> None:
    """The process has a locale other than UTF-8, the encoding of its settings."""
    run = small(tmp_path, "tags={who: 'Jürgen'}", steps=STEPS)
    run_dir = write_record(run)
    assert "Jürgen".encode() in run.layout.run_json.read_bytes()
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    to_trainer, from_trainer = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "rlcore.run.process", "--run", str(run_dir)]
    command += ["--commands-fd", str(to_trainer[0]), "--replies-fd", str(from_trainer[1])]
    process = subprocess.Popen(command, pass_fds=(to_trainer[0], from_trainer[1]), stderr=subprocess.DEVNULL, env=plain)
    os.close(to_trainer[0])
    os.close(from_trainer[1])
    with os.fdopen(from_trainer[0]) as replies:
        os.write(to_trainer[1], b'{"command": "train", "to_step": 2}\n')
        assert any(json.loads(line).get("event") == "done" for line in replies)
        process.send_signal(signal.SIGTERM)  # it waits for a command that never comes
        last = [json.loads(line) for line in replies][-1]
    os.close(to_trainer[1])
    assert (last["event"], last["type"]) == ("error", "StopRequestedError")
    assert "is saved" in last["message"]
    assert process.wait(WAIT_S) == RESUMABLE
    (rest,) = disturb(run, None)
    assert rest["code"] == 0, output_of(run)
    assert_same(run, undisturbed)
