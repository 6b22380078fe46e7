"""A whole run on a mixture: scores by part, validation by source, and a resume."""

from pathlib import Path

from rlcore.evaluation.result import ValidationResult
from tests.helpers.running import finish, steps_of, write_record
from tests.helpers.small_run import SmallRun, prepare

EASY = (
    "{task:countdown,train_size:30,validation_size:12,min_numbers:2,max_numbers:2,number_high:9,target_high:9,"
    "operations:[+,-],template:bare}"
)
PARTS = f"data.parts=[{{weight:3,name:easy,data:{EASY}}},{{data:{{task:custom,train_size:80,validation_size:8}}}}]"
OVERRIDES = (
    "data=mixture", PARTS, "trainer.steps_per_chunk=1", "validation.every_steps=1", "tracking.enabled=false",
    "warm_start.max_steps=20",
)  # fmt: skip


def train(root: Path, name: str, *ends: int) -> SmallRun:
    """Train to each of the steps in a separate trainer process."""
    for total_steps in ends:
        run = prepare(root, *OVERRIDES, f"run_id={name}", f"trainer.total_steps={total_steps}")
        finish(write_record(run), root / f"{name}.log")
    return run


def test_a_mixture_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", 2)
    expected = steps_of(whole)
    assert steps_of(train(tmp_path, "split", 1, 2)) == expected
    sources = ("all", "easy", "multiplication")
    assert all(f"val-core/{source}/reward/mean_at_2" in step for step in expected.values() for source in sources)
    result = ValidationResult.read(whole.layout.validation / "after.json")
    assert (result.data_source, len(result.problems)) == ("all", 20)
    summary = result.metrics()
    easy, times, both = (summary[f"val-core/{name}/reward/greedy"] for name in ("easy", "multiplication", "all"))
    assert abs(both - (12 * easy + 8 * times) / 20) < 1e-12
    assert list(result.by_source()) == ["easy", "multiplication"]
