"""Responses are tokenized with their prompt, as the template writes both, for tokenizers of every kind."""

import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.filter import filter_dataset
from data.tasks import build_dataset
from data.tokenizer import Messages, PromptTokenizer
from rlcore.config import Gsm8kData
from rlcore.models.tokenizer import end_of_text_ids, load_tokenizer
from rlcore.rollout.environment import TurnTokens
from tests.data.conftest import settings_in, user_prompts
from tests.helpers.tokenizer_kinds import KINDS

NUM_ROWS = 200
WORDS = ["What", "is", "19", "+", "7?", "(12", "*", "3)", "It's", "caf\u00e9", "\u4e2d\u6587", "x.", "a\nb", "a  b"]
WORDS += ['"q"', "####"]
TURNS = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "Janet has 16 eggs; she eats 3 and bakes with 4. What is 16 - 3 - 4?"},
    {"role": "assistant", "content": "She has 16 - 3 - 4 = <<16-3-4=9>>9 left.\n#### 9"},
    {"role": "user", "content": "And  at $2 each?\n\n  Caf\u00e9 \u4e2d\u6587 \U0001f95a"},
    {"role": "assistant", "content": "9 * 2 = 18 dollars.\n#### 18"},
]


def sentences(rng, number):
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, 9))) for _ in range(number)]


def listed(ids):
    return [int(id) for id in np.frombuffer(ids, dtype=np.int32)]


def tokens_of(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    return request.param, KINDS[request.param].saved(tmp_path_factory.mktemp("tokenizer"))


def conversations(rng, name):
    """Return questions, some with messages before or the assistant's words after them, and responses. A continued turn
    may follow an earlier turn of the assistant."""
    found: list[tuple[Messages, str]] = []
    thinks = name == "qwen3-thinking"
    for place, (question, text) in enumerate(zip(*(sentences(rng, NUM_ROWS) for _ in range(2)), strict=True)):
        response = f"<think>\n{question}\n</think>\n\n{text}" if thinks or (name == "qwen3" and place % 2) else text
        [[user]] = user_prompts(question)
        if place % 5 == 3 and name not in ("llama2", "mistral"):
            found.append(([{"role": "system", "content": "Be brief."}, user], response))
        elif place % 5 == 4 and not thinks:
            earlier = [*user_prompts("What?")[0], {"role": "assistant", "content": "9"}] if place % 2 else []
            begun = rng.choice(["So: 19 +", "Let me see.\n<think>"])
            found.append(([*earlier, user, {"role": "assistant", "content": begun}], f" {text}"))
        else:
            found.append(([user], response))
    return found


@pytest.mark.parametrize("fast_path", [True, False])
def test_prompt_and_response_are_the_tokens_of_the_conversation(kind, fast_path):
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
        end = {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
        begun = tokenizer.apply_chat_template(messages, tokenize=False, **end)
        assert text == begun
        assert listed(before) == tokens_of(tokenizer, begun)
        last = {"role": "assistant", "content": (messages.pop()["content"] if is_continued else "") + response}
        whole = tokens_of(tokenizer, tokenizer.apply_chat_template([*messages, last], tokenize=False))
        end = next(place for place in range(len(listed(before)), len(whole)) if whole[place] in stops)
        assert listed(before) + listed(target) == whole[: end + 1]


def test_plain_prompts_and_responses_are_the_tokens_of_one_text(kind):
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


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def ids_of(tokenizer, turns, *, prompt=False):
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    ids = tokens_of(tokenizer, text)
    assert tokenizer.decode(ids) == text
    return ids


def test_gsm8k_is_filtered_with_the_models_template(gsm8k_folder, smollm2, tokenizer, artifacts_root, tmp_path):
    for name in ("train.jsonl", "test.jsonl"):
        lines = (gsm8k_folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:400]), encoding="utf-8")
    dataset = build_dataset(Gsm8kData(source=str(tmp_path)), seed=1, root=artifacts_root)
    config = settings_in(artifacts_root, filter={"max_prompt_tokens": 160})
    filtered = filter_dataset(dataset.directory, smollm2, config)
    rows = pq.read_table(filtered.directory / "train.parquet").to_pylist()
    assert 0.8 * 400 < len(rows) < 400
    for row in rows[::4]:
        prompt = [dict(turn) for turn in row["prompt"]]
        answered = [*prompt, {"role": "assistant", "content": row["extra_info"]["solution"]}]
        assert row["prompt_ids"] == ids_of(tokenizer, prompt, prompt=True)
        assert len(row["prompt_ids"]) <= 160
        joint = row["prompt_ids"] + row["solution_ids"]
        assert ids_of(tokenizer, answered)[: len(joint)] == joint


@pytest.mark.parametrize("cut", [False, True])
def test_appended_turns_are_the_tokens_of_the_conversation(tokenizer, cut):
    """The template's end of a turn comes with the reply where a turn was cut at its limit."""
    turns = TurnTokens(tokenizer, chat=True, max_reply_tokens=64)
    ids = ids_of(tokenizer, TURNS[:2], prompt=True)
    for written, reply in ((TURNS[2], TURNS[3]), (TURNS[4], {"role": "user", "content": "#### right"})):
        ids += tokenizer(written["content"])["input_ids"] + ([] if cut else [tokenizer.eos_token_id])
        text, appended = turns.reply_tokens(ids[-1], reply["content"])
        assert text == reply["content"]
        ids += appended
    assert ids == ids_of(tokenizer, [*TURNS, {"role": "user", "content": "#### right"}], prompt=True)
