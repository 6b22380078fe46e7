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

from data.demonstrations import preview_demonstrations, tokenize_demonstrations
from data.schema import provenance
from data.tasks import StageResult
from rlcore.batching.prompts import read_demonstrations
from rlcore.config import WarmStartConfig
from rlcore.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE, saved
from tests.file_shapes import ADD, TOOL_TEMPLATE
from tests.helpers.tokenizer_kinds import KINDS


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
        learned = [token for token, is_answer in zip(row.token_ids, row.is_target, strict=True) if is_answer]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        end = tokenizer.eos_token
        assert tokenizer.decode(learned) == "".join(answer + end for answer in answers)


def test_equal_demonstrations_are_found_and_other_limits_are_not(chat_tokenizer: Path, tmp_path: Path) -> None:
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
    learned = [token for token, is_answer in zip(row.token_ids, row.is_target, strict=True) if is_answer]
    assert tokenizer.decode(row.token_ids) == f"<|endoftext|>0 plus 0 is 0.{tokenizer.eos_token}"
    assert tokenizer.decode(learned) == f" 0.{tokenizer.eos_token}"


def test_what_is_left_out_is_counted_by_reason(chat_tokenizer: Path, tmp_path: Path) -> None:
    rows = [*TALKS, TALKS[0], chat("Well?", " "), chat("Long?", "word " * 300)]
    found = tokenized(written(tmp_path / "talks.jsonl", rows), chat_tokenizer, max_tokens=120)
    assert found.counts == {"train": 3, "validation": 0, "duplicate": 1, "empty": 1, "overlong": 1}
    with pytest.raises(DataError, match=r"must be left, 0 are \(.*Raise warm_start\.max_tokens \(now 2\)"):
        tokenized(tmp_path / "talks.jsonl", chat_tokenizer, max_tokens=2)


def test_a_file_of_another_form_is_refused(chat_tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: must have messages, .* output, got the columns text"):
        tokenized(written(tmp_path / "texts.jsonl", [{"text": "a"}]), chat_tokenizer)


FORGETFUL = CHAT_TEMPLATE.replace("for m in messages", "for m in messages[-2:]")
SILENT = CHAT_TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else '')")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            FORGETFUL,
            r"line 2: the chat template of .* drops or changes response 0 .*differently before the turns that follow",
        ),
        (SILENT, r"line 1: the chat template of .* drops or changes response 0 .*does not write it as it is"),
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


def test_the_seed_chooses_the_held_out_rows(
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


def test_an_answer_without_end_token_or_changed_later_is_refused(trained_bpe: Tokenizer, tmp_path: Path) -> None:
    endless = CHAT_TEMPLATE.replace("'<|im_end|>\\n' }}{%- endfor", "'\\n' }}{%- endfor")
    later = CHAT_TEMPLATE.replace("m.content", "(m.content if loop.index0 < 4 or loop.last else 'x')")
    assert endless != CHAT_TEMPLATE != later
    file = written(tmp_path / "talks.jsonl", [TALKS[0], chat("a", "b", "c", "d", "e", "f", "g")])
    for name, template, said in (
        (
            "endless",
            endless,
            r"line 1: the chat template of .* ends the assistant's turn without a token at which the model stops, "
            r"<\|im_end\|> \(2\); eos_token_id of generation_config\.json names them",
        ),
        ("later", later, r"line 2: the chat template of .* drops or changes response 2 of the conversation"),
    ):
        tokenizer = saved(trained_bpe, tmp_path / name, chat_template=template)
        with pytest.raises(DataError, match=said):
            tokenized(file, tokenizer)


def test_only_the_first_rows_are_tokenized_in_a_trial(chat_tokenizer: Path, tmp_path: Path) -> None:
    config = WarmStartConfig(demonstrations=str(written(tmp_path / "talks.jsonl", [*TALKS, chat("only a question")])))
    preview_demonstrations(config, chat_tokenizer, 3)
    preview_demonstrations(config, None, 9)
    with pytest.raises(DataError, match="line 4: an assistant's turn must follow"):
        preview_demonstrations(config, chat_tokenizer, 4)
    (tmp_path / "talks.jsonl").write_text("")
    preview_demonstrations(config, chat_tokenizer, 4)


def test_a_turn_ends_at_the_first_stop_token(tmp_path: Path) -> None:
    """Phi's kind: `<|end|>`, which generation_config.json names, and the tokenizer's own end behind the last turn."""
    folder = KINDS["phi"].saved(tmp_path / "tokenizer")
    found = tokenized(written(tmp_path / "talks.jsonl", TALKS), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, talk in zip(read_demonstrations(found.directory / "train.parquet"), TALKS, strict=True):
        assert tokenizer.decode(row.token_ids) == tokenizer.apply_chat_template(talk["messages"], tokenize=False)
        learned = [token for token, is_answer in zip(row.token_ids, row.is_target, strict=True) if is_answer]
        answers = [message["content"] for message in talk["messages"] if message["role"] == "assistant"]
        assert tokenizer.decode(learned) == "".join(answer + "<|end|>" for answer in answers)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    again = tokenized(written(tmp_path / "one.jsonl", [TALKS[0], chat("Hello", "Hi.")]), folder)
    assert tokenized(tmp_path / "one.jsonl", folder).cached
    assert again.fingerprint != found.fingerprint
    learned = read_demonstrations(again.directory / "train.parquet")[0]
    assert tokenizer.decode([t for t, own in zip(learned.token_ids, learned.is_target, strict=True) if own]) == (
        "It is 4.<|end|>\n<|endoftext|>"
    )


@pytest.mark.parametrize("name", ["legacy", "first", "chatml"])
def test_a_completion_is_tokenized_with_its_prompt(tmp_path: Path, name: str) -> None:
    folder = KINDS[name].saved(tmp_path / "tokenizer", template=False)
    rows = [{"prompt": "Q: 1+1? A:", "completion": " 2"}, {"prompt": "Q: 1+1? A: ", "completion": "2"}]
    found = tokenized(written(tmp_path / "rows.jsonl", rows), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    joint, apart = read_demonstrations(found.directory / "train.parquet")
    assert list(joint.token_ids) == [*tokenizer("Q: 1+1? A: 2")["input_ids"], tokenizer.eos_token_id]
    begun = tokenizer("Q: 1+1? A: ")["input_ids"]
    assert list(apart.token_ids)[: len(begun)] == begun
    assert tokenizer.decode(apart.token_ids[:-1]) == tokenizer.decode(joint.token_ids[:-1])


def called(arguments: object, **more: object) -> dict[str, Any]:
    """A conversation with a call of a function, as OpenAI writes it."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "What is 2 + 5?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
            {"role": "assistant", "content": "It is 7."},
        ],
        **more,
    }


@pytest.fixture
def tool_tokenizer(trained_bpe: Tokenizer, tmp_path: Path) -> Path:
    return saved(trained_bpe, tmp_path / "with-tools", chat_template=TOOL_TEMPLATE)


def learned(file: Path, rows: Iterable[Any], tokenizer: Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each row, and which of them are learned."""
    found = read_demonstrations(tokenized(written(file, rows), tokenizer).directory / "train.parquet")
    return [(list(map(int, row.token_ids)), list(map(bool, row.is_target))) for row in found]


PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]


@pytest.mark.parametrize(
    ("shaped", "twin"),
    [
        (
            {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "It is 4."}]},
            chat("What is 2 + 2?", "It is 4."),
        ),
        (
            {"prompt": chat("What is 2 + 2?")["messages"], "completion": [{"role": "assistant", "content": "4"}]},
            chat("What is 2 + 2?", "4"),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be short."},
                    {"from": "human", "value": "And now"},
                    {"from": "gpt", "value": "you know"},
                ]
            },
            chat("And now", "you know", system="Be short."),
        ),
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, chat("Add.\n\n2, 2", "4")),
        ({"instruction": "Add 2, 2.", "input": "", "output": "4"}, chat("Add 2, 2.", "4")),
        (
            {"system": "Be short.", "instruction": "Add 2, 2.", "output": "4"},
            chat("Add 2, 2.", "4", system="Be short."),
        ),
    ],
    ids=["content-parts", "trl", "sharegpt", "alpaca-input", "alpaca", "alpaca-system"],
)
def test_each_shape_has_the_tokens_of_its_messages(
    chat_tokenizer: Path, tmp_path: Path, shaped: dict[str, Any], twin: dict[str, Any]
) -> None:
    other = chat("Hello", "Hi.")
    expected = learned(tmp_path / "twin.jsonl", [twin, other], chat_tokenizer)[0]
    rows = [shaped, {**shaped, **{"instruction": "x"}} if "instruction" in shaped else other]
    found = learned(tmp_path / "shaped.jsonl", rows, chat_tokenizer)[0]
    assert found == expected
    assert any(found[1])


def test_of_prompt_and_completion_only_the_completion_is_learned(chat_tokenizer: Path, tmp_path: Path) -> None:
    messages = chat("a", "first", "b", "second")["messages"]
    rows = [{"prompt": messages[:3], "completion": messages[3:]}, chat("Hello", "Hi.")]
    ids, own = learned(tmp_path / "trl.jsonl", rows, chat_tokenizer)[0]
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode([token for token, is_own in zip(ids, own, strict=True) if is_own]) == "second<|im_end|>"


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.writes])
def test_a_completion_continues_the_assistants_words(name: str, tmp_path: Path) -> None:
    """One turn, whose rest is learned; its first words are part of the prompt."""
    folder = KINDS[name].saved(tmp_path / "tokenizer")
    asked = [{"role": "user", "content": "What is 19 + 7?"}, {"role": "assistant", "content": "Let me see:"}]
    completion = [{"role": "assistant", "content": " 19 + 7 = 26."}]
    rows = [{"prompt": asked, "completion": completion}, chat("Hello", "Hi.")]
    ids, own = learned(tmp_path / "trl.jsonl", rows, folder)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begun = tokenizer.apply_chat_template(asked, continue_final_message=True, return_dict=False)
    joined = [asked[0], {"role": "assistant", "content": "Let me see: 19 + 7 = 26."}]
    assert own.index(True) == len(begun)
    assert ids[: len(begun)] == begun
    assert ids == tokenizer.apply_chat_template(joined, return_dict=False)
    answer = [token for token, is_own in zip(ids, own, strict=True) if is_own]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip().startswith("19 + 7 = 26.")


def test_words_that_a_completion_continues_do_not_end_their_turn(chat_tokenizer: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>"}]
    row = {"prompt": asked, "completion": [{"role": "assistant", "content": "c"}]}
    with pytest.raises(DataError, match=r"trl\.jsonl: line 2: .* must not end with <\|im_end\|>"):
        tokenized(written(tmp_path / "trl.jsonl", [TALKS[0], row]), chat_tokenizer)


def test_calls_of_functions_are_learned_as_the_template_writes_them(tool_tokenizer: Path, tmp_path: Path) -> None:
    arguments = {"a": 2, "b": [5]}
    shown = called(arguments, tools=[ADD])
    rows = [shown, called(json.dumps(arguments), tools=json.dumps([ADD]), more=1), called(arguments)]
    file = written(tmp_path / "calls.jsonl", rows)
    assert tokenized(file, tool_tokenizer).counts["duplicate"] == 1, "arguments and tools as JSON text are the same"
    ids, own = learned(file, rows, tool_tokenizer)[0]
    tokenizer = AutoTokenizer.from_pretrained(tool_tokenizer)
    rendered = [{**message, "content": message["content"] or ""} for message in shown["messages"]]
    assert ids == tokenizer.apply_chat_template(rendered, tools=[ADD], return_dict=False)
    assert tokenizer.decode([token for token, is_own in zip(ids, own, strict=True) if is_own]) == (
        '<tool_call>add {"a": 2, "b": [5]}</tool_call><|im_end|>It is 7.<|im_end|>'
    )
    without = tokenizer.decode(learned(file, rows, tool_tokenizer)[1][0])
    assert without.startswith("<|im_start|>user"), "tools are those of the row"
    assert tokenizer.decode(ids).startswith("<|im_start|>system\n[")


def test_a_template_without_calls_or_tools_is_refused(chat_tokenizer: Path, tmp_path: Path) -> None:
    for row, said in (
        (called({}), r"drops or changes response 0 of the conversation: it does not write the call of add"),
        (chat("a", "b") | {"tools": [ADD]}, r"does not show the function add of the row's tools\. Use a template"),
    ):
        with pytest.raises(DataError, match=rf"calls\.jsonl: line 2: the chat template of .*{said}"):
            tokenized(written(tmp_path / "calls.jsonl", [TALKS[0], row]), chat_tokenizer)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "human", "content": "a"}]}, r"message 0: role must be one of system, .*, got 'human'"),
        ({"messages": [{"role": "user", "content": None}]}, r"message 0: content must be text, got None; repair it"),
        (
            chat("a", "b", "cut \ud83d", "d"),
            r"message 2: content must be UTF-8 \('utf-8' codec can't encode .*; repair",
        ),
        (chat("only a question"), r"an assistant's turn must follow another one's, got the roles user; there"),
        (
            {"messages": [{"role": "assistant", "content": "a"}, *chat("b", "c")["messages"]]},
            r"an assistant's turn must follow another one's, got the roles assistant, user, assistant; there",
        ),
        ({"messages": []}, r"messages must be a list of messages with role and content, got \[\]; repair"),
        ([1], r"must be a JSON object, got '\[1\]'; repair"),
        (called("{"), r"message 1: arguments of add must be JSON \(.*\); repair it"),
        (
            {"messages": [*chat("a")["messages"], {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            r"message 1: tool_calls must have a function with a name, got \{\}; repair it",
        ),
        (called({}, tools="["), r"tools must be JSON \(.*\); repair it"),
        (called({}, tools={"name": "add"}), r"tools must be a list of function schemas, got .*; repair it"),
        (called({}, tools=[{"type": "function"}]), r"tools must be a list of function schemas, got .*; repair it"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]},
            r"message 0: content must be text, got \[\{'type': 'image_url'\}\]; repair it",
        ),
        ({"conversations": [{"from": "bing", "value": "x"}]}, r"message 0: role must be one of .*, got 'bing'"),
        ({"conversations": ["x"]}, r"message 0: role must be one of"),
        ({"instruction": "a", "output": None}, r"output must be text, got None; repair it"),
        ({"instruction": "a", "output": "b", "history": [["x", "y"]]}, r"history is not read; write the whole"),
        ({"prompt": chat("a")["messages"], "completion": "b"}, r"messages must be a list of messages .*, got 'b'"),
        (
            {"prompt": chat("a", "b")["messages"], "completion": chat("c")["messages"]},
            r"an assistant's turn must follow another one's, got the roles user, assistant, user",
        ),
        ({"text": "a"}, r"must be a conversation, as the first row of the file is, got the columns text; rename"),
        ({"prompt": "a", "completion": "b"}, r"must be a conversation, .* got the columns prompt, completion"),
    ],
)
def test_a_broken_row_is_refused_with_file_and_line(
    tool_tokenizer: Path, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    file = written(tmp_path / "rows.jsonl", [TALKS[0], row])
    for call in (
        lambda: tokenized(file, tool_tokenizer),
        lambda: preview_demonstrations(WarmStartConfig(demonstrations=str(file)), tool_tokenizer, 10),
    ):
        with pytest.raises(DataError, match=rf"rows\.jsonl: line 2: {said}"):
            call()
    assert not list((tmp_path / "demonstrations").glob("*"))
