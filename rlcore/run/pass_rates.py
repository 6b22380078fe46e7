"""The pass rates of the initial policy on the training rows. Runs can select training rows by pass rate.

    pass-rates/<fingerprint>/pass_rates.parquet      a row for each training row, in the order of the filtered rows
    pass-rates/measuring-<fingerprint>/              the parts of the table during its measurement

The fingerprint covers the initial policy, the filtered rows, the sampling, and the scorer with its code and settings.
This module does not import torch."""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlcore.batching.prompts import PassCounts
from rlcore.config import PassRatesConfig, RunConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError, StopRequestedError
from rlcore.evaluation.result import Response
from rlcore.prompt import Prompt
from rlcore.run.initial_policy import digests_in, planned_initial_policy
from rlcore.run.layout import RunInputs, code_payload, generation_payload
from rlcore.run.stop import locked_run
from rlcore.run.watchdog import Watchdog
from rlcore.storage.manifest import FINGERPRINT, MANIFEST, read_finished_or_set_aside
from rlcore.storage.publish import published_directory

if TYPE_CHECKING:
    from rlcore.run.record import Pace

PASS_RATES_FORMAT = 2  # increase this if the columns change, or if the same settings now give other responses
TABLE = "pass_rates.parquet"
KIND = "pass-rates"  # the kind in the table's manifest
WITHOUT_PASS_RATES = "pass_rates.samples: must be 1 or more to measure pass rates, got 0. Set pass_rates.samples=8"
SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("data_source", pa.string()),
        ("difficulty", pa.int64()),
        ("digest", pa.string()),
        ("samples", pa.int64()),
        ("passes", pa.int64()),
        ("unscored", pa.int64()),
        ("mean_score", pa.float64()),
        ("mean_parts", pa.map_(pa.string(), pa.float64())),
        ("mean_tokens", pa.float64()),
        ("max_tokens", pa.int64()),
        ("truncated", pa.int64()),
    ]
)
"""The columns of the table. `samples`: the number of responses with a score. `passes`: the number of correct responses.
`unscored`: the number of responses without a score. `mean_score` and `mean_parts` cover scored responses. Token counts
and `truncated` cover all responses. `digest`: see `row_digests`."""

STAGE = "pass-rates"  # the name of the stage in events


def planned_pass_rates(config: RunConfig, filtered_directory: Path) -> Path:
    """Return the folder of the run's pass-rate table. The folder's name is a fingerprint."""
    payload: dict[str, object] = {
        "format": PASS_RATES_FORMAT,
        "seed": config.seed,
        "samples": config.pass_rates.samples,
        "filtered": filtered_directory.name,
        "model": _model_payload(planned_initial_policy(config, filtered_directory)),
        "dtype": [config.model.dtype, config.rollout.dtype],
        **generation_payload(config),
    }
    if config.data.environment:
        payload["environment"] = [code_payload(name) for name in (config.data.environment, *config.episode.tools)]
        payload["episode"] = config.episode.model_dump(mode="json", exclude={"deadline_s", "num_processes"})
        payload["template"] = config.data.chat_template_kwargs
    return Path(config.paths.root).resolve() / "pass-rates" / fingerprint("pass-rates", payload)


def _model_payload(folder: Path) -> object:
    if (folder / MANIFEST).is_file() or not folder.is_dir():
        return folder.name if folder.parent.name == "models" else str(folder)
    return digests_in(folder)


@dataclass(frozen=True, slots=True)
class PassRates:
    """The pass counts of a run's training rows, by data source and row."""

    directory: Path
    counts: PassCounts
    part_sizes: tuple[int, ...]
    settings: PassRatesConfig

    @property
    def selected(self) -> tuple[np.ndarray, ...]:
        """A mask for each data source, which is true for rows whose pass rate is known and inside `pass_rates.keep`. If
        `pass_rates.keep` is [0, 1], all rows are selected."""
        low, high = self.settings.keep
        rates = self.counts.rates()
        inside = np.ones(len(rates), dtype=bool) if (low, high) == (0, 1) else (rates >= low) & (rates <= high)
        return tuple(np.split(inside, np.cumsum(self.part_sizes)[:-1]))

    def selected_counts(self) -> PassCounts:
        """Return the pass counts of the selected rows."""
        kept = np.concatenate(self.selected)
        return PassCounts(self.counts.passes[kept], self.counts.samples[kept])

    def metrics(self) -> dict[str, float]:
        """Return the metrics that step 0 records about the initial policy's pass rates on all training rows."""
        known, kept = _known_rates(self.counts), np.concatenate(self.selected)
        return {
            "pass_rates/mean": float(known.mean()),
            "pass_rates/never_share": float((known == 0).mean()),
            "pass_rates/always_share": float((known == 1).mean()),
            "pass_rates/rows_kept": float(kept.sum()),
            "pass_rates/kept_share": float(kept.mean()),
        }

    def require_enough(self, batch_size: int) -> None:
        """Raise DataError if `pass_rates.keep` leaves no row of a data source, or fewer rows than one batch."""
        low, high = self.settings.keep
        kept = [int(part.sum()) for part in self.selected]
        of = f"of {sum(self.part_sizes):,} training rows (table {self.directory})"
        remedy = f"Widen pass_rates.keep; the pass rates are {self.spread()}"
        if 0 in kept and any(kept):
            raise DataError(
                f"pass_rates.keep: must leave rows of every part of a mixture, got [{low:g}, {high:g}], which leaves "
                f"none of entry {kept.index(0)} of data.parts. {remedy}, or leave that part out"
            )
        if sum(kept) < batch_size:
            raise DataError(
                f"pass_rates.keep: must leave trainer.batch_size={batch_size} rows or more, got [{low:g}, {high:g}], "
                f"which leaves {sum(kept):,} {of}. {remedy}"
            )

    def spread(self) -> str:
        """Return a text with the shares of rows whose pass rate is 0, 1, or between 0 and 1."""
        known = _known_rates(self.counts)
        if not len(known):
            return "not known: no response has a score"
        never, always = (known == 0).mean(), (known == 1).mean()
        return f"0 for {never:.0%} of the rows, 1 for {always:.0%}, between for {1 - never - always:.0%}"


def _known_rates(counts: PassCounts) -> np.ndarray:
    rates = counts.rates()
    known: np.ndarray = rates[~np.isnan(rates)]
    return known


def find_pass_rates(config: RunConfig, inputs: RunInputs) -> PassRates | None:
    """Return the pass rates of the run, or None if they are not measured yet. A damaged table is renamed."""
    directory = planned_pass_rates(config, inputs.filtered_directory)
    if read_finished_or_set_aside(directory) is None:
        return None
    table = read_table(directory / TABLE)
    counts = PassCounts.of(table.column("passes").to_numpy(), table.column("samples").to_numpy())
    sizes = tuple(pq.read_metadata(file).num_rows for file in inputs.train_parquets)
    return PassRates(directory, counts, sizes, config.pass_rates)


def read_table(file: Path) -> pa.Table:
    """Read a pass-rate table, or a part saved during the measurement. Raises DataError if the file is not valid."""
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as a table of pass rates ({error}). Delete its folder") from error
    if table.schema.names != SCHEMA.names:
        raise DataError(f"{file}: must have the columns {', '.join(SCHEMA.names)}, got {', '.join(table.schema.names)}")
    return table.cast(SCHEMA)


def row_digests(filtered: Path) -> list[str]:
    """Return a digest of 16 hex digits for each row of a filtered file. It covers the row's prompt and ground truth."""
    table = pq.read_table(filtered, columns=["prompt_ids", "ground_truth_json"])
    ids = table.column("prompt_ids").combine_chunks()
    flat = ids.flatten().cast(pa.int32()).to_numpy(zero_copy_only=False)
    ends = pc.list_value_length(ids).to_numpy(zero_copy_only=False).cumsum().tolist()
    truths = table.column("ground_truth_json").to_pylist()
    return [
        blake2b(flat[first:last].tobytes() + b"\0" + truth.encode(), digest_size=8).hexdigest()
        for first, last, truth in zip([0, *ends], ends, truths, strict=False)
    ]


def facts_of(table: pa.Table, samples: int) -> Mapping[str, str | int | float]:
    """Return the entries of a table's manifest. `rows_by_passes` lists the number of rows for each pass count.
    `samples`: the number of responses sampled for each row."""
    passes = table.column("passes").to_numpy()
    counts = PassCounts.of(passes, table.column("samples").to_numpy())
    return {
        "kind": KIND,
        "rows": table.num_rows,
        "samples": samples,
        "mean": float(_known_rates(counts).mean()),
        "unscored": int(pc.sum(table.column("unscored")).as_py()),
        "rows_by_passes": " ".join(map(str, np.bincount(passes, minlength=samples + 1))),
    }


class PassRateMeasurement:
    """The measurement of a run's pass rates. `prompts()` loads the initial policy and returns the training prompts.
    `sample(prompts, n, first)` returns n responses to each prompt in `prompts`. `first` is the index of `prompts[0]`
    among all training prompts."""

    def __init__(
        self,
        config: RunConfig,
        inputs: RunInputs,
        guard: Watchdog,
        prompts: Callable[[], Sequence[Prompt]],
        sample: Callable[[Sequence[Prompt], int, int], Sequence[Response]],
    ) -> None:
        self._config, self._inputs, self._guard = config, inputs, guard
        self._prompts, self._sample = prompts, sample
        self._directory = planned_pass_rates(config, inputs.filtered_directory)
        self._parts_folder = self._directory.with_name(f"measuring-{self._directory.name}")

    def make(self) -> PassRates:
        """Return the pass rates, and measure them first if needed. Raises DataError if the scorer failed on every
        response, or if `pass_rates.keep` leaves too few rows. Raises StopRequestedError after a stop request."""
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
        from rlcore.run.record import Pace  # imports torch

        prompts = self._prompts()
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
                some, samples = prompts[done : done + size], self._config.pass_rates.samples
                responses = self._sample(some, samples, done)
                rows = [
                    {"digest": digest, **count_row(prompt, responses[index * samples : (index + 1) * samples])}
                    for index, (prompt, digest) in enumerate(zip(some, digests[done : done + size], strict=True))
                ]
                part = pa.Table.from_pylist(rows, schema=SCHEMA)
                seconds = time.monotonic() - begun
                _write(part, folder, {})
                pace.tick()
                self._report_progress(part, done + part.num_rows, len(prompts), pace, seconds)
            parts.append(read_table(folder / TABLE))
            done += parts[-1].num_rows
        return parts

    def _report_progress(self, part: pa.Table, done: int, total: int, pace: "Pace", seconds: float) -> None:
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
    """Return one prompt's row of the pass-rate table without the column `digest`, which the caller adds."""
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
