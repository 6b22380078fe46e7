"""Prompts that end with the assistant's words are continued, unless they end with the answer."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data.filter import filter_dataset
from data.tasks import StageResult, build_dataset
from rlcore.config import FilterConfig
from rlcore.config.compose import load_config
from rlcore.config.data import ParquetData
from rlcore.errors import DataError
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from rlcore.run.layout import RunInputs
from rlcore.run.supervised import Demonstrations
from tests.data.conftest import CHAT_TEMPLATE, saved
from tests.helpers.tokenizer_kinds import KINDS

PREFILL = "Let me solve this step by step.\n<think>"


def row(index: int, *messages: tuple[str, str], truth: object = "7", solution: str = "") -> dict[str, Any]:
    return {
        "data_source": "mine",
        "prompt": [{"role": role, "content": content} for role, content in messages],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index, "difficulty": 0, "solution": solution, "distractor": ""},
    }


def filtered(folder: Path, tokenizer: Path, rows: list[dict[str, Any]]) -> StageResult:
    held_out = [row(0, ("user", "Held out?"), truth=rows[0]["reward_model"]["ground_truth"])]
    for name, content in (("train", rows), ("validation", held_out)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet")
    files = {f"{name}_file": str(folder / f"{name}.parquet") for name in ("train", "validation")}
    dataset = build_dataset(ParquetData(**files), seed=1, root=folder)
    return filter_dataset(dataset.directory, tokenizer, FilterConfig(), root=folder)


@pytest.mark.parametrize("name", KINDS)
def test_words_are_continued_as_by_transformers(name: str, tmp_path: Path) -> None:
    """One of the four prompts starts a turn. The solution follows the assistant's words."""
    folder = KINDS[name].saved(tmp_path / "tokenizer")
    solution = " 3 + 4 = 7, so 7"
    rows = [
        row(0, ("user", "What is 3 + 4?"), ("assistant", PREFILL), truth="x", solution=solution),
        row(1, ("user", "What is 4 + 4?"), ("assistant", "So: "), truth="x", solution=solution),
        row(2, ("user", "What is 5 + 4?"), truth="x"),
        row(3, ("user", "What?"), ("assistant", "9"), ("user", "Sure?"), ("assistant", "No,"), truth="x"),
    ]
    made = filtered(tmp_path, folder, rows)
    tokenizer, stops, num_solutions = load_tokenizer(folder), end_of_text_ids(folder), 0
    for found in pq.read_table(made.directory / "train.parquet").to_pylist():
        messages, is_continued = found["prompt"], found["prompt"][-1]["role"] == "assistant"
        assert found["prompt_ids"] == tokenizer.apply_chat_template(
            messages, add_generation_prompt=not is_continued, continue_final_message=is_continued, return_dict=False
        )
        if found["solution_ids"]:
            num_solutions += 1
            messages[-1]["content"] += solution
            whole = tokenizer.apply_chat_template(messages, return_dict=False)
            joint = found["prompt_ids"] + found["solution_ids"]
            assert (whole[: len(joint)], joint[-1] in stops) == (joint, True)
    assert num_solutions > 0


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([("user", "a"), ("assistant", r"So \boxed{7}.")], "must not end with the row's ground truth '7', got"),
        ([("user", "a"), ("assistant", "It is <b>seven</b>.")], "the row's solution '<b>seven</b>', got 'It is"),
        ([("user", "a"), ("assistant", "So<|im_end|>\n")], "and must not end with <|im_end|>, which ends a turn"),
        ([("system", "a")], "the prompt must have a message of the user, got the roles system. Add one, or remove"),
    ],
)
def test_prompts_with_the_answer_or_without_a_question_are_refused(
    chat_tokenizer: Path, tmp_path: Path, messages: list[tuple[str, str]], problem: str
) -> None:
    good = row(0, ("user", "x"), ("assistant", "17 or x7 or 77"), solution="<b>seven</b>")
    match = rf"train\.parquet: row 1: .*{re.escape(problem)}"
    with pytest.raises(DataError, match=match):
        filtered(tmp_path, chat_tokenizer, [good, row(1, *messages, solution="<b>seven</b>")])


def test_templates_that_drop_the_words_are_refused(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else '')")
    folder = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    rows = [row(0, ("user", "x")), row(1, ("user", "y"), ("assistant", "So"))]
    with pytest.raises(DataError, match=r"train\.parquet: row 1: .* does not write the assistant's words .*: 'So'"):
        filtered(tmp_path, folder, rows)


def test_solutions_that_the_template_drops_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = KINDS["r1"].saved(tmp_path / "tokenizer")
    rows = [row(index, ("user", f"What is {index} + 7?"), solution=f"<think> {index} </think> 9") for index in range(3)]
    made = filtered(tmp_path, folder, rows)
    assert pq.read_table(made.directory / "train.parquet")["solution_ids"].to_pylist() == [[], [], []]
    assert "a warm start cannot show 3 solutions, such as '<think> 0 </think> 9'" in caplog.text
    assert "does not write it behind '" in caplog.text
    config = load_config(["experiment=debug", "warm_start.enabled=true"])
    problem = r"there is none\. Of 3 solutions the chat template does not write it behind '.*\. Set warm_start\.enabled"
    with pytest.raises(DataError, match=problem):
        Demonstrations.read(config, RunInputs(made.directory, folder))
