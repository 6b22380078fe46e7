"""Kill -9 of a rank under Ray: in a step, save, publication, deletion or journal write."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.run.initial_policy import stage_layout
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal
from tests.helpers.running import WAIT_S, assert_same, at, disturb, output_of, small, steps_of, weights_of
from tests.helpers.small_run import SmallRun

pytestmark = [pytest.mark.lengthy, pytest.mark.multiprocess, pytest.mark.needs_ray, pytest.mark.timeout(8 * WAIT_S)]

STEPS = 30
KEPT = ("checkpoint.keep_last=1", "checkpoint.keep_best=0")
LATEST = {
    "gen": 3,
    "update_actor": 3,
    "update_weights": 3,
    "save_checkpoint": 2,
    "publish": 2,
    "prune": 1,
    "journal": 3,
}  # moment -> the last time of it, in one start, at which the kill comes; together fewer steps than the run has
FAILED = 1  # exit code of the trainer, which reports the loss of a rank itself


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("undisturbed"), *KEPT, steps=STEPS)
    assert disturb(run, None)[0]["code"] == 0, output_of(run)
    return run


def test_seven_kills_and_the_numbers_are_the_same(undisturbed: SmallRun, tmp_path: Path) -> None:
    rng = random.Random("rank-0")
    run = small(tmp_path, *KEPT, "runtime=ray", steps=STEPS)
    newest = ""
    for moment in rng.sample(list(LATEST), len(LATEST)):
        kill = at(moment, "SIGKILL", nth=rng.randint(1, LATEST[moment]), to="rank-0")
        (found,) = disturb(run, kill)
        assert found["code"] == FAILED, (kill, output_of(run))
        assert found["left"] == [], "processes"
        assert found["unreadable"] == []
        committed = max(found["checkpoints"], default="")
        assert committed >= newest, "what was committed stays"
        newest = committed
    assert disturb(run, None)[0]["code"] == 0, output_of(run)
    assert_same(run, undisturbed)


def test_one_of_four_ranks_killed_in_an_update(tmp_path: Path) -> None:
    one = small(tmp_path, *KEPT, steps=4)
    assert disturb(one, None)[0]["code"] == 0, output_of(one)
    ranks = one.config.runtime.model_copy(update={"backend": "ray", "num_workers": 4})
    found = {}
    for name, plan in {"whole": [None], "killed": [at("update_actor", "SIGKILL", nth=3, to="rank-3"), None]}.items():
        run = replace(one, config=one.config.model_copy(update={"runtime": ranks, "run_id": name}))
        codes = [start["code"] for start in disturb(run, *plan)]
        assert codes == [FAILED, 0][-len(plan) :], output_of(run)
        found[name] = steps_of(run), weights_of(run)
    assert found["whole"] == found["killed"]
    for step, metrics in steps_of(one).items():
        for name in metrics.keys() - {name for name in metrics if name.startswith(("global_seqlen/", "perf/"))}:
            assert found["whole"][0][step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), (step, name)


@pytest.mark.parametrize("moment", ["gen", "environment"])
def test_killed_between_the_turns_of_episodes_it_ends_the_same(moment: str, tmp_path: Path) -> None:
    """Episodes have up to six turns, so the ninth occurrence of the moment is after the first step."""
    settings = ("trainer.batch_size=8", "trainer.mini_batch_size=8", "rollout.samples_per_prompt=2")
    whole = small(tmp_path / "whole", *settings, steps=4, experiment="number_guessing")
    assert disturb(whole, None)[0]["code"] == 0, output_of(whole)
    killed = small(tmp_path / "killed", *settings, "runtime=ray", steps=4, experiment="number_guessing")
    (found,) = disturb(killed, at(moment, "SIGKILL", nth=9, to="rank-0"))
    assert (found["code"], found["left"]) == (FAILED, []), output_of(killed)
    assert 0 < len(steps_of(killed)) < 4
    assert disturb(killed, None)[0]["code"] == 0, output_of(killed)
    assert_same(killed, whole)


def test_a_warm_start_on_two_ranks_survives_a_kill(tmp_path: Path) -> None:
    settings = ("warm_start.max_steps=6", "warm_start.steps_per_chunk=2", "warm_start.check_every=2")
    one = small(tmp_path, *settings, "warm_start.stop_at_reward=null", steps=1)
    stage = stage_layout(one.config, one.inputs.filtered_directory)
    losses = losses_of(stage)
    assert len(losses) == 6
    ranks = one.config.runtime.model_copy(update={"backend": "ray", "num_workers": 2})
    two = replace(one, config=one.config.model_copy(update={"runtime": ranks}))
    assert stage_layout(two.config, two.inputs.filtered_directory) == stage
    found = []
    for kill in ([], [at("warm-start", "SIGKILL", nth=4, to="rank-1")]):
        shutil.rmtree(one.model_directory)
        shutil.rmtree(stage.run_dir)
        shutil.rmtree(two.layout.run_dir, ignore_errors=True)
        *killed, done = disturb(two, *kill, None)
        assert [one["code"] for one in killed] == [FAILED] * len(kill), output_of(two)
        assert done["code"] == 0, output_of(two)
        found.append(((one.model_directory / "model.safetensors").read_bytes(), losses_of(stage)))
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(losses, abs=1e-4)


def losses_of(stage: RunLayout) -> list[float]:
    return [record.metrics["sft/loss"] for record in read_journal(stage.journal) if "sft/loss" in record.metrics]
