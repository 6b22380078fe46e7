"""The tokenizer as the filter uses it: prompts to text to token ids, many at a time.

transformers is imported only when a tokenizer is opened, so that a cached filter costs no seconds of start.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from data.chat_frame import ChatFrame
from data.pieces import ID_BYTES, PieceEncoder, encode_whole, to_bytes
from rlcore.errors import DataError

Messages = Sequence[Mapping[str, str]]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Templates that write the day into the prompt (Llama 3) write this one: the same rows and settings give the same tokens
# whenever the filter runs. It is the day that Llama's own template falls back on.
_TODAY = date(2024, 7, 26)
# One text in so many is also rendered and tokenized the long way; a difference stops the short way for good.
_CHECK_EVERY = 256


class ShortWayError(Exception):
    """A text came out differently by the short way than by the tokenizer itself. The filter starts again without."""


def tokenizer_fingerprint(directory: Path) -> str:
    """16 hex digits over the tokenizer's files in a model directory. Raises DataError where there is none."""
    digest = hashlib.sha256()
    found = [name for name in _FILES if (directory / name).is_file()]
    if not found:
        raise DataError(
            f"{directory}: holds no tokenizer (looked for {', '.join(_FILES[:3])}, ...). Give model.path a directory "
            "that has the tokenizer beside the model"
        )
    for name in found:
        content = (directory / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a directory. Raises DataError where that fails, or it is not a fast one."""
    # Not AutoTokenizer: beside some config.json files it ignores the tokenizer's own class and cuts text anew.
    from rlcore.models.load import load_tokenizer as load_as_its_file_says

    try:
        tokenizer: Any = load_as_its_file_says(directory)
    except Exception as error:  # a damaged tokenizer.json raises the bare class
        raise DataError(f"{directory}: the tokenizer cannot be loaded ({error}); check model.path") from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{directory}: the tokenizer has no fast form (tokenizer.json); convert it with transformers and save it"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"{directory}: the tokenizer has no eos_token; set it in tokenizer_config.json")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


class PromptTokenizer:
    """Prompts to text and to token ids, as one tokenizer does it.

    The short way renders a chat template once and tokenizes each word once (`PieceEncoder`); it is taken where it
    gives the same ids, which is probed here and checked on a sample of what is encoded.

    Raises:
        DataError: no tokenizer, or prompts are chats and it has no chat template.
    """

    def __init__(self, directory: Path, *, chat: bool, short_way: bool = True) -> None:
        self._name = str(directory)
        self._tokenizer = load_tokenizer(directory)
        self.chat = chat
        if chat and not self._tokenizer.chat_template:
            raise DataError(
                f"{directory}: the prompts are chats, but this tokenizer has no chat template. Use an instruct model, "
                "put a chat_template.jinja beside the tokenizer, or choose a prompt that is plain text "
                "(data.template=base for countdown, data.template=text for gsm8k)"
            )
        self._backend = self._tokenizer.backend_tokenizer
        self._pieces = PieceEncoder.of(self._backend) if short_way else None
        self._frame = ChatFrame.of(self._tokenizer.chat_template, self._render) if chat and short_way else None
        self._end = to_bytes([self._tokenizer.eos_token_id])
        # Special tokens that the tokenizer puts around plain text, such as a beginning-of-sequence token.
        self._around = (b"", b"") if chat else self._find_special_tokens()

    def texts(self, prompts: Sequence[Messages]) -> list[str]:
        """Each prompt as text: the chat template with the assistant's turn opened, or the messages as they are."""
        return [self._render(messages) for messages in prompts]

    def texts_of_user_messages(self, contents: Sequence[str]) -> list[str]:
        """`texts` of prompts that are a single user message each."""
        if not self.chat:
            return list(contents)
        if self._frame is None:
            return self.texts([[{"role": "user", "content": content}] for content in contents])
        found = []
        for index, content in enumerate(contents):
            framed = self._frame.text(content)
            if framed is None or index % _CHECK_EVERY == 0:
                rendered = self._render([{"role": "user", "content": content}])
                if framed is not None and framed != rendered:
                    raise ShortWayError(content)
                framed = rendered
            found.append(framed)
        return found

    def encode_prompts(self, texts: Sequence[str]) -> list[bytes]:
        """Token ids (int32, as bytes) of each prompt's text. A chat template writes its own special tokens; plain text
        gets the tokenizer's here."""
        if self._around is None:
            return encode_whole(self._backend, texts, add_special_tokens=True)
        before, after = self._around
        encoded = self._encode(texts)
        if not before and not after:
            return encoded
        # A text may write the first token itself, as prompts do that were rendered elsewhere: once is enough.
        return [(b"" if before and ids.startswith(before) else before) + ids + after for ids in encoded]

    def encode_answers(self, answers: Sequence[str]) -> list[bytes]:
        """Token ids of each answer with the end-of-sequence token; none for ''.

        Raises:
            DataError: an answer has a word that the tokenizer does not know, so no model with it could write it.
        """
        encoded = self._encode(answers)
        self._require_known(answers, encoded)
        end = self._end
        return [ids + end if answer else b"" for answer, ids in zip(answers, encoded, strict=True)]

    def with_unknown_words(self, encoded: Sequence[bytes]) -> list[int]:
        """Places of the texts in which the tokenizer does not know a word."""
        unknown = self._tokenizer.unk_token_id
        # Byte-level tokenizers know every word; some name an end-of-text token as the unknown one.
        if unknown is None or self._pieces is not None:
            return []
        return [place for place, ids in enumerate(encoded) if unknown in np.frombuffer(ids, dtype=np.int32)]

    def _require_known(self, answers: Sequence[str], encoded: Sequence[bytes]) -> None:
        if places := self.with_unknown_words(encoded):
            raise DataError(
                f"{self._name}: the tokenizer has no token for a word of the answer {answers[places[0]][:200]!r}. Take "
                "another model, or a task whose answers it can write (model.scratch.max_integer bounds the numbers of "
                "a model made from nothing)"
            )

    def _render(self, messages: Messages) -> str:
        if not self.chat:
            return "".join(message["content"] for message in messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=_TODAY.strftime,
                )
            )
        except Exception as error:  # jinja's own classes, and what a template raises
            raise DataError(
                f"{self._name}: the chat template cannot render the prompt ({type(error).__name__}: {error}). Mend "
                "chat_template.jinja, or choose another model"
            ) from error

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        if self._pieces is None:
            return encode_whole(self._backend, texts)
        found = self._pieces.encode(texts)
        sample = range(0, len(texts), _CHECK_EVERY)
        for index, ids in zip(sample, encode_whole(self._backend, [texts[i] for i in sample]), strict=True):
            if found[index] != ids:
                raise ShortWayError(texts[index])
        return found

    def _find_special_tokens(self) -> tuple[bytes, bytes] | None:
        """What comes before and after; None where that cannot be told from one text.

        An end-of-sequence token after it is left out: a prompt is to be gone on with.
        """
        [plain] = encode_whole(self._backend, ["a"])
        [full] = encode_whole(self._backend, ["a"], add_special_tokens=True)
        for start in range(0, len(full) - len(plain) + 1, ID_BYTES):
            if full[start : start + len(plain)] == plain:
                after = full[start + len(plain) :]
                return full[:start], b"" if after == self._end else after
        return None
