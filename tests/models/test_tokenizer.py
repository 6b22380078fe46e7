"""Only tags that scorers and tools read survive decoding."""

from pathlib import Path

import pytest

from rlcore.models.tokenizer import load_tokenizer, response_tags, text_decoder
from tests.helpers.tagged_tokenizer import MARKERS, PLAIN, TAGS, tagged


@pytest.mark.parametrize("byte_level", [True, False])
def test_decoder_keeps_tags_only(tmp_path: Path, byte_level: bool) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=byte_level))
    assert set(tokenizer.convert_ids_to_tokens(sorted(response_tags(tokenizer)))) == set(TAGS)
    parts = [*MARKERS, "a", *TAGS, "b", *PLAIN, "a", *MARKERS]
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.convert_ids_to_tokens(ids) == parts
    between = "" if byte_level else " "
    texts = text_decoder(tokenizer)([ids, [], ids[:1]])
    assert texts == [between.join(["a", *TAGS, "b", *PLAIN, "a"]), "", ""]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [between.join(parts)]


def test_decoder_without_tags_matches_transformers(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert response_tags(tokenizer) == frozenset()
    ids = tokenizer.encode("<|im_start|>user\nIt 's <think>4</think> </s>.<|im_end|>\n")
    assert text_decoder(tokenizer)([ids]) == [tokenizer.decode(ids, skip_special_tokens=True)]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [tokenizer.decode(ids)]


def test_end_token_like_tag_is_removed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=True))
    tokenizer.eos_token = "</tool_call>"
    assert text_decoder(tokenizer)([tokenizer.encode("a<think></tool_call>")]) == ["a<think>"]
