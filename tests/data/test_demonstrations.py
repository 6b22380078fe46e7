"""Demonstrations of one's own: tokenized once, with a loss on the assistant's turns alone."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.demonstrations import tokenize_demonstrations, try_demonstrations
from data.schema import provenance
from data.stage import StageResult
from rlcore.batching.prompts import read_demonstrations
from rlcore.config import WarmStartConfig
from rlcore.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE, saved


def chat(*contents: str, system: str = "") -> dict[str, Any]:
    """A conversation that a user begins."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return {"messages": first + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def written(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tokenized(file: Path, tokenizer: Path, **settings: Any) -> StageResult:
    config = WarmStartConfig(demonstrations=str(file), **{"held_out_rows": 0, **settings})
    return tokenize_demonstrations(config, tokenizer, seed=1, root=file.parent)


TALKS = [
    chat("What is 2 + 2?", "It is 4."),
    chat("Hello", "Hi, ask me.", "import os?", "A module.\n\nOf Python."),
    chat("And now", "you know", "more", system="Be short."),
]


def test_answers_alone_are_learned_and_every_turn_keeps_its_tokens(chat_tokenizer: Path, tmp_path: Path) -> None:
    found = tokenized(written(tmp_path / "talks.jsonl", TALKS), chat_tokenizer)
    assert found.counts == {"train": 3, "validation": 0}
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    rows = read_demonstrations(found.directory / "train.parquet")
    for row, talk in zip(rows, TALKS, strict=True):
        messages = talk["messages"]
        assert list(row.token_ids) == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        learned = [token for token, is_answer in zip(row.token_ids, row.is_answer, strict=True) if is_answer]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        end = tokenizer.eos_token
        assert tokenizer.decode(learned) == "".join(answer + end for answer in answers)


def test_the_same_again_is_found_and_another_tokenizer_or_limit_is_another(
    chat_tokenizer: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "talks.jsonl", TALKS)
    first = tokenized(file, chat_tokenizer)
    assert tokenized(file, chat_tokenizer).cached
    assert tokenized(file, chat_tokenizer, max_tokens=1_000).fingerprint != first.fingerprint
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(file.read_bytes())
    assert tokenized(copy, chat_tokenizer).fingerprint == first.fingerprint, "the content counts, not the place"


def test_prompts_with_completions_of_a_parquet_file(base_tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}."} for a in range(5) for b in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    found = tokenized(tmp_path / "sums.parquet", base_tokenizer, held_out_rows=256)
    assert found.counts == {"train": 23, "validation": 2}, "at most a tenth is held out"
    tokenizer = AutoTokenizer.from_pretrained(base_tokenizer)
    row = read_demonstrations(found.directory / "train.parquet")[0]
    learned = [token for token, is_answer in zip(row.token_ids, row.is_answer, strict=True) if is_answer]
    assert tokenizer.decode(row.token_ids) == f"<|endoftext|>0 plus 0 is 0.{tokenizer.eos_token}"
    assert tokenizer.decode(learned) == f" 0.{tokenizer.eos_token}"


def test_what_is_left_out_is_counted_by_reason(chat_tokenizer: Path, tmp_path: Path) -> None:
    rows = [*TALKS, TALKS[0], chat("Well?", " "), chat("Long?", "word " * 300)]
    found = tokenized(written(tmp_path / "talks.jsonl", rows), chat_tokenizer, max_tokens=120)
    assert found.counts == {"train": 3, "validation": 0, "duplicate": 1, "empty": 1, "overlong": 1}
    with pytest.raises(DataError, match=r"must be left, 0 are \(.*Raise warm_start\.max_tokens \(now 2\)"):
        tokenized(tmp_path / "talks.jsonl", chat_tokenizer, max_tokens=2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"messages": [{"role": "human", "content": "a"}]},
            r"message 0: role must be one of system, user, assistant, tool, got 'human'",
        ),
        (
            chat("a", "b") | {"messages": [{"role": "user", "content": None}]},
            r"message 0: content must be text, got None",
        ),
        (
            chat("a", "b", "cut \ud83d", "d"),
            r"message 2: content must be UTF-8 \('utf-8' codec can't encode .*surrogates",
        ),
        (chat("only a question"), r"an assistant's turn must follow another one's, got the roles user"),
        ({"messages": []}, r"messages must be a list of messages with role and content, got \[\]"),
        ({"messages": "a"}, r"messages must be a list"),
        ([1], r"must be a JSON object, got '\[1\]"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, r"message 0: role must be .*, got 'bot'"),
        ({"conversations": "a"}, r"conversations must be a list of messages"),
        ({"prompt": "a", "completion": "b"}, r"prompt must be a list of messages .*, got 'a'"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, r"completion must be a list .*, got 'b'"),
        ({"instruction": "a", "output": None}, r"message 1: content must be text, got None"),
        ({"instruction": "a", "input": 3, "output": "b"}, r"message 0: content must be text, got None"),
        (
            chat("a", "b") | {"tools": [{"type": "function"}]},
            r"tools is not shown to the model, got \[\{.*",
        ),
        (chat("a", "b") | {"history": [["x", "y"]]}, r"history is not shown to the model, got \[\['x'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            r"message 0: content must be text, got None",
        ),
        (
            {
                "messages": [
                    chat("a")["messages"][0],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            r"message 1: tool_calls: must have a name and arguments as an object each, got \{'function'",
        ),
    ],
)
def test_a_bad_row_is_refused_with_file_line_rule_and_remedy(
    chat_tokenizer: Path, tmp_path: Path, row: Any, said: str
) -> None:
    file = written(tmp_path / "talks.jsonl", [TALKS[0], row])
    for call in (
        lambda: tokenized(file, chat_tokenizer),
        lambda: try_demonstrations(WarmStartConfig(demonstrations=str(file)), chat_tokenizer, 10),
    ):
        with pytest.raises(DataError, match=rf"talks\.jsonl: line 2: {said}.*(repair|rename)"):
            call()
    assert not list((tmp_path / "demonstrations").glob("*"))


SHAPES = {
    "sharegpt": {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi, ask me."}]},
    "alpaca": {"instruction": "Hello", "input": "", "output": "Hi, ask me."},
    "alpaca with an input": {"instruction": "Hello", "input": "you", "output": "Hi, ask me.", "history": []},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hi, ask me."}], "tool_calls": None},
        ]
    },
    "trl": {"prompt": chat("Hello")["messages"], "completion": [{"role": "assistant", "content": "Hi, ask me."}]},
    "a system's column": {**chat("Hello", "Hi, ask me."), "system": "Be short.", "tools": None},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_in_a_published_shape_is_the_conversation_that_it_means(
    chat_tokenizer: Path, tmp_path: Path, shape: str, kind: str
) -> None:
    asked = "Hello\n\nyou" if shape == "alpaca with an input" else "Hello"
    meant = chat(asked, "Hi, ask me.", system="Be short." if "system" in shape else "")
    rows = [SHAPES[shape], json.loads(json.dumps(SHAPES[shape]).replace("Hi", "Well"))]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "shape.parquet")
    else:
        written(tmp_path / "shape.jsonl", rows)
    plain = tokenized(written(tmp_path / "plain.jsonl", [meant, TALKS[0]]), chat_tokenizer)
    found = tokenized(tmp_path / f"shape.{kind}", chat_tokenizer)
    assert found.counts == {"train": 2, "validation": 0}
    first, expected = (read_demonstrations(made.directory / "train.parquet")[0] for made in (found, plain))
    assert list(first.token_ids) == list(expected.token_ids)
    assert list(first.is_answer) == list(expected.is_answer)


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_of_tools_are_learned_as_the_template_writes_them(
    trained_bpe: Tokenizer, chat_tokenizer: Path, tmp_path: Path
) -> None:
    def talk(arguments: object) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [*chat("1+2?")["messages"], calling, {"role": "tool", "tool_call_id": "1", "content": "3"}]
        return {"messages": [*messages, {"role": "assistant", "content": "It is 3."}]}

    tokenizer = saved(trained_bpe, tmp_path / "calling", chat_template=CALLING)
    file = written(tmp_path / "calls.jsonl", [talk('{"a": 1}'), talk({"a": 2}), talk("")])
    found = tokenized(file, tokenizer)
    decoder = AutoTokenizer.from_pretrained(tokenizer)
    rows = read_demonstrations(found.directory / "train.parquet")
    learned = [
        decoder.decode([token for token, is_answer in zip(row.token_ids, row.is_answer, strict=True) if is_answer])
        for row in rows
    ]
    calls = ('{"a": 1}', '{"a": 2}', "{}")
    assert learned == [f"<call>add{call}</call><|im_end|>It is 3.<|im_end|>" for call in calls]
    with pytest.raises(DataError, match=r"line 1: the chat template .* drops or changes answer 0 .*write it as it is"):
        tokenized(file, chat_tokenizer)


def test_a_file_of_another_form_is_refused(chat_tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: must have messages, conversations, .*, got the columns text"):
        tokenized(written(tmp_path / "texts.jsonl", [{"text": "a"}]), chat_tokenizer)


FORGETFUL = CHAT_TEMPLATE.replace("for m in messages", "for m in messages[-2:]")
SILENT = CHAT_TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else '')")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            FORGETFUL,
            r"line 2: the chat template of .* drops or changes answer 0 .*came before it otherwise",
        ),
        (SILENT, r"line 1: the chat template of .* drops or changes answer 0 .*does not write it as it is"),
    ],
)
def test_a_template_that_drops_a_turn_is_refused(
    trained_bpe: Tokenizer, tmp_path: Path, template: str, said: str
) -> None:
    assert template != CHAT_TEMPLATE
    tokenizer = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    with pytest.raises(DataError, match=said):
        tokenized(written(tmp_path / "talks.jsonl", TALKS), tokenizer)


def test_the_limit_of_tokens_is_exact(chat_tokenizer: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "talks.jsonl", TALKS)
    rows = read_demonstrations(tokenized(file, chat_tokenizer).directory / "train.parquet")
    longest = max(len(row.token_ids) for row in rows)
    assert sum(len(row.token_ids) == longest for row in rows) == 1
    assert tokenized(file, chat_tokenizer, max_tokens=longest).counts == {"train": 3, "validation": 0}
    assert tokenized(file, chat_tokenizer, max_tokens=longest - 1).counts == {
        "overlong": 1,
        "train": 2,
        "validation": 0,
    }


def test_the_seed_chooses_the_held_out_rows_and_the_others_stay_in_order(
    base_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.demonstrations.ROWS_PER_GROUP", 8)
    for number, wanted, expected in ((19, 5, 1), (20, 5, 2), (20, 1, 1), (9, 5, 0)):
        rows = [{"prompt": f"{n} is", "completion": f" {n}."} for n in range(number)]
        file = written(tmp_path / f"rows-{number}-{wanted}.jsonl", rows)
        found = tokenized(file, base_tokenizer, held_out_rows=wanted)
        assert found.counts == {"train": number - expected, "validation": expected}
        assert not found.cached
        chosen = set(np.random.default_rng(1).permutation(number)[:expected].tolist())
        tokenizer = AutoTokenizer.from_pretrained(base_tokenizer)
        for split in ("train", "validation"):
            texts = [
                tokenizer.decode(row.token_ids, skip_special_tokens=True)
                for row in read_demonstrations(found.directory / f"{split}.parquet")
            ]
            assert texts == [f"{n} is {n}." for n in range(number) if (n in chosen) == (split == "validation")]
    file = pq.ParquetFile(found.directory / "train.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [8, 1]
    told = provenance(found.directory / "train.parquet")
    assert (told["split"], told["kind"], told["counts"]) == ("train", "demonstrations", {"train": 9, "validation": 0})
    assert tokenized(tmp_path / "rows-9-5.jsonl", base_tokenizer, held_out_rows=5).cached


def test_two_rows_are_enough_and_one_is_not(base_tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": text} for text in (" b", "", " c")]
    file = written(tmp_path / "rows.jsonl", rows)
    assert tokenized(file, base_tokenizer).counts == {"empty": 1, "train": 2, "validation": 0}
    rest = "Raise warm_start.max_tokens (now 512), or check the file"
    for number, why in ((1, "the file has too few rows"), (2, "1 empty")):
        with pytest.raises(DataError) as error:
            tokenized(written(file, rows[:number]), base_tokenizer, max_tokens=512)
        assert str(error.value) == f"{file}: two demonstrations at least must be left, 1 are ({why}). {rest}"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 1, "completion": "a"}, "prompt must be text, got 1; repair it"),
        ({"prompt": "a", "completion": None}, "completion must be text, got None; repair it"),
        ({"prompt": "a"}, "completion must be text, got None; repair it"),
        (
            {"prompt": "a", "completion": "\ud83d"},
            "completion must be UTF-8 ('utf-8' codec can't encode character '\\ud83d' in position 0: surrogates not "
            "allowed); repair or remove it",
        ),
    ],
)
def test_a_prompt_or_completion_that_is_no_text_is_refused(
    base_tokenizer: Path, tmp_path: Path, row: dict[str, object], said: str
) -> None:
    file = written(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": " b"}, row])
    with pytest.raises(DataError) as error:
        tokenized(file, base_tokenizer)
    assert str(error.value) == f"{file}: line 2: {said}"


def test_a_conversation_begins_with_somebody_else_than_the_assistant(chat_tokenizer: Path, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "assistant", "content": "a"}, *chat("b", "c")["messages"]]}
    with pytest.raises(DataError, match="must follow another one's, got the roles assistant, user, assistant; there"):
        tokenized(written(tmp_path / "talks.jsonl", [TALKS[0], talk]), chat_tokenizer)


def test_an_answer_without_the_end_token_or_changed_later_is_refused_by_its_number(
    trained_bpe: Tokenizer, tmp_path: Path
) -> None:
    endless = CHAT_TEMPLATE.replace("'<|im_end|>\\n' }}{%- endfor", "'\\n' }}{%- endfor")
    later = CHAT_TEMPLATE.replace("m.content", "(m.content if loop.index0 < 4 or loop.last else 'x')")
    assert endless != CHAT_TEMPLATE != later
    file = written(tmp_path / "talks.jsonl", [TALKS[0], chat("a", "b", "c", "d", "e", "f", "g")])
    for name, template, said in (
        (
            "endless",
            endless,
            r"line 1: the chat template of .* ends the assistant's turn without the tokenizer's eos_token 2",
        ),
        ("later", later, r"line 2: the chat template of .* drops or changes answer 2 of the conversation"),
    ):
        tokenizer = saved(trained_bpe, tmp_path / name, chat_template=template)
        with pytest.raises(DataError, match=said):
            tokenized(file, tokenizer)


def test_only_the_first_rows_are_tried_and_lines_after_them_read(chat_tokenizer: Path, tmp_path: Path) -> None:
    config = WarmStartConfig(demonstrations=str(written(tmp_path / "talks.jsonl", [*TALKS, chat("only a question")])))
    try_demonstrations(config, chat_tokenizer, 3)
    try_demonstrations(config, None, 9)
    with pytest.raises(DataError, match="line 4: an assistant's turn must follow"):
        try_demonstrations(config, chat_tokenizer, 4)
    (tmp_path / "talks.jsonl").write_text("")
    try_demonstrations(config, chat_tokenizer, 4)
