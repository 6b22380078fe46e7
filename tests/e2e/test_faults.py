"""Workers and engines that die, hang or run out of memory: the fault is named, and a resume gives the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.run.watchdog import read_failures
from rlcore.tracking.journal import load_journal
from tests.helpers.harmful import HARM
from tests.helpers.running import WAIT_S, assert_same, at, disturb, output_of, small, steps_of
from tests.helpers.sessions import run_to_the_end
from tests.helpers.small_run import SmallRun

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(WAIT_S + 40)]

STEPS = 6
FAILED = 1
RAY = ("runtime=ray", "runtime.num_workers=2")


def kinds(run: SmallRun) -> list[tuple[str, str]]:
    return [(str(fault.kind), fault.phase) for fault in read_failures(run.layout.run_dir)]


def stacks(run: SmallRun) -> list[str]:
    named = [fault.stacks for fault in read_failures(run.layout.run_dir)]
    return [Path(file).read_text() for file in named if file is not None]


@pytest.fixture
def harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "harm"
    folder.mkdir()
    monkeypatch.setenv(HARM, str(folder))
    return folder


@pytest.mark.lengthy
def test_a_publication_that_hangs_is_ended(tmp_path: Path) -> None:
    calm = small(tmp_path / "calm", steps=3)
    assert disturb(calm, None)[0]["code"] == 0, output_of(calm)
    run = small(tmp_path / "run", "runtime.deadlines.save_s=20", steps=3)
    found = disturb(run, at("publish", nth=2, sleep_s=600), None)
    assert [one["code"] for one in found] == [FAILED, 0], output_of(run)
    assert [one["left"] for one in found] == [[], []]
    assert kinds(run) == [("hang", "commit")]
    assert "runtime.deadlines.save_s: hang in commit after step" in output_of(run)
    assert "s; checkpoint of step 2: renaming" in output_of(run)
    assert_same(run, calm)


def test_hangs_and_lack_of_memory_in_this_process(tmp_path: Path, harm: Path) -> None:
    with_scorer = ("algo.policy_loss=tests.helpers.harmful:short_of_memory", "reward.num_processes=1")
    calm = small(tmp_path / "calm", *with_scorer, steps=STEPS)
    (harm / "memory").touch()
    assert disturb(calm, None)[0]["code"] == 0, output_of(calm)
    (harm / "memory").unlink()

    run = small(tmp_path / "run", *with_scorer, "runtime.deadlines.update_s=20", "reward.deadline_s=2", steps=STEPS)
    found = disturb(
        run,
        None,  # the loss allocates more than there is
        at("update_actor", nth=3, sleep_s=600),
        at("gen", "SIGSTOP", to="scorer"),  # no fault of the run: the pool replaces it
    )
    assert [one["code"] for one in found] == [FAILED, FAILED, 0], output_of(run)
    assert [one["left"] for one in found] == [[], [], []]
    assert kinds(run) == [("host out of memory", "update_actor"), ("hang", "update_actor")]
    assert "runtime.deadlines.update_s: hang in update_actor after step" in output_of(run)
    hung = stacks(run)[-1]
    assert "=== trainer, process" in hung
    assert 'disturbed.py", line' in hung, "the line where it hangs is missing"
    assert "=== scorer, process" in hung
    assert "scoring_worker.py" in hung
    events = load_journal(run.layout.journal).events
    assert [event.data["kind"] for event in events if event.name == "fault"] == ["host out of memory", "hang"]
    assert_same(run, calm)


@pytest.mark.usefixtures("harm")
def test_a_hanging_scorer_costs_its_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("data.scorer=tests.helpers.harmful:never_ends", "reward.num_processes=1", "reward.deadline_s=2")
    run = small(tmp_path, *words, "warm_start.enabled=false", steps=2)
    heard: list[str] = []
    run_to_the_end(run, lambda event: heard.append(str(event.get("text", ""))))
    assert caplog.text.count("overran reward.deadline_s=2") == 1
    (reported,) = [text for text in heard if "data.scorer failed on" in text]
    assert "on 1 response(s) so far, which are left out of training" in reported
    assert "the last error: a response took longer" in reported
    steps = steps_of(run)
    assert len(steps) == 3
    # The one answer is the first of the validation at step 0, or one of the 16 of a step.
    seen = [
        step[name] for step in steps.values() for name in step if name.endswith(("/num_unscored", "/unscored_share"))
    ]
    assert len(seen) == 1, seen


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("two_ranks"), *RAY, steps=STEPS)
    assert disturb(run, None)[0]["code"] == 0, output_of(run)
    return run


@pytest.mark.needs_ray
def test_a_lost_rank_and_a_host_without_memory(two_ranks: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, *RAY, steps=STEPS)
    short = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    found = disturb(
        run,
        at("update_actor", "SIGKILL", to="rank-1", nth=3),  # its peer waits in a collective
        at("never", env=short),  # Ray kills workers of a host that is short of memory
        None,
    )
    assert [one["code"] for one in found] == [FAILED, FAILED, 0], output_of(run)
    assert [one["left"] for one in found] == [[]] * 3
    named = kinds(run)
    assert named[0] == ("lost worker", "update_actor")
    assert named[-1][0] == "host out of memory"
    assert_same(run, two_ranks)


@pytest.mark.lengthy
@pytest.mark.needs_ray
def test_a_hung_engine_and_a_collective_that_never_returns(two_ranks: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, *RAY, "runtime.deadlines.generate_s=15", "runtime.deadlines.update_s=15", steps=STEPS)
    found = disturb(run, at("gen", "SIGSTOP", to="rank-1", nth=3), at("update_actor", "SIGSTOP", to="rank-0"), None)
    assert [one["code"] for one in found] == [FAILED, FAILED, 0], output_of(run)
    assert [one["left"] for one in found] == [[]] * 3
    assert kinds(run) == [("hang", "gen"), ("hang", "update_actor")]
    hung = stacks(run)[0]
    assert "It was stopped from outside (SIGSTOP)" in hung
    assert "=== rank-0, process" in hung
    assert_same(run, two_ranks)


@pytest.mark.lengthy
@pytest.mark.needs_ray
def test_a_cluster_that_is_lost_or_hangs_at_its_start(two_ranks: SmallRun, tmp_path: Path) -> None:
    run = small(tmp_path, *RAY, steps=STEPS)  # before the short deadline: both share its warm start
    impatient = small(tmp_path, *RAY, "runtime.deadlines.start_s=15", steps=STEPS)
    # Not gcs_server: stopped before it answers, it was abandoned by Ray itself, under load, before this deadline.
    (hung,) = disturb(impatient, at("start", "SIGSTOP", to="raylet", aside=True))
    lost, done = disturb(run, at("start", "SIGKILL", to="raylet", aside=True), None)
    assert [one["code"] for one in (hung, lost, done)] == [FAILED, FAILED, 0], output_of(run)
    assert [one["left"] for one in (hung, lost, done)] == [[], [], []]
    assert kinds(run) == [("hang", "start"), ("lost worker", "start")]
    assert "a private Ray cluster did not start: Exception: The current node timed out" in output_of(run)
    assert_same(run, two_ranks)


CLUSTER = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "object_store_memory": 80 * 1024**2}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A Ray cluster of three nodes with one core each on this host, until its standard input ends."""


@pytest.mark.lengthy
@pytest.mark.needs_ray
def test_a_lost_node_of_a_cluster(two_ranks: SmallRun, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        run = small(tmp_path, *RAY, f"runtime.ray_address={address}", steps=STEPS)
        found = disturb(run, at("gen", "SIGKILL", to="node", nth=4), None)
        cluster.communicate()
    assert [one["code"] for one in found] == [FAILED, 0], output_of(run)
    assert kinds(run)[0][0] == "lost worker"
    assert_same(run, two_ranks)
