"""Mixtures: several datasets made, filtered, drawn, scored and validated in one run."""

import json
from pathlib import Path

import pytest

from data.filter import filter_dataset, filter_fingerprint
from data.tasks import StageResult, build_dataset, dataset_fingerprint, publish_mixture
from data.tokenizer import tokenizer_fingerprint
from rlcore.batching.loader import MixedStream
from rlcore.config import CountdownData, CustomData, FilterConfig, MixtureData, MixturePart, RewardConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.inputs import RunInputs
from rlcore.run.problems import Problems

SMALL = {"train_size": 60, "validation_size": 20, "number_high": 9, "target_high": 20, "template": "bare"}
EASY = CountdownData(min_numbers=2, max_numbers=2, operations=("+", "-"), **SMALL | {"train_size": 40})
HARD = CountdownData(min_numbers=3, max_numbers=3, operations=("+", "-"), **SMALL)
TIMES = CustomData(train_size=50, validation_size=10)
MIXED = MixtureData(
    parts=(
        MixturePart(data=EASY, weight=1, name="easy"),
        MixturePart(data=HARD, weight=2),
        MixturePart(data=TIMES, weight=0.5),
    )
)


def make(settings, tokenizer, root):
    dataset = build_dataset(settings, seed=1, root=root)
    return dataset, filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=root)


@pytest.fixture
def mixed(scratch_tokenizer, artifacts_root):
    return make(MIXED, scratch_tokenizer, artifacts_root)


def problems_of(filtered, tokenizer, settings=MIXED):
    return Problems.read(RunConfig(data=settings), RunInputs(filtered.directory, tokenizer))


def test_parts_are_shared_by_mixtures(mixed, scratch_tokenizer, artifacts_root):
    dataset, filtered = mixed
    assert dataset.counts == filtered.counts == {"train": 150, "validation": 50}
    assert dataset_fingerprint(MIXED, 1) == dataset.fingerprint == dataset.directory.name
    alone, alone_filtered = make(HARD, scratch_tokenizer, artifacts_root)
    heavier = MixtureData(parts=(*MIXED.parts[:2], MIXED.parts[2].model_copy(update={"weight": 9})))
    again, again_filtered = make(heavier, scratch_tokenizer, artifacts_root)
    assert all(result.cached for result in (alone, alone_filtered, again, again_filtered))
    assert again.fingerprint == dataset.fingerprint
    other, _ = make(MixtureData(parts=MIXED.parts[:2]), scratch_tokenizer, artifacts_root)
    assert not other.cached
    assert other.fingerprint != dataset.fingerprint
    tokenizer = tokenizer_fingerprint(scratch_tokenizer)
    assert filter_fingerprint(dataset.fingerprint, tokenizer, FilterConfig()) == filtered.fingerprint
    assert alone.fingerprint in (dataset.directory / "README.md").read_text()


def test_stream_draws_from_all_parts(mixed, scratch_tokenizer):
    problems = problems_of(mixed[1], scratch_tokenizer)
    assert isinstance(problems.stream, MixedStream)
    assert len(problems.stream) == 150
    assert {p.data_source for p in problems.stream.take(0, 60)} == {"easy", "countdown", "multiplication"}
    first = [p.data_source for p in problems.validation[:25]]
    assert {name: first.count(name) for name in set(first)} == {"easy": 10, "countdown": 10, "multiplication": 5}
    every = [*problems.validation, *problems.stream.take(0, 0)]
    assert len({prompt.prompt_id for prompt in every}) == 50


@pytest.mark.parametrize("num_processes", [0, 1])
def test_responses_are_scored_by_the_scorer_of_their_part(mixed, scratch_tokenizer, num_processes):
    """A right response for one scorer is wrong for the other: separate digits, or an equation."""
    prompts = problems_of(mixed[1], scratch_tokenizer).validation
    truths = [json.loads(prompt.ground_truth_json) for prompt in prompts]
    responses = [
        " ".join(str(truth["product"])) if "product" in truth else " + ".join(map(str, truth["numbers"]))
        for truth in truths
    ]
    with ScoringPool(MIXED.scorer, RewardConfig(num_processes=num_processes)) as pool:
        scores = pool.score(responses, [prompt.ground_truth_json for prompt in prompts])
        assert pool.errors == 0
    for truth, score in zip(truths, scores, strict=True):
        assert score.parts["format"] == 1.0
        assert score.total == ("product" in truth or sum(truth["numbers"]) == truth["target"])


def test_missing_scorers_are_refused_before_scoring(mixed, scratch_tokenizer):
    wrong = MIXED.parts[1].model_copy(update={"data": HARD.model_copy(update={"scorer": "data.countdown:nothing"})})
    settings = MIXED.model_copy(update={"parts": (MIXED.parts[0], wrong, MIXED.parts[2])})
    with pytest.raises(ConfigError, match=r"must name a function as module:function, got 'data.countdown:nothing'"):
        problems_of(mixed[1], scratch_tokenizer, settings).scoring_pool()


def test_parts_with_the_same_name_are_refused(mixed, scratch_tokenizer):
    settings = MIXED.model_copy(update={"parts": (MIXED.parts[0].model_copy(update={"name": ""}), *MIXED.parts[1:])})
    with pytest.raises(DataError, match=r"entries 0 and 1 both have rows of countdown.*at least one of them a name"):
        problems_of(mixed[1], scratch_tokenizer, settings)


def test_training_rows_that_another_part_holds_out_are_refused(scratch_tokenizer, artifacts_root):
    other = HARD.model_copy(update={"target_high": 21})
    settings = MixtureData(parts=(MixturePart(data=HARD), MixturePart(data=other, name="other")))
    message = r"row \d+: has the same (prompt|multiset of numbers \[.*\]) as a held-out row of"
    with pytest.raises(DataError, match=message):
        make(settings, scratch_tokenizer, artifacts_root)
    assert len(list((artifacts_root / "filtered").glob("*/manifest.json"))) == 2, "of the parts, not of the mixture"


def test_mixtures_compose_from_overrides():
    given = "data.parts=[{weight:3,data:{task:countdown,train_size:50}},{name:x,data:{task:custom}}]"
    config = load_config(["data=mixture", given, "model.path=some/model"])
    assert [part.weight for part in config.data.parts] == [3, 1]
    assert config.data.parts[0].data == CountdownData(train_size=50)


@pytest.mark.parametrize(
    ("parts", "messages"),
    [
        (
            "[{weight:-1,data:{task:countdown}},{data:{task:gsm8k,sorce:x}},{data:{task:custm}}]",
            ["data.parts: entry 0: weight: must be greater than 0; got -1",
             "data.parts: entry 1: data.sorce: there is no such setting; got x", "data.parts: entry 2: data"],
        ),
        ("[]", ["data.parts: must hold two datasets or more; got []"]),
        ("[{data:{task:countdown}}]", ["data.parts: must hold two datasets or more; got 1"]),
        ("[{name:x,data:{task:custom}},{name:x,data:{task:countdown}}]", ["must name each dataset once"]),
        ("[{name:all,data:{task:custom}},{data:{task:countdown}}]", ["must name each dataset once"]),
        (
            "[{data:{task:custom}},{data:{task:countdown,min_numbers:5}}]",
            ["entry 1 (countdown): data.min_numbers must be at most data.max_numbers"],
        ),
        ("[{data:{task:custom}},{data:{task:mapped,scorer:'data.math:score'}}]", ["entry 1 (mapped): reward.num_proc"]),
    ],
)  # fmt: skip
def test_invalid_parts_are_refused(parts, messages):
    with pytest.raises(ConfigError) as error:
        load_config(["data=mixture", f"data.parts={parts}", "model.path=some/model"])
    assert [message for message in messages if message not in str(error.value)] == []


def test_published_mixture_names_its_parts_and_sums_their_rows(tmp_path: Path) -> None:
    parts = [
        StageResult(tmp_path / name, name, cached, {"train": rows, f"train/{name}": 1})
        for name, rows, cached in (("one", 1_200, True), ("two", 30, False))
    ]
    counts = {"train": 1_230, "train/one": 1, "train/two": 1}
    made = publish_mixture("dataset", tmp_path / "mix", parts)
    assert made == StageResult(tmp_path / "mix", "mix", False, counts)
    assert (tmp_path / "mix" / "README.md").read_text() == (
        "# Mixture of 2 datasets\n\n| part | rows |\n| --- | --- |\n| [one](../one) | 1,200 train, 1 train/one |\n"
        "| [two](../two) | 30 train, 1 train/two |\n"
    )
    assert publish_mixture("dataset", tmp_path / "mix", parts).cached is False
    again = publish_mixture("dataset", tmp_path / "mix", parts[:1])
    assert again == StageResult(tmp_path / "mix", "mix", True, {"train": 1_200, "train/one": 1})
