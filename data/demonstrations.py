"""The user's demonstrations for the warm start, tokenized once: conversations, or prompts with completions.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}    OpenAI
    {"prompt": [messages], "completion": [messages]}                                                TRL
    {"prompt": "plain text", "completion": "plain text"}

The targets, which are the tokens to learn, are the assistant's turns with their end tokens. If a row has a
`completion`, only turns of the `completion` are targets. If the `prompt` ends with a message of the assistant, only the
continuation of this message is a target. Each split of the result has the columns `token_ids` and `answer_lengths`.
`token_ids` is the whole conversation. `answer_lengths` gives the lengths of the runs of tokens, which alternate between
context and targets.

With `warm_start.loss=dpo`, each row is a preference pair. The columns `rejected_ids` and `rejected_lengths` then
describe the rejected conversation. The file has the columns that TRL uses for pairs:

    {"prompt": "plain text", "chosen": "plain text", "rejected": "plain text"}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    {"chosen": [messages], "rejected": [messages]}     both begin with the messages of the prompt
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.records import Record, records_of
from data.schema import ROWS_PER_GROUP, parquet_writer, provenance_metadata
from data.tasks import StageResult
from data.tokenizer import ID_BYTES, PromptTokenizer, ResponseChangedError, encode_whole, tokenizer_fingerprint
from rlcore.config import RunConfig, WarmStartConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.storage.documents import content_digest
from rlcore.storage.manifest import FILE_SHA256, read_finished_or_set_aside
from rlcore.storage.publish import published_directory

VERSION = 1  # increase it when the same rows give other columns or token ids
ROLES = ("system", "user", "assistant", "tool")
MOST_HELD_OUT = 10  # the number of rows per held-out row: at most one in ten is held out
_IDS = pa.list_(pa.int32())
_NAMES = ("token_ids", "answer_lengths", "rejected_ids", "rejected_lengths")


class _Tokenized(NamedTuple):
    ids: bytes
    lengths: tuple[int, ...]  # of alternating runs of context and target tokens


def tokenized_directory(config: RunConfig, tokenizer_dir: Path) -> Path:
    """Return the folder below `paths.root` for the tokenized rows of the file `warm_start.demonstrations`."""
    warm = config.warm_start
    payload = {
        "version": VERSION,
        "file": content_digest(Path(warm.demonstrations or "")),
        "tokenizer": tokenizer_fingerprint(tokenizer_dir),
        "max_tokens": warm.max_tokens,
        "held_out_rows": warm.held_out_rows,
        "seed": config.data.seed,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        **({"loss": warm.loss} if warm.loss == "dpo" else {}),
    }
    return Path(config.paths.root).resolve() / "demonstrations" / fingerprint("demonstrations", payload)


def tokenize_demonstrations(config: RunConfig, tokenizer_dir: Path) -> StageResult:
    """Tokenize a file of demonstrations and hold out some rows, or reuse a stored result.

    The result counts the rows of `train` and `validation`, and the omitted rows: `overlong`, `empty` (a turn without
    text), `duplicate` and `identical` (the chosen and the rejected response are equal). Raises DataError if a row has
    an invalid form, the template changes a response, or fewer than two rows remain. Raises DiskSpaceError if the disk
    is full. No partial result remains after an error."""
    directory = tokenized_directory(config, tokenizer_dir)
    if (manifest := read_finished_or_set_aside(directory)) is not None:
        return StageResult(directory, cached=True, counts=manifest.values["counts"])
    warm, counts = config.warm_start, Counter[str]()
    file = Path(warm.demonstrations or "").expanduser()
    kept = list(_rows_that_fit(config, tokenizer_dir, counts))
    if len(kept) < 2:
        reasons = ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "the file has too few rows"
        raise DataError(
            f"{file}: two demonstrations at least must be left, {len(kept)} are ({reasons}). Raise "
            f"warm_start.max_tokens (now {warm.max_tokens}), or check the file"
        )
    num_held_out = min(warm.held_out_rows, len(kept) // MOST_HELD_OUT)
    held_out = set(np.random.default_rng(config.data.seed).permutation(len(kept))[:num_held_out].tolist())
    splits: dict[str, list[tuple[_Tokenized, ...]]] = {"train": [], "validation": []}
    for place, row in enumerate(kept):
        splits["validation" if place in held_out else "train"].append(row)
    counts.update({split: len(rows) for split, rows in splits.items()})
    facts: dict[str, Any] = {"kind": "demonstrations", "fingerprint": directory.name, "file": str(file)}
    facts |= {FILE_SHA256: content_digest(file), "counts": dict(sorted(counts.items()))}
    schema = pa.schema([(name, _IDS) for name in _NAMES[: 2 * len(kept[0])]])
    with published_directory(directory, facts) as folder:
        for split, rows in splits.items():
            with parquet_writer(folder / f"{split}.parquet", schema) as writer:
                for start in range(0, len(rows), ROWS_PER_GROUP):
                    arrays = []
                    for each in zip(*rows[start : start + ROWS_PER_GROUP], strict=True):
                        arrays.append(pa.array([np.frombuffer(one.ids, dtype=np.int32) for one in each], _IDS))
                        arrays.append(pa.array([list(one.lengths) for one in each], _IDS))
                    writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
                writer.add_key_value_metadata(provenance_metadata({**facts, "split": split}))
    return StageResult(directory, cached=False, counts=facts["counts"])


def check_first_row(config: WarmStartConfig) -> None:
    """Raise DataError if the file has no row or the form of its first row is wrong."""
    file = Path(config.demonstrations or "").expanduser()
    if (first := next(records_of(file), None)) is None:
        raise DataError(f"warm_start.demonstrations: {file} must have rows, and is empty. Name another file")
    for row in _chosen_and_rejected(first) if config.loss == "dpo" else [first]:
        if _is_chat(row):
            _conversation(row)


def _rows_that_fit(config: RunConfig, tokenizer_dir: Path, counts: Counter[str]) -> Iterator[tuple[_Tokenized, ...]]:
    """Yield the tokenized responses of each row: two for a preference pair, otherwise one.

    Rows that are empty, overlong, identical or duplicate are omitted and counted in `counts`."""
    warm, tokenizer = config.warm_start, None
    rows, size = records_of(Path(warm.demonstrations or "").expanduser()), 1 + (warm.loss == "dpo")
    seen = set[int]()
    while batch := list(islice(rows, ROWS_PER_GROUP)):
        if warm.loss == "dpo":
            batch = [response for row in batch for response in _chosen_and_rejected(row)]
        if tokenizer is None:
            chat, kwargs = _is_chat(batch[0]), config.data.chat_template_kwargs
            tokenizer = PromptTokenizer(tokenizer_dir, chat=chat, fast_path=False, chat_template_kwargs=kwargs)
        found = (_conversations if tokenizer.chat else _completions)(batch, tokenizer)
        for start in range(0, len(found), size):
            row = tuple(response for response in found[start : start + size] if response is not None)
            if len(row) < size:
                counts["empty"] += 1
            elif max(len(response.ids) for response in row) > warm.max_tokens * ID_BYTES:
                counts["overlong"] += 1
            elif size == 2 and row[0].ids == row[1].ids:
                counts["identical"] += 1
            elif (key := hash(row)) in seen:
                counts["duplicate"] += 1
            else:
                seen.add(key)
                yield row


def _chosen_and_rejected(row: Record) -> list[Record]:
    """Return both responses of a pair as demonstrations with `prompt` and `completion`."""
    values = row.values
    chosen, rejected, prompt = (values.get(name) for name in ("chosen", "rejected", "prompt"))
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = takewhile(lambda both: both[0] == both[1], zip(chosen[:-1], rejected[:-1], strict=False))
        prompt = [message for message, _ in shared]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen is None or rejected is None or not prompt:
        columns = ", ".join(map(str, values)) or "none"
        raise DataError(
            f"{row.where}: a preference pair must have a prompt, chosen and rejected (docs/data.md), got the columns "
            f"{columns}; rename them, repair the row, or set warm_start.loss=nll for demonstrations"
        )
    more = {"tools": values["tools"]} if values.get("tools") else {}
    return [
        Record(f"{row.where}: {name}", {"prompt": prompt, "completion": response, **more})
        for name, response in (("chosen", chosen), ("rejected", rejected))
    ]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a row. The targets are the assistant's turns from message `first` on.

    `begun`: the beginning of message `first` that belongs to the prompt and is not a target, or ''."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    first: int = 0
    begun: str = ""

    @property
    def learned(self) -> list[int]:
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant" and n >= self.first]


def _is_chat(row: Record) -> bool:
    """Return whether a row is a conversation. Raises DataError if it is neither a conversation nor plain text."""
    values = row.values
    if "messages" in values or (isinstance(values.get("prompt"), list) and "completion" in values):
        return True
    if not {"prompt", "completion"} <= values.keys():
        columns = ", ".join(map(str, values)) or "none"
        pairs = "set warm_start.loss=dpo for preference pairs, or " if {"chosen", "rejected"} <= values.keys() else ""
        raise DataError(
            f"{row.where}: must have messages, or prompt and completion, got the columns {columns}; {pairs}rename or "
            "convert them (docs/data.md)"
        )
    return False


def _conversation(row: Record) -> _Conversation:
    values = row.values
    prompt, found, first = values.get("prompt"), values.get("messages"), 0
    if "messages" not in values:
        if not isinstance(prompt, list) or "completion" not in values:
            columns = ", ".join(map(str, values)) or "none"
            raise DataError(
                f"{row.where}: must be a conversation, as the first row of the file is, got the columns {columns}; "
                "rename them, or write the row to a separate file"
            )
        found = values["completion"]
        if isinstance(found, list):
            found, first = [*prompt, *found], len(prompt)
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{row.where}: messages must be a list of messages with role and content, got {found!r:.80}; repair or "
            "remove it"
        )
    messages = [_message(message, f"{row.where}: message {number}") for number, message in enumerate(found)]
    begun = ""
    if 0 < first < len(messages) and messages[first - 1]["role"] == messages[first]["role"] == "assistant":
        first -= 1
        before, rest = messages[first : first + 2]
        begun = before["content"]
        messages[first : first + 2] = [{**before, **rest, "content": begun + rest["content"]}]
    conversation = _Conversation(messages, _tools(row), first, begun)
    roles = [message["role"] for message in messages]
    if not any(conversation.learned) or roles[0] == "assistant":
        raise DataError(
            f"{row.where}: an assistant's turn must follow another one's, got the roles {', '.join(roles)}; there is "
            "nothing to learn: repair or remove it"
        )
    return conversation


def _message(found: object, where: str) -> dict[str, Any]:
    message = found if isinstance(found, dict) else {}
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}; rename it, or remove the row")
    if content is None and calls and role == "assistant":
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    _require_text(content, f"{where}: content")
    more = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    if calls:
        more["tool_calls"] = [_tool_call(call, where) for call in calls]
    return {"role": role, "content": content, **more}


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. Arguments that are given as JSON text are parsed, because a
    chat template would put the text in quotes."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: tool_calls must have a function with a name, got {call!r:.80}; repair it")
    arguments = _from_json(function.get("arguments") or {}, f"{where}: arguments of {function['name']}")
    return {**call, "function": {**function, "arguments": arguments}}  # type: ignore[dict-item]


def _tools(row: Record) -> tuple[dict[str, Any], ...]:
    """Return the function schemas in the column `tools` of a row. The column contains a list, or a list as JSON
    text."""
    found = _from_json(row.values.get("tools") or (), f"{row.where}: tools")
    schemas = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in found]
    if not isinstance(found, list | tuple) or not all(isinstance(one, dict) and "name" in one for one in schemas):
        raise DataError(f"{row.where}: tools must be a list of function schemas, got {found!r:.80}; repair it")
    return tuple(found)


def _from_json(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{what} must be JSON ({error}); repair it") from error


def _require_text(found: object, what: str) -> None:
    if not isinstance(found, str):
        raise DataError(f"{what} must be text, got {found!r:.80}; repair it")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} must be UTF-8 ({error}); repair or remove it") from error


def _completions(rows: Sequence[Record], tokenizer: PromptTokenizer) -> list[_Tokenized | None]:
    for row in rows:
        for name in ("prompt", "completion"):
            _require_text(row.values.get(name), f"{row.where}: {name}")
    texts = [row.values["prompt"] for row in rows]
    prompts = tokenizer.encode_prompts(texts)
    messages = [[{"role": "user", "content": text}] for text in texts]
    targets, unwritten = tokenizer.encode_responses(messages, texts, [row.values["completion"] for row in rows])
    for place, why in unwritten.items():
        raise DataError(f"{rows[place].where}: completion: {why}; put white space between it and the prompt")
    return [
        _Tokenized(prompt + target, (len(prompt) // ID_BYTES, len(target) // ID_BYTES)) if prompt and target else None
        for prompt, target in zip(prompts, targets, strict=True)
    ]


def _conversations(rows: Sequence[Record], tokenizer: PromptTokenizer) -> list[_Tokenized | None]:
    conversations = [_conversation(row) for row in rows]
    prefixes = []
    for row, conversation in zip(rows, conversations, strict=True):
        try:
            prefixes.append(_prefixes(conversation, tokenizer))
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
    ids = iter(encode_whole(tokenizer.backend, [text for texts in prefixes for text in texts]))
    return [
        _tokenize(row.where, conversation, list(islice(ids, len(texts))), texts, tokenizer)
        for row, conversation, texts in zip(rows, conversations, prefixes, strict=True)
    ]


def _prefixes(conversation: _Conversation, tokenizer: PromptTokenizer) -> list[str]:
    messages, found = conversation.messages, []
    render = partial(tokenizer.render, tools=conversation.tools)
    for place in conversation.learned:
        if place == conversation.first and conversation.begun:
            words = {"role": "assistant", "content": conversation.begun}
            before = tokenizer.prompt([*messages[:place], words], tools=conversation.tools)
        else:
            before = render(messages[:place])
        found += [before, render(messages[: place + 1], opened=False)]
    return [*found, render(messages, opened=False)]


def _tokenize(
    where: str, conversation: _Conversation, ids: list[bytes], texts: list[str], tokenizer: PromptTokenizer
) -> _Tokenized | None:
    turns = [conversation.messages[place] for place in conversation.learned]
    answers = [turn["content"] for turn in turns]
    answers[0] = answers[0].removeprefix(conversation.begun)
    answers = [answer.strip() for answer in answers]
    for schema in conversation.tools:
        if (name := schema.get("function", schema)["name"]) not in texts[0]:
            raise DataError(
                f"{where}: the chat template of {tokenizer.name} does not show the function {name} of the row's tools. "
                "Use a template that renders `tools`, or remove them"
            )
    if not all(answer or "tool_calls" in turn for turn, answer in zip(turns, answers, strict=True)):
        return None
    lengths: list[int] = []
    whole = ids[-1]
    for number, answer in enumerate(answers):
        before, after = 2 * number, 2 * number + 1
        try:
            tokenizer.require_response(texts[before], texts[after], answer)
            written = texts[after][len(texts[before]) :]
            for call in turns[number].get("tool_calls", ()):
                if (name := call["function"]["name"]) not in written:
                    raise ResponseChangedError(f"does not write the call of {name}")
            learned = tokenizer.response_ids(ids[before], ids[after], written)
        except ResponseChangedError as error:
            raise DataError(_changed(where, number, str(error), tokenizer)) from error
        ended = ids[before] + learned
        if texts[after + 1] == texts[after]:
            whole = ended + tokenizer.after_end()
        elif not ids[after + 1].startswith(ended):
            raise DataError(_changed(where, number, "writes it differently before the turns that follow", tokenizer))
        lengths += [len(ids[before]) // ID_BYTES - sum(lengths), len(learned) // ID_BYTES]
    lengths.append(len(whole) // ID_BYTES - sum(lengths))
    return _Tokenized(whole, tuple(lengths))


def _changed(where: str, number: int, how: str, tokenizer: PromptTokenizer) -> str:
    return (
        f"{where}: the chat template of {tokenizer.name} drops or changes response {number} of the conversation: it "
        f"{how}. So the targets would differ from sampled text. Cut the conversation before that response, or use "
        "a template that keeps every turn"
    )
