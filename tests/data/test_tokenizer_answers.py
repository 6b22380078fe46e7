"""An answer is tokenized with its prompt, as the template writes both, whatever the kind of the tokenizer."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from data.demonstrations import tokenize_demonstrations
from data.tokenizer import Messages, PromptTokenizer
from rlcore.batching.prompts import read_demonstrations
from rlcore.config import WarmStartConfig
from rlcore.errors import DataError
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from tests.data.conftest import asked
from tests.helpers.tokenizer_kinds import KINDS, scratch

NUM_ROWS = 200
WORDS = (
    "What", "is", "19", "+", "7?", "(12", "*", "3)", "It's", "caf\u00e9", "\u4e2d\u6587", 'x.', 'a\nb', 'a  b', '"q"',
    '####',
)  # fmt: skip


def sentences(rng: random.Random, number: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, 9))) for _ in range(number)]


def listed(ids: bytes) -> list[int]:
    return [int(id) for id in np.frombuffer(ids, dtype=np.int32)]


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, KINDS[request.param].saved(tmp_path_factory.mktemp("tokenizer"))


def conversations(rng: random.Random, name: str) -> list[tuple[Messages, str]]:
    """Questions, some with messages before them or words of the assistant's after them, and answers."""
    found: list[tuple[Messages, str]] = []
    thinks = name == "qwen3-thinking"
    for place, (question, answer) in enumerate(zip(*(sentences(rng, NUM_ROWS) for _ in range(2)), strict=True)):
        said = f"<think>\n{question}\n</think>\n\n{answer}" if thinks or (name == "qwen3" and place % 2) else answer
        if place % 5 == 3 and name not in ("llama2", "mistral"):
            before = {"role": "system", "content": "Be brief."}
            found.append(([before, {"role": "user", "content": question}], said))
        elif place % 5 == 4 and not thinks:
            words = [{"role": "user", "content": question}, {"role": "assistant", "content": "So: 19 +"}]
            found.append((words, f" {answer}"))
        else:
            found.append((*asked(question), said))
    return found


def test_prompt_and_answer_are_the_tokens_of_the_whole_conversation(kind: tuple[str, Path]) -> None:
    name, folder = kind
    tokenizer, stops = load_tokenizer(folder), end_of_text_ids(folder)
    rows = conversations(random.Random(name), name)
    prompts, answers = [prompt for prompt, _ in rows], [answer for _, answer in rows]
    for short_way in (True, False):
        own = PromptTokenizer(folder, chat=True, short_way=short_way)
        texts = own.texts(prompts)
        ids = own.encode_prompts(texts)
        found, unwritten = own.encode_responses(prompts, texts, answers)
        for place, ((prompt, answer), text, before, learned) in enumerate(zip(rows, texts, ids, found, strict=True)):
            messages = list(prompt)
            goes_on = messages[-1]["role"] == "assistant"
            if not KINDS[name].writes and not goes_on:
                assert (learned, "the end of the prompt" in unwritten[place]) == (b"", True)
                continue
            assert place not in unwritten
            begun = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
            )
            assert text == begun
            assert listed(before) == tokens_of(tokenizer, begun)
            said = {"role": "assistant", "content": (messages.pop()["content"] if goes_on else "") + answer}
            whole = tokens_of(tokenizer, tokenizer.apply_chat_template([*messages, said], tokenize=False))
            end = next(place for place in range(len(listed(before)), len(whole)) if whole[place] in stops)
            assert listed(before) + listed(learned) == whole[: end + 1]


def test_plain_prompts_and_answers_are_the_tokens_of_one_text(kind: tuple[str, Path]) -> None:
    """Where one token reaches from prompt to answer, those of the answer go on at the boundary."""
    name, folder = kind
    tokenizer = load_tokenizer(folder)
    rng = random.Random(name)
    prompts = [question + rng.choice(["", " ", "\n", "\nA:"]) for question in sentences(rng, NUM_ROWS)]
    answers = [rng.choice(["", " ", "\n"]) + answer for answer in sentences(rng, NUM_ROWS)]
    own = PromptTokenizer(folder, chat=False)
    ids = own.encode_prompts(prompts)
    found, unwritten = own.encode_responses(asked(*prompts), prompts, answers)
    num_joint = 0
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        before, learned = listed(ids[place]), listed(found[place])
        assert before == tokenizer(prompt)["input_ids"]
        joint = tokenizer(prompt + answer)["input_ids"]
        if joint[: len(before)] == before:
            num_joint += 1
            assert learned[-1] in own.stop_ids
            assert before + learned[:-1] == joint
        elif place not in unwritten:
            assert tokenizer.decode(before + learned[:-1]) == tokenizer.decode(joint)
    assert num_joint > NUM_ROWS / 3
    assert len(unwritten) < NUM_ROWS / 20 or name == "unigram", unwritten


def test_the_scratch_tokenizer_writes_answers_and_their_end(tmp_path: Path) -> None:
    folder = scratch(tmp_path)
    tokenizer = load_tokenizer(folder)
    for chat in (True, False):
        own = PromptTokenizer(folder, chat=chat)
        prompts = [f"{a} + {b} =" for a in range(9) for b in range(9)]
        answers = [f" {a + b} > {a}" for a in range(9) for b in range(9)]
        texts = own.texts(asked(*prompts))
        ids = own.encode_prompts(texts)
        found, unwritten = own.encode_responses(asked(*prompts), texts, answers)
        assert unwritten == {}
        for prompt, answer, before, learned in zip(prompts, answers, ids, found, strict=True):
            assert listed(before) + listed(learned) == tokens_of(tokenizer, f"{prompt}{answer}<eos>")


def test_demonstrations_and_solutions_are_the_same_tokens(kind: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = kind
    rows = [row for row in conversations(random.Random(3), name) if len(row[0]) == 1]
    file = tmp_path / "talks.jsonl"
    lines = [{"messages": [*prompt, {"role": "assistant", "content": answer}]} for prompt, answer in rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = WarmStartConfig(demonstrations=str(file), held_out_rows=0)
    if not KINDS[name].writes:
        told = r"talks\.jsonl: line 1: .*does not write it behind '.*<think>..', the end of the prompt"
        with pytest.raises(DataError, match=told):
            tokenize_demonstrations(config, folder, seed=1, root=tmp_path)
        return
    made = tokenize_demonstrations(config, folder, seed=1, root=tmp_path)
    own = PromptTokenizer(folder, chat=True)
    prompts, answers = [prompt for prompt, _ in rows], [answer for _, answer in rows]
    texts = own.texts(prompts)
    ids = own.encode_prompts(texts)
    found, _ = own.encode_responses(prompts, texts, answers)
    expected = dict.fromkeys(zip(ids, found, strict=True))
    shown = read_demonstrations(made.directory / "train.parquet")
    assert len(shown) == len(expected)
    for demonstration, (before, learned) in zip(shown, expected, strict=True):
        together = listed(before) + listed(learned)
        assert list(demonstration.token_ids)[: len(together)] == together
        assert [*np.flatnonzero(demonstration.is_target)] == [*range(len(listed(before)), len(together))]
