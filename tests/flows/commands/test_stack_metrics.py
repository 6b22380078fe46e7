"""The Prometheus text of a root: a real run that works, slots, and free disk space."""

import time

from prometheus_client.parser import text_string_to_metric_families

from flows.commands.stack import prometheus_text
from flows.work.slots import Slots
from tests.flows.conftest import SMALL, Millrace, ended, journal


def test_a_living_run_and_slots_are_metrics(bare: Millrace) -> None:
    Slots(bare.root).set_devices(["", ""])
    working = bare.start("train", *SMALL)
    while not (
        list((bare.root / "runs").glob("*/metrics.jsonl")) and any(one["step"] for one in journal(bare.run_dir()))
    ):
        assert working.poll() is None
        time.sleep(0.1)
    families = text_string_to_metric_families(prometheus_text(bare.root))
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    run = bare.run_dir().name
    assert found["millrace_runs", "running"] == 1
    assert found["millrace_runs", "finished"] == 0
    assert 1 <= found["millrace_run_step", run] <= 60
    assert found["millrace_run_total_steps", run] == 60
    assert found["millrace_run_tokens_per_second", run] > 0
    assert found["millrace_run_last_journal_timestamp_seconds", run] >= journal(bare.run_dir())[0]["time"]
    assert (found["millrace_slots", "taken"], found["millrace_slots", "free"]) == (1, 1)
    assert found["millrace_disk_free_bytes",] > 0
    assert bare("stop", str(bare.run_dir())).code == 0
    assert ended(working).code == 75
    after = prometheus_text(bare.root)
    assert 'millrace_runs{state="stopped"} 1.0' in after
    assert run not in after, "only living runs have separate metrics"
