"""Custom tasks: a function in a file, and the files that it reads."""

import sys
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data import multiplication
from data.filter import filter_dataset
from data.tasks import build_dataset, dataset_directory, dataset_fingerprint, input_digests, inputs_of
from data.trial import first_row
from rlcore.batching.prompts import read_prompts, read_solutions
from rlcore.config import CustomData, FilterConfig, MixtureData, MixturePart, RewardConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool

TIMES = CustomData(train_size=200, validation_size=20)


def test_multiplication_rows_are_filtered_and_scored(scratch_tokenizer, artifacts_root):
    dataset = build_dataset(TIMES, seed=1, root=artifacts_root)
    assert dataset.counts == {"train": 200, "validation": 20}
    filtered = filter_dataset(dataset.directory, scratch_tokenizer, FilterConfig(), root=artifacts_root)
    file = filtered.directory / "train.parquet"
    prompts = read_prompts(file)
    assert all(len(prompt.token_ids) == 4 for prompt in prompts)
    assert len(read_solutions(file)) == 200
    solutions = [row["extra_info"]["solution"] for row in pq.read_table(file).to_pylist()]
    with ScoringPool(TIMES.scorer, RewardConfig(num_processes=1)) as pool:
        truths = [prompt.ground_truth_json for prompt in prompts]
        assert {score.total for score in pool.score(solutions, truths)} == {1.0}
        assert {score.total for score in pool.score(solutions[1:], truths[:-1])} == {0.0}
    with pytest.raises(DataError, match="at most 4851 products exist, got 5020"):
        build_dataset(TIMES.model_copy(update={"train_size": 5_000}), seed=1, root=artifacts_root)


@pytest.mark.parametrize(
    ("response", "total", "well_formed"),
    [("12", 1, 1), (" 1 2\n", 1, 1), ("13", 0, 1), ("12.0", 0, 0), ("", 0, 0), ("\u0661\u0662", 0, 0),
     ("9" * 10_000, 0, 0)],
)  # fmt: skip
def test_multiplication_scores_products(response, total, well_formed):
    found = multiplication.score(response, {"product": 12})
    assert (found.total, found.parts["format"]) == (total, well_formed)


def test_fingerprint_depends_on_the_source_file(tmp_path, monkeypatch, artifacts_root):
    source = Path(multiplication.__file__).read_text()
    (tmp_path / "my_own_task.py").write_text(source.replace('data_source="multiplication"', 'data_source="mine"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = TIMES.model_copy(update={"build": "my_own_task:build", "scorer": "my_own_task:score"})
    dataset = build_dataset(mine, seed=1, root=artifacts_root)
    assert pq.read_table(dataset.directory / "train.parquet").column("data_source")[0].as_py() == "mine"
    assert dataset_fingerprint(mine, 1) == dataset.fingerprint
    with (tmp_path / "my_own_task.py").open("a") as file:
        file.write("# changed\n")
    assert dataset_fingerprint(mine, 1) != dataset.fingerprint


READER = """
from data.multiplication import Message, Row, TaskRows
from pathlib import Path
def build(settings, seed):
    def rows(split):  # opened while the rows are read
        for number in (Path(settings.options[0]) / f"{split}.txt").read_text().split():
            yield Row((Message("user", number),), {"product": int(number)})
    return TaskRows("read", "math", "text", {split: rows(split) for split in ("train", "validation")})
"""


def test_files_of_an_option_folder_count_by_content(tmp_path, monkeypatch):
    mine = TIMES.model_copy(update={"build": "reading_task:build", "options": ("numbers",)})
    fingerprints = []
    for machine in ("one", "other"):
        folder, root = tmp_path / machine, tmp_path / machine / "artifacts"
        (folder / "numbers").mkdir(parents=True)
        (folder / "reading_task.py").write_text(READER)
        for split, numbers in (("train", "1\n2\n"), ("validation", "3\n")):
            (folder / "numbers" / f"{split}.txt").write_text(numbers)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.chdir(folder)
        monkeypatch.delitem(sys.modules, "reading_task", raising=False)
        first = build_dataset(mine, seed=1, root=root)
        assert not first.cached
        assert build_dataset(mine, seed=1, root=root).cached
        (folder / "numbers" / "train.txt").write_text("1\n2\n4\n")
        second = build_dataset(mine, seed=1, root=root)
        assert (second.cached, second.counts["train"]) == (False, 3)
        assert len([each for each in (root / "datasets").iterdir() if each.is_dir()]) == 2, "nothing is left over"
        mixture, fresh = MixtureData(parts=(MixturePart(data=mine), MixturePart(data=TIMES))), folder / "fresh"
        made = build_dataset(mixture, seed=1, root=fresh)
        assert made.directory == dataset_directory(dataset_fingerprint(mixture, 1), fresh), "the filter finds it"
        fingerprints.append((first.fingerprint, second.fingerprint))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints[0])) == 2


def test_each_of_several_files_with_one_name_counts(tmp_path):
    places = [tmp_path / f"{name}.txt" for name in ("de/train", "en/train", "de/validation", "more/named/validation")]
    for number, file in enumerate(places):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}\n")
    mine = TIMES.model_copy(update={"options": tuple(map(str, places))})
    for number, file in enumerate(places):
        made = build_dataset(mine, seed=1, root=tmp_path / "root")
        assert build_dataset(mine, seed=1, root=tmp_path / "root").cached
        file.write_text(f"1{number}\n")
        assert inputs_of(made.directory) != input_digests(mine)
        assert not build_dataset(mine, seed=1, root=tmp_path / "root").cached, file


def test_option_files_are_named_by_file_or_folder(tmp_path: Path) -> None:
    names = ("one/a.txt", "one/b.txt", "two/one/b.txt", "c.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    options = tuple(str(tmp_path / name) for name in ("one", "two/one", "c.txt", "nowhere"))
    found = input_digests(CustomData(build="data.multiplication:build", options=options))
    a, b, other, c = (sha256(name.encode()).hexdigest() for name in names)
    assert (found["one/a.txt"], found["one/b.txt"], found["c.txt"]) == (a, f"{b} {other}", c)


def test_unusable_build_functions_are_refused(tmp_path, monkeypatch, artifacts_root):
    (tmp_path / "wrong_task.py").write_text("def build(settings, seed): return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, message in (
        *((name, r"data.build: must name a function") for name in ("nowhere:build", "data.multiplication:nothing")),
        *((name, r"data.build: must name a function") for name in ("data.multiplication:_HIGHEST", "..:x")),
        ("wrong_task:build", r"wrong_task:build must return data\.rows\.TaskRows, got list"),
    ):
        with pytest.raises(ConfigError if "data.build" in message else DataError, match=message):
            build_dataset(TIMES.model_copy(update={"build": name}), seed=1, root=artifacts_root)


def test_first_row_is_found_among_printed_lines(tmp_path, monkeypatch, artifacts_root):
    printing = "import atexit, sys\natexit.register(print, 'bye')\nsys.stdout.buffer.write(b'\\xff')\nprint('{}')\n"
    (tmp_path / "loud_task.py").write_text(printing + "from data.multiplication import build, score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = first_row(TIMES.model_copy(update={"build": "loud_task:build"}), 1, artifacts_root)
    assert row == first_row(TIMES, 1, artifacts_root)


def test_settings_groups_of_custom_tasks_compose():
    config = load_config(["data=math", "data.source=some/maths", "model.path=some/model", "reward.num_processes=1"])
    assert (config.data.task, config.data.question, config.data.scorer) == ("mapped", "problem", "data.math:score")
    assert load_config(["data=custom", "model.path=some/model"]).data == CustomData()
