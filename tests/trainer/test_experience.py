"""Scored responses to prompts, with fake and real engines."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.batching.prompts import PassCounts, RowSampler
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import PassRatesConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.config.model import ScratchModel
from rlcore.config.rollout import RewardConfig, SamplingConfig
from rlcore.errors import EngineError, UnscoredError
from rlcore.models.load import build_scratch_model
from rlcore.models.tokenizer import load_tokenizer
from rlcore.responses.table import response_table
from rlcore.rollout.engine import TRAINING_STREAM, SamplingRequest, make_requests, response_seed
from rlcore.rollout.hf import HfEngine
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.problems import Problems
from rlcore.trainer import PhaseClock, experience
from rlcore.types import Rollout
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, prepare, train
from tests.helpers.tokenizer_kinds import tagged
from tests.trainer.batches import PROMPTS, InOrder, Written

START = LoopState(4, 4, 0, 0, 0.0)


def make_config(*overrides: str) -> RunConfig:
    sizes = ("trainer.batch_size=3", "trainer.mini_batch_size=3", "rollout.samples_per_prompt=2")
    return load_config(["experiment=debug", *sizes, "warm_start.enabled=false", *overrides])


def collect(answerer: Written, *more: Any) -> experience.Experience:
    return experience.ExperienceCollector(answerer, *(more or [InOrder(PROMPTS, seed=1)])).collect(START, PhaseClock())


TEACHES, EQUAL, LOST = (0.0, 1.0), (1.0, 1.0), (None, None)
DYNAMIC = ("algo.dynamic_sampling.enabled=true", "algo.dynamic_sampling.max_refills=2")


@pytest.mark.parametrize(("totals", "rounds", "texts", "dropped"), [
    ([TEACHES, TEACHES, TEACHES], [[0, 1, 2]], [0, 1, 2], []),
    ([TEACHES, EQUAL, TEACHES, TEACHES], [[0, 1, 2], [3]], [0, 2, 3], [1]),
    ([EQUAL, LOST, TEACHES, EQUAL, TEACHES, EQUAL], [[0, 1, 2], [3, 4], [5]], [2, 4, 0], [1, 3, 5]),
    ([EQUAL] * 9, [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [0, 1, 2], [3, 4, 5, 6, 7, 8]),
])  # fmt: skip
def test_groups_without_signal_are_replaced(totals, rounds, texts, dropped) -> None:
    answerer = Written(make_config(*DYNAMIC), dict(enumerate(totals)))
    found = collect(answerer)
    assert [[request.prompt.prompt_id for request in asked[::2]] for asked in answerer.asked] == rounds
    seeds = [request.seed for asked in answerer.asked for request in asked]
    places = [(group, sample) for group in range(len(seeds) // 2) for sample in (0, 1)]
    run_seed = answerer.config.seed
    assert seeds == [response_seed(run_seed, TRAINING_STREAM, 5, *place) for place in places], "seeds of the fifth step"
    assert [*found.texts] == [f"{number}.{sample}" for number in texts for sample in (0, 1)]
    assert [one.prompt.prompt_id for one in found.rollouts[::2]] == texts
    assert [score.total for score in found.scores] == [total or 0.0 for number in texts for total in totals[number]]
    assert found.group_ids == (0, 0, 1, 1, 2, 2)
    assert (found.num_prompts_drawn, found.num_groups_dropped) == (sum(map(len, rounds)), len(dropped))
    assert found.num_tokens_dropped == sum(2 * (1 + number) for number in dropped)
    assert found.num_response_tokens == sum(2 * (1 + number) for number in texts)
    assert (found.greedy_scores, found.pass_counts, found.pass_metrics) == (None, "", {})


def test_all_unscored_error() -> None:
    answerer = Written(make_config(), dict.fromkeys(range(12), LOST))
    rule = rf"for 6 responses have no score; {answerer.config.data.scorer} failed, the last time: no scorer"
    with pytest.raises(UnscoredError, match=rf"^step 5: has no metrics, {rule}$"):
        collect(answerer)


def test_remax_baseline_is_one_greedy_response() -> None:
    """The greedy sample has index -1: the last score of the prompt."""
    totals: dict[int, Sequence[float | None]] = {0: (0.0, 0.25), 1: (1.0, None), 2: (0.5, 0.75)}
    answerer = Written(make_config("algo=remax"), totals)
    found = collect(answerer)
    assert answerer.asked[1] == [SamplingRequest(prompt, -1, seed=0) for prompt in PROMPTS[:3]]
    assert answerer.temperatures == [1.0, 0.0]
    np.testing.assert_array_equal(found.greedy_scores, [0.25, 0.25, np.nan, np.nan, 0.75, 0.75])


def test_overlong_penalty_in_total_and_parts() -> None:
    words = ("algo.overlong.enabled=true", "algo.overlong.buffer_tokens=2", "rollout.max_response_tokens=3")
    answerer = Written(make_config("algo=remax", *words), dict.fromkeys(range(12), (1.0, 1.0)))
    found = collect(answerer)
    assert [score.total for score in found.scores] == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    parts = [{"correct": 1.0, "overlong": penalty} for penalty in (0.0, -0.5, -1.0)]
    assert [score.parts for score in found.scores[::2]] == parts
    assert found.greedy_scores == (1.0, 1.0, 0.5, 0.5, 0.0, 0.0)


def test_all_groups_count_in_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PassRatesConfig(draw="band", band=(0.25, 0.75), rest_weight=0.1, fade=0.5)
    counted = RowSampler(range(12), PassCounts.of([0] * 12, [0] * 12), settings)
    totals: list[Sequence[float | None]] = [EQUAL, LOST, TEACHES, (1.0, None), TEACHES, TEACHES]
    answerer = Written(make_config(*DYNAMIC), dict.fromkeys(range(12), LOST) | dict(enumerate(totals)))
    stream, weighed = InOrder(PROMPTS, seed=1), list[list[float]]()
    monkeypatch.setattr(stream, "set_weights", lambda weights: weighed.append(weights.tolist()))
    found = collect(answerer, stream, counted)
    assert weighed == [[1.0] * 12], "once a step"
    after = PassCounts.read(found.pass_counts, 12)
    assert after.samples.tolist() == [2, 0, 2, 1, 2, 2, *[0] * 6]
    assert after.passes.tolist() == [2, 0, 1, 1, 1, 1, *[0] * 6]
    assert found.pass_metrics["pass_rates/rows_retired"] == 2.0
    tally = {7: (1, 3)}
    again = [answerer._written(SamplingRequest(PROMPTS[number], 1, 0)) for number in (0, 2, 2, 1)]
    experience.count_solved(again, tally)
    assert tally == {7: (1, 3), 0: (1, 1), 2: (2, 2)}


def test_split_requests_keeps_prompts_together() -> None:
    requests = [SamplingRequest(PROMPTS[number], sample, 0) for number in (5, 0, 1) for sample in range(2)]
    assert experience.split_requests(requests, 1) == [[0, 1, 2, 3, 4, 5]]
    assert experience.split_requests(requests, 2) == [[0, 1], [2, 3, 4, 5]]
    assert experience.split_requests(requests, 4) == [[0, 1], [4, 5], [2, 3], []]
    twice = [replace(request, seed=1) for request in requests[:2]]
    assert experience.split_requests([*requests[:2], *requests[2:4], *twice], 3) == [[0, 1], [4, 5], [2, 3]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    # 32 responses a step, 8 concurrently
    return prepare(tmp_path_factory.mktemp("artifacts"), "rollout.max_num_seqs=8", "reward.num_processes=1")


@pytest.fixture(scope="module")
def group(run: SmallRun) -> LocalGroup:
    return LocalGroup(run.config, str(run.model_directory))


@pytest.fixture(scope="module")
def problems(run: SmallRun) -> Problems:
    return Problems.read(run.config, run.inputs)


@pytest.fixture(scope="module")
def sampler(run: SmallRun, group: LocalGroup, problems: Problems) -> Iterator[experience.ResponseSampler]:
    with ExitStack() as opened:
        yield problems.build_sampler(run.inputs, opened)(group)


def test_scoring_starts_during_generation(run: SmallRun, group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    written, submitted, begun = list[int](), list[int](), threading.Event()
    write, submit = HfEngine._generate_batch, ScoringPool.submit

    def writing(self: HfEngine, requests: Any, *args: Any) -> Any:
        assert not written or begun.wait(60), "the first responses must not wait for the others"
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


def test_streamed_scores_equal_batch_scores(problems: Problems, sampler: experience.ResponseSampler) -> None:
    requests = make_requests(problems.stream.take(0, 8), 4, run_seed=1, stream=1, step=1)
    sampler.group.each(Worker.sync_weights, 3)
    plain = sampler.generate(requests, SamplingConfig(), policy_version=3)
    early = experience.StreamScorer(sampler.scoring, problems.decode, has_processes=True)
    streamed = sampler.generate(requests, SamplingConfig(), policy_version=3, on_finished=early.submit)
    scored = early.collect()
    assert [r.response_ids.tolist() for r in streamed] == [r.response_ids.tolist() for r in plain]
    texts = problems.decode([r.response_ids for r in plain])
    scores = sampler.scoring.score(texts, [r.prompt.ground_truth_json for r in plain])
    assert scored == dict(enumerate(zip(scores, texts, strict=True)))
    for has_processes in (False, True):
        late_first = experience.StreamScorer(sampler.scoring, problems.decode, has_processes=has_processes)
        for pair in reversed(list(enumerate(plain))):
            late_first.submit([pair])
        assert late_first.collect() == scored


def test_stale_rollout_raises_before_scoring(problems: Problems, sampler: experience.ResponseSampler) -> None:
    requests = make_requests(problems.stream.take(0, 2), 1, run_seed=1, stream=1, step=1)
    sampler.group.each(Worker.sync_weights, 3)
    scored: list[Any] = []
    with pytest.raises(EngineError, match=r"stale rollout.*version 3, the trainer is at 4"):
        sampler.generate(requests, SamplingConfig(), policy_version=4, on_finished=scored.append)
    assert scored == []


def test_dynamic_sampling_ignores_overlong_penalty(tmp_path: Path) -> None:
    """DAPO filters by score before the penalty."""
    overrides = ("algo=dapo", "algo.dynamic_sampling.max_refills=1", "algo.overlong.buffer_tokens=8")
    untrained = prepare(tmp_path, "warm_start.enabled=false", *overrides)
    problems = Problems.read(untrained.config, untrained.inputs)
    workers = LocalGroup(untrained.config, str(untrained.model_directory))
    with closing(workers), ScoringPool("tests.rollout.odd_scorers:always_the_same", RewardConfig()) as scoring:
        sampler = experience.ResponseSampler(untrained.config, workers, scoring, problems.decode)
        workers.each(Worker.sync_weights, 0)
        collector = experience.ExperienceCollector(sampler, problems.stream)
        found = collector.collect(LoopState(0, 0, 0, 0, 0.0), PhaseClock())
    size = untrained.config.trainer.batch_size
    assert (found.num_prompts_drawn, found.num_groups_dropped) == (2 * size, size)
    assert len({score.total for score in found.scores}) > 1, "scores include the penalty"


def test_prepared_prompts_belong_to_their_step(problems: Problems, sampler: experience.ResponseSampler) -> None:
    first = LoopState(0, 0, 0, 0, 0.0)
    second = replace(first, step=1, num_prompts_drawn=sampler.config.trainer.batch_size)
    sampler.group.each(Worker.sync_weights, 0)
    one, other, ahead = (experience.ExperienceCollector(sampler, problems.stream) for _ in range(3))
    fresh = [one.collect(first, PhaseClock()), other.collect(second, PhaseClock())]
    ahead.prepare(second)
    for state, expected in zip((second, first, second), (fresh[1], *fresh), strict=True):
        found = ahead.collect(state, PhaseClock())
        assert [one.prompt for one in found.rollouts] == [one.prompt for one in expected.rollouts]
        assert found.texts == expected.texts
    assert fresh[0].texts != fresh[1].texts


def test_stream_batches_shrink(problems: Problems, group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(problems.stream.take(0, 25), 4, run_seed=1, stream=1, step=1)
    answer = Rollout(requests[0].prompt, 0, np.ones(1, dtype=np.int32), np.zeros(1), "stop", 0)
    monkeypatch.setattr(HfEngine, "stream", lambda self, requests, *_: ((i, answer) for i in range(len(requests))))
    found: list[int] = []
    group.stream(Worker.generate, [(requests, SamplingConfig(), 8)], lambda _, some: found.append(len(some)))
    assert found == [25, 18, 14, 10, 8, 8, 8, 8, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, which samples all tokens."""
    shape = ScratchModel(max_position_embeddings=256, max_integer=262)  # as many tokens as the tagged tokenizer
    folder = build_scratch_model(shape, seed=1, directory=tmp_path_factory.mktemp("model"))
    end = load_tokenizer(tagged(folder, byte_level=True)).eos_token_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


@pytest.mark.parametrize("skips", [True, False])
def test_scored_text_keeps_tags(model: Path, tmp_path: Path, skips: bool) -> None:
    run = prepare(
        tmp_path, f"model.path={model}", "warm_start.enabled=false", "data.scorer=tests.rollout.odd_scorers:thinks",
        "rollout.max_response_tokens=64", f"rollout.skip_special_tokens={skips}", "filter.max_prompt_tokens=64",
    )  # fmt: skip
    tokenizer = load_tokenizer(model)
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, 8), 8, run_seed=1, stream=1, step=1)
    with closing(LocalGroup(run.config, str(model))) as group, ExitStack() as opened:
        group.each(Worker.sync_weights, 1)
        sampler = problems.build_sampler(run.inputs, opened)(group)
        answers = sampler.sample(requests, run.config.rollout.sampling, policy_version=1)
    rollouts, scores, texts = zip(*answers, strict=True)
    tag = tokenizer.convert_tokens_to_ids("</think>")
    has_tag = [tag in rollout.response_ids for rollout in rollouts]
    assert {*has_tag} == {True, False}
    assert [score.total for score in scores] == [float(has) for has in has_tag]
    ended = [rollout.response_ids[-1] == tokenizer.eos_token_id for rollout in rollouts]
    assert any(ended)
    assert [text.endswith("<|im_end|>") for text in texts] == [has and not skips for has in ended]
    table = response_table(1, rollouts, scores, texts, problems.decode)
    assert table.column("answer").to_pylist() == [*texts]
    asked = [tokenizer.decode(rollout.prompt.token_ids, skip_special_tokens=True) for rollout in rollouts]
    assert table.column("prompt").to_pylist() == asked
