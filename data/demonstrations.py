"""Demonstrations of one's own for the warm start, tokenized once: conversations, or prompts with completions.

A row of the file is one of

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}     ShareGPT
    {"prompt": [messages], "completion": [messages]}                                             TRL
    {"instruction": ..., "input": ..., "output": ...}                                            Alpaca
    {"prompt": "plain text", "completion": "plain text"}

A content is a text or a list of parts `{"type": "text", "text": ...}`; an answer may have `tool_calls` in place of it.
Each turn of the assistant is learned, with the end token after it, and nothing else. A chat template may write a turn
otherwise once another follows (some cut out what was thought): then what is learned is not what is sampled, so each
prefix of a conversation must keep its tokens. The result has, for training and held out,

    token_ids        list<int32>   the whole conversation
    answer_lengths   list<int32>   runs of tokens that are no answer's and of an answer's, in turn
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.schema import ROWS_PER_GROUP, provenance_metadata
from data.sources import Record, records_of
from data.stage import StageResult, source_digest
from data.tokenizer import ID_BYTES, PromptTokenizer, encode_whole, tokenizer_fingerprint
from data.write import parquet_writer
from rlcore.config import WarmStartConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.run.inputs import FILE_SHA256, content_digest
from rlcore.storage.finished import finished_or_set_aside
from rlcore.storage.publish import published_directory

DEMONSTRATIONS_FORMAT = 1
"""Raise it when the columns of tokenized demonstrations change."""
ROLES = ("system", "user", "assistant", "tool")
_CONVERSATIONS = {"messages", "conversations", "instruction"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_NOT_SHOWN = ("tools", "history")
"""Columns beside a conversation that belong to what the model sees, and are not put there."""
MOST_HELD_OUT = 10
"""One row in so many is held out, at most."""
_SOURCE = ("data.demonstrations", "data.sources", "data.tokenizer")
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("token_ids", _IDS), ("answer_lengths", _IDS)])


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A row: its ids as bytes, and runs of tokens in turn, see `answer_lengths`."""

    ids: bytes
    lengths: tuple[int, ...]


Encode = Callable[[Sequence[Record]], list[Tokenized | None]]
"""Tokenizes rows: None for one without text to learn."""


def demonstrations_fingerprint(
    config: WarmStartConfig, tokenizer_dir: Path, *, seed: int, chat_template_kwargs: Mapping[str, Any] | None = None
) -> str:
    """Fingerprint of the tokenized demonstrations of `warm_start.demonstrations`."""
    payload = {
        "format": DEMONSTRATIONS_FORMAT,
        "file": content_digest(Path(config.demonstrations or "")),
        "tokenizer": tokenizer_fingerprint(tokenizer_dir),
        "max_tokens": config.max_tokens,
        "held_out_rows": config.held_out_rows,
        "seed": seed,
        "source": source_digest(*_SOURCE),
        **({"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {}),
    }
    return fingerprint("demonstrations", payload)


def tokenize_demonstrations(
    config: WarmStartConfig,
    tokenizer_dir: Path,
    *,
    seed: int,
    root: Path,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> StageResult:
    """Tokenize a file of demonstrations, unless that has been done, and hold out some of them.

    Counts are rows of `train` and `validation`, and of what was left out: `overlong`, `empty` (an answer without text),
    `duplicate`. `chat_template_kwargs` are further names that the chat template reads.

    Raises:
        DataError: a row that breaks the form, an answer that the template changes, or no row left.
        DiskSpaceError: no room. Nothing is left behind.
    """
    digest = demonstrations_fingerprint(config, tokenizer_dir, seed=seed, chat_template_kwargs=chat_template_kwargs)
    directory = root / "demonstrations" / digest
    if (manifest := finished_or_set_aside(directory)) is not None:
        return StageResult(directory, digest, cached=True, counts=manifest.values["counts"])
    file = Path(config.demonstrations or "").expanduser()
    counts: Counter[str] = Counter()
    kept = _fitting(file, partial(_encoder, tokenizer_dir, chat_template_kwargs), config.max_tokens, counts)
    if len(kept) < 2:
        reasons = ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "the file has too few rows"
        raise DataError(
            f"{file}: two demonstrations at least must be left, {len(kept)} are ({reasons}). Raise "
            f"warm_start.max_tokens (now {config.max_tokens}), or check the file"
        )
    num_held_out = min(config.held_out_rows, len(kept) // MOST_HELD_OUT)
    order = np.random.default_rng(seed).permutation(len(kept))
    held_out = set(order[:num_held_out].tolist())
    splits = {
        "train": [row for place, row in enumerate(kept) if place not in held_out],
        "validation": [row for place, row in enumerate(kept) if place in held_out],
    }
    counts.update({split: len(rows) for split, rows in splits.items()})
    facts: dict[str, Any] = {"kind": "demonstrations", "fingerprint": digest, "file": str(file)}
    facts[FILE_SHA256] = content_digest(file)
    facts["counts"] = dict(sorted(counts.items()))
    with published_directory(directory, facts) as folder:
        for split, rows in splits.items():
            _write(folder / f"{split}.parquet", rows, facts)
    return StageResult(directory, digest, cached=False, counts=facts["counts"])


def try_demonstrations(
    config: WarmStartConfig,
    tokenizer_dir: Path | None,
    num_rows: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Tokenize the first rows as the stage will, where the tokenizer is there, and read the lines that follow.

    Raises:
        DataError: a row breaks the form, a line cannot be read, or the template changes an answer.
    """
    file = Path(config.demonstrations or "").expanduser()
    rows = records_of(file)
    first = list(islice(rows, num_rows))
    if first and tokenizer_dir is not None:
        _encoder(tokenizer_dir, chat_template_kwargs, first[0])(first)
    if file.suffix == ".jsonl":
        deque(rows, maxlen=0)


def _fitting(file: Path, encoder: Callable[[Record], Encode], max_tokens: int, counts: Counter[str]) -> list[Tokenized]:
    """The rows that are left, in the file's order; the others are counted."""
    rows, kept, seen = records_of(file), [], set()
    encode: Encode | None = None
    while batch := list(islice(rows, ROWS_PER_GROUP)):
        encode = encode or encoder(batch[0])
        for found in encode(batch):
            if found is None:
                counts["empty"] += 1
            elif len(found.ids) > max_tokens * ID_BYTES:
                counts["overlong"] += 1
            elif (key := hash((found.ids, found.lengths))) in seen:
                counts["duplicate"] += 1
            else:
                seen.add(key)
                kept.append(found)
    return kept


def _write(target: Path, rows: Sequence[Tokenized], facts: Mapping[str, Any]) -> None:
    with parquet_writer(target, _SCHEMA) as writer:
        for start in range(0, len(rows), ROWS_PER_GROUP):
            batch = rows[start : start + ROWS_PER_GROUP]
            ids = [np.frombuffer(row.ids, dtype=np.int32) for row in batch]
            arrays = [pa.array(ids, _IDS), pa.array([list(row.lengths) for row in batch], _IDS)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
        writer.add_key_value_metadata(provenance_metadata({**facts, "split": target.stem}))


# ---------------------------------------------------------------------- rows of the file


def _messages(row: Record) -> list[dict[str, Any]]:
    """The row's messages, checked: role, content as text, and what calls of tools have beside it."""
    if left_out := [name for name in _NOT_SHOWN if row.values.get(name)]:
        raise DataError(
            f"{row.where}: {left_out[0]} is not shown to the model, got {row.values[left_out[0]]!r:.80}; repair the "
            "row: write it into the messages, and remove the column"
        )
    name, found = _conversation(row.values)
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{row.where}: {name} must be a list of messages with role and content, got {found!r:.80}; repair or "
            "remove it"
        )
    if system := row.values.get("system"):
        found = [{"role": "system", "content": system}, *found]
    messages = [_message(entry, f"{row.where}: message {number}") for number, entry in enumerate(found)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise DataError(
            f"{row.where}: an assistant's turn must follow another one's, got the roles {', '.join(roles)}; there is "
            "nothing to learn: repair or remove it"
        )
    return messages


def _conversation(values: Mapping[str, Any]) -> tuple[str, Any]:
    """What a row has its messages in, and these."""
    for name in ("messages", "conversations"):
        if name in values:
            return name, values[name]
    if "instruction" in values:
        asked = [text for text in (values["instruction"], values.get("input")) if text]
        question = "\n\n".join(map(str, asked)) if all(isinstance(text, str) for text in asked) else None
        answer = {"role": "assistant", "content": values.get("output")}
        return "instruction and output", [{"role": "user", "content": question}, answer]
    for name in ("prompt", "completion"):
        if not isinstance(values.get(name), list):
            return name, values.get(name)
    return "prompt", [*values["prompt"], *values["completion"]]


def _message(entry: Any, where: str) -> dict[str, Any]:
    """A message as chat templates read it: without fields that are null, arguments of calls as an object."""
    fields = {name: value for name, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
    role = fields.get("role", _SHAREGPT_ROLES.get(fields.get("from", ""), fields.get("from")))
    if role not in ROLES:
        raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}; rename it, or remove the row")
    calls = fields.get("tool_calls") or []
    content = fields.get("content", fields.get("value", "" if calls else None))
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
            for part in content
        ]
        content = None if None in parts else "".join(parts)
    _require_text(content, f"{where}: content")
    message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = [_call(call, f"{where}: tool_calls") for call in calls]
    return message | {name: fields[name] for name in ("name", "tool_call_id") if name in fields}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool; its arguments may be JSON in a text, as in OpenAI's files."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise DataError(f"{where}: must have a name and arguments as an object each, got {call!r:.200}; repair it")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def _words(message: Mapping[str, Any]) -> list[str]:
    """What a template must write of an answer: its text, and the names of the tools that it calls."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [word for word in (message["content"].strip(), *calls) if word]


def _require_text(found: object, what: str) -> None:
    if not isinstance(found, str):
        raise DataError(f"{what} must be text, got {found!r:.80}; repair it")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} must be UTF-8 ({error}); repair or remove it") from error


# ---------------------------------------------------------------------- rows to tokens


def _encoder(tokenizer_dir: Path, chat_template_kwargs: Mapping[str, Any] | None, first: Record) -> Encode:
    """How the rows of a file are tokenized, by the form of the first: None for one without text to learn."""
    values = first.values
    has_both = {"prompt", "completion"} <= values.keys()
    is_chat = has_both and not isinstance(values["prompt"], str)
    if is_chat or not _CONVERSATIONS.isdisjoint(values):
        return _Conversations(tokenizer_dir, chat_template_kwargs).encode
    if has_both:
        tokenizer = PromptTokenizer(tokenizer_dir, chat=False, short_way=False)
        return lambda rows: _completions(rows, tokenizer)
    columns = ", ".join(map(str, first.values)) or "none"
    raise DataError(
        f"{first.where}: must have messages, conversations, instruction and output, or prompt and completion, got the "
        f"columns {columns}; rename them"
    )


def _completions(rows: Sequence[Record], tokenizer: PromptTokenizer) -> list[Tokenized | None]:
    for row in rows:
        for name in ("prompt", "completion"):
            _require_text(row.values.get(name), f"{row.where}: {name}")
    prompts = tokenizer.encode_prompts([row.values["prompt"] for row in rows])
    answers = tokenizer.encode_answers([row.values["completion"] for row in rows])
    return [
        Tokenized(prompt + answer, (len(prompt) // ID_BYTES, len(answer) // ID_BYTES)) if prompt and answer else None
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


class _Conversations:
    """Tokenizes conversations by the chat template."""

    def __init__(self, tokenizer_dir: Path, chat_template_kwargs: Mapping[str, Any] | None) -> None:
        self._name = str(tokenizer_dir)
        self._tokenizer = PromptTokenizer(
            tokenizer_dir, chat=True, short_way=False, chat_template_kwargs=chat_template_kwargs
        )

    def encode(self, rows: Sequence[Record]) -> list[Tokenized | None]:
        """Ids and answers of each row; all prefixes of all rows are tokenized together."""
        conversations = [_messages(row) for row in rows]
        prefixes = [self._prefixes(messages) for messages in conversations]
        ids = iter(encode_whole(self._tokenizer.backend, [text for texts in prefixes for text in texts]))
        return [
            self._tokenized(row.where, messages, list(islice(ids, len(texts))), texts)
            for row, messages, texts in zip(rows, conversations, prefixes, strict=True)
        ]

    def _prefixes(self, messages: list[dict[str, Any]]) -> list[str]:
        """Up to each answer's first token, up to its end, and the whole: each begins with the one before."""
        render, found = self._tokenizer.render, []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                found += [render(messages[:place]), render(messages[: place + 1], opened=False)]
        return [*found, render(messages, opened=False)]

    def _tokenized(
        self, where: str, messages: list[dict[str, Any]], ids: list[bytes], texts: list[str]
    ) -> Tokenized | None:
        answers = [_words(message) for message in messages if message["role"] == "assistant"]
        if not all(answers):
            return None
        lengths: list[int] = []
        for number, answer in enumerate(answers):
            before, after, following = (2 * number, 2 * number + 1, 2 * number + 2)
            written = texts[after][len(texts[before]) :]
            if not texts[after].startswith(texts[before]) or any(word not in written for word in answer):
                raise DataError(self._changed(where, number, "does not write it as it is"))
            if not (ids[after].startswith(ids[before]) and ids[following].startswith(ids[after])):
                raise DataError(self._changed(where, number, "writes what came before it otherwise afterwards"))
            end = self._end_of_answer(ids[after], len(ids[before]), where)
            lengths += [len(ids[before]) // ID_BYTES - sum(lengths), 0]
            lengths[-1] = end // ID_BYTES - sum(lengths)
        lengths.append(len(ids[-1]) // ID_BYTES - sum(lengths))
        return Tokenized(ids[-1], tuple(lengths))

    def _end_of_answer(self, ids: bytes, start: int, where: str) -> int:
        """Right after the end token: what a template writes behind it is never sampled."""
        tokens = np.frombuffer(ids[start:], dtype=np.int32)
        ends = np.flatnonzero(tokens == self._tokenizer.end_of_text)
        if not len(ends):
            raise DataError(
                f"{where}: the chat template of {self._name} ends the assistant's turn without the tokenizer's "
                f"eos_token {self._tokenizer.end_of_text}, so nothing would teach the model to stop; set eos_token to "
                "the token that ends a turn"
            )
        return start + (int(ends[-1]) + 1) * ID_BYTES

    def _changed(self, where: str, number: int, how: str) -> str:
        return (
            f"{where}: the chat template of {self._name} drops or changes answer {number} of the conversation (it "
            f"{how}), so what is learned would not be what is sampled. Cut the conversation after that answer, or use "
            "a template that keeps every turn"
        )
