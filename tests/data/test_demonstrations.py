"""The user's demonstrations and preference pairs: tokenized once, with a loss only on the assistant's turns."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from data.demonstrations import tokenize_demonstrations
from data.schema import provenance
from rlcore.batching.prompts import read_demonstrations, read_pairs
from rlcore.errors import DataError
from tests.data.conftest import saved, settings_in
from tests.helpers.file_shapes import ADD, TOOL_TEMPLATE, write_rows
from tests.helpers.tokenizer_kinds import CHAT_TEMPLATE, KINDS

FOLLOW = r"an assistant's turn must follow another one's, got the roles"


def chat(*contents, system=""):
    """Return a conversation that a user begins."""
    first = [{"role": "system", "content": system}] if system else []
    return {
        "messages": first + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    }


def tokenized(file, tokenizer, **settings):
    warm = {"demonstrations": str(file), "held_out_rows": 0, **settings}
    return tokenize_demonstrations(settings_in(file.parent, warm_start=warm), tokenizer)


def tokens_of(file, rows, tokenizer):
    """The tokens of each row, and which of them are targets."""
    found = read_demonstrations(tokenized(write_rows(file, rows), tokenizer).directory / "train.parquet")
    return [(list(map(int, row.token_ids)), list(map(bool, row.is_target))) for row in found]


def target_text(tokenizer, row, **options):
    return str(tokenizer.decode([id for id, is_target in zip(*row, strict=True) if is_target], **options))


TALKS = [
    chat("What is 2 + 2?", "It is 4."),
    chat("Hello", "Hi, ask me.", "import os?", "A module.\n\nOf Python."),
    chat("And now", "you know", "more", system="Be short."),
]


def test_targets_are_the_assistants_turns(chat_tokenizer, tmp_path):
    found = tokens_of(tmp_path / "talks.jsonl", TALKS, chat_tokenizer)
    assert tokenized(tmp_path / "talks.jsonl", chat_tokenizer).counts == {"train": 3, "validation": 0}
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    for row, talk in zip(found, TALKS, strict=True):
        assert row[0] == tokenizer.apply_chat_template(talk["messages"], tokenize=True, return_dict=False)
        turns = [message["content"] for message in talk["messages"] if message["role"] == "assistant"]
        assert target_text(tokenizer, row) == "".join(turn + tokenizer.eos_token for turn in turns)


def test_fingerprint_depends_on_content_and_settings(chat_tokenizer, tmp_path):
    file = write_rows(tmp_path / "talks.jsonl", TALKS)
    first, again = tokenized(file, chat_tokenizer), tokenized(file, chat_tokenizer)
    assert again.cached
    assert tokenized(file, chat_tokenizer, max_tokens=1_000).directory.name != first.directory.name
    copy = file.rename(tmp_path / "elsewhere.jsonl")
    assert tokenized(copy, chat_tokenizer).directory.name == first.directory.name, "the place does not count"


def test_omitted_rows_are_counted_by_reason(chat_tokenizer, base_tokenizer, tmp_path):
    """The limit of tokens is exact."""
    longest = max(len(ids) for ids, _ in tokens_of(tmp_path / "talks.jsonl", TALKS, chat_tokenizer))
    rows = [*TALKS, TALKS[0], chat("Well?", " "), chat("Long?", "word " * 300)]
    file = write_rows(tmp_path / "talks.jsonl", rows)
    for limit, train, overlong in ((longest, 3, 1), (longest - 1, 2, 2)):
        counts = tokenized(file, chat_tokenizer, max_tokens=limit).counts
        assert counts == {"train": train, "validation": 0, "duplicate": 1, "empty": 1, "overlong": overlong}
    with pytest.raises(DataError, match=r"must be left, 0 are \(.*Raise warm_start\.max_tokens \(now 2\)"):
        tokenized(file, chat_tokenizer, max_tokens=2)
    rows = [{"prompt": "a", "completion": text} for text in (" b", "", " c")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    assert tokenized(file, base_tokenizer).counts == {"empty": 1, "train": 2, "validation": 0}
    for number, why in ((1, "the file has too few rows"), (2, "1 empty")):
        with pytest.raises(DataError, match=rf"rows\.jsonl: two demonstrations at least must be left, 1 are \({why}\)"):
            tokenized(write_rows(file, rows[:number]), base_tokenizer, max_tokens=512)


@pytest.mark.parametrize(("number", "wanted", "expected"), [(19, 5, 1), (20, 5, 2), (20, 1, 1), (9, 5, 0)])
def test_seed_chooses_the_held_out_rows(base_tokenizer, tmp_path, monkeypatch, number, wanted, expected):
    monkeypatch.setattr("data.demonstrations.ROWS_PER_GROUP", 8)
    rows = [{"prompt": f"{n} is", "completion": f" {n}."} for n in range(number)]
    file = write_rows(tmp_path / "rows.parquet", rows)
    found = tokenized(file, base_tokenizer, held_out_rows=wanted)
    counts = {"train": number - expected, "validation": expected}
    assert (found.counts, found.cached) == (counts, False)
    chosen = set(np.random.default_rng(1).permutation(number)[:expected].tolist())
    tokenizer = AutoTokenizer.from_pretrained(base_tokenizer)
    for split in ("train", "validation"):
        texts = [tokenizer.decode(row.token_ids) for row in read_demonstrations(found.directory / f"{split}.parquet")]
        expected_rows = [n for n in range(number) if (n in chosen) == (split == "validation")]
        assert texts == [f"<|endoftext|>{n} is {n}.{tokenizer.eos_token}" for n in expected_rows]
    row = read_demonstrations(found.directory / "train.parquet")[-1]
    assert target_text(tokenizer, (list(row.token_ids), list(row.is_target))).startswith(" ")
    document = provenance(found.directory / "train.parquet")
    assert (document["split"], document["kind"], document["counts"]) == ("train", "demonstrations", counts)
    assert tokenized(file, base_tokenizer, held_out_rows=wanted).cached


def test_prompts_and_completions_must_be_text(base_tokenizer, tmp_path):
    for row, problem in (
        ({"prompt": 1, "completion": "a"}, "prompt must be text, got 1; repair it"),
        ({"prompt": "a"}, "completion must be text, got None; repair it"),
        ({"prompt": "a", "completion": "\ud83d"}, "completion must be UTF-8 .*; repair or remove it"),
    ):
        file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": " b"}, row])
        with pytest.raises(DataError, match=f"^{file}: line 2: {problem}$"):
            tokenized(file, base_tokenizer)


@pytest.mark.parametrize(("change", "problem"), [
    (("for m in messages", "for m in messages[-2:]"),
     r"line 2: the chat template of .* drops or changes response 0 .*differently before the turns that follow"),
    (("m.content", "(m.content if m.role == 'user' else '')"),
     r"line 1: the chat template of .* drops or changes response 0 .*does not write it as it is"),
    (("'<|im_end|>\\n' }}{%- endfor", "'\\n' }}{%- endfor"),
     r"line 1: the chat template of .* ends the assistant's turn without a token at which the model stops, "
     r"<\|im_end\|> \(2\); eos_token_id of generation_config\.json names them"),
], ids=["drops earlier turns", "drops responses", "writes no end"])  # fmt: skip
def test_templates_that_change_responses_are_refused(trained_bpe, tmp_path, change, problem):
    template = CHAT_TEMPLATE.replace(*change)
    assert template != CHAT_TEMPLATE
    tokenizer = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    with pytest.raises(DataError, match=problem):
        tokenized(write_rows(tmp_path / "talks.jsonl", TALKS), tokenizer)


def test_turns_end_at_the_first_stop_token(tmp_path):
    """Phi's generation_config.json names `<|end|>`; the tokenizer's end token follows the last turn."""
    folder = KINDS["phi"].saved(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    one = write_rows(tmp_path / "one.jsonl", [TALKS[0], chat("Hello", "Hi.")])
    first = tokenized(one, folder)
    for row, talk in zip(tokens_of(tmp_path / "talks.jsonl", TALKS, folder), TALKS, strict=True):
        assert tokenizer.decode(row[0]) == tokenizer.apply_chat_template(talk["messages"], tokenize=False)
        turns = [message["content"] for message in talk["messages"] if message["role"] == "assistant"]
        assert target_text(tokenizer, row) == "".join(turn + "<|end|>" for turn in turns)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    row = tokens_of(one, [TALKS[0], chat("Hello", "Hi.")], folder)[0]
    assert target_text(tokenizer, row) == "It is 4.<|end|>\n<|endoftext|>"
    assert tokenized(one, folder).directory.name != first.directory.name


def test_content_may_have_parts_and_only_the_completion_is_a_target(chat_tokenizer, tmp_path):
    messages = chat("a", "first", "b", "second")["messages"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]
    in_parts = {"messages": [*parts, *chat("a", "c")["messages"][1:]]}
    rows = [{"prompt": messages[:3], "completion": messages[3:]}, in_parts]
    trl, joined = tokens_of(tmp_path / "trl.jsonl", rows, chat_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    assert trl[0] == tokenizer.apply_chat_template(messages, return_dict=False)
    assert target_text(tokenizer, trl) == "second<|im_end|>"
    assert joined[0] == tokenizer.apply_chat_template(chat("a b", "c")["messages"], return_dict=False)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.writes])
def test_completions_continue_the_assistants_words(name, tmp_path):
    """The first words of the turn are part of the prompt, and the rest of the turn is the target."""
    folder = KINDS[name].saved(tmp_path / "tokenizer")
    prompt, completion = chat("What is 19 + 7?", "Let me see:")["messages"], chat("", " 19 + 7 = 26.")["messages"][1:]
    rows = [{"prompt": prompt, "completion": completion}, chat("Hello", "Hi.")]
    row = tokens_of(tmp_path / "trl.jsonl", rows, folder)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begun = tokenizer.apply_chat_template(prompt, continue_final_message=True, return_dict=False)
    joined = chat("What is 19 + 7?", "Let me see: 19 + 7 = 26.")["messages"]
    assert (row[1].index(True), row[0][: len(begun)]) == (len(begun), begun)
    assert row[0] == tokenizer.apply_chat_template(joined, return_dict=False)
    assert target_text(tokenizer, row, skip_special_tokens=True).strip().startswith("19 + 7 = 26.")


def called(arguments, **more):
    """Return a conversation with a call of a function, as in OpenAI's API."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    question, answer = chat("What is 2 + 5?", "It is 7.")["messages"]
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [question, calls, {"role": "tool", "tool_call_id": "1", "content": "7"}, answer], **more}


@pytest.fixture
def tool_tokenizer(trained_bpe, tmp_path):
    return saved(trained_bpe, tmp_path / "with-tools", chat_template=TOOL_TEMPLATE)


def test_end_of_text_may_be_the_declared_unknown_token(trained_bpe, tmp_path):
    """GPT-2 declares it so, and its byte-level model never writes an unknown token."""
    folder = saved(trained_bpe, tmp_path / "tokenizer", chat_template=None)
    declared = folder / "tokenizer_config.json"
    declared.write_text(json.dumps({**json.loads(declared.read_text()), "unk_token": "<|im_end|>"}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.unk_token_id == tokenizer.eos_token_id
    rows = [{"prompt": "Say it: ", "completion": word} for word in ("yes", "no")]
    found = tokens_of(tmp_path / "pairs.jsonl", rows, folder)
    assert [target_text(tokenizer, row) for row in found] == ["yes<|im_end|>", "no<|im_end|>"]


def test_function_calls_are_targets_as_the_template_writes_them(tool_tokenizer, tmp_path):
    arguments = {"a": 2, "b": [5]}
    shown = called(arguments, tools=[ADD])
    rows = [shown, called(json.dumps(arguments), tools=json.dumps([ADD]), more=1), called(arguments)]
    file = write_rows(tmp_path / "calls.jsonl", rows)
    assert tokenized(file, tool_tokenizer).counts["duplicate"] == 1, "arguments and tools as JSON text are the same"
    row, without = tokens_of(file, rows, tool_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tool_tokenizer)
    rendered = [{**message, "content": message["content"] or ""} for message in shown["messages"]]
    assert row[0] == tokenizer.apply_chat_template(rendered, tools=[ADD], return_dict=False)
    call = '<tool_call>add {"a": 2, "b": [5]}</tool_call><|im_end|>'
    assert target_text(tokenizer, row) == f"{call}It is 7.<|im_end|>"
    assert tokenizer.decode(without[0]).startswith("<|im_start|>user"), "tools are those of the row"
    assert tokenizer.decode(row[0]).startswith("<|im_start|>system\n[")


@pytest.mark.parametrize(("row", "problem"), [
    (called({}), r"the chat template of .*drops or changes response 0 .*: it does not write the call of add"),
    (chat("a", "b") | {"tools": [ADD]},
     r"the chat template of .*does not show the function add of the row's tools\. Use a template"),
    ({"prompt": chat("a", "b<|im_end|>")["messages"], "completion": [{"role": "assistant", "content": "c"}]},
     r".* must not end with <\|im_end\|>"),
], ids=["call", "tools", "ended words"])  # fmt: skip
def test_rows_that_the_template_cannot_write_are_refused(chat_tokenizer, tmp_path, row, problem):
    with pytest.raises(DataError, match=rf"rows\.jsonl: line 2: {problem}"):
        tokenized(write_rows(tmp_path / "rows.jsonl", [TALKS[0], row]), chat_tokenizer)


@pytest.mark.parametrize(("row", "problem"), [
    ({"messages": [{"role": "human", "content": "a"}]}, r"message 0: role must be one of system, .*, got 'human'"),
    (chat("a", "b", "cut \ud83d", "d"), r"message 2: content must be UTF-8 \('utf-8' codec can't encode .*; repair"),
    (chat("only a question"), rf"{FOLLOW} user; there"),
    ({"messages": [{"role": "assistant", "content": "a"}, *chat("b", "c")["messages"]]},
     rf"{FOLLOW} assistant, user, assistant; there"),
    ({"messages": []}, r"messages must be a list of messages with role and content, got \[\]; repair"),
    ([1], r"must be a JSON object, got '\[1\]'; repair"),
    (called("{"), r"message 1: arguments of add must be JSON \(.*\); repair it"),
    ({"messages": [*chat("a")["messages"], {"role": "assistant", "content": None, "tool_calls": [{}]}]},
     r"message 1: tool_calls must have a function with a name, got \{\}; repair it"),
    (called({}, tools="["), r"tools must be JSON \(.*\); repair it"),
    (called({}, tools={"name": "add"}), r"tools must be a list of function schemas, got .*; repair it"),
    (called({}, tools=[{"type": "function"}]), r"tools must be a list of function schemas, got .*; repair it"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x"}]},
     r"message 0: content must be text, got \[\{'type': 'image_url'\}\]; repair it"),
    ({"prompt": chat("a")["messages"], "completion": "b"}, r"messages must be a list of messages .*, got 'b'"),
    ({"text": "a"}, r"must be a conversation, as the first row of the file is, got the columns text; rename"),
    ({"prompt": "a", "completion": "b"}, r"must be a conversation, .* got the columns prompt, completion"),
])  # fmt: skip
def test_broken_rows_are_refused_with_file_and_line(tool_tokenizer, tmp_path, row, problem):
    file = write_rows(tmp_path / "rows.jsonl", [TALKS[0], row])
    with pytest.raises(DataError, match=rf"rows\.jsonl: line 2: {problem}"):
        tokenized(file, tool_tokenizer)
    assert not list((tmp_path / "demonstrations").glob("*"))
    with pytest.raises(DataError, match=r"line 1: must have messages, .* completion, got the columns text"):
        tokenized(write_rows(tmp_path / "texts.jsonl", [{"text": "a"}]), tool_tokenizer)


ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 2?"}]
GOOD, BAD = [{"role": "assistant", "content": "It is 4."}], [{"role": "assistant", "content": "I think that it is 5."}]
CHAT = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
PAIR = "a preference pair must have a prompt, chosen and rejected"
TEXT = {"prompt": "Q: 2 + 2? A:", "chosen": " 4", "rejected": " 5 or so"}


def pairs_in(file, rows, tokenizer):
    return read_pairs(tokenized(write_rows(file, rows), tokenizer, loss="dpo").directory / "train.parquet")


@pytest.mark.parametrize(("row", "twin", "chat"), [
    (CHAT, CHAT, True), ({"chosen": ASK + GOOD, "rejected": ASK + BAD, "score": 1.5}, CHAT, True),
    ({"prompt": ASK[1]["content"], "chosen": ASK + GOOD, "rejected": ASK + BAD}, CHAT, True),
    ({"prompt": [*ASK, {"role": "assistant", "content": "It is "}],
      "chosen": [{"role": "assistant", "content": "4."}], "rejected": [{"role": "assistant", "content": "5."}]},
     None, True),
    (TEXT, TEXT, False),
], ids=["messages", "no-prompt", "text-prompt", "begun-turn", "plain-text"])  # fmt: skip
def test_pairs_have_the_tokens_of_two_demonstrations(chat_tokenizer, base_tokenizer, tmp_path, row, twin, chat):
    tokenizer = chat_tokenizer if chat else base_tokenizer
    other = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    pair, _ = pairs_in(tmp_path / f"pairs.{'jsonl' if chat else 'parquet'}", [row, other], tokenizer)
    twin = twin or row
    rows = [{"prompt": twin["prompt"], "completion": twin[name]} for name in ("chosen", "rejected")]
    found = tokenized(write_rows(tmp_path / "twin.jsonl", rows), tokenizer)
    chosen, rejected = read_demonstrations(found.directory / "train.parquet")
    assert (pair.token_ids, pair.is_target, pair.rejected) == (chosen.token_ids, chosen.is_target, rejected)
    assert all(any(one.is_target) for one in (chosen, rejected))
    assert len(pair.reference) == sum(chosen.is_target) + sum(rejected.is_target)
    assert all(value != value for value in pair.reference), "it is unknown yet"


def test_omitted_pairs_are_counted_by_reason(base_tokenizer, tmp_path):
    rows = [
        TEXT, {**TEXT, "prompt": "Q: 1? A:"}, TEXT, {**TEXT, "rejected": " 6"}, {**TEXT, "rejected": " 4"},
        {**TEXT, "rejected": ""}, {**TEXT, "chosen": ""}, {**TEXT, "rejected": " word" * 99},
    ]  # fmt: skip
    found = tokenized(write_rows(tmp_path / "pairs.jsonl", rows), base_tokenizer, loss="dpo", max_tokens=60)
    assert found.counts == {"train": 3, "validation": 0, "identical": 1, "duplicate": 1, "empty": 2, "overlong": 1}
    rows = [{"prompt": f"{n} is", "chosen": f" {n}.", "rejected": f" not {n}."} for n in range(20)]
    found = tokenized(write_rows(tmp_path / "held_out.jsonl", rows), base_tokenizer, loss="dpo", held_out_rows=5)
    assert [len(read_pairs(found.directory / f"{split}.parquet")) for split in ("train", "validation")] == [18, 2]
    with pytest.raises(DataError, match=r"must be left, 0 are \(2 identical\). Raise warm_start\.max_tokens"):
        pairs_in(tmp_path / "same.jsonl", [{**TEXT, "rejected": " 4"}] * 2, base_tokenizer)


@pytest.mark.parametrize(("rows", "loss", "problem"), [
    ([CHAT, {"prompt": ASK, "chosen": GOOD}], "dpo",
     f"line 2: {PAIR} (docs/data.md), got the columns prompt, chosen; rename them, repair the row, or set "
     "warm_start.loss=nll for demonstrations"),
    ([{"chosen": "a", "rejected": "b"}], "dpo", f"line 1: {PAIR}"),
    ([{"chosen": GOOD, "rejected": BAD}], "dpo", f"line 1: {PAIR}"),
    ([CHAT, {**CHAT, "rejected": 5}], "dpo", "line 2: rejected: messages must be a list of messages"),
    ([CHAT, TEXT], "dpo", "line 2: chosen: must be a conversation, as the first row of the file is"),
    ([CHAT], "nll", "line 1: must have messages, or prompt and completion, got the columns prompt, chosen, "
     "rejected; set warm_start.loss=dpo for preference pairs, or rename or convert them (docs/data.md)"),
])  # fmt: skip
def test_unusable_files_of_pairs_are_refused(chat_tokenizer, tmp_path, rows, loss, problem):
    with pytest.raises(DataError) as error:
        tokenized(write_rows(tmp_path / "pairs.jsonl", rows), chat_tokenizer, loss=loss)
    assert str(error.value).startswith(f"{tmp_path / 'pairs.jsonl'}: {problem}")
