"""Preference pairs: their tokens in every form of a file, refused files, and pairs from recorded responses."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data.demonstrations import tokenize_demonstrations
from data.tasks import StageResult
from flows.commands.rollouts import recorded_pairs
from rlcore.batching.prompts import Demonstration, read_demonstrations, read_pairs
from rlcore.config import AnswersConfig, WarmStartConfig
from rlcore.errors import DataError
from rlcore.prompt import ROWS_PER_SOURCE
from rlcore.responses.query import Query, find_responses
from rlcore.responses.store import ResponseWriter, parts_of
from tests.data.conftest import CHAT_TEMPLATE, saved
from tests.helpers.answers import Made

ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 2?"}]
GOOD, BAD = [{"role": "assistant", "content": "It is 4."}], [{"role": "assistant", "content": "I think that it is 5."}]
CHAT = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
OTHER = {"prompt": ASK[1:], "chosen": BAD, "rejected": GOOD}
PAIR = "a preference pair must have a prompt, chosen and rejected"
TEXT = {"prompt": "Q: 2 + 2? A:", "chosen": " 4", "rejected": " 5 or so"}


def tokenized(file: Path, rows: list[Any], tokenizer: Path, loss: str = "dpo", **settings: Any) -> StageResult:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = WarmStartConfig(demonstrations=str(file), loss=loss, **{"held_out_rows": 0, **settings})
    return tokenize_demonstrations(config, tokenizer, seed=1, root=file.parent)


def pairs_in(file: Path, rows: list[Any], tokenizer: Path) -> list[Demonstration]:
    return read_pairs(tokenized(file, rows, tokenizer).directory / "train.parquet")


@pytest.mark.parametrize(
    ("row", "twin", "chat"),
    [
        (CHAT, CHAT, True),
        ({"chosen": ASK + GOOD, "rejected": ASK + BAD, "score": 1.5}, CHAT, True),
        ({"prompt": ASK[1]["content"], "chosen": ASK + GOOD, "rejected": ASK + BAD}, CHAT, True),
        ({"prompt": [*ASK, {"role": "assistant", "content": "It is "}],
          "chosen": [{"role": "assistant", "content": "4."}], "rejected": [{"role": "assistant", "content": "5."}]},
         None, True),
        (TEXT, TEXT, False),
    ],
    ids=["messages", "no-prompt", "text-prompt", "begun-turn", "plain-text"],
)  # fmt: skip
def test_pairs_have_the_tokens_of_two_demonstrations(
    chat_tokenizer: Path, base_tokenizer: Path, tmp_path: Path, row: dict[str, Any], twin: Any, chat: bool
) -> None:
    tokenizer = chat_tokenizer if chat else base_tokenizer
    other = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    pair, _ = pairs_in(tmp_path / f"pairs.{'jsonl' if chat else 'parquet'}", [row, other], tokenizer)
    twin = twin or row
    rows = [{"prompt": twin["prompt"], "completion": twin[name]} for name in ("chosen", "rejected")]
    found = tokenized(tmp_path / "twin.jsonl", rows, tokenizer, "nll")
    chosen, rejected = read_demonstrations(found.directory / "train.parquet")
    assert (pair.token_ids, pair.is_target) == (chosen.token_ids, chosen.is_target)
    assert pair.rejected == rejected
    assert any(chosen.is_target)
    assert any(rejected.is_target)
    assert len(pair.reference) == sum(chosen.is_target) + sum(rejected.is_target)
    assert all(value != value for value in pair.reference), "it is unknown yet"


def test_omitted_pairs_are_counted_by_reason(base_tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        TEXT, {**TEXT, "prompt": "Q: 1? A:"}, TEXT, {**TEXT, "rejected": " 6"}, {**TEXT, "rejected": " 4"},
        {**TEXT, "rejected": ""}, {**TEXT, "chosen": ""}, {**TEXT, "rejected": " word" * 99},
    ]  # fmt: skip
    found = tokenized(tmp_path / "pairs.jsonl", rows, base_tokenizer, max_tokens=60)
    assert found.counts == {"train": 3, "validation": 0, "identical": 1, "duplicate": 1, "empty": 2, "overlong": 1}
    rows = [{"prompt": f"{n} is", "chosen": f" {n}.", "rejected": f" not {n}."} for n in range(20)]
    found = tokenized(tmp_path / "held_out.jsonl", rows, base_tokenizer, held_out_rows=5)
    assert [len(read_pairs(found.directory / f"{split}.parquet")) for split in ("train", "validation")] == [18, 2]
    with pytest.raises(DataError, match=r"must be left, 0 are \(2 identical\). Raise warm_start\.max_tokens"):
        tokenized(tmp_path / "same.jsonl", [{**TEXT, "rejected": " 4"}] * 2, base_tokenizer)


@pytest.mark.parametrize(
    ("rows", "loss", "problem"),
    [
        ([CHAT, {"prompt": ASK, "chosen": GOOD}], "dpo",
         f"line 2: {PAIR} (docs/data.md), got the columns prompt, chosen; rename them, repair the row, or set "
         "warm_start.loss=nll for demonstrations"),
        ([{"chosen": "a", "rejected": "b"}], "dpo", f"line 1: {PAIR}"),
        ([{"chosen": GOOD, "rejected": BAD}], "dpo", f"line 1: {PAIR}"),
        ([CHAT, {**CHAT, "rejected": 5}], "dpo", "line 2: rejected: messages must be a list of messages"),
        ([CHAT, TEXT], "dpo", "line 2: chosen: must be a conversation, as the first row of the file is"),
        ([CHAT], "nll", "line 1: must have messages, or prompt and completion, got the columns prompt, chosen, "
         "rejected; set warm_start.loss=dpo for preference pairs, or rename or convert them (docs/data.md)"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused(
    chat_tokenizer: Path, tmp_path: Path, rows: list[Any], loss: str, problem: str
) -> None:
    with pytest.raises(DataError) as error:
        tokenized(tmp_path / "pairs.jsonl", rows, chat_tokenizer, loss)
    assert str(error.value).startswith(f"{tmp_path / 'pairs.jsonl'}: {problem}")


def test_template_that_changes_a_response_is_refused(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("m.content", "m.content.replace('I think', '')")
    tokenizer = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    with pytest.raises(DataError, match=r"line 1: rejected: the chat template of .* drops or changes response 0"):
        tokenized(tmp_path / "pairs.jsonl", [CHAT, OTHER], tokenizer)


# ---------------------------------------------------------------- recorded responses


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


def responses(seed: int, *, groups: int, prompt_ids: list[int], failures: bool = True) -> Made:
    """Return made-up responses to the prompts `prompt_ids`, one for each response."""
    made = Made(seed, groups=groups, failures=failures)
    made.rollouts = [
        replace(one, prompt=replace(one.prompt, prompt_id=prompt))
        for one, prompt in zip(made.rollouts, prompt_ids, strict=True)
    ]
    return made


def test_recorded_pairs_are_the_best_and_worst_of_each_group(tmp_path: Path) -> None:
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    for step in (1, 2):
        made = responses(step, groups=40, prompt_ids=[index // 4 for index in range(80)])
        made.scores[:4] = [made.scores[0]] * 4
        writer.add(made.of_step(step))
    writer.start_part()
    writer.wait()
    writer.write_validation("after", Made(3).of_validation(2, "after"))
    found = find_responses(tmp_path / "answers", Query(kind="training"))
    file = rows_file(tmp_path / "text.parquet", "text", 20)
    pairs = recorded_pairs(found, [file], "a-run")
    expected = naive_pairs(tmp_path / "answers")
    assert 30 < len(expected) < 40
    assert [{name: value for name, value in pair.items() if name != "prompt"} for pair in pairs] == expected
    assert [pair["prompt"] for pair in pairs] == [f"question {pair['prompt_id']} of text" for pair in pairs]
    assert recorded_pairs(find_responses(tmp_path / "answers", Query(step=(9, 9))), [file], "a-run") == []


def test_recorded_chats_are_messages_of_their_data_source(chat_tokenizer: Path, tmp_path: Path) -> None:
    ids = [index // 4 + start for start in (0, ROWS_PER_SOURCE) for index in range(12)]
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    writer.add(responses(1, groups=12, prompt_ids=ids, failures=False).of_step(1))
    writer.start_part()
    writer.wait()
    files = [rows_file(tmp_path / f"{name}.parquet", "chat", 3) for name in ("first", "second")]
    pairs = recorded_pairs(find_responses(tmp_path / "answers", Query()), files, "a-run")
    assert [pair["prompt"][0]["content"] for pair in pairs] == [
        f"question {index} of {name}" for name in ("first", "second") for index in range(3)
    ]
    assert all(pair["chosen"][0]["role"] == pair["rejected"][0]["role"] == "assistant" for pair in pairs)
    assert tokenized(tmp_path / "pairs.jsonl", pairs, chat_tokenizer).counts["train"] == 6
