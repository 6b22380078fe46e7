"""`millrace rollouts` and `audit` on a run, from another folder, also with wrong words."""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.demonstrations import tokenize_demonstrations
from flows.commands import rollouts
from rlcore.batching.prompts import read_pairs, read_prompts
from rlcore.config import AnswersConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.prompt import ROWS_PER_SOURCE
from rlcore.responses.query import Query, find_responses
from rlcore.responses.store import ResponseWriter, parts_of
from rlcore.rollout.by_part import with_scorer
from rlcore.run.layout import RunLayout
from tests.helpers.answers import Made
from tests.helpers.running import small
from tests.helpers.sessions import run_to_the_end
from tests.helpers.small_run import SmallRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    run = small(tmp_path_factory.mktemp("rollouts"), steps=2)
    run_to_the_end(run)
    return run


def test_answers_are_shown_as_a_page_as_rows_and_as_json(run, monkeypatch, capsys):
    words = [str(run.layout.run_dir)]
    rollouts.rollouts(words, kind="training", sort="-score", limit=3)
    lines, said = capsys.readouterr()
    assert said == "3 shown of 64 responses that match, of 256 on record\n"
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        rollouts.rollouts(words, kind="training", sort="-score", limit=3)
    page = capsys.readouterr().out
    assert page.count("-- step ") == page.count("\n=> ") == 3
    for line in lines.splitlines():
        step, validation, prompt, response, score, _, _, _, _, answer = line.split("\t")
        assert f"-- step {step} · prompt {prompt} · response {response} · score {score} " in page
        assert (validation, answer in " ".join(page.split())) == ("", True)
    rollouts.rollouts(words, step="2", kind="training", limit=0, tokens=True, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [2] * 32
    assert all(len(row["token_ids"]) == len(row["behavior_logprobs"]) == row["num_tokens"] for row in rows)
    assert {"correct", "format"} == rows[0]["parts"].keys()


def test_pairs_are_of_the_run_and_train_a_model_by_the_same_prompts(run, tmp_path, capsys):
    words = [str(run.layout.run_dir)]
    rollouts.rollouts(words, pairs=True)
    text = capsys.readouterr().out
    pairs = list(map(json.loads, text.splitlines()))
    assert {pair["run"] for pair in pairs} == {run.layout.run_dir.name}
    rollouts.rollouts(words, pairs=True, limit=1)
    assert capsys.readouterr().out == text.splitlines(keepends=True)[0]
    (file := tmp_path / "pairs.jsonl").write_text(text)
    warm = {"loss": "dpo", "demonstrations": str(file), "held_out_rows": 0}
    config = RunConfig(warm_start=warm, paths={"root": str(tmp_path)})
    made = tokenize_demonstrations(config, run.inputs.tokenizer_directory)
    prompts = {one.prompt_id: one.token_ids for file in run.inputs.train_parquets for one in read_prompts(file)}
    trained = read_pairs(made.directory / "train.parquet")
    whole = Counter(tuple(one.token_ids)[: one.is_target.index(True)] for one in trained)
    assert whole <= Counter(prompts[pair["prompt_id"]] for pair in pairs), "those were sampled from"


def rows_file(path: Path, form: str, count: int) -> Path:
    """Write the columns of filtered rows from which pairs take their prompts."""
    rows = [
        {"prompt": [{"role": "user", "content": f"question {index} of {path.stem}"}], "extra_info": {"index": index}}
        for index in reversed(range(count))
    ]
    metadata = {b"millrace": json.dumps({"origin": {"prompt_form": form}}).encode()}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return path


def naive_pairs(folder: Path) -> list[Mapping[str, Any]]:
    """Return the rows of the best and the worst response of each group, with the prompt's id and the step."""
    groups: dict[Any, list[Any]] = {}
    for row in [row for part in parts_of(folder) for row in pq.read_table(part).to_pylist()]:
        if row["validation"] is None and row["score"] is not None and row["finish_reason"] == "stop":
            groups.setdefault((row["step"], row["prompt_id"]), []).append(row)
    found = []
    for (step, prompt), rows in groups.items():
        best, worst = (choose(rows, key=lambda row: row["score"]) for choose in (max, min))
        if best["score"] > worst["score"]:
            found.append({
                "chosen": best["answer"], "rejected": worst["answer"], "chosen_score": best["score"],
                "rejected_score": worst["score"], "run": "a-run", "step": step, "data_source": "made",
                "prompt_id": prompt,
            })  # fmt: skip
    return found


def test_recorded_pairs_are_the_best_and_worst_of_each_group(tmp_path):
    """The prompts of the first data source are chats, those of the second one are texts."""
    ids = [index // 4 + start for start in (0, ROWS_PER_SOURCE) for index in range(40)]
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    for step in (1, 2):
        made = Made(step, groups=40, failures=True)
        each = zip(made.rollouts, ids, strict=True)
        made.rollouts = [replace(one, prompt=replace(one.prompt, prompt_id=prompt)) for one, prompt in each]
        made.scores[:4] = [made.scores[0]] * 4
        writer.add(made.of_step(step))
    writer.start_part()
    writer.wait()
    writer.write_validation("after", Made(3).of_validation(2, "after"))
    found = find_responses(tmp_path / "answers", Query(kind="training"))
    files = [rows_file(tmp_path / f"{form}.parquet", form, 10) for form in ("chat", "text")]
    pairs, expected = rollouts.recorded_pairs(found, files, "a-run"), naive_pairs(tmp_path / "answers")
    assert 30 < len(expected) < 40
    for pair, twin in zip(pairs, expected, strict=True):
        source, index = divmod(pair["prompt_id"], ROWS_PER_SOURCE)
        words = {"prompt": f"question {index} of {files[source].stem}", **twin}
        if source == 0:
            roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
            words |= {name: [{"role": role, "content": words[name]}] for name, role in roles.items()}
        assert pair == words
    assert rollouts.recorded_pairs(find_responses(tmp_path / "answers", Query(step=(9, 9))), files, "a-run") == []


@pytest.mark.parametrize(
    ("command", "options", "error", "problem"),
    [
        ("rollouts", {"step": "999"}, ConfigError,
         r"^--step: must have recorded responses; got 999\. Choose from 0, 1, 2$"),
        ("rollouts", {"step": "..0", "kind": "training", "as_json": True}, ConfigError,
         r"^--step: must have recorded training responses; got \.\.0\. Choose from 1, 2$"),
        ("rollouts", {"pairs": True, "kind": "validation"}, ConfigError,
         r"^--pairs: takes training responses only, got --kind v"),
        ("rollouts", {"pairs": True, "step": "9"}, ConfigError,
         r"^--step: must have recorded training responses; got 9\. Choose from 1, 2$"),
        ("rollouts", {"pairs": True, "search": "no such text"}, DataError,
         "no group has two finished .* among 0 responses"),
        ("rollouts", {"tokens": True, "limit": 1}, ConfigError, "--tokens: must come with --json"),
        ("audit", {"scorer": ""}, ConfigError, "^--scorer: must name a function as module:function, got ''"),
        ("audit", {"scorer": "nope"}, ConfigError, "^--scorer: must name a function as module:function, got 'nope'"),
        ("audit", {"scorer": "math:prod"}, DataError, r"must score any text, but failed on \d+ responses of the audit"),
    ],
)  # fmt: skip
def test_options_without_result_are_reported(run, command, options, error, problem):
    with pytest.raises(error, match=problem):
        getattr(rollouts, command)([str(run.layout.run_dir)], **options)


def test_steps_of_a_long_run_are_listed_briefly(run, tmp_path):
    layout = RunLayout(tmp_path, tmp_path)
    layout.answers.mkdir()
    table = pq.read_table(next(run.layout.answers.glob("train-*")))
    for step in range(10, 100, 10):
        column = pa.array([step] * len(table), pa.int32())
        part = table.set_column(table.schema.get_field_index("step"), "step", column)
        pq.write_table(part, layout.answers / f"train-{step:06}-{step:06}.parquet")
    with pytest.raises(ConfigError, match=r"got 3\. Choose from 10, 20, 30, \.\.\., 90$"):
        rollouts._find(layout, Query((3, 3)), "3")
    assert len(rollouts._find(layout, Query((None, 10)), "..10")) == len(table)


def test_pairs_need_responses_of_one_turn(run):
    game = load_config(["experiment=number_guessing", "model.path=some/model"])
    with pytest.raises(ConfigError, match=r"^--pairs: needs responses of one turn, got a run with data\.environment="):
        rollouts._print_pairs(game, run.layout, Query(), "", None)


def test_audit_by_a_custom_scorer(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_scorer.py").write_text("def score(response, truth):\n    return float('+' in response)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, os.fspath(tmp_path)])
    words = [str(run.layout.run_dir)]
    rollouts.audit(words)
    assert "none of the responses that must not score did" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        rollouts.audit(words, scorer="my_own_scorer:score")
    assert ended.value.code == 1
    assert "  response to another problem: " in capsys.readouterr().out


def test_another_scorer_gets_ground_truths_without_scorer_names(run):
    """A row's own field of that name stays, and the run's own scorer reads it."""
    parts = "data.parts=[{data:{task:countdown}},{data:{task:gsm8k}}]"
    mixture = load_config(["data=mixture", "model.path=some/model", parts])
    named = with_scorer('{"answer": "3"}', "data.gsm8k:score")
    assert rollouts.ground_truth_converter(mixture, "my_own:score")(named) == '{"answer": "3"}'
    for config, scorer in ((mixture, None), (mixture, mixture.data.scorer), (run.config, "my_own:score")):
        assert rollouts.ground_truth_converter(config, scorer)(named) == named


def test_a_run_without_answers_says_why(run):
    """This test is the last in the file, because it removes the responses."""
    run.layout.answers.rename(run.layout.run_dir / "elsewhere")
    with pytest.raises(DataError, match="has no stored responses, either not yet"):
        rollouts.audit([str(run.layout.run_dir)])
