"""A pass of a run that runs out of memory: the run continues with the same numbers, and reports it."""

from pathlib import Path

import pytest

from rlcore.config.fingerprint import run_id
from rlcore.run.watchdog import read_failures
from rlcore.tracking.delivery import sync_run
from rlcore.tracking.journal import load_journal, read_journal
from tests.helpers.mlflow import client_of, main_run
from tests.helpers.running import disturb, output_of, steps_of
from tests.helpers.sessions import elsewhere, run_to_the_end
from tests.helpers.small_run import prepare

SETTINGS = (
    "trainer.steps_per_chunk=2", "trainer.total_steps=2", "validation.every_steps=0", "tracking.enabled=false",
    "trainer.batch_size=4", "trainer.mini_batch_size=4", "rollout.samples_per_prompt=4", "validation.max_problems=2",
    "rollout.max_response_tokens=8", "runtime.stop_deadline_s=200",
)  # fmt: skip
NAMES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy")


def test_a_shortage_is_in_journal_mlflow_and_events(tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", *SETTINGS)
    run_to_the_end(plain)
    short = elsewhere(plain, tmp_path / "short", *SETTINGS, "algo.policy_loss=tests.helpers.harmful:at_most_four")
    heard: list[dict[str, object]] = []
    run_to_the_end(short, lambda event: heard.append(dict(event)))

    journal = load_journal(short.layout.journal)
    found = [event for event in journal.events if event.name == "out_of_memory"]
    assert [event.step for event in found] == [1, 1], "16 answers do not fit, nor do 8; step 2 begins with 4"
    budget = short.config.trainer.max_tokens_per_micro_batch
    assert [event.data["max_tokens_per_micro_batch"] for event in found] == [budget // 2, budget // 4]
    last = found[-1].data
    assert (last["name"], last["num_micro"], last["num_again"]) == ("the policy's update", 2, 4)
    assert "step 1: the policy's update ran out of memory in 2 micro-batches and is repeated in 4" in str(last["text"])
    assert "allocate" in str(last["refusal"])
    reported = [event for event in heard if event["event"] == "out_of_memory"]
    assert [{**event.data, "event": event.name, "step": event.step} for event in found] == reported
    assert [record.metrics.get("perf/num_passes_redone") for record in read_journal(short.layout.journal)[1:]] == [2, 2]

    steps, expected = steps_of(short), steps_of(plain)
    for step in (1, 2):
        for name in NAMES:
            assert steps[step][name] == pytest.approx(expected[step][name], rel=2e-5, abs=1e-6), (step, name)

    assert sync_run(short.layout.run_dir).status
    client = client_of(tmp_path / "short")
    run = main_run(client, run_id(short.config))
    assert run.data.tags["events.out_of_memory"] == "step 1"


@pytest.mark.multiprocess
def test_one_of_two_ranks_runs_out_of_memory(tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", *SETTINGS)
    run_to_the_end(plain)
    loss = "algo.policy_loss=tests.helpers.harmful:at_most_four_on_rank_1"
    short = elsewhere(plain, tmp_path / "short", *SETTINGS, "runtime=ray", "runtime.num_workers=2", loss)
    failed, finished = disturb(short, None, None)
    assert (failed["code"], finished["code"]) == (1, 0), output_of(short)

    (fault,) = read_failures(short.layout.run_dir)
    assert (fault.kind, fault.step) == ("rank out of memory", 0)
    assert "the policy's update ran out of memory in 1 micro-batches on one of 2 ranks" in fault.message
    names = [event.name for event in load_journal(short.layout.journal).events]
    assert ("fault" in names, "out_of_memory" in names) == (True, False), "the second start begins with a finer cut"
    steps, expected = steps_of(short), steps_of(plain)
    for step in (1, 2):
        for name in NAMES:
            assert steps[step][name] == pytest.approx(expected[step][name], rel=2e-5, abs=1e-6), (step, name)
