"""Preference pairs: their tokens in every form of a file, and refused files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.demonstrations import tokenize_demonstrations
from rlcore.batching.prompts import read_demonstrations, read_pairs
from rlcore.config import WarmStartConfig
from rlcore.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE, saved

ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 2?"}]
GOOD, BAD = [{"role": "assistant", "content": "It is 4."}], [{"role": "assistant", "content": "I think that it is 5."}]
CHAT = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
OTHER = {"prompt": ASK[1:], "chosen": BAD, "rejected": GOOD}
PAIR = "a preference pair must have a prompt, chosen and rejected"
TEXT = {"prompt": "Q: 2 + 2? A:", "chosen": " 4", "rejected": " 5 or so"}


def tokenized(file, rows, tokenizer, loss="dpo", **settings):
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    config = WarmStartConfig(demonstrations=str(file), loss=loss, **{"held_out_rows": 0, **settings})
    return tokenize_demonstrations(config, tokenizer, seed=1, root=file.parent)


def pairs_in(file, rows, tokenizer):
    return read_pairs(tokenized(file, rows, tokenizer).directory / "train.parquet")


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
    found = tokenized(tmp_path / "twin.jsonl", rows, tokenizer, "nll")
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
    found = tokenized(tmp_path / "pairs.jsonl", rows, base_tokenizer, max_tokens=60)
    assert found.counts == {"train": 3, "validation": 0, "identical": 1, "duplicate": 1, "empty": 2, "overlong": 1}
    rows = [{"prompt": f"{n} is", "chosen": f" {n}.", "rejected": f" not {n}."} for n in range(20)]
    found = tokenized(tmp_path / "held_out.jsonl", rows, base_tokenizer, held_out_rows=5)
    assert [len(read_pairs(found.directory / f"{split}.parquet")) for split in ("train", "validation")] == [18, 2]
    with pytest.raises(DataError, match=r"must be left, 0 are \(2 identical\). Raise warm_start\.max_tokens"):
        tokenized(tmp_path / "same.jsonl", [{**TEXT, "rejected": " 4"}] * 2, base_tokenizer)


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
def test_unusable_files_are_refused(chat_tokenizer, tmp_path, rows, loss, problem):
    with pytest.raises(DataError) as error:
        tokenized(tmp_path / "pairs.jsonl", rows, chat_tokenizer, loss)
    assert str(error.value).startswith(f"{tmp_path / 'pairs.jsonl'}: {problem}")


def test_template_that_changes_a_response_is_refused(trained_bpe, tmp_path):
    template = CHAT_TEMPLATE.replace("m.content", "m.content.replace('I think', '')")
    tokenizer = saved(trained_bpe, tmp_path / "tokenizer", chat_template=template)
    with pytest.raises(DataError, match=r"line 1: rejected: the chat template of .* drops or changes response 0"):
        tokenized(tmp_path / "pairs.jsonl", [CHAT, OTHER], tokenizer)
