"""Preference pairs from recorded responses, compared with a naive search."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.commands.rollouts import recorded_pairs
from rlcore.config import AnswersConfig
from rlcore.prompt import ROWS_PER_SOURCE
from rlcore.responses.query import Query, find_responses
from rlcore.responses.store import ResponseWriter, parts_of
from tests.helpers.answers import Made


def rows_file(path: Path, form: str, count: int) -> Path:
    """Write the columns of filtered rows from which pairs take their prompts."""
    rows = [
        {"prompt": [{"role": "user", "content": f"question {index} of {path.stem}"}], "extra_info": {"index": index}}
        for index in reversed(range(count))
    ]
    metadata = {b"millrace": json.dumps({"origin": {"prompt_form": form}}).encode()}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return path


def naive_pairs(folder: Path) -> list[Mapping[str, Any]]:
    """Return the rows of the best and the worst response of each group, with the prompt's id and the step."""
    groups: dict[Any, list[Any]] = {}
    for row in [row for part in parts_of(folder) for row in pq.read_table(part).to_pylist()]:
        if row["validation"] is None and row["score"] is not None and row["finish_reason"] == "stop":
            groups.setdefault((row["step"], row["prompt_id"]), []).append(row)
    found = []
    for (step, prompt), rows in groups.items():
        best, worst = (choose(rows, key=lambda row: row["score"]) for choose in (max, min))
        if best["score"] > worst["score"]:
            found.append({
                "chosen": best["answer"], "rejected": worst["answer"], "chosen_score": best["score"],
                "rejected_score": worst["score"], "run": "a-run", "step": step, "data_source": "made",
                "prompt_id": prompt,
            })  # fmt: skip
    return found


def test_recorded_pairs_are_the_best_and_worst_of_each_group(tmp_path):
    """The prompts of the first data source are chats, those of the second one are texts."""
    ids = [index // 4 + start for start in (0, ROWS_PER_SOURCE) for index in range(40)]
    writer = ResponseWriter(tmp_path / "answers", AnswersConfig())
    for step in (1, 2):
        made = Made(step, groups=40, failures=True)
        each = zip(made.rollouts, ids, strict=True)
        made.rollouts = [replace(one, prompt=replace(one.prompt, prompt_id=prompt)) for one, prompt in each]
        made.scores[:4] = [made.scores[0]] * 4
        writer.add(made.of_step(step))
    writer.start_part()
    writer.wait()
    writer.write_validation("after", Made(3).of_validation(2, "after"))
    found = find_responses(tmp_path / "answers", Query(kind="training"))
    files = [rows_file(tmp_path / f"{form}.parquet", form, 10) for form in ("chat", "text")]
    pairs, expected = recorded_pairs(found, files, "a-run"), naive_pairs(tmp_path / "answers")
    assert 30 < len(expected) < 40
    for pair, twin in zip(pairs, expected, strict=True):
        source, index = divmod(pair["prompt_id"], ROWS_PER_SOURCE)
        words = {"prompt": f"question {index} of {files[source].stem}", **twin}
        if source == 0:
            roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
            words |= {name: [{"role": role, "content": words[name]}] for name, role in roles.items()}
        assert pair == words
    assert recorded_pairs(find_responses(tmp_path / "answers", Query(step=(9, 9))), files, "a-run") == []
