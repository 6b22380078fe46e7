"""Tokenizers: of a model directory, of the hub, and one made from nothing. Most need no torch, and import none.

The one made from nothing holds arithmetic only: one token for every integer up to a limit and one for each operator.
A whole countdown answer is then a dozen tokens, which is why half a million parameters can learn the task on two CPU
cores.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from rlcore.config.model import ScratchModel
from rlcore.models.hub import attempt, hub_answers, located
from rlcore.models.shape import is_plain_tokenizer

Decode = Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]
"""Token ids of many answers -> their texts, without special tokens."""

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"
OPERATORS = ("+", "-", "*", "/", "(", ")", "=", ":", ">", ",")

# Messages one after another, nothing around them: a model made from nothing has no roles.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def build_scratch_tokenizer(config: ScratchModel, directory: Path) -> Path:
    """Write the arithmetic tokenizer into `directory` and return it; the bytes depend on `max_integer` alone.

    Text is split at white space, between digits and other characters, and at every single other character, so
    "19+7" and "19 + 7" are the same three tokens. Decoding joins tokens with one space. Whatever is not a number up
    to `max_integer` or an operator becomes `<unk>`.
    """
    core = Tokenizer(WordLevel(scratch_tokens(config), unk_token=UNK_TOKEN))
    core.pre_tokenizer = pre_tokenizers.Sequence([WhitespaceSplit(), Split(Regex(r"\d+|\D"), behavior="isolated")])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        padding_side="left",
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    return directory


def scratch_tokens(config: ScratchModel) -> dict[str, int]:
    """Id of each token of the arithmetic tokenizer."""
    words = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *OPERATORS, *map(str, range(config.max_integer + 1)))
    return {word: index for index, word in enumerate(words)}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id. Raises ModelError where there is none."""
    where = located(path, "tokenizer_config.json")
    found = attempt(where, "a tokenizer", lambda **kw: _tokenizer_class(where).from_pretrained(where, **kw))
    return cast(PreTrainedTokenizerBase, found)


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The decoder of answers. It is the tokenizers library itself where its texts are those of transformers, which
    visits every id in Python: that takes twice the time, and other threads wait meanwhile."""

    def as_lists(answers: Sequence[Sequence[int] | np.ndarray]) -> list[list[int]]:
        return [np.asarray(ids).tolist() for ids in answers]

    def by_transformers(answers: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        # Of no answers at all (validation.greedy=false) transformers makes one empty text.
        return tokenizer.batch_decode(as_lists(answers), skip_special_tokens=True) if answers else []

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return by_transformers
    core = tokenizer.backend_tokenizer
    if tokenizer.clean_up_tokenization_spaces and not isinstance(core.model, BPE):
        return by_transformers

    def by_tokenizers(answers: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        return list(core.decode_batch(as_lists(answers), skip_special_tokens=True))

    probe = [tokenizer.encode("It 's here , is n't it ? No . (3 + 4) !")]
    return by_tokenizers if by_tokenizers(probe) == by_transformers(probe) else by_transformers


def _tokenizer_class(where: str) -> type[Any]:
    file = _file_of(where, "tokenizer_config.json")
    has_file = _file_of(where, "tokenizer.json") is not None
    is_plain = has_file and file is not None and is_plain_tokenizer(file)
    return PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer  # which imports torch


def _file_of(where: str, name: str) -> Path | None:
    """A file of a directory, or of a hub id (from the cache where there is no network); None where it has none."""
    if Path(where).is_dir():
        file = Path(where) / name
        return file if file.is_file() else None
    found = cached_file(
        where,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        local_files_only=not hub_answers(),
    )
    return None if found is None else Path(found)
