"""Small files in the shapes that docs/data.md names, and a model with a chat template for them."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.models.tiny import CONFIGS

NUM_ROWS = {"train": 6, "test": 3}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _asked(split: str, number: int) -> str:
    return f"{split}: {number} + 1?"


def write_shapes(folder: Path) -> None:
    """Write files with the names that docs/data.md gives them."""
    for name in ("verl", "chats", "sheet"):
        (folder / name).mkdir()
    for split, count in NUM_ROWS.items():
        asked = [(_asked(split, n), str(n + 1)) for n in range(count)]
        extra = [{"split": split, "index": n, "question": text} for n, (text, _) in enumerate(asked)]
        rows = [_in_schema("openai/gsm8k", *pair, more) for pair, more in zip(asked, extra, strict=True)]
        _parquet(folder / "verl" / f"{split}.parquet", rows)
        name = "dapo-math-17k" if split == "train" else "aime-2024"
        dapo = [_in_schema("math_dapo", *pair, {"index": f"9a9b6eb4-{n}"}) for n, pair in enumerate(asked)]
        _parquet(folder / f"{name}.parquet", dapo * 3)
        talks = [{"messages": [_said("user", text), _said("assistant", answer)]} for text, answer in asked]
        _lines(folder / "chats" / f"{split}.jsonl", talks)
        with (folder / "sheet" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("Question", "Answer"), *asked])
    asked = [(_asked("shown", n), f"It is {n + 1}.") for n in range(NUM_ROWS["train"])]
    turns = (("human", "gpt"), asked)
    _lines(
        folder / "sharegpt.jsonl",
        [{"conversations": [{"from": who, "value": text} for who, text in zip(turns[0], pair, strict=True)]}
         for pair in asked],
    )  # fmt: skip
    alpaca = [{"instruction": text, "input": "", "output": answer} for text, answer in asked]
    (folder / "alpaca_data.json").write_text(json.dumps(alpaca, indent=4))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = [_said("assistant", None, tool_calls=[call]), _said("tool", "2", tool_call_id="1")]
    _lines(
        folder / "tool_calls.jsonl",
        [{"messages": [_said("user", text), *calling, _said("assistant", answer)]} for text, answer in asked],
    )
    parts = [[[{"type": "text", "text": text}] for text in pair] for pair in asked]
    _lines(folder / "parts.jsonl", [{"messages": [_said("user", a), _said("assistant", b)]} for a, b in parts])
    trl = [{"prompt": [_said("user", text)], "completion": [_said("assistant", answer)]} for text, answer in asked]
    _parquet(folder / "prompt_completion.parquet", trl)


def _in_schema(data_source: str, question: str, answer: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [_said("user", question)],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": extra,
    }


def _lines(file: Path, rows: Sequence[object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file)


def write_chat_model(folder: Path) -> None:
    """Write a tiny model made from nothing, with a token for each byte and a template that writes calls of tools."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: place for place, token in enumerate((*special, *alphabet))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=special[0], eos_token=special[2], chat_template=_TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [special[1]]})
    tokenizer.save_pretrained(folder)
    config = CONFIGS["qwen2-tied"]()
    config.vocab_size, config.max_position_embeddings, config.eos_token_id = len(tokenizer), 1_024, 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
