"""A renderer and tokenizer for many prompts at a time, with exactly the results of the model's tokenizer.

Byte-level BPE (as in GPT) starts a new word at every single space between two visible characters. `PieceEncoder`
therefore tokenizes each different word once and joins the ids. With other tokenizers, each text is tokenized as a
whole. Texts that cannot be split at spaces are also tokenized as a whole. Token ids are stored as bytes, four for each
id (int32), because bytes are fast to join and split. A chat template renders the text around a message once, unless
this text may depend on the message. Tokenization by words and the reuse of the text around a message are the fast path.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables

from rlcore.config.data import RENDERING_NAMES
from rlcore.errors import DataError
from rlcore.models.hub import MODEL_FILES, read_stop_ids
from rlcore.rollout.environment import TODAY

Messages = Sequence[Mapping[str, str]]

ID_BYTES = 4  # size of one token id
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_CHECK_EVERY = 256  # one of this many texts is also rendered and tokenized without the fast path, for a comparison
_MARK = "MillraceContent"
_LAST_TAG = re.compile(r"([<\[][^<>\[\]]*[>\]])\s*\Z")
_MAX_PIECES = 1_000_000  # cached, about 200 MB
# The probe tries each pair of these around a space: letters of several scripts, digits, punctuation and symbols.
_EDGES = (*"aZ7.,'\"()<>|-+=#$_", "\u00e9", "\u4e2d", "\u0438", "\u0663", "\u20ac", "\U0001f642")
_OTHER_SPACE = re.compile(r"[^\S\n]")  # line ends are tokenized with their piece


class ResponseChangedError(Exception):
    """A response has no tokens to train on, for example because the chat template changes the response. The message
    gives the reason."""


class FastPathError(Exception):
    """The fast path gives another text or other token ids than the chat template or the tokenizer."""


def tokenizer_fingerprint(directory: Path) -> str:
    """Return a hash (16 hex digits) of the tokenizer's files and the model's stop ids."""
    digest = hashlib.sha256()
    found = [name for name in _FILES if (directory / name).is_file()]
    if not found:
        raise DataError(
            f"{directory}: holds no tokenizer (looked for {', '.join(_FILES[:3])}, ...). Give model.path a directory "
            "that has the tokenizer next to the model"
        )
    for name in found:
        content = (directory / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    if (stops := read_stop_ids(directory / name for name in MODEL_FILES)) is not None:
        digest.update(repr(sorted(stops)).encode())
    return digest.hexdigest()[:16]


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory. Raises DataError if it cannot be loaded, is not fast, or has no eos_token."""
    # AutoTokenizer ignores the tokenizer's own class for some config.json files.
    from rlcore.models.tokenizer import load_tokenizer as load_as_its_file_says

    try:
        tokenizer: Any = load_as_its_file_says(directory)
    except Exception as error:  # a damaged tokenizer.json raises Exception itself
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
    """A tokenizer that renders and tokenizes prompts and responses. The fast path is checked on a sample of the texts.

    Raises DataError if the tokenizer cannot be loaded, or if it has no chat template for chat prompts. Also raises
    DataError if the chat template ignores the `tools` (JSON schemas) or a variable in `chat_template_kwargs`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        chat: bool,
        fast_path: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = str(directory)
        self._tokenizer = load_tokenizer(directory)
        self.chat = chat
        if chat and not self._tokenizer.chat_template:
            raise DataError(
                f"{directory}: the prompts are chats, but this tokenizer has no chat template. Use an instruct model, "
                "put a chat_template.jinja next to the tokenizer, or choose a prompt that is plain text "
                "(data.template=base for countdown, data.template=text for gsm8k)"
            )
        self._template_kwargs = chat_template_kwargs or {}
        self._tools = None
        if chat and self._template_kwargs:
            self._require_read(self._template_kwargs)
        if chat and tools:
            question = [{"role": "user", "content": _MARK}]
            without, self._tools = self.render(question), list(tools)
            if self.render(question) == without:
                raise DataError(
                    f"{directory}: its chat template shows no tools to the model (episode.tools). Take a model whose "
                    "template does, or put a chat_template.jinja that renders `tools` next to the tokenizer"
                )
        self.backend = self._tokenizer.backend_tokenizer
        from rlcore.models.tokenizer import end_of_text_ids

        self.stop_ids = end_of_text_ids(directory, self._tokenizer)
        eos = int(self._tokenizer.eos_token_id)
        self._end = to_bytes([eos if eos in self.stop_ids else min(self.stop_ids)])
        self._pieces = PieceEncoder.of(self.backend) if fast_path else None
        self._frames = self._find_frames() if chat and fast_path else None
        self._around = (b"", b"") if chat else self._find_special_tokens()

    def texts(self, prompts: Sequence[Messages], where: Callable[[int], str] = lambda place: "") -> list[str]:
        """Return the text of each prompt. `where`: a function that returns the prefix of error messages about the
        prompt with a given index.
        """
        if not self.chat:
            return [self.render(prompt) for prompt in prompts]
        found = []
        for place, prompt in enumerate(prompts):
            framed = self._frames.prompt(prompt) if self._frames else None
            try:
                found.append(_checked(framed, place, partial(self.prompt, prompt)))
            except DataError as error:
                raise DataError(f"{where(place)}{error}") from error
        return found

    def prompt(self, messages: Messages, tools: Sequence[Any] = ()) -> str:
        """Render a chat prompt. The text ends with the beginning of the assistant's turn.

        If the last message is the assistant's, the text ends with this message instead.
        """
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            raise DataError(
                f"the prompt must have a message of the user, got the roles {', '.join(roles)}. Add one, or remove the "
                "row"
            )
        if roles[-1] != "assistant":
            return self.render(messages, tools=tools)
        words = messages[-1]["content"].rstrip()
        ends = map(self.backend.id_to_token, sorted(self.stop_ids))
        if (end := next((token for token in ends if token and words.endswith(token)), None)) is not None:
            raise DataError(
                f"the prompt's last message is the assistant's, which is continued, and must not end with {end}, which "
                f"ends a turn, got {words[-80:]!r}. Remove the token or the message"
            )
        return self.render(messages, continued=True, tools=tools)

    def encode_prompts(self, texts: Sequence[str]) -> list[bytes]:
        """Return the token ids of each prompt (int32, as bytes). Plain text gets special tokens around it."""
        before, after = self._around
        # A prompt rendered by another program may begin with the first token already.
        return [(b"" if before and ids.startswith(before) else before) + ids + after for ids in self._encode(texts)]

    def encode_responses(
        self, prompts: Sequence[Messages], texts: Sequence[str], responses: Sequence[str]
    ) -> tuple[list[bytes], dict[int, str]]:
        """Return the token ids of each response, with the end token. `texts`: the rendered prompts.

        An empty response has no ids. The second result gives the reason for each response that has text but no ids.
        Raises DataError if a response has a word without a token.
        """
        found, unwritten, wholes = [b""] * len(responses), dict[int, str](), dict[int, str]()
        for place, response in enumerate(responses):
            if not response.strip():
                continue
            prompt, text = prompts[place], texts[place]
            framed = self._frames.response(prompt, text, response) if self._frames else None
            try:
                wholes[place] = _checked(framed, place, partial(self._whole, prompt, text, response))
            except ResponseChangedError as error:
                if framed is not None:
                    raise FastPathError(framed) from error
                unwritten[place] = str(error)
        # If texts are tokenized by pieces, both begin at the last piece of the prompt.
        starts = [0 if self._pieces is None else _last_piece(texts[place]) for place in wholes]
        befores = self._encode([texts[place][start:] for place, start in zip(wholes, starts, strict=True)])
        joints = self._encode([whole[start:] for whole, start in zip(wholes.values(), starts, strict=True)])
        for (place, whole), before, joint in zip(wholes.items(), befores, joints, strict=True):
            try:
                found[place] = self.response_ids(before, joint, whole[len(texts[place]) :])
            except ResponseChangedError as error:
                unwritten[place] = str(error)
        if places := self.with_unknown_words(found):
            raise DataError(
                f"{self.name}: the tokenizer has no token for a word of the solution {responses[places[0]][:200]!r}. "
                "Take another model, or a task whose solutions it can write (model.scratch.max_integer bounds the "
                "numbers of a randomly initialized model)"
            )
        return found, unwritten

    def require_response(self, prompt: str, whole: str, response: str) -> None:
        """Check that the template writes a response after the prompt unchanged, except in white space.

        `whole`: the text up to the end of the turn. The response may repeat an opening tag at the end of the prompt."""
        if not whole.startswith(prompt):
            raise ResponseChangedError(f"does not write it behind {prompt[-40:]!r}, the end of the prompt")
        written = whole[len(prompt) :]
        if (tag := _LAST_TAG.search(prompt)) is not None:
            response = response.lstrip().removeprefix(tag[1])
        if not written.endswith(self._closing[0]) or "".join(response.split()) not in "".join(written.split()):
            raise ResponseChangedError("does not write it as it is")

    def response_ids(self, before: bytes, joint: bytes, written: str) -> bytes:
        """Return the ids of a response with its end token.

        `before`: the ids of the prompt. `joint`: the ids of prompt and response, tokenized together. `written`: the
        rendered text after the prompt. If a token of `joint` spans the end of the prompt, `written` is tokenized alone.
        """
        found = joint[len(before) :] if joint.startswith(before) else self._from_boundary(before, joint, written)
        if not self.chat:
            return found + self._end
        closing = self._closing[1]
        if not closing or not found.endswith(closing):
            stops = ", ".join(f"{self.backend.id_to_token(id)} ({id})" for id in sorted(self.stop_ids))
            raise ResponseChangedError(
                f"ends the assistant's turn without a token at which the model stops, {stops}; eos_token_id of "
                "generation_config.json names them"
            )
        return found[: len(found) - len(closing) + ID_BYTES]

    def after_end(self) -> bytes:
        """Return the ids that the template writes after the end token. They are never sampled."""
        return self._closing[1][ID_BYTES:]

    def with_unknown_words(self, encoded: Sequence[bytes]) -> list[int]:
        """Return the indices of the encoded texts that contain a word outside the vocabulary."""
        unknown = self._tokenizer.unk_token_id
        # Byte-level tokenizers have tokens for every word. Many of them, such as GPT-2's, declare the end-of-text token
        # as the unknown token, but their model never writes it.
        if unknown is None or self._pieces is not None or not getattr(self.backend.model, "unk_token", unknown):
            return []
        return [place for place, ids in enumerate(encoded) if unknown in np.frombuffer(ids, dtype=np.int32)]

    def render(
        self, messages: Messages, *, opened: bool = True, continued: bool = False, tools: Sequence[Any] = ()
    ) -> str:
        """Render messages as text. `opened`: whether the beginning of the assistant's next turn is appended.

        `continued`: whether the last message stays open for a continuation. If true, `opened` has no effect. `tools`:
        schemas of tools that replace those given to the constructor."""
        if not self.chat:
            return "".join(message["content"] for message in messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[*tools] or self._tools,
                    tokenize=False,
                    add_generation_prompt=opened and not continued,
                    continue_final_message=continued,
                    strftime_now=TODAY.strftime,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # errors of jinja and of the template
            kind = type(error).__name__
            problem = f"cannot render the prompt ({kind}: {error}). Repair chat_template.jinja"
            if continued:
                problem = (
                    "does not write the assistant's words that the prompt ends with, so they cannot be continued "
                    f"({kind}): {messages[-1]['content'][-80:]!r}. Remove them"
                )
            raise DataError(f"{self.name}: the chat template {problem}, or choose another model") from error

    def _find_frames(self) -> "_Frames | None":
        if (tree := self._parsed_template()) is None:
            return None
        question = [{"role": "user", "content": "?"}]
        try:
            opened = self.render(question)
            prompt = _frame(lambda text: self.render([{"role": "user", "content": text}]))
            whole = _frame(lambda text: self.render([*question, {"role": "assistant", "content": text}], opened=False))
        except DataError:  # rendering a row reports it
            return None
        if prompt is None or whole is None or not whole[0].startswith(opened):
            return None
        strings = {one.value.strip() for one in tree.find_all(nodes.Const) if isinstance(one.value, str)}
        literals = "|".join(re.escape(text) for text in sorted(strings) if text)
        return _Frames(prompt, (whole[0].removeprefix(opened), whole[1]), re.compile(literals or r"(?!)"))

    @cached_property
    def _closing(self) -> tuple[str, bytes]:
        """The text that the template writes after a response, and its ids from the first stop id on."""
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self.render(answered, opened=False).rpartition(_MARK)[2]
        [ids] = encode_whole(self.backend, [text])
        ends = np.flatnonzero(np.isin(np.frombuffer(ids, dtype=np.int32), [*self.stop_ids]))
        return text, ids[int(ends[0]) * ID_BYTES :] if len(ends) else b""

    def _whole(self, prompt: Messages, text: str, response: str) -> str:
        if not self.chat:
            return text + response
        try:
            *before, last = prompt
            if last["role"] == "assistant":
                messages = [*before, {**last, "content": last["content"] + response}]
            else:
                messages = [*before, last, {"role": "assistant", "content": response}]
            whole = self.render(messages, opened=False)
            self.require_response(text, whole, response)
        except DataError as error:
            raise ResponseChangedError(str(error)) from error
        return whole

    def _from_boundary(self, before: bytes, joint: bytes, written: str) -> bytes:
        alone, line_end, behind = encode_whole(self.backend, [written, "\n", f"\n{written}"])
        ways = [alone, *([behind[len(line_end) :]] if behind.startswith(line_end) else [])]
        text = self._decode(joint)
        for found in ways:
            if self._decode(before + found) == text:
                return found
        raise ResponseChangedError(f"leaves no token to begin with where the prompt ends, before {written[:40]!r}")

    def _decode(self, ids: bytes) -> str:
        return str(self.backend.decode(np.frombuffer(ids, dtype=np.int32).tolist(), skip_special_tokens=False))

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        if self._pieces is None:
            return encode_whole(self.backend, texts)
        found = self._pieces.encode(texts)
        sample = range(0, len(texts), _CHECK_EVERY)
        for index, ids in zip(sample, encode_whole(self.backend, [texts[i] for i in sample]), strict=True):
            if found[index] != ids:
                raise FastPathError(texts[index])
        return found

    def _parsed_template(self) -> nodes.Template | None:
        """Parse the chat template. Return None if it has an error, which rendering reports, or an unknown tag."""
        try:
            template = self._tokenizer.get_chat_template(tools=self._tools)
            # The extension parses tags of chat templates.
            return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except (TemplateSyntaxError, ValueError):
            return None

    def _require_read(self, names: Collection[str]) -> None:
        if (tree := self._parsed_template()) is None:
            return
        read = find_undeclared_variables(tree) - RENDERING_NAMES - set(self._tokenizer.special_tokens_map)
        if unread := sorted(set(names) - read):
            raise DataError(
                f"{self.name}: its chat template does not read {', '.join(unread)} (data.chat_template_kwargs), only "
                f"{', '.join(sorted(read)) or 'the messages'}. Correct the name or leave it out, or put a "
                "chat_template.jinja that reads it next to the tokenizer"
            )

    def _find_special_tokens(self) -> tuple[bytes, bytes]:
        """Return the special tokens that the tokenizer adds before and after plain text. An end-of-sequence token after
        the text is omitted."""
        [plain] = encode_whole(self.backend, ["a"])
        full = to_bytes(self.backend.encode("a").ids)
        for start in range(0, len(full) - len(plain) + 1, ID_BYTES):
            if full[start : start + len(plain)] == plain:
                after = full[start + len(plain) :]
                return full[:start], b"" if after == to_bytes([self._tokenizer.eos_token_id]) else after
        raise DataError(
            f"{self.name}: its special tokens must stand around a text, which they change ('a' has other tokens with "
            "than without them). Take another model, or prompts with a chat template"
        )


def to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def encode_whole(backend: Any, texts: Sequence[str]) -> list[bytes]:
    """Tokenize each text as a whole with the tokenizer itself, without special tokens. Return the ids as bytes."""
    found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [to_bytes(encoding.ids) for encoding in found]


class _Pieces(dict[str, bytes]):
    """A cache of the token ids of pieces, which are the texts between single spaces. `lead` (a space or '') is put
    before a piece when it is tokenized. Raises KeyError if other white space prevents tokenization by pieces."""

    def __init__(self, backend: Any, lead: str) -> None:
        super().__init__()
        self._backend, self._lead = backend, lead

    def __missing__(self, piece: str) -> bytes:
        if _OTHER_SPACE.search(piece) or (self._lead and not piece[:1].strip()):
            raise KeyError(piece)
        if len(self) >= _MAX_PIECES:
            self.clear()
        [self[piece]] = encode_whole(self._backend, [self._lead + piece])
        return self[piece]


def _frame(render: Callable[[str], str]) -> tuple[str, str] | None:
    """Return the texts that `render` writes before and after a message, or None if it changes messages."""
    before, mark, after = render(_MARK).partition(_MARK)
    spaced = f"{_MARK}  \n\t{_MARK}"
    return (before, after) if mark and render(spaced) == f"{before}{spaced}{after}" else None


def _checked(framed: str | None, place: int, render: Callable[[], str]) -> str:
    """Return `framed`, or the rendered text if `framed` is None. One of `_CHECK_EVERY` places is rendered too. Raises
    FastPathError if the two texts differ there."""
    if framed is not None and place % _CHECK_EVERY:
        return framed
    rendered = render()
    if framed not in (None, rendered):
        raise FastPathError(rendered)
    return rendered


@dataclass(frozen=True, slots=True)
class _Frames:
    """The texts that a chat template writes before and after the only message of a user, and before and after the
    response to such a message. `literals`: a pattern of the strings in the template. The template may treat a message
    that contains one of them, or that is empty, or that begins or ends with white space, in another way. Such messages
    are not framed."""

    of_prompt: tuple[str, str]
    of_response: tuple[str, str]
    literals: re.Pattern[str]

    def prompt(self, messages: Messages) -> str | None:
        """Return the rendered prompt, or None if the template must render it."""
        if len(messages) != 1 or messages[0]["role"] != "user" or not self._is_plain(content := messages[0]["content"]):
            return None
        return f"{self.of_prompt[0]}{content}{self.of_prompt[1]}"

    def response(self, messages: Messages, prompt: str, response: str) -> str | None:
        """Return the rendered prompt with its response, or None if the template must render them."""
        if not self._is_plain(response) or self.prompt(messages) is None:
            return None
        return f"{prompt}{self.of_response[0]}{response}{self.of_response[1]}"

    def _is_plain(self, text: str) -> bool:
        return text == text.strip() != "" and self.literals.search(text) is None


class PieceEncoder:
    """An encoder that splits a text at spaces and tokenizes each different piece once, without special tokens.

    The ids are the same as for the whole text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pieces = _Pieces(backend, " ")
        self._heads = _Pieces(backend, "")  # the first piece of a text

    @classmethod
    def of(cls, backend: Any) -> "PieceEncoder | None":
        """Return an encoder, or None if the `tokenizers.Tokenizer` does not split at single spaces."""
        return cls(backend) if _is_byte_level(json.loads(backend.to_str())) and _cuts_at_spaces(backend) else None

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the token ids of each text. Texts that cannot be split are tokenized as a whole."""
        found = [self._by_pieces(text) for text in texts]
        odd = [place for place, ids in enumerate(found) if ids is None]
        whole = iter(encode_whole(self._backend, [texts[place] for place in odd]))
        return [next(whole) if ids is None else ids for ids in found]

    def _by_pieces(self, text: str) -> bytes | None:
        if "\n " in text:
            return None
        head, *rest = text.split(" ")
        try:
            return b"".join((self._heads[head], *map(self._pieces.__getitem__, rest)))
        except KeyError:
            return None


def _last_piece(text: str) -> int:
    r"""Return the index of the last space if the text can be split there, otherwise 0.

    >>> _last_piece("add 1 and 2?\n"), _last_piece("add: ")
    (9, 0)
    """
    place = text.rfind(" ")
    is_cut = 0 < place < len(text) - 1 and not text[place - 1].isspace() and not text[place + 1].isspace()
    return place if is_cut else 0


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Return whether a tokenizer is byte-level BPE without steps that look at the text on both sides of a space."""
    plain_normalizer = description["normalizer"] is None or description["normalizer"]["type"] == "NFC"
    steps = description["pre_tokenizer"] or {}
    parts = steps.get("pretokenizers", [steps])
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    known = all(part.get("type") in ("ByteLevel", "Split", "Digits", "Punctuation") for part in parts)
    no_prefix = not any(part.get("add_prefix_space") for part in byte_level)
    plain_added = not any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or " " in token["content"]
        for token in description["added_tokens"]
    )
    is_bpe = description["model"]["type"] == "BPE"
    return bool(is_bpe and plain_normalizer and byte_level and known and no_prefix and plain_added)


def _cuts_at_spaces(backend: Any) -> bool:
    pairs = [(f"x{a}", f" {b}y") for a in _EDGES for b in _EDGES]
    pairs += [(f"{a}{a}\n{a}", f" {b}{b}") for a in _EDGES for b in _EDGES]
    whole = encode_whole(backend, [left + right for left, right in pairs])
    lefts = encode_whole(backend, [left for left, _ in pairs])
    rights = encode_whole(backend, [right for _, right in pairs])
    return all(ids == left + right for ids, left, right in zip(whole, lefts, rights, strict=True))
