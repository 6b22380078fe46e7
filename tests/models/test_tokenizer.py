"""The randomly initialized model, its tokenizer, and decoders of responses."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rlcore.config.model import ScratchModel
from rlcore.models.load import build_scratch_model
from rlcore.models.tokenizer import (
    end_of_text_ids,
    load_tokenizer,
    response_tags,
    text_decoder,
)
from tests.helpers.tokenizer_kinds import KINDS, MARKERS, PLAIN, TAGS, tagged

SMALL = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_position_embeddings=32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """The config of the model in the same directory must not change tokenization."""
    return load_tokenizer(build_scratch_model(SMALL, seed=1, directory=tmp_path_factory.mktemp("model")))


def test_scratch_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 100 + 10 + 3
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(100))
    assert len(tokenizer.encode("19+7 - (3*4)/2 = 14 : 5 , 6 >")) == 18
    assert tokenizer.encode("19+7") == tokenizer.encode(" 19 +  7\n")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("100 x 7 007")) == ["<unk>", "<unk>", "7", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


@given(st.lists(st.sampled_from(["0", "7", "42", "99", *"+-*/()=:>,"]), min_size=1))
def test_scratch_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> None:
    text = " ".join(words)
    ids = tokenizer.encode(text)
    assert len(ids) == len(words)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_scratch_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "1 +"}, {"role": "user", "content": "2 : 3 >"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1 + 2 : 3 >"


def test_scratch_model_is_reproducible(tmp_path: Path) -> None:
    first, again, other = (
        build_scratch_model(SMALL, seed=seed, directory=tmp_path / name)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    names = sorted(file.name for file in first.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert names == sorted(file.name for file in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
        assert ((first / name).read_bytes() != (other / name).read_bytes()) == (name == "model.safetensors"), name


def test_scratch_directory_loads_in_transformers(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    directory = build_scratch_model(SMALL, seed=1, directory=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == 1
    assert end_of_text_ids(directory) == frozenset({1})


@pytest.mark.parametrize("byte_level", [True, False])
def test_decoder_keeps_tags_only(tmp_path: Path, byte_level: bool) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=byte_level))
    assert set(tokenizer.convert_ids_to_tokens(sorted(response_tags(tokenizer)))) == set(TAGS)
    parts = [*MARKERS, "a", *TAGS, "b", *PLAIN, "a", *MARKERS]
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.convert_ids_to_tokens(ids) == parts
    between = "" if byte_level else " "
    decode = text_decoder(tokenizer)
    assert decode([]) == []
    assert decode([ids, [], ids[:1]]) == [between.join(["a", *TAGS, "b", *PLAIN, "a"]), "", ""]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [between.join(parts)]


def test_decoder_without_tags_matches_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(KINDS["chatml"].saved(tmp_path))
    assert response_tags(tokenizer) == frozenset()
    ids = tokenizer.encode("<|im_start|>user\nIt 's <think>4</think> </s>.<|im_end|>\n")
    assert text_decoder(tokenizer)([ids]) == [tokenizer.decode(ids, skip_special_tokens=True)]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [tokenizer.decode(ids)]


def test_end_token_like_tag_is_removed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=True))
    tokenizer.eos_token = "</tool_call>"
    assert text_decoder(tokenizer)([tokenizer.encode("a<think></tool_call>")]) == ["a<think>"]
