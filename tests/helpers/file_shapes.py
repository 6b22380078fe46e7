"""Small files in the shapes that people publish, under the names of docs/data.md, and a tiny model that reads them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizer_kinds import KINDS

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # A chat template that writes tools and calls
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NUM_ROWS = 20

Rows = Callable[[int], dict[str, Any]]


def write_tokenizer(folder: Path) -> int:
    KINDS["chatml"].saved(folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return len(PreTrainedTokenizerFast.from_pretrained(folder))


def write_model(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM  # they load torch

    size = write_tokenizer(folder)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=2_048, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _question(n: int) -> str:
    return f"What is {n} + 1?"


def _messages(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _question(n)}, {"role": "assistant", "content": f"It is {n + 1}."}]


def _schema(source: str, truth: Callable[[int], Any], **extra: Callable[[int], Any]) -> Rows:
    return lambda n: {
        "data_source": source,
        "prompt": [{"role": "user", "content": _question(n)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth(n)},
        "extra_info": {name: value(n) for name, value in extra.items()},
    }


def _maths_of_eurus(n: int) -> dict[str, Any]:
    row = _schema("numina_cn_k12", lambda n: str(n + 1), split=lambda n: "train", index=lambda n: n)(n)
    return row | {"prompt": [{"role": "system", "content": "Think."}, *row["prompt"]]}


def _eurus(n: int) -> dict[str, Any]:
    program = {"style": "rule", "ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}
    others = {"data_source": "codeforces", "ability": "code", "reward_model": program}
    return _maths_of_eurus(n) | (others if n % 2 else {})


def _open_r1(n: int) -> dict[str, Any]:
    return {
        "problem": _question(n),
        "solution": rf"It is $\boxed{{{n + 1}}}$.",
        "answer": str(n + 1),
        "generations": [rf"<think>{n}</think> \boxed{{{n + 1}}}", "No."],
        "messages": _messages(n),
    }


def _called(n: int) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": n, "b": 1})}}
    asked, answered = _messages(n)
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": str(n + 1)}]
    return {"messages": [asked, *turns, answered], "tools": [ADD]}


def _parts(n: int) -> dict[str, Any]:
    return {"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in _messages(n)]}


PROBLEMS: dict[str, Rows] = {
    "dapo/{}.parquet": _schema("math_dapo", lambda n: str(n + 1), index=lambda n: f"9a9b6eb4-{n}"),
    "verl_gsm8k/{}.parquet": _schema(
        "openai/gsm8k", lambda n: str(n + 1), split=lambda n: "train", index=lambda n: n,
        answer=lambda n: f"#### {n + 1}", question=_question,
    ),
    "tinyzero/{}.parquet": _schema(
        "countdown", lambda n: {"target": n + 1, "numbers": [n, 1]}, split=lambda n: "train", index=lambda n: n
    ),
    "eurus/{}.parquet": _eurus,
    "eurus_maths/{}.parquet": _maths_of_eurus,
    "lighteval_math/{}.parquet": lambda n: {
        "problem": _question(n), "level": "Level 1", "type": "Algebra", "solution": rf"It is $\boxed{{{n + 1}}}$."
    },
    "open_r1/{}-00000-of-00001.parquet": _open_r1,
    "chats/{}.jsonl": lambda n: {
        "messages": [_messages(n)[0], {"role": "assistant", "content": rf"\boxed{{{n + 1}}}"}]
    },
    "array/{}.json": lambda n: {"question": _question(n), "answer": n + 1},
}  # fmt: skip
"""Files of problems: the name, with the split in its place, and a row by its number."""
DEMONSTRATIONS: dict[str, Rows] = {
    "openai.jsonl": lambda n: {"messages": _messages(n)},
    "parts.jsonl": _parts,
    "calls.jsonl": _called,
    "trl.parquet": lambda n: {"prompt": _messages(n)[:1], "completion": _messages(n)[1:]},
    "texts.jsonl": lambda n: {"prompt": f"Q: {_question(n)} A:", "completion": f" {n + 1}"},
    "pairs.jsonl": lambda n: {
        "prompt": _messages(n)[:1], "chosen": _messages(n)[1:], "rejected": [{"role": "assistant", "content": "No."}]
    },
}  # fmt: skip
"""Files of demonstrations: the name, and a row by its number."""


def write_files(folder: Path) -> None:
    for name, row in PROBLEMS.items():
        for first, split in ((0, "train"), (NUM_ROWS, "test")):
            write_rows(folder / name.format(split), [row(first + n) for n in range(NUM_ROWS)])
    for name, row in DEMONSTRATIONS.items():
        write_rows(folder / name, [row(n) for n in range(NUM_ROWS)])


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    """Write rows in the form that the file's name states: parquet, a JSON array, or lines of JSON."""
    file.parent.mkdir(exist_ok=True)
    match file.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), file)
        case ".json":
            file.write_text(json.dumps(rows, indent=2))
        case _:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
