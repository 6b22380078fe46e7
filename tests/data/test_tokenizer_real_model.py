"""The tokenizer and the chat template of a real model: SmolLM2-135M-Instruct."""

from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.config import FilterConfig, Gsm8kData
from rlcore.models.tokenizer import load_tokenizer
from rlcore.rollout.turns import TurnTokens

TURNS = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "Janet has 16 eggs; she eats 3 and bakes with 4. What is 16 - 3 - 4?"},
    {"role": "assistant", "content": "She has 16 - 3 - 4 = <<16-3-4=9>>9 left.\n#### 9"},
    {"role": "user", "content": "And  at $2 each?\n\n  Caf\u00e9 \u4e2d\u6587 \U0001f95a"},
    {"role": "assistant", "content": "9 * 2 = 18 dollars.\n#### 18"},
]
NUM_ROWS = 400


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2)


def ids_of(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, prompt: bool = False) -> list[int]:
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    return ids


def test_gsm8k_is_filtered_with_the_models_template(
    gsm8k_folder: Path, smollm2: Path, tokenizer: PreTrainedTokenizerBase, artifacts_root: Path, tmp_path: Path
) -> None:
    source = tmp_path / "gsm8k"
    source.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        with (gsm8k_folder / name).open(encoding="utf-8") as lines:
            (source / name).write_text("".join(islice(lines, NUM_ROWS)), encoding="utf-8")
    dataset = build_dataset(Gsm8kData(source=str(source)), seed=1, root=artifacts_root)
    settings = FilterConfig(max_prompt_tokens=160)
    filtered = filter_dataset(dataset.directory, smollm2, settings, root=artifacts_root)
    rows = pq.read_table(filtered.directory / "train.parquet").to_pylist()
    assert 0.8 * NUM_ROWS < len(rows) < NUM_ROWS
    for row in rows[::4]:
        prompt = [dict(turn) for turn in row["prompt"]]
        answered = [*prompt, {"role": "assistant", "content": row["extra_info"]["solution"]}]
        assert row["prompt_ids"] == ids_of(tokenizer, prompt, prompt=True)
        assert len(row["prompt_ids"]) <= settings.max_prompt_tokens
        joint = row["prompt_ids"] + row["solution_ids"]
        assert ids_of(tokenizer, answered)[: len(joint)] == joint


@pytest.mark.parametrize("cut", [False, True])
def test_appended_turns_are_the_tokens_of_the_conversation(tokenizer: PreTrainedTokenizerBase, cut: bool) -> None:
    """The template's end of a turn comes with the reply where a turn was cut at its limit."""
    turns = TurnTokens(tokenizer, chat=True, max_reply_tokens=64)
    ids = ids_of(tokenizer, TURNS[:2], prompt=True)
    for written, reply in ((TURNS[2], TURNS[3]), (TURNS[4], {"role": "user", "content": "#### right"})):
        ids += tokenizer(written["content"])["input_ids"] + ([] if cut else [tokenizer.eos_token_id])
        text, appended = turns.reply_tokens(ids[-1], reply["content"])
        assert text == reply["content"]
        ids += appended
    assert ids == ids_of(tokenizer, [*TURNS, {"role": "user", "content": "#### right"}], prompt=True)


def test_opening_message_follows_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = ids_of(tokenizer, TURNS[:2], prompt=True)
    turns = TurnTokens(tokenizer, chat=True, max_reply_tokens=64)
    text, before, appended = turns.first_message_tokens(prompt, "Continue.")
    assert [*before, *appended] == ids_of(tokenizer, [*TURNS[:2], {"role": "user", "content": text}], prompt=True)
