"""Kill -9 at twenty moments of one run: in steps, saves, publications, deletions and writes to the journal."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import WAIT_S, answers_of, assert_same, at, disturb, output_of
from tests.helpers.small_run import prepare

OVERRIDES = (
    "trainer.total_steps=60", "trainer.steps_per_chunk=2", "validation.every_steps=4",
    "checkpoint.keep_last=1", "checkpoint.keep_best=1", "tracking.enabled=false",
)  # fmt: skip
OPERATIONS = (
    ("os.mkdir", "checkpoints/.tmp-step-", 2),  # a save begins
    ("os.mkdir", "/policy", 1),  # a rank begins to write
    ("os.rename", "optimizer.json", 2),
    ("open", ".tmp-step-*/state.json", 1),  # not the reading of the last one
    ("open", ".tmp-step-*/manifest.json", 2),  # the shards are hashed and on the disk
    ("os.remove", ".owner.lock", 1),  # the last act before the rename
    ("os.rename", "checkpoints/.tmp-step-", 2),  # publishing
    ("shutil.rmtree", "checkpoints/.tmp-step-", 2),  # an old one is out of sight and is being deleted
    ("os.rename", "/validation/", 1),
    ("os.rename", "/answers/train-", 2),  # a chunk's answers are on the disk, its checkpoint is not
    ("open", "/answers/.tmp-train-", 2),
)
"""Audit events of Python, a part of a path, and which one of them."""
CUT = at("os.rename", "SIGKILL", path=".tmp-metrics.jsonl")
"""The start after a kill in a step: the journal is cut to the checkpoint."""


def meanwhile(rng: random.Random) -> dict[str, Any]:
    """Return a kill wherever the run is, half of the times with all its processes."""
    to = rng.choice(["trainer", "group"])
    return at("journal", "SIGKILL", to=to, aside=True, after_s=rng.uniform(0.0, 0.15))


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S + 240)
def test_killed_twenty_times(tmp_path: Path) -> None:
    undisturbed, run = (prepare(tmp_path / name, *OVERRIDES) for name in ("undisturbed", "killed"))
    assert disturb(undisturbed, None)[0]["code"] == 0, output_of(undisturbed)
    rng = random.Random(11)
    kills: list[list[dict[str, Any]]] = [[meanwhile(rng)] for _ in range(8)]
    kills[-1].append(CUT)
    kills += [[at(event, "SIGKILL", nth=nth, path=path)] for event, path, nth in OPERATIONS]
    rng.shuffle(kills)
    found = disturb(run, *(kill for group in kills for kill in group), None)
    assert [one["code"] for one in found] == [-9] * 20 + [0], output_of(run)
    assert [one["unreadable"] for one in found] == [[]] * 21
    newest = [max(one["checkpoints"], default="") for one in found]
    assert newest == sorted(newest), "what was committed stays"
    assert_same(run, undisturbed)
    assert answers_of(run) == answers_of(undisturbed), "each answer is there once"
    assert [row["step"] for row in answers_of(run)["train"]] == [step for step in range(1, 61) for _ in range(32)]
