"""Rows from a function in a file and from columns of any dataset, rows tried before a dataset is made, and a game."""

import json
import math
import random
import sys
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data import sort_digits
from data.number_guessing import Game
from data.rows import Message, Row
from data.tasks import build_dataset, build_mapped, dataset_directory, input_digests, inputs_of
from data.trial import first_row, validate_rows
from rlcore.config import CountdownData, CustomData, MappedData
from rlcore.errors import ConfigError, DataError
from tests.helpers.file_shapes import write_rows

SORT = CustomData(train_size=200, validation_size=20)
READER = """
from data.rows import Message, Row, TaskRows
from pathlib import Path
def build(settings, seed):
    def rows(split):  # opened while the rows are read
        for number in (Path(settings.options[0]) / f"{split}.txt").read_text().split():
            yield Row((Message("user", number),), {"product": int(number)})
    return TaskRows("read", "math", "text", {split: rows(split) for split in ("train", "validation")})
"""


@pytest.mark.parametrize(("response", "total", "well_formed"), [
    ("1 2 3 4", 1, 1), (" 1 2\n3 4", 1, 1), ("1 2 4 3", 0, 1), ("1 2 3", 0, 0), ("1 2 3 4.0", 0, 0), ("", 0, 0),
    ("1 2 3 \u0664", 0, 0), ("9 " * 10_000, 0, 0),
])  # fmt: skip
def test_sort_digits_scores_digits_in_order(response, total, well_formed):
    found = sort_digits.score(response, {"digits": "1 2 3 4"})
    assert (found.total, found.parts["format"]) == (total, well_formed)
    assert found.said == (" ".join(response.split()) if well_formed else None)
    with pytest.raises(DataError, match="at most 11110000 problems exist, got 11110020"):
        sort_digits.build(SORT.model_copy(update={"train_size": 11_110_000}), 1)


def test_sort_digits_rows_are_distinct_and_solved():
    rows = [row for split in sort_digits.build(SORT, 1).splits.values() for row in split]
    assert len({row.prompt for row in rows}) == len(rows) == 220
    assert {row.difficulty for row in rows} == {4, 5, 6, 7}
    for row in rows:
        digits = row.prompt[0].content.removesuffix(" =").split()
        assert row.ground_truth == {"digits": row.solution}
        assert row.solution == " ".join(sorted(digits))
        assert sort_digits.score(row.solution, row.ground_truth).total == 1.0


def test_fingerprint_depends_on_the_source_file(tmp_path, monkeypatch, artifacts_root):
    source = Path(sort_digits.__file__).read_text()
    (tmp_path / "my_own_task.py").write_text(source.replace('data_source="sort_digits"', 'data_source="mine"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = SORT.model_copy(update={"build": "my_own_task:build", "scorer": "my_own_task:score"})
    dataset = build_dataset(mine, seed=1, root=artifacts_root)
    assert pq.read_table(dataset.directory / "train.parquet").column("data_source")[0].as_py() == "mine"
    assert dataset_directory(mine, 1, artifacts_root) == dataset.directory
    with (tmp_path / "my_own_task.py").open("a") as file:
        file.write("# changed\n")
    assert dataset_directory(mine, 1, artifacts_root) != dataset.directory


def test_files_of_an_option_folder_count_by_content(tmp_path, monkeypatch):
    mine = SORT.model_copy(update={"build": "reading_task:build", "options": ("numbers",)})
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
        first, again = (build_dataset(mine, seed=1, root=root) for _ in range(2))
        assert (first.cached, again.cached) == (False, True)
        (folder / "numbers" / "train.txt").write_text("1\n2\n4\n")
        second = build_dataset(mine, seed=1, root=root)
        assert (second.cached, second.counts["train"]) == (False, 3)
        assert len([each for each in (root / "datasets").iterdir() if each.is_dir()]) == 2, "nothing is left over"
        fingerprints.append((first.directory.name, second.directory.name))
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints[0])) == 2


def test_option_files_are_named_by_file_or_folder(tmp_path: Path) -> None:
    """Both digests of two files with one name count."""
    names = ("one/a.txt", "one/b.txt", "two/one/b.txt", "c.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    options = tuple(str(tmp_path / name) for name in ("one", "two/one", "c.txt", "nowhere"))
    found = input_digests(CustomData(build="data.sort_digits:build", options=options))
    a, b, other, c = (sha256(name.encode()).hexdigest() for name in names)
    assert (found["one/a.txt"], found["one/b.txt"], found["c.txt"]) == (a, f"{b} {other}", c)


def test_unusable_build_functions_are_refused(tmp_path, monkeypatch, artifacts_root):
    (tmp_path / "wrong_task.py").write_text("def build(settings, seed): return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    unusable = ("nowhere:build", "data.sort_digits:nothing", "data.sort_digits:LENGTHS", "..:x")
    cases = [(name, ConfigError, r"data.build: must name a function") for name in unusable]
    returned = r"wrong_task:build must return data\.rows\.TaskRows, got list"
    for name, kind, message in (*cases, ("wrong_task:build", DataError, returned)):
        with pytest.raises(kind, match=message):
            build_dataset(SORT.model_copy(update={"build": name}), seed=1, root=artifacts_root)


def test_first_row_is_found_among_printed_lines(tmp_path, monkeypatch, artifacts_root):
    printing = "import atexit, sys\natexit.register(print, 'bye')\nsys.stdout.buffer.write(b'\\xff')\nprint('{}')\n"
    (tmp_path / "loud_task.py").write_text(printing + "from data.sort_digits import build, score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = first_row(SORT.model_copy(update={"build": "loud_task:build"}), 1, artifacts_root)
    assert row == first_row(SORT, 1, artifacts_root)


def mapped_rows(folder: Path, *rows: dict[str, object], **names: object) -> MappedData:
    """Return settings that read the same rows for both splits."""
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl", rows)
    return MappedData(source=str(folder), **names)


def test_rows_are_named_after_their_folder(tmp_path: Path) -> None:
    plain = mapped_rows(tmp_path, {"q": "What?", "a": 2, "s": "It is 2"}, question="q", answer="a")
    assert build_mapped(plain, 0).data_source == tmp_path.name
    more = {"data_source": "own", "instruction": "Think.", "solution": "s"}
    found = build_mapped(plain.model_copy(update=more), 0)
    row = Row((Message("user", "What? Think."),), "2", solution="It is 2", where=f"{tmp_path}/train.jsonl: line 1")
    assert (found.data_source, list(found.splits["train"])) == ("own", [row])


def test_further_columns_reach_the_scorer_as_text(tmp_path: Path, artifacts_root: Path) -> None:
    line = {"question": "What?", "answer": 2, "unit": "m", "kinds": ["a", {"b": None}], "limit": 3.0, "none": None}
    settings = mapped_rows(tmp_path, line, columns=("unit", "kinds", "kinds.0", "limit"), scorer="my_reward:score")
    made = build_dataset(settings, seed=1, root=artifacts_root)
    (row,) = pq.read_table(made.directory / "validation.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == {
        "answer": "2", "unit": "m", "kinds": '["a", {"b": null}]', "kinds.0": "a", "limit": "3",
    }  # fmt: skip
    with pytest.raises(DataError, match=r"train.jsonl: line 1: column none: must be a text"):
        list(build_mapped(settings.model_copy(update={"columns": ("none",)}), 0).splits["train"])


def test_settings_that_name_missing_columns_are_reported_together(tmp_path: Path) -> None:
    first, second = {"question": "What?", "truth": {"text": "2"}}, {"question": "And?", "truth": {}}
    columns = {"question": "qestion", "answer": "truth.txt", "columns": ("truth", ""), "solution": "y"}
    at, rest = f"must name a column of {tmp_path}/train.jsonl: line 1", "Name another column, or repair the row"
    with pytest.raises(ConfigError) as wrong:
        list(build_mapped(mapped_rows(tmp_path, first, second, **columns), 0).splits["train"])
    assert str(wrong.value).splitlines() == ["4 problems in the settings:"] + [
        f"  {number}. data.{key}: {at} ({has}); got {got}. {near}{rest}"
        for number, (key, has, got, near) in enumerate((
            ("question", "columns: question, truth", "qestion", "Did you mean question? "),
            ("answer", "truth has text", "truth.txt", "Did you mean truth.text? "),
            ("columns", "columns: question, truth", "''", ""),
            ("solution", "columns: question, truth", "y", ""),
        ), start=1)
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"train.jsonl: line 2: there is no column truth.text \(truth has nothing\)"):
        list(build_mapped(MappedData(source=str(tmp_path), answer="truth.text"), 0).splits["train"])


@pytest.mark.parametrize(("good", "value", "problem"), [
    *(("none", text, f"'{text}' of a missing") for text in ("NaN", "nan", "inf", "-Infinity", "None", "null", "<NA>")),
    (1.0, math.nan, r"got nan \(columns"), (1.0, -math.inf, r"got -inf \(columns"),
])  # fmt: skip
def test_missing_values_are_refused(good: object, value: object, problem: str, tmp_path: Path) -> None:
    rows = [{"question": "None", "answer": good}, {"question": "b?", "answer": value}]
    settings = mapped_rows(tmp_path, *rows)
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.jsonl: line 2: column answer: .*{problem}"):
        list(build_mapped(settings, 1).splits["train"])
    (tmp_path / "train.jsonl").unlink()
    write_rows(tmp_path / "train.parquet", rows)
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.parquet: row 1: column answer: .*{problem}"):
        list(build_mapped(settings, 1).splits["train"])


@pytest.mark.parametrize(("changes", "message"), [
    ({"question": "cut"}, r"line 1: column cut: must be UTF-8 .*surrogates not allowed"),
    ({"source": ""}, r"data.source: must be a folder or a hub id"),
])  # fmt: skip
def test_wrong_names_are_refused(tmp_path, artifacts_root, changes, message):
    for name in ("big", "small"):
        line = {"task": {"text": f"{name}: what?"}, "final": 1, "cut": "\ud83d"}
        write_rows(tmp_path / f"{name}.jsonl", [line])
    names = {"question": "task.text", "answer": "final", "train_split": "big", "validation_split": "small"}
    with pytest.raises(DataError, match=message):
        build_dataset(MappedData(**{"source": str(tmp_path), **names, **changes}), seed=1, root=artifacts_root)


def test_repeated_prompts_are_refused_with_their_line(mapped: MappedData, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert validate_rows(mapped, 1, root, each_once=True) == 3
    assert validate_rows(mapped, 1, root, ("validation",), each_once=True) == 2
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    with train.open("a") as file:
        file.write('\n{"question": "train 1?", "answer": "7"}\n')
    assert validate_rows(mapped, 1, root, each_once=False) == 4
    again = rf"^{train}: line 5: the same prompt as {train}: line 2. Remove one of them, or"
    with pytest.raises(DataError, match=again):
        validate_rows(mapped, 1, root, each_once=True)
    with test.open("a") as file:
        file.write('{"question": "train 0?", "answer": "7"}\n')
    again = rf"the same prompt as {train}: line 1, so validation would .* Remove it from one of the two"
    with pytest.raises(DataError, match=f"^{test}: line 3: {again}"):
        validate_rows(mapped, 1, root, each_once=False)
    assert {validate_rows(data, 1, root, each_once=True) for data in (CountdownData(), CustomData())} == {None}
    made = first_row(mapped, 1, root)
    dataset = build_dataset(mapped, seed=1, root=root)
    assert inputs_of(dataset.directory) == input_digests(mapped)
    assert made == first_row(mapped, 1, root)
    assert validate_rows(mapped, 1, root, each_once=True) == 4, "the rows of a finished dataset are not built"


def test_first_row_of_a_large_task_is_made_alone(tmp_path: Path) -> None:
    settings = CountdownData(train_size=10**9, template="bare", search_tries=None)
    found = first_row(settings, 7, tmp_path)
    assert (found.prompt_form, json.loads(found.ground_truth_json)["form"]) == ("text", "bare")


def test_replies_compare_the_guess_with_the_number() -> None:
    game = Game()
    for seed in range(5):
        game.reset({"seed": seed})
        number = random.Random(seed).randint(1, 7)
        for guess in range(-1, 10):
            turn, right = game.step(f" {guess} " if guess >= 0 else "what"), guess == number
            reply = "" if right else ":" if guess < 0 else "+" if guess < number else "-"
            assert (turn.reply, turn.done, turn.reward) == (reply, right, 1.0 if right else -0.1)
            assert turn.parts == {"correct": float(right)}
    for text in ("\u00b2", "1" * 5_000):
        assert game.step(text).reply == ":"
