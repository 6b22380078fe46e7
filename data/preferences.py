"""Preference pairs: a prompt with a chosen and a rejected response, in TRL's columns, from a file or a recorded run.

{"prompt": "plain text", "chosen": "plain text", "rejected": "plain text"}
{"prompt": [messages], "chosen": [messages], "rejected": [messages]}
{"chosen": [messages], "rejected": [messages]}     both begin with the messages of the prompt
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data.records import Record
from rlcore.batching.prompts import is_chat
from rlcore.errors import DataError
from rlcore.prompt import ROWS_PER_SOURCE
from rlcore.responses.query import SearchResult

_GROUP = ["step", "data_source", "prompt_id"]


def chosen_and_rejected(row: Record) -> tuple[Record, Record]:
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
    first, second = (
        Record(f"{row.where}: {name}", {"prompt": prompt, "completion": response, **more})
        for name, response in (("chosen", chosen), ("rejected", rejected))
    )
    return first, second


def recorded_pairs(found: SearchResult, files: Sequence[Path], run: str) -> list[dict[str, Any]]:
    """Return the best and the worst recorded response of each group as a pair. `files` contain the prompts.

    Responses that end at the length limit or have no score are left out, and so are groups with equal scores."""
    light = found.light.select([*_GROUP, "score", "finish_reason"]).to_pandas()
    groups = light[light.score.notna() & (light.finish_reason == "stop")].groupby(_GROUP, sort=False).score
    differ = groups.max() > groups.min()
    best, worst = (found.rows(places[differ].to_list()) for places in (groups.idxmax(), groups.idxmin()))
    prompts, rows = [_prompts(file) for file in files], []
    for chosen, rejected in zip(best, worst, strict=True):
        source, index = divmod(chosen["prompt_id"], ROWS_PER_SOURCE)
        prompt, texts = prompts[source][index], [chosen["answer"], rejected["answer"]]
        if isinstance(prompt, list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        scores = {"chosen_score": chosen["score"], "rejected_score": rejected["score"]}
        origin = {name: chosen[name] for name in _GROUP}
        rows.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1], **scores, "run": run, **origin})
    return rows


def _prompts(file: Path) -> dict[int, Any]:
    table, chat = pq.read_table(file, columns=["prompt", "extra_info"]), is_chat(file)
    indices = [row["index"] for row in table.column("extra_info").to_pylist()]
    prompts = table.column("prompt").to_pylist()
    return {
        index: prompt if chat else "".join(message["content"] for message in prompt)
        for index, prompt in zip(indices, prompts, strict=True)
    }
