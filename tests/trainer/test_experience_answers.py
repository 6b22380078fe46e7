"""Answers on their way from engine to scores."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.batching.loader import PromptStream
from rlcore.batching.pass_counts import PassCounts, RowSampler
from rlcore.checkpoint.state import LoopState
from rlcore.config import PassRatesConfig
from rlcore.config.rollout import RewardConfig, SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import make_requests
from rlcore.rollout.hf import HfEngine
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.problems import Problems
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.clock import PhaseClock
from rlcore.trainer.experience import ExperienceCollector, ResponseSampler, StreamScorer
from rlcore.trainer.generate import generate
from rlcore.types import Rollout
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, prepare, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    # 32 answers a step, 8 at a time
    return prepare(tmp_path_factory.mktemp("artifacts"), "rollout.max_num_seqs=8", "reward.num_processes=1")


@pytest.fixture(scope="module")
def group(run: SmallRun) -> LocalGroup:
    return LocalGroup(run.config, str(run.model_directory))


def test_scoring_begins_while_the_engine_writes(
    run: SmallRun, group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    submitted: list[int] = []
    begun = threading.Event()
    write, submit = HfEngine._generate_batch, ScoringPool.submit

    def writing(self: HfEngine, requests: Any, *args: Any) -> Any:
        assert not written or begun.wait(60), "the first answers wait until all are written"
        written.append(len(requests))
        return write(self, requests, *args)

    def submitting(self: ScoringPool, responses: Sequence[str], truths: Sequence[str]) -> Any:
        submitted.append(len(responses))
        begun.set()
        return submit(self, responses, truths)

    monkeypatch.setattr(HfEngine, "_generate_batch", writing)
    monkeypatch.setattr(ScoringPool, "submit", submitting)
    train(run, group, 1)
    assert written == submitted
    assert len(written) == 4


def test_streamed_answers_and_scores_are_those_asked_for_at_once(run: SmallRun, group: LocalGroup) -> None:
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, 8), 4, run_seed=1, stream=1, step=1)
    group.each(Worker.sync_weights, 3)
    sampling, limit = SamplingConfig(), run.config.rollout.max_response_tokens
    plain = generate(group, requests, sampling, limit, policy_version=3)
    with ScoringPool(run.config.data.scorer, run.config.reward) as scoring:
        early = StreamScorer(scoring, problems.decode)
        streamed = generate(group, requests, sampling, limit, policy_version=3, on_finished=early.submit)
        scores, texts = early.collect()
        assert [r.response_ids.tolist() for r in streamed] == [r.response_ids.tolist() for r in plain]
        assert texts == problems.decode([r.response_ids for r in plain])
        assert scores == scoring.score(texts, [r.prompt.ground_truth_json for r in plain])
        late_first = StreamScorer(scoring, problems.decode)
        for pair in reversed(list(enumerate(plain))):
            late_first.submit([pair])
        assert late_first.collect() == (scores, texts), "in the order of the requests, whichever answer ends first"


def test_an_answer_by_other_weights_is_refused_before_it_is_scored(run: SmallRun, group: LocalGroup) -> None:
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, 2), 1, run_seed=1, stream=1, step=1)
    group.each(Worker.sync_weights, 3)
    scored: list[Any] = []
    with pytest.raises(EngineError, match=r"stale rollout.*version 3, the trainer is at 4"):
        generate(group, requests, SamplingConfig(), 4, policy_version=4, on_finished=scored.append)
    assert scored == []


@pytest.mark.parametrize("max_refills", [0, 2])
def test_groups_of_equal_score_are_dropped_though_the_overlong_penalty_tells_them_apart(
    tmp_path: Path, max_refills: int
) -> None:
    """DAPO filters by what an answer is worth; and no refill means one round."""
    overrides = ("algo=dapo", f"algo.dynamic_sampling.max_refills={max_refills}", "algo.overlong.buffer_tokens=8")
    untrained = prepare(tmp_path, "warm_start.enabled=false", *overrides)
    problems = Problems.read(untrained.config, untrained.inputs)
    workers = LocalGroup(untrained.config, str(untrained.model_directory))
    with ScoringPool("tests.rollout.odd_scorers:always_the_same", RewardConfig()) as scoring:
        collector = ExperienceCollector(
            ResponseSampler(untrained.config, workers, scoring, problems.decode), problems.stream
        )
        workers.each(Worker.sync_weights, 0)
        found = collector.collect(LoopState(0, 0, 0, 0, 0.0), PhaseClock())
    workers.close()
    size = untrained.config.trainer.batch_size
    assert found.num_prompts_drawn == (1 + max_refills) * size
    assert found.num_groups_dropped == max_refills * size
    assert len({score.total for score in found.scores}) > 1, "the penalty is in what is learned from"


def test_prompts_drawn_ahead_are_given_to_their_step_alone(run: SmallRun, group: LocalGroup) -> None:
    first = LoopState(0, 0, 0, 0, 0.0)
    second = replace(first, step=1, num_prompts_drawn=run.config.trainer.batch_size)
    problems = Problems.read(run.config, run.inputs)
    group.each(Worker.sync_weights, 0)
    with ScoringPool(run.config.data.scorer, run.config.reward) as scoring:
        answerer = ResponseSampler(run.config, group, scoring, problems.decode)
        fresh = [
            ExperienceCollector(answerer, problems.stream).collect(state, PhaseClock()) for state in (first, second)
        ]
        ahead = ExperienceCollector(answerer, problems.stream)
        ahead.prepare(second)
        for state, expected in zip((second, first, second), (fresh[1], *fresh), strict=True):
            found = ahead.collect(state, PhaseClock())
            assert [one.prompt for one in found.rollouts] == [one.prompt for one in expected.rollouts]
            assert found.texts == expected.texts
    assert fresh[0].texts != fresh[1].texts


def test_prompts_are_drawn_by_their_pass_rates(run: SmallRun, group: LocalGroup) -> None:
    size, problems = run.config.trainer.batch_size, Problems.read(run.config, run.inputs)
    prompts = problems.stream.take(0, 4 * size)
    inside = {prompt.prompt_id for prompt in prompts[1::4]}
    passes = np.array([2.0 if prompt.prompt_id in inside else 4.0 for prompt in prompts], dtype=np.float32)
    start = PassCounts(passes, np.full(len(prompts), 4.0, dtype=np.float32))
    settings = PassRatesConfig(draw="band", band=(0.2, 0.8), rest_weight=1e-9)
    counted = RowSampler([prompt.prompt_id for prompt in prompts], start, settings)
    group.each(Worker.sync_weights, 0)
    with ScoringPool(run.config.data.scorer, run.config.reward) as scoring:
        answerer = ResponseSampler(run.config, group, scoring, problems.decode)
        collector = ExperienceCollector(answerer, PromptStream(prompts, seed=1), counted)
        found = collector.collect(LoopState(0, 0, 0, 0, 0.0), PhaseClock())
    assert {rollout.prompt.prompt_id for rollout in found.rollouts} == inside


def test_answers_come_in_large_handfuls_first_and_in_small_ones_at_the_end(
    run: SmallRun, group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Problems.read(run.config, run.inputs).stream.take(0, 25), 4, run_seed=1, stream=1, step=1)
    answer = Rollout(requests[0].prompt, 0, np.ones(1, dtype=np.int32), np.zeros(1), "stop", 0)
    monkeypatch.setattr(HfEngine, "stream", lambda self, requests, *_: ((i, answer) for i in range(len(requests))))
    found: list[int] = []
    group.stream(Worker.generate, [(requests, SamplingConfig(), 8)], lambda _, some: found.append(len(some)))
    assert found == [25, 18, 14, 10, 8, 8, 8, 8, 1]
