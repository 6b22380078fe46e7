"""State of a training between its steps: saves, stored results, the reward audit."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlcore.checkpoint.catalog import HELD_OUT_LOSS, LoopState, TrainerState
from rlcore.config import RunConfig
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.run.record import RunRecord
from rlcore.run.reinforcement import RunTraining
from tests.run.conftest import Reported

STATE = LoopState(3, 3, 24, 100, 0.1)


def training(record: RunRecord, **workers: Any) -> RunTraining:
    return RunTraining(record, cast(Any, SimpleNamespace(**{"holds": None, "each": "each rank", **workers})))


def result_of(config: RunConfig, *failures: str | None, name: str = "before", step: int = 0) -> ValidationResult:
    answers = tuple(Response("a", 0.5, {}, 1, "stop", failure=failure) for failure in failures)
    problem = ProblemResult(1, 0, "2 + 2", "{}", None, answers, "countdown")
    return ValidationResult(name, step, step, "countdown", (problem,), config.validation.evaluation)


def test_checkpoint_has_no_metrics_of_suites_or_between_chunks(record: RunRecord, monkeypatch) -> None:
    """A stop may come at any step, and the model does not depend on it."""
    made, begun = training(record), list[object]()

    def begin(step: int, complete: Callable[[], TrainerState], metrics: Mapping[str, float], each: object) -> None:
        begun.append((step, complete().num_tokens, dict(metrics), each))

    monkeypatch.setattr(record.saves, "begin", begin)
    end = record.config.trainer.steps_per_chunk
    suite = {"name": "s", "data": {"task": "countdown"}}
    made._config = RunConfig.model_validate({**made._config.model_dump(), "validation": {"suites": [suite]}})
    others = {"actor/loss": 1.0, "val-core/t/reward/mean_at_1": 0.5}
    made._metrics = {**others, HELD_OUT_LOSS: 0.5, "val-core/s/reward/mean_at_1": 0.5}
    for step in (end - 1, end):
        made._begin_save(replace(STATE, step=step))
    saved = ((end - 1, others), (end, {**others, HELD_OUT_LOSS: 0.5}))
    assert begun == [(step, STATE.num_tokens, metrics, "each rank") for step, metrics in saved]


def test_stored_result_is_reused_if_unchanged(record: RunRecord) -> None:
    config, made, suite = record.config, training(record), cast(Any, SimpleNamespace(name="s"))
    assert made.file_of("before") == record.layout.validation / "before.json"
    assert made.file_of("before", suite) == record.layout.suites / "s" / "before.json"
    assert made._known_result(3, None) is None
    result = result_of(config, None, name="step-000003", step=3)
    result.write(made.file_of(result.name))
    assert made._known_result(3, None) == result
    assert made._known_result(4, None) is None
    for changes in ({"step": 4}, {"suite": "of another"}):
        replace(result, **changes).write(made.file_of(result.name))
        assert made._known_result(3, None) is None
    result.write(made.file_of(result.name))
    limited = config.validation.model_copy(update={"max_problems": 1})
    made._config = config.model_copy(update={"validation": limited})
    assert made._known_result(3, None) is None, "it saw some of the problems"


@pytest.mark.parametrize("pays", [True, False])
def test_reward_audit_findings_are_reported(record: RunRecord, reported: Reported, pays: bool) -> None:
    class Found(SimpleNamespace):
        def __str__(self) -> str:
            return f"{self.kind}: 1 of 2"

    findings = (Found(kind="empty"), Found(kind="long")) if pays else ()
    made = training(record, audit=lambda result: findings)
    result_of(record.config, None).write(made.file_of("step-000000"))
    made._audit_reward()
    text = f"{record.config.data.scorer} pays for responses that are no answers: empty: 1 of 2; long: 1 of 2"
    event = {"event": "reward_audit", "step": 0, "text": text, "kinds": ["empty", "long"]}
    assert reported == ([event] if pays else [])


def test_best_score_is_kept(record: RunRecord) -> None:
    config, made = record.config, training(record)
    last, samples = config.trainer.total_steps, config.validation.samples_per_problem
    result = result_of(config, *[None] * samples, step=last)
    made.evaluate = lambda name, step: result
    for best, kept in ((float("-inf"), (0.5, last)), (0.5, (0.5, 1)), (0.75, (0.75, 1)), (0.25, (0.5, last))):
        metrics, state = made._evaluate(replace(STATE, step=last, best_metric=best, best_step=1))
        assert (metrics, state.best_metric, state.best_step) == (result.metrics(), *kept)
    made.evaluate = lambda name, step: replace(result, suite="x")
    _, state = made._evaluate(replace(STATE, step=last))
    assert state.best_metric == float("-inf"), "a suite scores no checkpoint"
