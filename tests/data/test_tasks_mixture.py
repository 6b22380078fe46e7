"""Mixtures: several datasets made, filtered, drawn, scored and judged in one run."""

import json
from pathlib import Path

import pytest

from data.filter import filter_dataset, filter_fingerprint
from data.inspect import inspect_dataset
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


def made(settings, tokenizer, root):
    dataset = build_dataset(settings, seed=1, root=root)
    return dataset, filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=root)


@pytest.fixture
def mixed(scratch_tokenizer, artifacts_root):
    return made(MIXED, scratch_tokenizer, artifacts_root)


def problems_of(filtered, tokenizer, settings=MIXED):
    return Problems.read(RunConfig(data=settings), RunInputs(filtered.directory, tokenizer))


def test_parts_are_made_once_whatever_mixture_they_are_in(mixed, scratch_tokenizer, artifacts_root):
    dataset, filtered = mixed
    assert dataset.counts == filtered.counts == {"train": 150, "validation": 50}
    assert dataset_fingerprint(MIXED, 1) == dataset.fingerprint == dataset.directory.name
    alone, alone_filtered = made(HARD, scratch_tokenizer, artifacts_root)
    assert alone.cached
    assert alone_filtered.cached
    heavier = MixtureData(parts=(*MIXED.parts[:2], MIXED.parts[2].model_copy(update={"weight": 9})))
    again, again_filtered = made(heavier, scratch_tokenizer, artifacts_root)
    assert (again.cached, again_filtered.cached) == (True, True)
    assert again.fingerprint == dataset.fingerprint
    other, _ = made(MixtureData(parts=MIXED.parts[:2]), scratch_tokenizer, artifacts_root)
    assert not other.cached
    assert other.fingerprint != dataset.fingerprint
    tokenizer = tokenizer_fingerprint(scratch_tokenizer)
    assert filter_fingerprint(dataset.fingerprint, tokenizer, FilterConfig()) == filtered.fingerprint
    assert alone.fingerprint in (dataset.directory / "README.md").read_text()


def test_the_stream_draws_from_all_parts(mixed, scratch_tokenizer):
    problems = problems_of(mixed[1], scratch_tokenizer)
    assert isinstance(problems.stream, MixedStream)
    assert len(problems.stream) == 150
    assert {p.data_source for p in problems.stream.take(0, 60)} == {"easy", "countdown", "multiplication"}
    first = [p.data_source for p in problems.validation[:25]]
    assert {name: first.count(name) for name in set(first)} == {"easy": 10, "countdown": 10, "multiplication": 5}
    every = [*problems.validation, *problems.stream.take(0, 0)]
    assert len({prompt.prompt_id for prompt in every}) == 50


@pytest.mark.parametrize("num_processes", [0, 1])
def test_each_answer_is_scored_by_the_scorer_of_its_part(mixed, scratch_tokenizer, num_processes):
    problems = problems_of(mixed[1], scratch_tokenizer)
    prompts = problems.validation
    answers = []
    for prompt in prompts:
        truth = json.loads(prompt.ground_truth_json)
        # What is right for one scorer is wrong for the other: digits apart, or an equation.
        product = " ".join(str(truth.get("product")))
        answers.append(product if "product" in truth else " + ".join(map(str, truth["numbers"])))
    truths = [prompt.ground_truth_json for prompt in prompts]
    with ScoringPool(MIXED.scorer, RewardConfig(num_processes=num_processes)) as pool:
        scores = pool.score(answers, truths)
        assert pool.errors == 0
    for prompt, score in zip(prompts, scores, strict=True):
        truth = json.loads(prompt.ground_truth_json)
        assert score.parts["format"] == 1.0
        assert score.total == ("product" in truth or sum(truth["numbers"]) == truth["target"])


def test_a_missing_scorer_is_refused_before_the_first_answer(mixed, scratch_tokenizer):
    wrong = MIXED.parts[1].model_copy(update={"data": HARD.model_copy(update={"scorer": "data.countdown:nothing"})})
    settings = MIXED.model_copy(update={"parts": (MIXED.parts[0], wrong, MIXED.parts[2])})
    with pytest.raises(ConfigError, match=r"must name a function as module:function, got 'data.countdown:nothing'"):
        problems_of(mixed[1], scratch_tokenizer, settings).scoring_pool()


def test_two_parts_of_one_name_are_refused(mixed, scratch_tokenizer):
    settings = MIXED.model_copy(update={"parts": (MIXED.parts[0].model_copy(update={"name": ""}), *MIXED.parts[1:])})
    with pytest.raises(DataError, match=r"entries 0 and 1 both have rows of countdown.*at least one of them a name"):
        problems_of(mixed[1], scratch_tokenizer, settings)


def test_training_on_held_out_rows_of_another_part_is_refused(scratch_tokenizer, artifacts_root):
    other = HARD.model_copy(update={"target_high": 21})
    settings = MixtureData(parts=(MixturePart(data=HARD), MixturePart(data=other, name="other")))
    with pytest.raises(
        DataError, match=r"row \d+: has the same (prompt|multiset of numbers \[.*\]) as a held-out row of"
    ):
        made(settings, scratch_tokenizer, artifacts_root)
    manifests = [json.loads(path.read_text()) for path in (artifacts_root / "filtered").glob("*/manifest.json")]
    assert len(manifests) == 2  # of the two parts; none of the mixture


def test_inspection_shows_every_part_and_looks_for_leaks_between_them(mixed):
    report = inspect_dataset(mixed[1].directory, num_rows=1)
    assert [split.num_rows for split in report.splits] == [40, 20, 60, 20, 50, 10]
    assert len({split.name for split in report.splits}) == 6
    assert len(report.leakage) == 15
    assert all(pair.num_prompts == 0 for pair in report.leakage)


def test_a_mixture_composes_from_overrides():
    given = "data.parts=[{weight:3,data:{task:countdown,train_size:50}},{name:x,data:{task:custom}}]"
    config = load_config(["data=mixture", given, "model.path=some/model"])
    assert [part.weight for part in config.data.parts] == [3, 1]
    assert config.data.parts[0].data == CountdownData(train_size=50)
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                "data=mixture",
                "data.parts=[{weight:-1,data:{task:countdown}},{data:{task:gsm8k,sorce:x}},{data:{task:custm}}]",
                "model.path=some/model",
            ]
        )
    told = str(caught.value)
    assert "data.parts: entry 0: weight: must be greater than 0; got -1" in told
    assert "data.parts: entry 1: data.sorce: there is no such setting; got x" in told
    assert "data.parts: entry 2: data" in told


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ("[]", "data.parts: must hold two datasets or more; got []"),
        ("[{data:{task:countdown}}]", "data.parts: must hold two datasets or more; got 1"),
        ("[{name:x,data:{task:custom}},{name:x,data:{task:countdown}}]", "must name each dataset once"),
        ("[{name:all,data:{task:custom}},{data:{task:countdown}}]", "must name each dataset once"),
        (
            "[{data:{task:custom}},{data:{task:countdown,min_numbers:5}}]",
            r"entry 1 (countdown): data.min_numbers must be at most data.max_numbers",
        ),
        ("[{data:{task:custom}},{data:{task:mapped,scorer:'data.math:score'}}]", "entry 1 (mapped): reward.num_proc"),
    ],
)
def test_rules_hold_for_every_part(parts, told):
    with pytest.raises(ConfigError) as caught:
        load_config(["data=mixture", f"data.parts={parts}", "model.path=some/model"])
    assert told in str(caught.value)


def test_a_mixture_names_its_parts_and_adds_up_their_rows(tmp_path: Path) -> None:
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
    assert publish_mixture("dataset", tmp_path / "mix", parts[:1]) == StageResult(
        tmp_path / "mix", "mix", True, {"train": 1_200, "train/one": 1}
    )
