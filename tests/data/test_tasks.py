"""Datasets on disk: schema, provenance, cache, mixtures, and rows that never change for a seed."""

import json
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import number_guessing, sort_digits
from data.countdown import build
from data.countdown_problems import generate
from data.filter import filter_dataset, filtered_directory
from data.rows import Message, Row, TaskRows
from data.schema import provenance, require_row_schema, row_schema
from data.tasks import build_dataset, dataset_directory, input_digests, inputs_of
from rlcore.batching.prompts import read_prompts, read_solutions
from rlcore.config import CountdownData, CustomData, MappedData, RewardConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.config.data import MixtureData, MixturePart
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.layout import RunInputs
from rlcore.run.problems import Problems
from tests.data.conftest import settings_in

SMALL = CountdownData(
    train_size=60, validation_size=20, max_numbers=3, number_high=9, target_high=20, operations=("+", "-"),
    template="bare",
)  # fmt: skip
ENUMERATED = CountdownData(
    train_size=61, validation_size=11, min_numbers=2, max_numbers=3, number_high=6, target_high=30,
    balance_difficulty=True,
)  # fmt: skip
LOW = CountdownData(
    train_size=30, validation_size=8, min_numbers=3, max_numbers=3, number_low=2, number_high=6, target_low=3,
    target_high=30, template="bare", operations=("+", "-", "/"),
)  # fmt: skip
DRAWN = CountdownData(train_size=90, validation_size=9, max_numbers=5)
UNIFORM = CountdownData(train_size=90, validation_size=9, targets="uniform")
EQUAL = {"balance_difficulty": True, "min_numbers": 2, "max_numbers": 5}
BALANCED = CountdownData(train_size=41, validation_size=6, template="bare", **EQUAL)
FEW = {"train_size": 60, "validation_size": 20, "number_high": 9, "target_high": 20, "template": "bare"}
EASY = CountdownData(min_numbers=2, max_numbers=2, operations=("+", "-"), **FEW | {"train_size": 40})
HARD = CountdownData(min_numbers=3, max_numbers=3, operations=("+", "-"), **FEW)
TIMES = CustomData(train_size=50, validation_size=10)
PARTS = (MixturePart(data=EASY, name="easy"), MixturePart(data=HARD, weight=2), MixturePart(data=TIMES, weight=0.5))
MIXED = MixtureData(parts=PARTS)


@pytest.fixture
def dataset(artifacts_root):
    return build_dataset(SMALL, seed=1, root=artifacts_root)


def test_dataset_has_schema_provenance_counts_and_the_bytes_of_its_seed(dataset, artifacts_root, tmp_path):
    assert (dataset.counts, dataset.cached) == ({"train": 60, "validation": 20}, False)
    file = dataset.directory / "train.parquet"
    table = pq.read_table(file)
    truth = pa.struct([("target", pa.int64()), ("numbers", pa.list_(pa.int64())), ("form", pa.string())])
    assert table.schema.remove_metadata() == row_schema(truth)
    require_row_schema(table.schema, file)
    document = provenance(file)
    assert document["fingerprint"] == dataset.directory.name
    assert dataset.directory == dataset_directory(SMALL, 1, artifacts_root)
    assert (document["seed"], document["counts"]["rows"], document["settings"]["number_high"]) == (1, 60, 9)
    before = file.stat().st_mtime_ns
    again = build_dataset(SMALL, seed=1, root=artifacts_root)
    assert (again.cached, again.counts, file.stat().st_mtime_ns) == (True, dataset.counts, before)
    scored = {"scorer": "somewhere:else", "environment": "somewhere:Else", "chat_template_kwargs": {"think": False}}
    assert dataset_directory(SMALL.model_copy(update=scored), 1, artifacts_root) == dataset.directory
    assert dataset_directory(SMALL, 2, artifacts_root) != dataset.directory
    again, other = (build_dataset(SMALL, seed=seed, root=tmp_path / "elsewhere") for seed in (1, 2))
    for name in ("train.parquet", "validation.parquet"):
        content = (dataset.directory / name).read_bytes()
        assert (again.directory / name).read_bytes() == content
        assert pq.read_table(other.directory / name).to_pylist() != pq.read_table(dataset.directory / name).to_pylist()


def test_filter_tokenizes_prompts_and_solutions(dataset, scratch_tokenizer, artifacts_root):
    filtered = filter_dataset(dataset.directory, scratch_tokenizer, settings_in(artifacts_root))
    assert filtered.counts == {"train": 60, "validation": 20}
    file = filtered.directory / "train.parquet"
    rows, prompts, demonstrations = pq.read_table(file).to_pylist(), read_prompts(file), read_solutions(file)
    assert len(rows) == len(prompts) == len(demonstrations) == 60
    vocabulary = json.loads((scratch_tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    for row, prompt, demonstration in zip(rows, prompts, demonstrations, strict=True):
        assert prompt.token_ids == tuple(vocabulary[word] for word in row["prompt"][0]["content"].split())
        assert json.loads(prompt.ground_truth_json) == row["reward_model"]["ground_truth"]
        solution = row["extra_info"]["solution"].replace("(", "( ").replace(")", " )").split()
        response = (*(vocabulary[word] for word in solution), vocabulary["<eos>"])
        assert tuple(demonstration.token_ids) == (*prompt.token_ids, *response)
        assert list(demonstration.is_target) == [False] * len(prompt.token_ids) + [True] * len(response)
        assert bool(demonstration.misdirected) == bool(row["extra_info"]["distractor"])
        assert (prompt.prompt_id, prompt.data_source, prompt.difficulty) == (row["extra_info"]["index"], "countdown", 2)
    with pytest.raises(DataError, match=r"column prompt_ids: expected list of integers, got nothing"):
        read_prompts(dataset.directory / "train.parquet")


def test_input_files_of_a_mixture_are_named_by_part(mapped: MappedData, tmp_path: Path) -> None:
    root, named = tmp_path / "root", input_digests(mapped)
    assert named.keys() == {"train.jsonl", "test.jsonl"}
    mixture = MixtureData(parts=(MixturePart(data=SMALL), MixturePart(data=mapped)))
    by_part = {f"part 1: {name}": digest for name, digest in named.items()}
    assert input_digests(mixture) == by_part
    made = build_dataset(mixture, seed=1, root=root)
    assert inputs_of(made.directory) == by_part
    assert made.counts == {"train": 63, "validation": 22}
    assert build_dataset(mixture, seed=1, root=root).cached
    assert inputs_of(root) == {}


def test_suites_have_held_out_rows_alone(mapped: MappedData, tmp_path: Path) -> None:
    whole = dataset_directory(mapped, 1, tmp_path)
    assert dataset_directory(mapped, 2, tmp_path) == whole, "its rows are not generated"
    assert dataset_directory(mapped, 1, tmp_path, ("train", "validation")) == whole
    made = build_dataset(mapped, seed=1, root=tmp_path, splits=("validation",))
    assert made.directory == dataset_directory(mapped, 1, tmp_path, ("validation",)) != whole
    assert made.counts == {"validation": 2}
    assert sorted(path.name for path in made.directory.glob("*.parquet")) == ["validation.parquet"]


# Finished runs name their dataset by settings and seed. A changed digest below means other rows.


def digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]


def digest_of_rows(task: TaskRows) -> str:
    # without `where`, the last field
    rows = {split: [astuple(row)[:-1] for row in found] for split, found in task.splits.items()}
    return digest((task.data_source, task.ability, task.prompt_form, rows))


@pytest.mark.parametrize(("settings", "seed", "expected"), [
    (ENUMERATED, 7, "36d2ef82bfadf8af"), (LOW, 7, "580b7b1338cdc2b8"), (DRAWN, 7, "40750fd48515c2f1"),
    (DRAWN, 8, "2af86bc70cbf6721"), (BALANCED, 7, "e77bc38788021aee"), (UNIFORM, 7, "ab35c111aad7511c"),
], ids=["enumerated", "low", "drawn", "another seed", "balanced", "uniform"])  # fmt: skip
def test_countdown_problems_of_a_seed_never_change(settings: CountdownData, seed: int, expected: str) -> None:
    splits = generate(settings, seed)
    assert digest({split: [astuple(problem) for problem in problems] for split, problems in splits.items()}) == expected


@pytest.mark.parametrize(("settings", "expected"), [
    ({"template": "bare"}, "24f0f512bb5a1e20"), ({"template": "bare", "search_tries": 3}, "24f0f512bb5a1e20"),
    ({"template": "base"}, "3e7e475025089e7f"), ({"template": "base", "search_tries": 4}, "af900ce3a12be1b2"),
    ({"template": "chat"}, "c8147955b8b57679"), ({"template": "few-shot"}, "a1c26b6898b5bfd0"),
    ({"template": "qwen-instruct"}, "692fd1358b42b88c"),
])  # fmt: skip
def test_countdown_rows_of_a_template_never_change(settings: dict[str, object], expected: str) -> None:
    assert digest_of_rows(build(ENUMERATED.model_copy(update=settings), 7)) == expected


def test_rows_of_custom_tasks_never_change() -> None:
    settings = CustomData(train_size=20, validation_size=70)
    games = number_guessing.build(settings, 1)
    assert games.splits["train"][0] == Row((Message("user", "1 0 6 >"),), {"game": 70})
    assert digest_of_rows(games) == "467202d63b253de8"
    assert digest_of_rows(sort_digits.build(settings, 1)) == "28673e34d981ae1b"


def make(settings, tokenizer, root):
    dataset = build_dataset(settings, seed=1, root=root)
    return dataset, filter_dataset(dataset.directory, tokenizer, settings_in(root))


def test_parts_are_shared_by_mixtures_and_keep_their_scorers(scratch_tokenizer, artifacts_root):
    dataset, filtered = make(MIXED, scratch_tokenizer, artifacts_root)
    assert dataset.counts == filtered.counts == {"train": 150, "validation": 50}
    assert dataset_directory(MIXED, 1, artifacts_root) == dataset.directory
    alone, alone_filtered = make(HARD, scratch_tokenizer, artifacts_root)
    heavier = MixtureData(parts=(*PARTS[:2], MixturePart(data=TIMES, weight=9)))
    again, again_filtered = make(heavier, scratch_tokenizer, artifacts_root)
    assert all(result.cached for result in (alone, alone_filtered, again, again_filtered))
    assert again.directory.name == dataset.directory.name
    other, _ = make(MixtureData(parts=PARTS[:2]), scratch_tokenizer, artifacts_root)
    name = dataset.directory.name
    assert (other.cached, other.directory.name == name) == (False, False)
    assert filtered_directory(name, scratch_tokenizer, settings_in(artifacts_root)) == filtered.directory
    row = f"| [{alone.directory.name}](../{alone.directory.name}) | 60 train, 20 validation |"
    assert row in (dataset.directory / "README.md").read_text()

    # A right response for one scorer is wrong for the other: digits, or an equation.
    prompts = Problems.read(RunConfig(data=MIXED), RunInputs(filtered.directory, scratch_tokenizer)).validation
    truths = [json.loads(prompt.ground_truth_json) for prompt in prompts]
    responses = [truth.get("digits") or " + ".join(map(str, truth["numbers"])) for truth in truths]
    with ScoringPool(MIXED.scorer, RewardConfig(num_processes=1)) as pool:
        scores = pool.score(responses, [prompt.ground_truth_json for prompt in prompts])
        assert pool.errors == 0
    for truth, score in zip(truths, scores, strict=True):
        assert score.parts["format"] == 1.0
        assert score.total == ("digits" in truth or sum(truth["numbers"]) == truth["target"])


def test_training_rows_that_another_part_holds_out_are_refused(scratch_tokenizer, artifacts_root):
    other = HARD.model_copy(update={"target_high": 21})
    settings = MixtureData(parts=(MixturePart(data=HARD), MixturePart(data=other, name="other")))
    message = r"row \d+: has the same (prompt|multiset of numbers \[.*\]) as a held-out row of"
    with pytest.raises(DataError, match=message):
        make(settings, scratch_tokenizer, artifacts_root)
    assert len(list((artifacts_root / "filtered").glob("*/manifest.json"))) == 2, "of the parts, not of the mixture"


def test_invalid_parts_are_refused():
    parts = "[{weight:-1,data:{task:countdown}},{data:{task:gsm8k,sorce:x}},{data:{task:custm}}]"
    first, second = "weight: must be greater than 0; got -1", "data.sorce: there is no such setting; got x"
    entries = f"data.parts: entry 0: {first}.*data.parts: entry 1: {second}.*data.parts: entry 2: data"
    with pytest.raises(ConfigError, match=f"(?s){entries}"):
        load_config(["data=mixture", f"data.parts={parts}", "model.path=some/model"])
