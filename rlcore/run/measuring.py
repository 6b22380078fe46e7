"""The measurement of pass rates, in which the initial policy samples responses to each training row. The rows are
measured in parts, and each part is published as a folder. A resumed measurement gives the same results as an
uninterrupted one, because random numbers depend only on the run's seed and the row's index."""

import math
import shutil
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import DataError, StopRequestedError
from rlcore.evaluation.result import Response
from rlcore.run.inputs import RunInputs
from rlcore.run.pass_rates import (
    SCHEMA,
    TABLE,
    PassRates,
    facts_of,
    find_pass_rates,
    planned_pass_rates,
    read_table,
    row_digests,
)
from rlcore.run.record import Pace, RunRecord
from rlcore.run.stop import locked_run
from rlcore.run.workers import RunWorkers
from rlcore.storage.manifest import FINGERPRINT, read_finished_or_set_aside
from rlcore.storage.publish import published_directory
from rlcore.types import Prompt

STAGE = "pass-rates"  # the name of the stage in events


class PassRateMeasurement:
    """The measurement of the pass rates of one run."""

    def __init__(self, record: RunRecord, inputs: RunInputs, workers: RunWorkers) -> None:
        self._config, self._guard = record.config, record.guard
        self._inputs, self._workers = inputs, workers

    @cached_property
    def _directory(self) -> Path:
        return planned_pass_rates(self._config, self._inputs.filtered_directory)

    @property
    def _parts_folder(self) -> Path:
        return self._directory.with_name(f"measuring-{self._directory.name}")

    def make(self) -> PassRates:
        """Return the table of pass rates. Measure them first if needed. Raises DataError if the scorer always failed or
        `pass_rates.keep` leaves too few rows, and StopRequestedError after a stop request."""
        found = find_pass_rates(self._config, self._inputs)
        if found is None:
            with locked_run(self._parts_folder, self._guard.report, self._guard.stop, math.inf):
                if find_pass_rates(self._config, self._inputs) is None:  # no other run has measured it
                    self._publish(self._parts())
            found = find_pass_rates(self._config, self._inputs)
            assert found is not None, "it has been published"
        found.require_enough(self._config.trainer.batch_size)
        return found

    def _parts(self) -> list[pa.Table]:
        self._workers.load("start")
        prompts = [prompt for part in self._workers.problems.train for prompt in part]
        digests = [digest for file in self._inputs.train_parquets for digest in row_digests(file)]
        parts: list[pa.Table] = []
        pace, done, size = Pace(is_warm=False), 0, self._config.pass_rates.rows_per_part
        while done < len(prompts):
            folder = self._parts_folder / f"rows-{done:09d}"
            if read_finished_or_set_aside(folder) is None:
                if self._guard.stop():
                    raise StopRequestedError(
                        f"the pass rates of {done:,} of {len(prompts):,} rows are saved; start again to resume"
                    )
                begun = time.monotonic()
                part = self._measure(prompts[done : done + size], digests[done : done + size], done)
                seconds = time.monotonic() - begun
                _write(part, folder, {})
                pace.tick()
                self._report_progress(part, done + part.num_rows, len(prompts), pace, seconds)
            parts.append(read_table(folder / TABLE))
            done += parts[-1].num_rows
        return parts

    def _measure(self, prompts: Sequence[Prompt], digests: Sequence[str], first_row: int) -> pa.Table:
        count = self._config.pass_rates.samples
        responses = self._workers.training_responses(prompts, count, first_row)
        rows = [
            {"digest": digest, **count_row(prompt, responses[index * count : (index + 1) * count])}
            for index, (prompt, digest) in enumerate(zip(prompts, digests, strict=True))
        ]
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def _report_progress(self, part: pa.Table, done: int, total: int, pace: Pace, seconds: float) -> None:
        samples = self._config.pass_rates.samples
        scores = [score for score in part.column("mean_score").to_pylist() if score is not None]
        tokens = float(np.sum(part.column("mean_tokens").to_numpy())) * samples
        self._guard.report(
            {
                "event": "progress",
                "stage": STAGE,
                "step": done,
                "to_step": total,
                "total_steps": total,
                "metrics": {"critic/score/mean": sum(scores) / len(scores)} if scores else {},
                "tokens_per_s": tokens / max(seconds, 1e-9) / self._config.runtime.num_workers,
                "num_devices": self._config.runtime.num_workers,
                "eta_s": pace.eta_s(-(-(total - done) // self._config.pass_rates.rows_per_part)),
            }
        )

    def _publish(self, parts: Sequence[pa.Table]) -> None:
        table = pa.concat_tables(parts).combine_chunks()
        samples, scorer = self._config.pass_rates.samples, self._config.data.environment or self._config.data.scorer
        unscored = sum(table.column("unscored").to_pylist())
        if unscored == samples * table.num_rows:
            raise DataError(
                f"{scorer}: failed on all {unscored:,} responses of the initial policy, so there are no pass rates. "
                f"Repair it, and delete {self._parts_folder}"
            )
        if unscored:
            text = f"pass rates: {scorer} failed on {unscored:,} responses, which are left out"
            self._guard.report({"event": "note", "text": text})
        facts = {FINGERPRINT: self._directory.name, **facts_of(table, samples)}
        _write(table, self._directory, facts)
        for folder in self._parts_folder.glob("rows-*"):
            shutil.rmtree(folder, ignore_errors=True)


def count_row(prompt: Prompt, responses: Sequence[Response]) -> dict[str, object]:
    """Return one prompt's row of the pass-rate table. The column `digest` is left out."""
    scored = [response for response in responses if response.failure is None]
    names = sorted({name for response in scored for name in response.parts})
    by_part = {name: [response.parts[name] for response in scored if name in response.parts] for name in names}
    return {
        "row_id": prompt.prompt_id,
        "data_source": prompt.data_source,
        "difficulty": prompt.difficulty,
        "samples": len(scored),
        "passes": sum(response.solved for response in scored),
        "unscored": len(responses) - len(scored),
        "mean_score": sum(response.score for response in scored) / len(scored) if scored else None,
        "mean_parts": [(name, sum(values) / len(values)) for name, values in by_part.items()],
        "mean_tokens": sum(response.num_tokens for response in responses) / len(responses),
        "max_tokens": max(response.num_tokens for response in responses),
        "truncated": sum(response.finish_reason == "length" for response in responses),
    }


def _write(table: pa.Table, folder: Path, facts: dict[str, str | int | float]) -> None:
    with published_directory(folder, dict(facts)) as temporary:
        pq.write_table(table, temporary / TABLE)
