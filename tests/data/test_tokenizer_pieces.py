"""Tokenizing by words gives what the tokenizer gives for the whole text."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.tokenizer import PieceEncoder, encode_whole

# Words with every kind of white space and end between them, many of them shared by the texts of a batch.
WORDS = st.sampled_from(
    [
        *(
            "the",
            "The",
            "number",
            "12",
            "7,",
            "(3",
            "+",
            "'s",
            "it's",
            "...",
            "=",
            "a_b",
            "",
            "<|im_start|>",
            "<|im_end|>\n",
        ),
        *("x\ny", "\n", "\n\n", "\t", "\r\n", "\x0b", "\u00a0", "\u3000"),
        *("caf\u00e9", "e\u0301", "\u0301", "\u4e2d\u6587", "\U0001f642", "\u2019s"),
    ]
)
SPACES = st.sampled_from([" ", " ", " ", " ", "", "  ", "   ", "\n", " \n", "\n "])
TEXTS = st.lists(st.tuples(WORDS, SPACES), max_size=12).map(
    lambda parts: "".join(word + space for word, space in parts)
)


@pytest.fixture(scope="module")
def encoder(trained_bpe):
    found = PieceEncoder.of(trained_bpe)
    assert found is not None
    return found


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(middles=st.lists(TEXTS, max_size=6), before=TEXTS, after=TEXTS)
@example(middles=["1", "2"], before="a b ", after=" c d")
@example(middles=["", " "], before="a b", after="c d")
@example(middles=["x", "x"], before="", after="")
@example(middles=["a b", "a b c"], before="", after=" ")
def test_texts_of_known_pieces_have_the_tokenizers_ids(encoder, trained_bpe, middles, before, after):
    texts = [before + middle + after for middle in middles]
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_any_text_has_the_tokenizers_ids(encoder, trained_bpe, texts):
    assert encoder.encode(texts) == encode_whole(trained_bpe, texts)


def test_the_memory_of_pieces_is_bounded(trained_bpe, monkeypatch):
    monkeypatch.setattr("data.tokenizer._MAX_PIECES", 20)
    encoder = PieceEncoder.of(trained_bpe)
    for start in range(0, 200, 10):
        texts = [f"{start + i} and {start - i} or {start * i}" for i in range(10)]
        assert encoder.encode(texts) == encode_whole(trained_bpe, texts)
        for cache in (encoder._pieces, encoder._heads):  # their size is seen nowhere else
            assert len(cache) <= 20 + 3 * len(texts)  # the bound, and what one call has learned beyond it


def without(core, **changes):
    """The tokenizer with parts of its description replaced."""
    return Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), **changes}))


def test_tokenizers_that_do_not_cut_at_single_spaces_are_refused(trained_bpe):
    assert PieceEncoder.of(trained_bpe) is not None
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert PieceEncoder.of(words) is None
    uncut = without(trained_bpe, pre_tokenizer=None)
    assert PieceEncoder.of(uncut) is None
    prefixed = Tokenizer.from_str(trained_bpe.to_str())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert PieceEncoder.of(prefixed) is None
    lowered = Tokenizer.from_str(trained_bpe.to_str())
    lowered.normalizer = normalizers.Lowercase()
    assert PieceEncoder.of(lowered) is None
    greedy = Tokenizer.from_str(trained_bpe.to_str())
    greedy.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    assert PieceEncoder.of(greedy) is None


def test_a_tokenizer_with_spaces_in_words_is_found_by_the_probe():
    core = Tokenizer(
        models.BPE(
            vocab={letter: i for i, letter in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "\u0120b"])}, merges=[]
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    assert PieceEncoder.of(core) is not None  # without merges nothing depends on where words end
    letters = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "a\u0120"])}
    merged = Tokenizer(models.BPE(vocab=letters, merges=[("a", "\u0120")]))
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert PieceEncoder.of(merged) is None
