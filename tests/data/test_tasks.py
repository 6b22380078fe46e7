"""Datasets on disk: schema, provenance, cache, filter."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.countdown import CALCULATOR, TURN_END
from data.filter import filter_dataset, filter_fingerprint
from data.schema import provenance, require_row_schema, row_schema
from data.tasks import build_dataset, dataset_directory, dataset_fingerprint, input_digests, inputs_of
from data.tokenizer import tokenizer_fingerprint
from rlcore.batching.prompts import read_prompts, read_solutions
from rlcore.config import CountdownData, FilterConfig, MappedData, MixtureData, MixturePart
from rlcore.config.model import ScratchModel
from rlcore.errors import DataError
from rlcore.models.tokenizer import build_scratch_tokenizer

SMALL = CountdownData(
    train_size=60,
    validation_size=20,
    max_numbers=3,
    number_high=9,
    target_high=20,
    operations=("+", "-"),
    template="bare",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_scratch_tokenizer(ScratchModel(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def dataset(artifacts_root):
    return build_dataset(SMALL, seed=1, root=artifacts_root)


def test_a_dataset_has_the_schema_the_provenance_and_the_counts(dataset):
    assert dataset.counts == {"train": 60, "validation": 20}
    table = pq.read_table(dataset.directory / "train.parquet")
    truth = pa.struct([("target", pa.int64()), ("numbers", pa.list_(pa.int64())), ("form", pa.string())])
    assert table.schema.remove_metadata() == row_schema(truth)
    require_row_schema(table.schema, dataset.directory / "train.parquet")
    assert table.column("extra_info").to_pylist()[7]["index"] == 7
    document = provenance(dataset.directory / "train.parquet")
    assert document["fingerprint"] == dataset.fingerprint == dataset.directory.name
    assert (document["seed"], document["counts"]["rows"], document["settings"]["number_high"]) == (1, 60, 9)


def test_the_same_settings_and_seed_give_the_same_bytes(dataset, tmp_path):
    again = build_dataset(SMALL, seed=1, root=tmp_path / "elsewhere")
    for name in ("train.parquet", "validation.parquet"):
        assert (again.directory / name).read_bytes() == (dataset.directory / name).read_bytes()
    other = build_dataset(SMALL, seed=2, root=tmp_path / "elsewhere")
    assert (other.directory / "train.parquet").read_bytes() != (dataset.directory / "train.parquet").read_bytes()


def test_a_finished_dataset_is_not_made_again(dataset, artifacts_root):
    before = (dataset.directory / "train.parquet").stat()
    again = build_dataset(SMALL, seed=1, root=artifacts_root)
    assert again.cached
    assert not dataset.cached
    assert again.counts == dataset.counts
    assert (dataset.directory / "train.parquet").stat().st_mtime_ns == before.st_mtime_ns


def test_the_fingerprint_is_known_before_the_work(dataset, artifacts_root):
    assert dataset_fingerprint(SMALL, 1) == dataset.fingerprint
    assert dataset_directory(dataset.fingerprint, artifacts_root) == dataset.directory
    other_scorer = SMALL.model_copy(update={"scorer": "somewhere:else"})
    assert dataset_fingerprint(other_scorer, 1) == dataset.fingerprint
    assert dataset_fingerprint(SMALL, 2) != dataset.fingerprint


def test_an_environment_counts_where_solutions_show_its_turns(dataset, artifacts_root):
    """Each of the two datasets would be taken for the other."""
    with_calculator = SMALL.model_copy(update={"environment": CALCULATOR})
    assert dataset_fingerprint(with_calculator, 1) == dataset.fingerprint
    shown = with_calculator.model_copy(update={"search_tries": 3})
    plain = SMALL.model_copy(update={"search_tries": 3})
    solutions = []
    for settings in (shown, plain):
        made = build_dataset(settings, seed=1, root=artifacts_root)
        assert not made.cached
        rows = pq.read_table(made.directory / "train.parquet").column("extra_info").to_pylist()
        solutions.append([row["solution"] for row in rows])
    assert any(TURN_END in text for text in solutions[0])
    assert not any(TURN_END in text for text in solutions[1])


def test_a_failed_build_leaves_nothing(artifacts_root):
    with pytest.raises(DataError):
        build_dataset(SMALL.model_copy(update={"train_size": 10**6}), seed=1, root=artifacts_root)
    assert list((artifacts_root / "datasets").iterdir()) == []


def test_the_filter_tokenizes_prompts_and_demonstrations(dataset, tokenizer, artifacts_root):
    found = filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=artifacts_root)
    assert found.counts == {"train": 60, "validation": 20}
    rows = pq.read_table(found.directory / "train.parquet").to_pylist()
    prompts = read_prompts(found.directory / "train.parquet")
    demonstrations = read_solutions(found.directory / "train.parquet")
    assert len(rows) == len(prompts) == len(demonstrations) == 60
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    for row, prompt, demonstration in zip(rows, prompts, demonstrations, strict=True):
        words = row["prompt"][0]["content"].split()
        assert prompt.token_ids == tuple(vocabulary[word] for word in words)
        assert json.loads(prompt.ground_truth_json) == row["reward_model"]["ground_truth"]
        solution = row["extra_info"]["solution"].replace("(", "( ").replace(")", " )").split()
        answer = (*(vocabulary[word] for word in solution), vocabulary["<eos>"])
        assert tuple(demonstration.token_ids) == (*prompt.token_ids, *answer)
        assert list(demonstration.is_target) == [False] * len(prompt.token_ids) + [True] * len(answer)
        assert bool(demonstration.misdirected) == bool(row["extra_info"]["distractor"])
        assert (prompt.prompt_id, prompt.data_source, prompt.difficulty) == (row["extra_info"]["index"], "countdown", 2)


def test_a_finished_filter_is_not_done_again(dataset, tokenizer, artifacts_root):
    first = filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=artifacts_root)
    second = filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=artifacts_root)
    assert (first.cached, second.cached, second.counts) == (False, True, first.counts)
    print_ = filter_fingerprint(dataset.fingerprint, tokenizer_fingerprint(tokenizer), FilterConfig())
    assert print_ == first.fingerprint
    assert filter_fingerprint(dataset.fingerprint, "0" * 16, FilterConfig()) != first.fingerprint


def test_prompts_of_a_file_without_the_filters_columns_are_refused(dataset):
    with pytest.raises(DataError, match=r"column prompt_ids: expected list of integers, got nothing"):
        read_prompts(dataset.directory / "train.parquet")


def test_the_files_of_a_mixture_are_named_by_part(mapped: MappedData, tmp_path: Path) -> None:
    root = tmp_path / "root"
    named = input_digests(mapped)
    assert named.keys() == {"train.jsonl", "test.jsonl"}
    other = CountdownData(min_numbers=2, max_numbers=2, number_high=9, target_high=9, train_size=9, validation_size=3)
    mixture = MixtureData(parts=(MixturePart(data=other), MixturePart(data=mapped)))
    by_part = {f"part 1: {name}": digest for name, digest in named.items()}
    assert input_digests(mixture) == by_part
    made = build_dataset(mixture, seed=1, root=root)
    assert inputs_of(made.directory) == by_part
    assert made.counts == {"train": 12, "validation": 5}
    assert build_dataset(mixture, seed=1, root=root).cached
    assert inputs_of(root) == {}


def test_a_suites_dataset_has_held_out_rows_alone(mapped: MappedData, tmp_path: Path) -> None:
    whole = dataset_fingerprint(mapped, 1)
    assert dataset_fingerprint(mapped, 2) == whole, "no row of it is drawn"
    assert dataset_fingerprint(mapped, 1, ("train", "validation")) == whole
    made = build_dataset(mapped, seed=1, root=tmp_path, splits=("validation",))
    assert made.fingerprint == dataset_fingerprint(mapped, 1, ("validation",)) != whole
    assert (made.counts, made.directory) == ({"validation": 2}, dataset_directory(made.fingerprint, tmp_path))
    assert sorted(path.name for path in made.directory.glob("*.parquet")) == ["validation.parquet"]
