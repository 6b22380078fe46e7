"""The trainer process of a small run: its settings on disk, starts with disturbances, and their outcomes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

from rlcore.responses.store import parts_of
from rlcore.tracking.journal import read_journal
from tests.helpers.forked import run_module
from tests.helpers.repeatable import repeatable
from tests.helpers.small_run import SmallRun, prepare

OVERRIDES = ("trainer.steps_per_chunk=2", "validation.every_steps=2", "tracking.enabled=false")
DEADLINE_S = 240  # limit of one start
WAIT_S = 560  # limit of a whole chain of starts, on a machine that others keep busy too
Plan = dict[str, Any] | None


def small(root: Path, *overrides: str, steps: int, experiment: str = "debug") -> SmallRun:
    """Return a run of a few steps with a validation and a checkpoint every two steps, and a long deadline for saves."""
    given = any(word.startswith("runtime.stop_deadline_s=") for word in overrides)
    patience = () if given else ("runtime.stop_deadline_s=200",)
    words = (*OVERRIDES, *patience, f"trainer.total_steps={steps}", *overrides)
    return prepare(root, *words, experiment=experiment)


def write_record(run: SmallRun) -> Path:
    run.inputs.write(run.config, run.layout)
    return run.layout.run_dir


def finish(run_dir: Path, log: Path) -> None:
    arguments = ["--run", str(run_dir)]
    assert run_module("tests.helpers.whole_run", arguments, output=log, timeout_s=DEADLINE_S) == 0, log.read_text()


def disturb(run: SmallRun, *plan: Plan) -> list[dict[str, Any]]:
    run_dir = write_record(run)
    file, out, log = (run.layout.run_dir / name for name in ("plan.json", "out.json", "out.log"))
    file.write_text(json.dumps(plan))
    code = run_module("tests.helpers.disturbed", [str(run_dir), str(file), str(out)], output=log, timeout_s=WAIT_S)
    assert code == 0, log.read_text()
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def at(moment: str, *signals: str, nth: int = 1, **more: Any) -> dict[str, Any]:
    """Plan signals at the nth time that a start reaches a moment. `more`: further keys of `tests.helpers.disturbed`."""
    return {"at": moment, "nth": nth, "signals": list(signals), **more}


def output_of(run: SmallRun) -> str:
    return (run.layout.run_dir / "out.log").read_text()


def steps_of(run: SmallRun) -> dict[int, dict[str, float]]:
    """Return the journal's metrics by step, without those of the machine. Each step must occur once."""
    records = read_journal(run.layout.journal)
    assert [record.step for record in records] == list(range(len(records)))
    return {record.step: repeatable(dict(record.metrics)) for record in records}


def answers_of(run: SmallRun) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for part in parts_of(run.layout.answers):
        name = "train" if part.name.startswith("train-") else part.stem
        found.setdefault(name, []).extend(pq.read_table(part).to_pylist())
    return found


def weights_of(run: SmallRun) -> dict[str, bytes]:
    tensors = load_file(run.layout.exported_model / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(run: SmallRun, other: SmallRun) -> None:
    """Assert that both runs have the same metrics in each step and the same bytes of final weights."""
    assert steps_of(run) == steps_of(other)
    assert weights_of(run) == weights_of(other)
