"""Tasks without code of this package: mapped columns, a file of one's own, mathematics in general."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import data
from data import multiplication
from data.custom import first_row
from data.tasks import dataset_directory, dataset_fingerprint, input_digests, inputs_of
from rlcore.batching.prompts import read_prompts, read_solutions
from rlcore.config import CustomData, FilterConfig, MappedData, MixtureData, MixturePart, RewardConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool

TIMES = CustomData(train_size=200, validation_size=20)


def test_multiplication_end_to_end(scratch_tokenizer, artifacts_root):
    dataset = data.build_dataset(TIMES, seed=1, root=artifacts_root)
    assert dataset.counts == {"train": 200, "validation": 20}
    found = data.filter_dataset(dataset.directory, scratch_tokenizer, FilterConfig(), root=artifacts_root)
    prompts = read_prompts(found.directory / "train.parquet")
    assert all(len(prompt.token_ids) == 4 for prompt in prompts)
    assert len(read_solutions(found.directory / "train.parquet")) == 200
    solutions = [row["extra_info"]["solution"] for row in pq.read_table(found.directory / "train.parquet").to_pylist()]
    with ScoringPool(TIMES.scorer, RewardConfig(num_processes=1)) as pool:
        truths = [prompt.ground_truth_json for prompt in prompts]
        assert {score.total for score in pool.score(solutions, truths)} == {1.0}
        assert {score.total for score in pool.score(solutions[1:], truths[:-1])} == {0.0}


def test_multiplication_fits_a_screen_or_two():
    assert len(Path(multiplication.__file__).read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("answer", "total", "well_formed"),
    [
        ("12", 1, 1),
        (" 1 2\n", 1, 1),
        ("13", 0, 1),
        ("12.0", 0, 0),
        ("", 0, 0),
        ("\u0661\u0662", 0, 0),
        ("9" * 10_000, 0, 0),
    ],
)
def test_multiplication_scores(answer, total, well_formed):
    found = multiplication.score(answer, {"product": 12})
    assert (found.total, found.parts["format"]) == (total, well_formed)


def test_too_many_products_are_refused(artifacts_root):
    with pytest.raises(DataError, match="at most 4851 products exist, got 5020"):
        data.build_dataset(TIMES.model_copy(update={"train_size": 5_000}), seed=1, root=artifacts_root)


def test_a_task_from_a_file_of_ones_own_follows_its_source(tmp_path, monkeypatch, artifacts_root):
    source = Path(multiplication.__file__).read_text()
    (tmp_path / "my_own_task.py").write_text(source.replace('data_source="multiplication"', 'data_source="mine"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = TIMES.model_copy(update={"build": "my_own_task:build", "scorer": "my_own_task:score"})
    dataset = data.build_dataset(mine, seed=1, root=artifacts_root)
    assert pq.read_table(dataset.directory / "train.parquet").column("data_source")[0].as_py() == "mine"
    assert data.dataset_fingerprint(mine, 1) == dataset.fingerprint
    with (tmp_path / "my_own_task.py").open("a") as file:
        file.write("# changed\n")
    assert data.dataset_fingerprint(mine, 1) != dataset.fingerprint


READER = """
from data.multiplication import Message, Row, TaskRows
from pathlib import Path
def build(settings, seed):
    def rows(split):  # opened while the rows are read
        for number in (Path(settings.options[0]) / f"{split}.txt").read_text().split():
            yield Row((Message("user", number),), {"product": int(number)})
    return TaskRows("read", "math", "text", {split: rows(split) for split in ("train", "validation")})
"""


def test_the_files_of_a_folder_that_the_options_name_are_part_of_the_dataset_on_any_machine(tmp_path, monkeypatch):
    mine = TIMES.model_copy(update={"build": "reading_task:build", "options": ("numbers",)})
    found = []
    for machine in ("one", "other"):
        folder, root = tmp_path / machine, tmp_path / machine / "artifacts"
        (folder / "numbers").mkdir(parents=True)
        (folder / "reading_task.py").write_text(READER)
        for split, numbers in (("train", "1\n2\n"), ("validation", "3\n")):
            (folder / "numbers" / f"{split}.txt").write_text(numbers)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.chdir(folder)
        monkeypatch.delitem(sys.modules, "reading_task", raising=False)
        first = data.build_dataset(mine, seed=1, root=root)
        assert not first.cached
        assert data.build_dataset(mine, seed=1, root=root).cached
        (folder / "numbers" / "train.txt").write_text("1\n2\n4\n")
        second = data.build_dataset(mine, seed=1, root=root)
        assert (second.cached, second.counts["train"]) == (False, 3)
        assert len([each for each in (root / "datasets").iterdir() if each.is_dir()]) == 2, "nothing is left over"
        mixture, fresh = MixtureData(parts=(MixturePart(data=mine), MixturePart(data=TIMES))), folder / "fresh"
        made = data.build_dataset(mixture, seed=1, root=fresh)
        assert made.directory == dataset_directory(dataset_fingerprint(mixture, 1), fresh), "the filter finds it"
        found.append((first.fingerprint, second.fingerprint))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


def test_a_file_named_in_the_options_is_part_of_the_dataset_before_anything_reads_it(tmp_path):
    (tmp_path / "rows.bin").write_bytes(b"one")
    named = TIMES.model_copy(update={"options": (str(tmp_path / "rows.bin"), "no file")})
    before = data.dataset_fingerprint(named, 1)
    assert data.dataset_fingerprint(named, 1) == before
    (tmp_path / "rows.bin").write_bytes(b"two")
    assert data.dataset_fingerprint(named, 1) != before


def test_of_files_of_one_name_each_counts(tmp_path):
    places = [tmp_path / f"{name}.txt" for name in ("de/train", "en/train", "de/validation", "more/named/validation")]
    for number, file in enumerate(places):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}\n")
    mine = TIMES.model_copy(update={"options": tuple(map(str, places))})
    for number, file in enumerate(places):
        made = data.build_dataset(mine, seed=1, root=tmp_path / "root")
        assert data.build_dataset(mine, seed=1, root=tmp_path / "root").cached
        file.write_text(f"1{number}\n")
        assert inputs_of(made.directory) != input_digests(mine)
        assert not data.build_dataset(mine, seed=1, root=tmp_path / "root").cached, file


@pytest.mark.parametrize(
    "name", ["nowhere:build", "data.multiplication:nothing", "data.multiplication:_HIGHEST", "..:x"]
)
def test_a_build_function_that_is_not_there_is_refused(name, artifacts_root):
    settings = TIMES.model_copy(update={"build": name})
    with pytest.raises(DataError, match=r"data.build: must name a function"):
        data.build_dataset(settings, seed=1, root=artifacts_root)


def test_a_build_function_must_return_rows(tmp_path, monkeypatch, artifacts_root):
    (tmp_path / "wrong_task.py").write_text("def build(settings, seed): return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = TIMES.model_copy(update={"build": "wrong_task:build"})
    with pytest.raises(DataError, match=r"wrong_task:build must return data\.rows\.TaskRows, got list"):
        data.build_dataset(settings, seed=1, root=artifacts_root)


def test_the_first_row_is_found_among_all_that_a_build_prints(tmp_path, monkeypatch, artifacts_root):
    own = "import atexit, sys\natexit.register(print, 'bye')\nsys.stdout.buffer.write(b'\\xff')\nprint('{}')\n"
    (tmp_path / "loud_task.py").write_text(own + "from data.multiplication import build, score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = first_row(TIMES.model_copy(update={"build": "loud_task:build"}), 1, artifacts_root)
    assert row == first_row(TIMES, 1, artifacts_root)


@pytest.fixture
def folder(tmp_path):
    record = {"task": {"text": "What is half of two?"}, "final": 1, "worked": "Two halves make two. 1", "cut": "\ud83d"}
    for name, count in (("big", 5), ("small", 2)):
        lines = [json.dumps(record | {"task": {"text": f"{name} {i}: what?"}, "final": i}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def mapping(folder, **changes):
    names = {"question": "task.text", "answer": "final", "solution": "worked", "data_source": "puzzles"}
    return MappedData(source=str(folder), train_split="big", validation_split="small", **{**names, **changes})


def test_columns_are_mapped_by_name(folder, artifacts_root):
    found = data.build_dataset(mapping(folder, instruction="Be brief."), seed=1, root=artifacts_root)
    [first, *_] = pq.read_table(found.directory / "train.parquet").to_pylist()
    assert first["prompt"] == [{"role": "user", "content": "big 0: what? Be brief."}]
    assert (first["data_source"], first["reward_model"]["ground_truth"]) == ("puzzles", "0")
    assert first["extra_info"]["solution"] == "Two halves make two. 1"
    assert found.counts == {"train": 5, "validation": 2}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"question": "tsk.text"},
            r"line 1: there is no column tsk.text \(columns: task, final, worked, cut\)",
        ),
        ({"question": "task"}, r"column task: must be a text"),
        ({"question": "cut"}, r"line 1: column cut: must be UTF-8 .*surrogates not allowed"),
        ({"source": ""}, r"data.source: must be a folder or a hub id"),
        ({"train_split": "train"}, r"lacks train, as \.jsonl, .* Its data files: "),
    ],
)
def test_wrong_names_are_told(folder, artifacts_root, changes, told):
    settings = mapping(folder).model_copy(update=changes)
    with pytest.raises(DataError, match=told):
        data.build_dataset(settings, seed=1, root=artifacts_root)


MATH = [
    ("so \\boxed{\\frac{1}{2}}", r"\frac{1}{2}", 1.0, 1.0),
    ("so \\boxed{0.5}", r"\frac{1}{2}", 1.0, 1.0),
    ("the answer is $\\frac{2}{4}$", r"\frac{1}{2}", 1.0, 0.0),
    ("so \\boxed{\\sqrt{8}}", r"2\sqrt{2}", 1.0, 1.0),
    ("so \\boxed{x^2+2x+1}", r"(x+1)^2", 1.0, 1.0),
    ("so \\boxed{(1, 2)}", "(1,2)", 1.0, 1.0),
    ("so \\boxed{3}", r"\frac{1}{2}", 0.0, 1.0),
    ("I do not know", r"\frac{1}{2}", 0.0, 0.0),
    ("", "5", 0.0, 0.0),
    ("\\boxed{" * 300, "5", 0.0, 1.0),
    ("so \\boxed{1,000}", "1000", 1.0, 1.0),
    ("\\boxed{9^{9^{9^{9}}}}", "5", 0.0, 1.0),  # no number as one writes it, so nobody computes it
]


@pytest.mark.slow
def test_mathematics_is_judged_by_value_and_cannot_hang_a_run():
    answers = [answer for answer, *_ in MATH] + ["\\boxed{9^{9^{9^{9}}}}", MATH[0][0]]
    truths = (
        [json.dumps({"answer": truth}) for _, truth, *_ in MATH]
        + [json.dumps({"answer": "2^{10}"})]
        + [json.dumps({"answer": "0.5"})]
    )
    with ScoringPool("data.math:score", RewardConfig(num_processes=1, deadline_s=5)) as pool:
        scores = pool.score(answers, truths)
        assert [(s.total, s.parts["format"]) for s in scores[: len(MATH)]] == [
            (total, boxed) for *_, total, boxed in MATH
        ]
        assert (scores[-2].total, scores[-1].total) == (0.0, 1.0)
        assert pool.timeouts + pool.errors == 1
        assert scores[-2].failure is not None
        votes = ["\\boxed{1/2}", "\\boxed{\\frac12}", "\\boxed{0.5}", "\\boxed{2}", "\\boxed{2.0}", "none"]
        said = [each.said for each in pool.score(votes, [json.dumps({"answer": "2"})] * len(votes))]
        assert said == ["1/2", "1/2", "1/2", "2", "2", None]  # through the process; what is right is the reference


def test_the_groups_of_settings_for_own_tasks_compose():
    config = load_config(["data=math", "data.source=some/maths", "model.path=some/model", "reward.num_processes=1"])
    assert (config.data.task, config.data.question, config.data.scorer) == ("mapped", "problem", "data.math:score")
    config = load_config(["data=custom", "model.path=some/model"])
    assert config.data == CustomData()
