"""Rows of parquet files in the row schema, and their scorers by data source."""

import math
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.filter import filter_dataset
from data.references import check_references
from data.rows import Message, Row
from data.schema import provenance_metadata, row_schema
from data.tasks import build_dataset, build_parquet
from data.trial import first_row, validate_rows
from rlcore.config import ParquetData, RewardConfig
from rlcore.config.data import scorer_of_row, scorers_of
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.layout import RunInputs
from rlcore.run.problems import Problems
from tests.data.conftest import settings_in
from tests.helpers.file_shapes import write_rows

ROW: dict[str, object] = {
    "data_source": "own", "ability": None, "reward_model": {"style": "rule", "ground_truth": 7},
    "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "What?"}],
    "extra_info": {"split": "train", "index": 0, "difficulty": 3, "solution": "7", "distractor": None},
}  # fmt: skip
NO_PROMPT = "row 1: prompt must be messages with role and content, got"
NO_TRUTH = "row 1: reward_model.ground_truth must have a value, got"


def written(path, rows, truth, **document):
    table = pa.Table.from_pylist(rows, schema=row_schema(truth))
    pq.write_table(table.replace_schema_metadata(provenance_metadata(document)), path)
    return path


def row(source, truth, number=0, **more):
    prompt = [{"content": f"{source} {number}?", "role": "user"}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": truth}, **more}


def written_twice(folder, rows, **changes):
    held_out = [{**one, "prompt": [{"content": f"held out {n}?", "role": "user"}]} for n, one in enumerate(rows)]
    for setting, name, content in (("train_file", "train", rows), ("validation_file", "test", held_out)):
        changes[setting] = str(write_rows(folder / f"{name}.parquet", content))
    return ParquetData(**changes)


def test_rows_and_form_of_prompt_are_read(tmp_path, monkeypatch):
    """Unused columns may be missing or of any type."""
    monkeypatch.setattr("data.schema.ROWS_PER_GROUP", 1)
    bare = ROW | {"extra_info": None, "data_source": None, "ability": "logic"}
    train = written(tmp_path / "mine.parquet", [ROW, bare], pa.int64(), prompt_form="text")
    held_out = written(tmp_path / "held.parquet", [bare], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(held_out))
    task = build_parquet(settings, 0)
    assert (task.data_source, task.ability, task.prompt_form) == ("mine", "math", "text")
    assert task.ground_truth_type == pa.int64()
    messages = (Message("system", ""), Message("user", "What?"))
    assert list(task.splits["train"]) == [
        Row(messages, 7, difficulty=3, solution="7", data_source="own", where=f"{train}: row 0"),
        Row(messages, 7, ability="logic", where=f"{train}: row 1"),
    ]
    assert build_parquet(settings.model_copy(update={"template": "chat"}), 0).prompt_form == "chat"
    for more in ({}, {"extra_info": {"index": "9a9b6eb4", "split": 3}, "ability": "MATH", "uid": 7}):
        plain = written_twice(tmp_path, [row("math", "1", **more)])
        assert [one.ground_truth for one in build_parquet(plain, 0).splits["train"]] == ["1"]


@pytest.mark.parametrize(("broken", "truth", "message"), [
    *(({"prompt": prompt}, pa.int64(), f"{NO_PROMPT} [")
      for prompt in ([{"role": "user", "content": "x"}, None], [], [{"role": "", "content": "x"}],
                     [{"role": "user", "content": None}])),
    *(({"reward_model": value}, pa.int64(), f"{NO_TRUTH} nothing; repair or remove the")
      for value in ({"ground_truth": None}, None)),
    *(({"reward_model": {"ground_truth": value}}, kind, f"{NO_TRUTH} {value}")
      for kind, value in ((pa.float64(), math.nan), (pa.float64(), -math.inf), (pa.string(), "<NA>"))),
])  # fmt: skip
def test_unusable_rows_are_refused(tmp_path, broken, truth, message):
    good = ROW | {"reward_model": {"style": "rule", "ground_truth": "7" if truth == pa.string() else 7}}
    file = written(tmp_path / "x.parquet", [good, good | broken], truth)
    with pytest.raises(DataError, match=f"^{re.escape(f'{file}: {message}')}"):
        list(build_parquet(ParquetData(train_file=str(file), validation_file=str(file)), 0).splits["train"])


def test_files_of_different_kinds_are_refused(tmp_path):
    train = written(tmp_path / "a.parquet", [ROW], pa.int64(), prompt_form="text")
    settings = ParquetData(train_file=str(train), validation_file=str(tmp_path / "b.parquet"))
    with pytest.raises(DataError, match=r"^data\.validation_file: must be a parquet file that exists, got '/.*b\.parq"):
        build_parquet(settings, 0)
    for truth, form, got in ((pa.int64(), "chat", "int64, chat and text"), (pa.int32(), "text", "int32 and int64")):
        written(tmp_path / "b.parquet", [ROW], truth, prompt_form=form)
        with pytest.raises(DataError, match=f"one type of ground truth and one form of prompt, got {got}"):
            build_parquet(settings, 0)


@pytest.mark.parametrize(("data_sources", "scorer"), [
    (("openai/gsm8k", "gsm8k"), "data.gsm8k:score"), (("countdown",), "data.countdown:score"),
    (("lighteval/MATH", "HuggingFaceH4/MATH-500", "math_dapo_reasoning", "aime_2025", "numina_cn_k12"),
     "data.math:score"),
    (("codecontests", "taco", "hiyouga/geometry3k", "searchR1_nq", "", "mathematics"), None),
])  # fmt: skip
def test_scorers_follow_from_the_fields_data_sources(data_sources, scorer):
    assert {scorer_of_row(ParquetData(), source) for source in data_sources} == {scorer}
    assert {scorer_of_row(ParquetData(scorer="a.b:c"), source) for source in data_sources} == {"a.b:c"}
    assert scorer is None or scorer in scorers_of(ParquetData())
    assert scorers_of(ParquetData(scorer="a.b:c")) == ("a.b:c",)


def test_rows_are_scored_by_their_data_source(tmp_path, artifacts_root, chat_tokenizer):
    rows = [row("openai/gsm8k", "18"), row("math_dapo", "\\frac{1}{2}", 1, extra_info={"index": "9a9b-uuid"})]
    data = written_twice(tmp_path, rows)
    assert validate_rows(data, 1, artifacts_root, each_once=True) is None
    dataset = build_dataset(data, seed=1, root=artifacts_root)
    config = settings_in(artifacts_root, data=data)
    filtered = filter_dataset(dataset.directory, chat_tokenizer, config)
    problems = Problems.read(config, RunInputs(filtered.directory, chat_tokenizer))
    assert [prompt.data_source for prompt in problems.train[0]] == ["openai/gsm8k", "math_dapo"]
    truths = [prompt.ground_truth_json for prompt in (*problems.train[0], *problems.validation)]
    responses = ["#### 18", r"Answer: $0.5$", r"\boxed{18}", "#### 0.5"]
    with ScoringPool(data.scorer, RewardConfig(num_processes=1)) as pool:
        scores = pool.score(responses, truths)
    assert [(score.total, score.failure) for score in scores] == [(1.0, None), (1.0, None), (0.0, None), (0.0, None)]
    assert ["strict" in score.parts for score in scores[:2]] == [True, False]


def test_unknown_data_sources_are_refused(tmp_path, artifacts_root):
    rows = [row("openai/gsm8k", "18"), *(row(name, '{"inputs": ["1"]}', n) for n, name in enumerate(("taco", "apps")))]
    data = written_twice(tmp_path, rows)
    message = "its rows have the data_source apps, taco, for which no scorer is known. Set data.scorer,"
    with pytest.raises(DataError, match=rf"^data\.scorer: must be given for {tmp_path}/train\.parquet: {message}"):
        validate_rows(data, 1, artifacts_root, each_once=True)
    own = data.model_copy(update={"scorer": "my.own:score"})
    assert validate_rows(own, 1, artifacts_root, each_once=True) is None
    with ScoringPool(data.scorer, RewardConfig(num_processes=0)) as pool:
        (score,) = pool.score(["1"], ['{"answer": "1"}'])
    assert "known for the row's data_source" in str(score.failure)


def test_first_row_names_its_scorer(tmp_path, artifacts_root):
    data = written_twice(tmp_path, [row("countdown", {"target": 3, "numbers": [1, 2]})])
    before = first_row(data, 1, artifacts_root)
    assert '"scorer": "data.countdown:score"' in before.ground_truth_json
    build_dataset(data, seed=1, root=artifacts_root)
    assert first_row(data, 1, artifacts_root) == before
    own = data.model_copy(update={"scorer": "my.own:score"})
    assert "scorer" not in first_row(own, 1, artifacts_root).ground_truth_json


def test_references_are_checked_by_the_scorer_of_their_row(tmp_path):
    r"""Only the scorer for mathematics reads `\frac12`."""
    data = written_twice(tmp_path, [row("openai/gsm8k", "18"), row("math_dapo", r"\frac12"), row("gsm8k", "7", 1)])
    assert check_references(settings_in(tmp_path, data=data)) == ""
    with pytest.raises(DataError, match=r"data\.gsm8k:score does not for 1 of 3 rows of train"):
        check_references(settings_in(tmp_path, data=data.model_copy(update={"scorer": "data.gsm8k:score"})))
    unknown = written_twice(tmp_path, [row("gsm8k", "7"), row("mathematics", "7")])
    with pytest.raises(DataError, match=r"1 of 2 rows of train(?s:.*)row 1: .*known for the row's data_source"):
        check_references(settings_in(tmp_path, data=unknown))


@pytest.mark.parametrize(("scorer", "truth"), [
    ("data.countdown:score", "18"), ("data.countdown:score", '{"inputs": ["1"], "outputs": ["2"]}'),
    ("data.gsm8k:score", {"target": 5, "numbers": [2, 3]}),
    ("data.gsm8k:score_numeric", '{"inputs": ["1"], "outputs": ["2"]}'),
    ("data.math:score", {"target": 5, "numbers": [2, 3]}), ("data.code:score", "18"),
])  # fmt: skip
def test_unusable_ground_truths_are_refused_with_their_row(tmp_path, scorer, truth):
    data = written_twice(tmp_path, [row("mine", truth, n) for n in range(3)], scorer=scorer)
    message = rf"{scorer} does not for 3 of 3 rows of train \(100\.0%\) .*:\n.*train\.parquet: row 0: reference"
    with pytest.raises(DataError, match=message):
        check_references(settings_in(tmp_path, data=data))
