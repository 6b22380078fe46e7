"""Runs that cut and carry groups give the same numbers on two ranks, after kills and when they are extended."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.rollout.engine import carried_from_text
from rlcore.workers.group import LocalGroup
from tests.helpers.carrying import CARRYING, step_facts
from tests.helpers.forked import run_module
from tests.helpers.running import WAIT_S, answers_of, assert_same, at, disturb, output_of, small, steps_of
from tests.helpers.small_run import prepare, train
from tests.runtime.driver import STEPS


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S + 40)
def test_killed_and_extended_run_repeats_every_number(tmp_path: Path) -> None:
    words = (*CARRYING, "trainer.steps_per_chunk=2")
    undisturbed = small(tmp_path / "undisturbed", *words, steps=4)
    assert disturb(undisturbed, None)[0]["code"] == 0, output_of(undisturbed)
    short = small(tmp_path / "killed", *words, steps=2)
    assert disturb(short, None)[0]["code"] == 0, output_of(short)
    run = small(tmp_path / "killed", *words, steps=4)
    assert run.layout == short.layout
    found = disturb(run, at("gen", "SIGKILL", nth=2), at("publish", "SIGKILL"), None)
    assert [one["code"] for one in found] == [-9, -9, 0], output_of(run)
    assert_same(run, undisturbed)
    assert answers_of(run) == answers_of(undisturbed)
    metrics = steps_of(run)
    assert [metrics[step]["rollout/carried_groups"] for step in range(1, 5)] == [2.0] * 4
    assert metrics[1]["rollout/stale_token_share"] == 0.0
    assert all(0 < metrics[step]["rollout/stale_token_share"] < 1 for step in range(2, 5))
    state = json.loads((run.layout.checkpoints / "step-000004" / "state.json").read_text())
    assert len(carried_from_text(state["carried"])) == 4


@pytest.mark.multiprocess
@pytest.mark.needs_ray
@pytest.mark.timeout(WAIT_S + 40)
def test_two_ranks_cut_at_the_same_tokens(tmp_path: Path) -> None:
    out, log = tmp_path / "found.json", tmp_path / "driver.log"
    arguments = ["carried", str(tmp_path), str(out), *CARRYING, "runtime.num_workers=2"]
    assert run_module("tests.runtime.driver", arguments, output=log, timeout_s=WAIT_S) == 0, log.read_text()
    found = json.loads(out.read_text())
    run = prepare(tmp_path, *CARRYING)
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        assert found["steps"] == json.loads(json.dumps(step_facts(run, group, STEPS)))
        expected = train(run, group, STEPS)
    for have, want in zip(found["metrics"], expected, strict=True):
        for name, value in want.items():
            if name.startswith(("rollout/", "response_length/")):
                assert have[name] == value
            elif not name.startswith(("global_seqlen/", "training/rollout_probs_diff")):
                assert have[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
