"""Files that a build of one's own reads, rows that are tried before a run, and a game as a task of one file."""

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest

import data
from data.custom import FirstRow, digests_of, first_row, require_sound_rows
from data.number_guessing import Game
from data.reasoning_gym import score
from data.tasks import build_dataset, dataset_directory, dataset_fingerprint, input_digests, inputs_of
from rlcore.config import CountdownData, CustomData, MappedData, MixtureData, MixturePart
from rlcore.errors import DataError


def test_a_file_is_named_by_its_place_beside_the_build(tmp_path: Path) -> None:
    beside = tmp_path / "own"
    (beside / "deep").mkdir(parents=True)
    for file in (beside / "deep" / "a.txt", tmp_path / "b.txt"):
        file.write_text("x")
    found = digests_of([tmp_path / "b.txt", beside / "deep" / "a.txt"], beside)
    assert found == {"deep/a.txt": sha256(b"x").hexdigest(), "b.txt": sha256(b"x").hexdigest()}
    (tmp_path / "link").symlink_to(tmp_path)
    same = digests_of([tmp_path / "b.txt", tmp_path / "link" / "b.txt"], beside)
    assert same.keys() == {"b.txt"}, "two paths to one file"
    (beside / "b.txt").write_text("y")
    found = digests_of([tmp_path / "b.txt", beside / "b.txt", beside / "deep" / "a.txt"], beside)
    assert found == {
        (tmp_path / "b.txt").as_posix(): sha256(b"x").hexdigest(),
        (beside / "b.txt").as_posix(): sha256(b"y").hexdigest(),
        "deep/a.txt": sha256(b"x").hexdigest(),
    }


@pytest.fixture
def mapped(tmp_path: Path) -> MappedData:
    """Three rows for training and two held-out ones."""
    for name, number in (("train", 3), ("test", 2)):
        lines = (json.dumps({"question": f"{name} {n}?", "answer": str(n)}) for n in range(number))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return MappedData(source=str(tmp_path))


def test_rows_of_local_files_are_counted_and_one_that_stands_twice_is_told_by_its_line(
    mapped: MappedData, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    assert require_sound_rows(mapped, 1, root, each_once=True) == 3
    assert require_sound_rows(mapped, 1, root, ("validation",), each_once=True) == 2
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    with train.open("a") as file:
        file.write('\n{"question": "train 1?", "answer": "7"}\n')
    assert require_sound_rows(mapped, 1, root, each_once=False) == 4
    with pytest.raises(DataError) as told:
        require_sound_rows(mapped, 1, root, each_once=True)
    assert str(told.value) == (
        f"{train}: line 5: the same prompt as {train}: line 2. Remove one of them, or set "
        "filter.duplicates to drop or keep"
    )
    with test.open("a") as file:
        file.write('{"question": "train 0?", "answer": "7"}\n')
    with pytest.raises(DataError) as told:
        require_sound_rows(mapped, 1, root, each_once=False)
    assert str(told.value) == (
        f"{test}: line 3: the same prompt as {train}: line 1, so validation would not measure what is new to the "
        "model. Remove it from one of the two files"
    )
    assert require_sound_rows(CountdownData(), 1, root, each_once=True) is None
    assert require_sound_rows(CustomData(), 1, root, each_once=True) is None


def test_rows_of_a_finished_dataset_are_not_made_again(mapped: MappedData, tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = first_row(mapped, 1, root)
    assert made is not None
    assert (made.prompt_form, made.ground_truth_json, made.solution) == (mapped.template, '"0"', "")
    assert made.prompt[0]["content"].startswith("train 0?")
    dataset = build_dataset(mapped, seed=1, root=root)
    assert inputs_of(dataset.directory) == input_digests(mapped)
    assert first_row(mapped, 1, root) == made
    assert require_sound_rows(mapped, 1, root, each_once=True) == 3
    assert require_sound_rows(mapped, 1, root, ("validation", "train"), each_once=True) == 2


def test_the_first_row_of_a_large_task_is_made_alone(tmp_path: Path) -> None:
    settings = CountdownData(train_size=10**9, template="bare", search_tries=None)
    found = first_row(settings, 7, tmp_path)
    assert isinstance(found, FirstRow)
    assert (found.prompt_form, json.loads(found.ground_truth_json)["form"]) == ("text", "bare")


def test_a_game_tells_whether_the_number_is_higher_or_lower() -> None:
    game = Game()
    for seed in range(5):
        game.reset({"seed": seed})
        number = random.Random(seed).randint(1, 7)
        for guess in range(-1, 10):
            told = game.step(f" {guess} " if guess >= 0 else "what")
            if guess == number:
                assert (told.reply, told.done, told.reward, told.parts) == ("", True, 1.0, {"correct": 1.0})
            else:
                reply = ":" if guess < 0 else "+" if guess < number else "-"
                assert (told.reply, told.done, told.reward, told.parts) == (reply, False, -0.1, {"correct": 0.0})
    for text in ("\u00b2", "1" * 5_000):
        assert game.step(text).reply == ":", "no number of this game, and none that int() takes"


def test_an_answer_without_tags_is_worth_nothing_in_a_task_of_the_package() -> None:
    found = score("17 <answer>17", {"task": "chain_sum", "entry": "{}"})
    assert (found.total, found.parts, found.said) == (0.0, {"correct": 0.0, "format": 0.0}, None)


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


def test_a_suites_dataset_is_another_one_with_its_held_out_rows_alone(mapped: MappedData, tmp_path: Path) -> None:
    whole = dataset_fingerprint(mapped, 1)
    assert dataset_fingerprint(mapped, 2) == whole, "no row of it is drawn"
    assert dataset_fingerprint(mapped, 1, ("train", "validation")) == whole
    made = build_dataset(mapped, seed=1, root=tmp_path, splits=("validation",))
    assert made.fingerprint == dataset_fingerprint(mapped, 1, ("validation",)) != whole
    assert (made.counts, made.directory) == ({"validation": 2}, dataset_directory(made.fingerprint, tmp_path))
    assert sorted(path.name for path in made.directory.glob("*.parquet")) == ["validation.parquet"]


def test_the_package_names_what_it_offers_and_nothing_else() -> None:
    assert data.build_dataset is build_dataset
    with pytest.raises(AttributeError, match=r"^module 'data' has no attribute 'nothing'$"):
        _ = data.nothing
