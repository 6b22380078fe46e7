"""A sample of a run's answers as MLflow traces: a prompt, an answer and its score each, in MLflow's own view of them.

The process that delivers the journal reads them from the parts in which training keeps its answers
(`rlcore.answers.store`). So they cost the trainer nothing, and they are in MLflow after the end of their chunk. The id
of a trace follows from the MLflow run and the answer: one that is sent again stays single.

MLflow's public functions draw the ids by chance, use a global address, and only log what a store refuses. Here its
own client of traces is called (MLflow 3.17), which raises.
"""

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.answers.store import LIGHT, TEXTS, steps_of, training_parts

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

log = logging.getLogger(__name__)

PREVIEW_CHARACTERS = 1_000
"""MLflow's limit for what its table shows of a prompt (here its end, where the question is) and of an answer."""


def parts_to_trace(answers: Path, done: int, per_step: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """For each part with steps after `done`, the last one sent: its last step, and the chosen answers of these steps.

    `answers`: folder of the parts; it may be missing. `per_step`: answers of each step: the one with the highest score,
    the one with the lowest, and others evenly spread between them in the order of scores. A part that is damaged has no
    answers; a warning names it.

    Raises:
        FileNotFoundError: a part was deleted just now.
    """
    for path in training_parts(answers):
        if steps_of(path)[1] > done:
            try:
                table = pq.read_table(path, columns=[*LIGHT.names, *TEXTS.names], filters=[("step", ">", done)])
                rows = sample(table, per_step)
            except FileNotFoundError:
                raise
            except (OSError, ValueError, pa.ArrowException) as error:
                log.warning("%s: cannot be read (%s). MLflow gets no traces of its answers.", path, error)
                rows = []
            yield steps_of(path)[1], rows


def sample(table: pa.Table, per_step: int) -> list[dict[str, Any]]:
    """The chosen answers of each step, see `parts_to_trace`."""
    order = [("step", "ascending"), ("score", "descending"), ("prompt_id", "ascending"), ("sample_index", "ascending")]
    table = table.sort_by(order)
    starts = np.flatnonzero(np.diff(table["step"].to_numpy(), prepend=-1))
    ends = np.append(starts[1:], table.num_rows)
    chosen = [np.linspace(start, end - 1, min(per_step, end - start)) for start, end in zip(starts, ends, strict=True)]
    rows: list[dict[str, Any]] = table.take(np.concatenate(chosen).round().astype(np.int64)).to_pylist()
    return rows


def send(
    uri: str, experiment_id: str, mlflow_run: str, rows: list[dict[str, Any]], times_s: Mapping[int, float]
) -> None:
    """Send answers as traces of a run: one request each, and one for the contents of all. Raises what MLflow raises.

    `rows` have the columns of `rlcore.answers.store` but for the tokens; `times_s` says when each step was written to
    the journal, in seconds since the epoch.
    """
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    spans = []
    for row in rows:
        info, span = _trace(row, experiment_id, mlflow_run, round(times_s.get(row["step"], 0.0) * 1e3))
        client.start_trace(info)
        spans.append(span)
    if spans:
        client.log_spans(experiment_id, spans)


def _trace(row: dict[str, Any], experiment_id: str, mlflow_run: str, time_ms: int) -> "tuple[TraceInfo, Span]":
    from mlflow.entities import Feedback, Span, SpanType, TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

    step, prompt, answer = row["step"], row.pop("prompt"), row.pop("answer")
    prompt, answer = prompt.replace("\0", "\ufffd"), answer.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
    digest = sha256(f"{mlflow_run} {step} {row['prompt_id']} {row['sample_index']}".encode()).digest()
    trace_id = f"tr-{digest[:16].hex()}"
    score = Feedback("score", row["score"], row["failure"], trace_id=trace_id, create_time_ms=time_ms)
    score.assessment_id = f"a-{digest[:16].hex()}"
    info = TraceInfo(
        trace_id,
        TraceLocation.from_experiment_id(experiment_id),
        time_ms,
        TraceState.OK if row["failure"] is None else TraceState.ERROR,
        request_preview=prompt[-PREVIEW_CHARACTERS:],
        response_preview=answer[:PREVIEW_CHARACTERS],
        execution_duration=0,
        trace_metadata={TraceMetadataKey.SOURCE_RUN: mlflow_run},
        tags={TraceTagKey.TRACE_NAME: f"step {step}", "step": str(step), "data_source": row["data_source"] or ""},
        assessments=[score],
    )
    told = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: SpanType.LLM,
        SpanAttributeKey.INPUTS: prompt,
        SpanAttributeKey.OUTPUTS: answer,
        **{name: dict(value) if name == "parts" else value for name, value in row.items() if value is not None},
    }
    span = Span.from_dict(
        {
            "name": "answer",
            "trace_id": base64.b64encode(digest[:16]).decode(),
            "span_id": base64.b64encode(digest[16:24]).decode(),
            "parent_span_id": "",
            "start_time_unix_nano": time_ms * 1_000_000,
            "end_time_unix_nano": time_ms * 1_000_000,
            "status": {"code": f"STATUS_CODE_{info.state.value}"},
            "attributes": {name: json.dumps(value, ensure_ascii=False) for name, value in told.items()},
        }
    )
    return info, span
