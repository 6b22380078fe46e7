"""What of an answer's special tokens is text: the tags that scorers and tools read, and nothing else."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcore.models.tokenizer import answer_tags, load_tokenizer, text_decoder

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "</lone>", "[THINK]", "[/THINK]", "<seed:think>")
MARKERS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<unused1>", "<pad>")
PLAIN = ("<answer>", "</answer>", "</seed:think>")
"""Tokens of their own that no decoder cuts, as Qwen3 has `<think>`."""


def tagged(folder: Path, *, byte_level: bool) -> Path:
    """A tokenizer with special tokens of all kinds; its end is `<|im_end|>`."""
    if byte_level:
        core = Tokenizer(
            models.BPE({text: id for id, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:
        core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([*MARKERS, *TAGS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=not byte_level
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("byte_level", [True, False])
def test_tags_stay_and_role_markers_ends_and_padding_go(tmp_path: Path, byte_level: bool) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=byte_level))
    assert set(tokenizer.convert_ids_to_tokens(sorted(answer_tags(tokenizer)))) == set(TAGS)
    parts = [*MARKERS, "a", *TAGS, "b", *PLAIN, "a", *MARKERS]
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.convert_ids_to_tokens(ids) == parts
    between = "" if byte_level else " "
    texts = text_decoder(tokenizer)([ids, [], ids[:1]])
    assert texts == [between.join(["a", *TAGS, "b", *PLAIN, "a"]), "", ""]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [between.join(parts)]


def test_without_such_tags_the_text_is_that_of_transformers(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert answer_tags(tokenizer) == frozenset()
    ids = tokenizer.encode("<|im_start|>user\nIt 's <think>4</think> </s>.<|im_end|>\n")
    assert text_decoder(tokenizer)([ids]) == [tokenizer.decode(ids, skip_special_tokens=True)]
    assert text_decoder(tokenizer, skip_special_tokens=False)([ids]) == [tokenizer.decode(ids)]


def test_an_end_that_looks_like_a_tag_is_cut(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tagged(tmp_path, byte_level=True))
    tokenizer.eos_token = "</tool_call>"
    assert text_decoder(tokenizer)([tokenizer.encode("a<think></tool_call>")]) == ["a<think>"]
