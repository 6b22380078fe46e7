"""Tokenizing by words gives the ids of the whole text."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.tokenizer import PieceEncoder, encode_whole

# Words of several scripts and kinds of white space, many of them shared by the texts of a batch.
WORDS = st.sampled_from([
    "the", "The", "number", "12", "7,", "(3", "+", "'s", "it's", "...", "=", "a_b", "", "<|im_start|>", "<|im_end|>\n",
    "x\ny", "\n", "\n\n", "\t", "\r\n", "\x0b", "\u00a0", "\u3000", "caf\u00e9", "e\u0301", "\u0301", "\u4e2d\u6587",
    "\U0001f642", "\u2019s",
])  # fmt: skip
SPACES = st.sampled_from([" ", " ", " ", " ", "", "  ", "   ", "\n", " \n", "\n "])
TEXTS = st.lists(st.tuples(WORDS, SPACES), max_size=12).map(lambda parts: "".join(map("".join, parts)))
MANY = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def encoder(trained_bpe):
    encoder = PieceEncoder.of(trained_bpe)
    assert encoder is not None
    return encoder


@MANY
@given(middles=st.lists(TEXTS, max_size=6), before=TEXTS, after=TEXTS)
@example(middles=["1", "2"], before="a b ", after=" c d")
@example(middles=["", " "], before="a b", after="c d")
@example(middles=["x", "x"], before="", after="")
@example(middles=["a b", "a b c"], before="", after=" ")
def test_texts_of_shared_pieces_have_the_tokenizers_ids(encoder, trained_bpe, middles, before, after):
    texts = [before + middle + after for middle in middles]
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


@MANY
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_any_text_has_the_tokenizers_ids(encoder, trained_bpe, texts):
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


def test_cache_of_pieces_is_bounded(trained_bpe, monkeypatch):
    monkeypatch.setattr("data.tokenizer._MAX_PIECES", 20)
    encoder = PieceEncoder.of(trained_bpe)
    for start in range(0, 200, 10):
        texts = [f"{start + i} and {start - i} or {start * i}" for i in range(10)]
        assert encoder.encode(texts) == encode_whole(trained_bpe, texts)
        for cache in (encoder._pieces, encoder._heads):
            assert len(cache) <= 20 + 3 * len(texts)  # the bound, and the pieces of one call


def changed(core, **parts):
    """Copy a tokenizer, with parts of its description replaced or set."""
    copy = Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), **parts.pop("description", {})}))
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def test_tokenizers_that_do_not_split_at_single_spaces_are_refused(trained_bpe):
    assert PieceEncoder.of(changed(trained_bpe)) is not None
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    greedy = changed(trained_bpe)
    greedy.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    unsplit = changed(trained_bpe, description={"pre_tokenizer": None})
    prefixed = changed(trained_bpe, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    lowered = changed(trained_bpe, normalizer=normalizers.Lowercase())
    for tokenizer in (words, greedy, unsplit, prefixed, lowered):
        assert PieceEncoder.of(tokenizer) is None


@pytest.mark.parametrize(
    ("last", "merges", "splits"),
    [("\u0120b", [], True), ("a\u0120", [("a", "\u0120")], False)],
    ids=["without merges", "merged over a space"],
)
def test_probe_finds_tokens_over_spaces(last, merges, splits):
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), last]
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    assert (PieceEncoder.of(core) is not None) is splits
