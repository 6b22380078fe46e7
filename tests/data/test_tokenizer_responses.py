"""Responses are tokenized with their prompt, as the template writes both, for tokenizers of every kind."""

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
from tests.data.conftest import user_prompts
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
    """Return questions, some with messages before or the assistant's words after them, and responses."""
    found: list[tuple[Messages, str]] = []
    thinks = name == "qwen3-thinking"
    for place, (question, text) in enumerate(zip(*(sentences(rng, NUM_ROWS) for _ in range(2)), strict=True)):
        response = f"<think>\n{question}\n</think>\n\n{text}" if thinks or (name == "qwen3" and place % 2) else text
        [[user]] = user_prompts(question)
        if place % 5 == 3 and name not in ("llama2", "mistral"):
            found.append(([{"role": "system", "content": "Be brief."}, user], response))
        elif place % 5 == 4 and not thinks:
            found.append(([user, {"role": "assistant", "content": "So: 19 +"}], f" {text}"))
        else:
            found.append(([user], response))
    return found


@pytest.mark.parametrize("fast_path", [True, False])
def test_prompt_and_response_are_the_tokens_of_the_conversation(kind: tuple[str, Path], fast_path: bool) -> None:
    name, folder = kind
    tokenizer, stops = load_tokenizer(folder), end_of_text_ids(folder)
    rows = conversations(random.Random(name), name)
    prompts, responses = [prompt for prompt, _ in rows], [response for _, response in rows]
    own = PromptTokenizer(folder, chat=True, fast_path=fast_path)
    texts = own.texts(prompts)
    ids = own.encode_prompts(texts)
    found, unwritten = own.encode_responses(prompts, texts, responses)
    for place, ((prompt, response), text, before, target) in enumerate(zip(rows, texts, ids, found, strict=True)):
        messages = list(prompt)
        is_continued = messages[-1]["role"] == "assistant"
        if not KINDS[name].writes and not is_continued:
            assert (target, "the end of the prompt" in unwritten[place]) == (b"", True)
            continue
        assert place not in unwritten
        begun = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_continued, continue_final_message=is_continued
        )
        assert text == begun
        assert listed(before) == tokens_of(tokenizer, begun)
        last = {"role": "assistant", "content": (messages.pop()["content"] if is_continued else "") + response}
        whole = tokens_of(tokenizer, tokenizer.apply_chat_template([*messages, last], tokenize=False))
        end = next(place for place in range(len(listed(before)), len(whole)) if whole[place] in stops)
        assert listed(before) + listed(target) == whole[: end + 1]


def test_plain_prompts_and_responses_are_the_tokens_of_one_text(kind: tuple[str, Path]) -> None:
    """The response's tokens begin at the boundary where a token crosses it."""
    name, folder = kind
    tokenizer = load_tokenizer(folder)
    rng = random.Random(name)
    prompts = [question + rng.choice(["", " ", "\n", "\nA:"]) for question in sentences(rng, NUM_ROWS)]
    responses = [rng.choice(["", " ", "\n"]) + response for response in sentences(rng, NUM_ROWS)]
    own = PromptTokenizer(folder, chat=False)
    ids = own.encode_prompts(prompts)
    found, unwritten = own.encode_responses(user_prompts(*prompts), prompts, responses)
    num_joint = 0
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        before, target = listed(ids[place]), listed(found[place])
        assert before == tokenizer(prompt)["input_ids"]
        joint = tokenizer(prompt + response)["input_ids"]
        if joint[: len(before)] == before:
            num_joint += 1
            assert target[-1] in own.stop_ids
            assert before + target[:-1] == joint
        elif place not in unwritten:
            assert tokenizer.decode(before + target[:-1]) == tokenizer.decode(joint)
    assert num_joint > NUM_ROWS / 3
    assert len(unwritten) < NUM_ROWS / 20 or name == "unigram", unwritten


@pytest.mark.parametrize("chat", [True, False])
def test_scratch_tokenizer_writes_responses_and_their_end(tmp_path: Path, chat: bool) -> None:
    folder = scratch(tmp_path)
    tokenizer, own = load_tokenizer(folder), PromptTokenizer(folder, chat=chat)
    prompts = [f"{a} + {b} =" for a in range(9) for b in range(9)]
    responses = [f" {a + b} > {a}" for a in range(9) for b in range(9)]
    texts = own.texts(user_prompts(*prompts))
    found, unwritten = own.encode_responses(user_prompts(*prompts), texts, responses)
    assert unwritten == {}
    for prompt, response, before, target in zip(prompts, responses, own.encode_prompts(texts), found, strict=True):
        assert listed(before) + listed(target) == tokens_of(tokenizer, f"{prompt}{response}<eos>")


def test_demonstrations_and_solutions_have_the_same_tokens(kind: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = kind
    rows = [row for row in conversations(random.Random(3), name) if len(row[0]) == 1]
    file = tmp_path / "talks.jsonl"
    lines = [{"messages": [*prompt, {"role": "assistant", "content": response}]} for prompt, response in rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = WarmStartConfig(demonstrations=str(file), held_out_rows=0)
    if not KINDS[name].writes:
        problem = r"talks\.jsonl: line 1: .*does not write it behind '.*<think>..', the end of the prompt"
        with pytest.raises(DataError, match=problem):
            tokenize_demonstrations(config, folder, seed=1, root=tmp_path)
        return
    made = tokenize_demonstrations(config, folder, seed=1, root=tmp_path)
    own = PromptTokenizer(folder, chat=True)
    prompts, responses = [prompt for prompt, _ in rows], [response for _, response in rows]
    texts = own.texts(prompts)
    expected = dict.fromkeys(
        zip(own.encode_prompts(texts), own.encode_responses(prompts, texts, responses)[0], strict=True)
    )
    demonstrations = read_demonstrations(made.directory / "train.parquet")
    assert len(demonstrations) == len(expected)
    for demonstration, (before, target) in zip(demonstrations, expected, strict=True):
        together = listed(before) + listed(target)
        assert list(demonstration.token_ids)[: len(together)] == together
        assert [*np.flatnonzero(demonstration.is_target)] == [*range(len(listed(before)), len(together))]
