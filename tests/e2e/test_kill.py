"""Kill -9 at twenty moments of one run: in steps, saves, publications, deletions and writes to the journal."""

import json
from pathlib import Path

import pytest

from tests.helpers.crash_chain import MEANWHILE, OPERATIONS
from tests.helpers.forked import run_module
from tests.helpers.running import answers_of, steps_of, weights_of
from tests.helpers.sessions import elsewhere, run_to_the_end
from tests.helpers.small_run import prepare

OVERRIDES = (
    "trainer.total_steps=60", "trainer.steps_per_chunk=2", "validation.every_steps=4",
    "checkpoint.keep_last=1", "checkpoint.keep_best=1", "tracking.enabled=false",
)  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_killed_twenty_times(tmp_path: Path) -> None:
    undisturbed = prepare(tmp_path / "undisturbed", *OVERRIDES)
    run_to_the_end(undisturbed)
    run = elsewhere(undisturbed, tmp_path / "killed", *OVERRIDES)
    output, errors = tmp_path / "found.json", tmp_path / "errors.log"
    arguments = [str(tmp_path / "killed"), *OVERRIDES]
    code = run_module("tests.helpers.crash_chain", arguments, output=output, errors=errors, timeout_s=500)
    assert code == 0, errors.read_text()
    found = json.loads(output.read_text().splitlines()[-1])
    assert found["end"] == 0, errors.read_text()
    killed = [one["what"] for one in found["hit"] if one["killed"]]
    assert len(killed) == len(OPERATIONS) + MEANWHILE == 20, found
    newest = [max(one["verified"], default=0) for one in found["hit"]]
    assert newest == sorted(newest), "what was committed stays"
    assert steps_of(run) == steps_of(undisturbed)
    assert answers_of(run) == answers_of(undisturbed), "each answer is there once"
    assert [row["step"] for row in answers_of(run)["train"]] == [step for step in range(1, 61) for _ in range(32)]
    assert weights_of(run) == weights_of(undisturbed)
