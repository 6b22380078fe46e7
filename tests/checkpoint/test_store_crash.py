"""Kill -9 at random moments of steps, saves, publications and prunes never loses a committed step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import assert_same, build, digest, state_of, train
from tests.helpers.checkpoints import store_at

ROOT = Path(__file__).parents[2]
NUM_KILLS = 20


@pytest.mark.lengthy  # at chosen moments, of a whole run: run/test_kill.py
def test_repeated_kills_lose_no_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crashing", str(tmp_path), str(NUM_KILLS)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == NUM_KILLS
    assert all(one["refusals"] == [] for one in seen), "no half checkpoint under a checkpoint's name, ever"
    assert all(one["newest"] >= one["reported"] for one in seen), "what was committed is there"
    newest = [one["newest"] for one in seen]
    assert newest == sorted(newest), "no step back"
    # keep_last=2, one that is being written or not yet pruned; two in a row may be killed before they prune.
    assert all(one["num_checkpoints"] <= 4 for one in seen)
    assert sum(one["num_checkpoints"] == 4 for one in seen) <= 2
    assert newest[-1] > NUM_KILLS / 2, "the children must have been killed in the middle of things"

    # The run that was killed twenty times is, bit for bit, the run that was never killed.
    store = store_at(tmp_path)
    last = store.latest()
    model, optimizer = build(seed=8)
    load_shards(last.path / "policy", model=model, optimizer=optimizer)
    undisturbed, its_optimizer = build(seed=1)
    train(undisturbed, its_optimizer, last.step)
    expected = state_of(undisturbed, its_optimizer)
    assert store.load_state(last).journal_sha256 == digest(expected["model.value_head.weight"])
    assert_same(state_of(model, optimizer), expected)
