"""Tokenizers of model directories and the hub, and an arithmetic tokenizer for scratch models. The arithmetic tokenizer
has a token for each operator and for each integer up to `max_integer`. A model of half a million parameters can
therefore learn the countdown task on two CPU cores."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from rlcore.config.model import ScratchModel
from rlcore.errors import ModelError
from rlcore.models.hub import MODEL_FILES, is_hub_reachable, read_pretrained, read_stop_ids, resolve_model
from rlcore.models.shape import is_plain_tokenizer

Decode = Callable[[Sequence[Sequence[int] | np.ndarray]], list[str]]
"""A function that decodes the token ids of many responses into texts."""

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"
OPERATORS = ("+", "-", "*", "/", "(", ")", "=", ":", ">", ",")

# Concatenated messages with an end token after a response: a scratch model has no roles.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% if not loop.last %} {% endif %}{% endfor %}"
)
# A tag in a response: `<think>`, `</answer>`, `[THINK]`. Not a marker of roles or sequences.
_TAG = re.compile(r"([<\[])(/?)((?!(?:s|INST|SYSTEM_PROMPT)[>\]])\w[\w:.-]*[>\]])")


def build_scratch_tokenizer(config: ScratchModel, directory: Path) -> Path:
    """Write the files of the arithmetic tokenizer into `directory`, and return `directory`. The tokenizer splits text
    into whole numbers and single characters, without white space. Decoding joins tokens with one space. The content of
    the files depends only on `config`."""
    core = Tokenizer(WordLevel(scratch_vocabulary(config), unk_token=UNK_TOKEN))
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


def scratch_vocabulary(config: ScratchModel) -> dict[str, int]:
    """Return the id of each token of the arithmetic tokenizer."""
    words = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *OPERATORS, *map(str, range(config.max_integer + 1)))
    return {word: index for index, word in enumerate(words)}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or hub id. Raises ModelError if the model has no tokenizer."""
    where = resolve_model(path, "tokenizer_config.json")
    found = read_pretrained(where, "a tokenizer", lambda **kw: _tokenizer_class(where).from_pretrained(where, **kw))
    return cast(PreTrainedTokenizerBase, found)


def end_of_text_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Return the ids of the tokens that end a response. They come from the model's generation config, otherwise from
    its config, otherwise from its tokenizer. Raises ModelError if none of the three defines such a token."""
    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else resolve_model(path, "config.json")
    ids = read_stop_ids(file for name in MODEL_FILES if (file := _find_file(where, name)) is not None)
    if ids is None and (own := (tokenizer or load_tokenizer(path)).eos_token_id) is not None:
        ids = frozenset([own])
    if ids is None:
        raise ModelError(
            f"model.path: the model must define a token that ends a response, {path} defines none. "
            "Set eos_token_id in its generation_config.json."
        )
    return ids


def response_tags(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens that are tags in a response: closing tags such as `</think>`, and opening tags
    whose closing tag is also a token. Tokens with a special role, such as end and padding, are excluded."""
    named = {getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    added = {token.content: (id, token.special) for id, token in tokenizer.added_tokens_decoder.items()}
    parts = [(_TAG.fullmatch(text), text, *found) for text, found in added.items()]
    return frozenset(
        id
        for tag, text, id, is_special in parts
        if tag and is_special and text not in named and (tag[2] or f"{tag[1]}/{tag[3]}" in added)
    )


def text_decoder(tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> Decode:
    """Return a function that decodes responses. With `skip_special_tokens`, the texts contain no special tokens except
    tags."""
    tags = response_tags(tokenizer) if skip_special_tokens else frozenset[int]()
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    cut = special - tags if tags else frozenset[int]()  # the library removes all special tokens or none
    skip = skip_special_tokens and not tags

    def decode(responses: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        lists = [[id for id in np.asarray(ids).tolist() if id not in cut] for ids in responses]
        # transformers decodes an empty list to one empty text.
        return tokenizer.batch_decode(lists, skip_special_tokens=skip) if lists else []

    return decode


def _tokenizer_class(where: str) -> type[Any]:
    file = _find_file(where, "tokenizer_config.json")
    has_file = _find_file(where, "tokenizer.json") is not None
    is_plain = has_file and file is not None and is_plain_tokenizer(file)
    return PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer  # which imports torch


def _find_file(where: str, name: str) -> Path | None:
    if Path(where).is_dir():
        file = Path(where) / name
        return file if file.is_file() else None
    found = cached_file(
        where,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        local_files_only=not is_hub_reachable(),
    )
    return None if found is None else Path(found)
