"""The runs, slots, services and free disk space of a root in Prometheus's text format."""

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from flows.stack.control import service_states
from flows.work.runs import all_runs
from flows.work.slots import Slots
from flows.work.status import STATES, status_of
from rlcore.storage.disk import free_bytes

_LIVING = ("running", "waiting", "stopping")


def prometheus_text(root: Path) -> str:
    """Return the current metrics of a root. Only runs with a living process have separate metrics."""
    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"millrace_{name}", meaning, labels, registry=registry)

    runs = gauge("runs", "Number of runs in a state.", "state")
    step = gauge("run_step", "Last step of a run.", "run")
    total = gauge("run_total_steps", "Number of steps after which a run ends.", "run")
    speed = gauge("run_tokens_per_second", "Tokens per second of each device in a run's last step.", "run")
    changed = gauge("run_last_journal_timestamp_seconds", "Time of the last line in a run's journal.", "run")
    for state in STATES:
        runs.labels(state).set(0)
    for run in map(status_of, all_runs(root)):
        runs.labels(run.state).inc()
        if run.state in _LIVING:
            values = {step: run.step, total: run.total_steps, speed: run.tokens_per_s, changed: run.changed}
            for one, value in values.items():
                if value is not None:
                    one.labels(run.run_id).set(value)
    held = Slots(root).read_state()
    slots = gauge("slots", "Number of slots that are taken or free.", "state")
    slots.labels("taken").set(len(held.holders))
    slots.labels("free").set(held.num_free)
    gauge("runs_waiting_for_slots", "Number of runs that wait for slots.").set(len(held.waiting))
    up = gauge("service_up", "1 if a service of millrace up answers, otherwise 0.", "service")
    for service, found in service_states(root):
        up.labels(service.name).set(found == "up")
    gauge("disk_free_bytes", "Free space on the file system of the root.").set(free_bytes(root))
    return generate_latest(registry).decode()
