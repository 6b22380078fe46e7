"""Check of each reference against the scorer that will judge answers to it.

A reference that its own scorer cannot read gives every right answer 0, and one that is read as something else pays
wrong answers. So each row is scored, before a run, on answers that are right by construction: its own solution, and its
reference in the form that the scorer reads. Rows whose reference has no such form (tests of a program, the numbers of a
countdown) have their solution alone; without one, the scorer must at least accept the row.

The result is kept beside the datasets, by the dataset and the scorer's code.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.custom import place_of
from data.schema import open_parquet, read_batches
from data.sources import local_files
from data.stage import SPLITS
from data.tasks import dataset_directory, dataset_fingerprint, task_of
from rlcore.config import RewardConfig
from rlcore.config.data import (
    BY_ROW,
    CountdownData,
    Gsm8kData,
    MappedData,
    ParquetData,
    ReasoningGymData,
    TaskData,
    scorer_of_row,
    scorers_of,
)
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.score import Score
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.manifest import read_manifest
from rlcore.storage.publish import write_json_atomically
from rlcore.user_code import code_for

BUDGET_S = 60.0
"""Seconds for one dataset. A scorer that is slower is tried on rows spread evenly over the file."""
SAMPLE = 64
"""References on which the form that a scorer reads is found."""
SHOWN = 5
"""Rows that a message shows."""
KEPT = 100
"""Rows that the kept result has."""
WRONG = "0"
"""An answer to rows of which none is known to be right."""
_BATCH = 1_024

Form = tuple[str, str]
"""What stands before and after a reference in an answer."""
FORMS: Mapping[str, tuple[Form, ...]] = {
    "data.math:score": (("\\boxed{", "}"),),
    "data.gsm8k:score": (("#### ", ""),),
    "data.gsm8k:score_numeric": (("#### ", ""),),
    "data.countdown:score": (),
    "data.code:score": (),
}
"""Forms of our own scorers. Those of other scorers are found by trying `USUAL_FORMS`."""
USUAL_FORMS: tuple[Form, ...] = (("", ""), ("\\boxed{", "}"), ("#### ", ""), ("<answer>", "</answer>"))
JUDGE = "data.judge:score"
"""A scorer that asks a model: no row is checked."""


@dataclass(frozen=True, slots=True)
class RowReference:
    """What is checked of one row. `number`: its place in the split; `truth_json`: its ground truth."""

    split: str
    number: int
    data_source: str
    truth_json: str
    solution: str


@dataclass(frozen=True, slots=True)
class Unmet:
    """A row whose own answer does not earn full marks: `answer` got `score`, or the scorer failed with `failure`."""

    split: str
    number: int
    reference: str
    answer: str
    score: float
    failure: str = ""
    where: str = ""

    def __str__(self) -> str:
        what = f"fails: {self.failure[:200]}" if self.failure else f"scores {self.score:g}"
        return f"{self.where}: reference {self.reference[:120]}: the answer {self.answer[-120:]!r} {what}"


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check: `rows` were checked of `total`; `unmet` of them failed, the first of which are `shown`."""

    rows: int
    total: int
    unmet: int
    shown: tuple[Unmet, ...]

    @property
    def share(self) -> float:
        """Share of the checked rows whose own answer does not earn full marks."""
        return self.unmet / self.rows if self.rows else 0.0

    def text(self, scorer: str) -> str:
        """The finding in words, with file and line of the first rows; '' where every row earns full marks."""
        if not self.unmet:
            return ""
        part = "" if self.rows == self.total else f" that were checked in {BUDGET_S:g} s"
        lines = [
            f"data.scorer: must give full marks to the reference of each row and to its solution; {scorer} does not "
            f"for {self.unmet:,} of {self.rows:,} rows{part} ({self.share:.1%}):",
            *(f"  {row}" for row in self.shown[:SHOWN]),
        ]
        if self.unmet > SHOWN:
            lines.append(f"  and {self.unmet - SHOWN:,} more")
        return "\n".join(lines)


def is_checked(data: TaskData) -> bool:
    """Whether references are checked. Environments and judges have none; drawn problems come with tested solutions."""
    if data.environment or data.scorer == JUDGE:
        return False
    is_drawn = isinstance(data, CountdownData | ReasoningGymData)
    return not (is_drawn and data.scorer == type(data).model_fields["scorer"].default)


def check_references(
    data: TaskData, seed: int, reward: RewardConfig, root: Path, splits: Sequence[str] = SPLITS, *, again: bool = True
) -> str:
    """Check the rows of a task: of its dataset, or of the files here that the dataset will be made of.

    Returns what to report of rows below the allowed share; '' where there is nothing, where no row is known yet, or,
    unless `again`, where the check was made before.

    Raises:
        DataError: more than `reward.max_unmet_references` of the rows do not earn full marks; file, line and reference
            of the first ones.
    """
    if not is_checked(data):
        return ""
    dataset = dataset_fingerprint(data, seed, splits)
    kept = _kept_result(root, dataset, data, reward)
    found = _read(kept)
    if found is not None and not again:
        return ""
    if found is None:
        rows = _rows(data, seed, root, dataset, splits)
        if rows is None:
            return ""
        found = _place_rows(data, _check(data, reward, list(rows)))
        write_json_atomically(kept, asdict(found))
    text = found.text("the scorer of its data source" if data.scorer == BY_ROW else data.scorer)
    if text and found.share > reward.max_unmet_references:
        raise DataError(
            f"{text}\nreward.max_unmet_references={reward.max_unmet_references:g} is the share that is accepted. "
            "Repair or remove these rows, name another column (data.answer, data.solution) or another data.scorer, or "
            "raise it"
        )
    return text


def _kept_result(root: Path, dataset: str, data: TaskData, reward: RewardConfig) -> Path:
    code = {source.name: source.sha256 for name in scorers_of(data) for source in code_for(name)}
    payload = {"dataset": dataset, "scorer": data.scorer, "code": code, "deadline_s": reward.deadline_s}
    return root / "datasets" / f"references-{fingerprint('references', payload)}.json"


# ---------------------------------------------------------------------- rows


def _rows(data: TaskData, seed: int, root: Path, dataset: str, splits: Sequence[str]) -> Iterator[RowReference] | None:
    """The rows of the dataset, or of local files; None where neither is here."""
    directory = dataset_directory(dataset, root)
    if read_manifest(directory) is not None:
        return _published(directory, splits)
    is_local = isinstance(data, ParquetData) or (
        isinstance(data, Gsm8kData | MappedData) and local_files(data.source, []) is not None
    )
    if not is_local:
        return None
    made = task_of(data).build(data, seed)
    return (
        RowReference(split, number, row.data_source or made.data_source, json.dumps(row.ground_truth), row.solution)
        for split in splits
        for number, row in enumerate(made.splits[split])
    )


def _published(dataset: Path, splits: Sequence[str]) -> Iterator[RowReference]:
    for split in splits:
        path, number = dataset / f"{split}.parquet", 0
        for batch in read_batches(open_parquet(path), path, _BATCH):
            for values in batch.select(["data_source", "reward_model", "extra_info"]).to_pylist():
                truth = json.dumps(values["reward_model"]["ground_truth"])
                solution = values["extra_info"].get("solution") or ""
                yield RowReference(split, number, values["data_source"], truth, solution)
                number += 1


# ---------------------------------------------------------------------- the check


def _check(data: TaskData, reward: RewardConfig, rows: Sequence[RowReference]) -> Checked:
    """Check the rows of each scorer."""
    by_scorer: dict[str, list[RowReference]] = {}
    for row in rows:
        scorer = scorer_of_row(data, row.data_source)
        if scorer is None:
            raise DataError(
                f"data.scorer: must be given, for none is known for the data source {row.data_source!r} "
                f"({place_of(data, row.split, row.number)}). Such as data.scorer=data.math:score"
            )
        by_scorer.setdefault(scorer, []).append(row)
    deadline = time.monotonic() + BUDGET_S
    settings = reward.model_copy(update={"num_processes": max(reward.num_processes, os.cpu_count() or 1)})
    num_checked, unmet = 0, list[Unmet]()
    for scorer, own in by_scorer.items():
        with ScoringPool(scorer, settings, num_logged=0) as pool:
            checker = _Checker(scorer, pool, own)
            for first in range(-(-len(own) // _BATCH)):
                if time.monotonic() > deadline:
                    break
                batch = own[first :: -(-len(own) // _BATCH)]  # spread over the file, should time run out
                num_checked += len(batch)
                unmet += checker.unmet(batch)
    unmet.sort(key=lambda row: (row.split != "train", row.number))
    return Checked(num_checked, len(rows), len(unmet), tuple(unmet[:KEPT]))


class _Checker:
    """Scores the rows of one scorer. Equal answers to equal references are scored once."""

    def __init__(self, scorer: str, pool: ScoringPool, rows: Sequence[RowReference]) -> None:
        self._pool = pool
        self._known: dict[tuple[str, str], Score] = {}
        self._has_full_marks = False
        step = -(-len(rows) // SAMPLE)
        self._form = self._form_read(FORMS.get(scorer, USUAL_FORMS), rows[::step], is_ours=scorer in FORMS)

    def _form_read(self, forms: Sequence[Form], sample: Sequence[RowReference], *, is_ours: bool) -> Form | None:
        """The form in which most references of the sample earn full marks; None where half of them do in none."""
        references = [(row, text) for row in sample if (text := _reference(row)) is not None]
        if not references or not forms:
            return None
        if is_ours:
            return forms[0]
        earned = {}
        for before, after in forms:
            scores = self._scores([(f"{before}{text}{after}", row.truth_json) for row, text in references])
            earned[before, after] = sum(_earns_all(score) for score in scores)
        best = max(forms, key=lambda form: earned[form])
        return best if 2 * earned[best] >= len(references) else None

    def unmet(self, rows: Sequence[RowReference]) -> list[Unmet]:
        """The rows of which an answer that is right does not earn full marks."""
        asked: list[tuple[RowReference, str, bool]] = []
        for row in rows:
            if row.solution:
                asked.append((row, row.solution, True))
            if self._form is not None and (text := _reference(row)) is not None:
                asked.append((row, f"{self._form[0]}{text}{self._form[1]}", True))
            elif not row.solution:
                asked.append((row, WRONG, False))
        scores = self._scores([(answer, row.truth_json) for row, answer, _ in asked])
        self._has_full_marks |= any(
            is_right and _earns_all(score) for (_, _, is_right), score in zip(asked, scores, strict=True)
        )
        found: dict[tuple[str, int], Unmet] = {}
        for (row, answer, is_right), score in zip(asked, scores, strict=True):
            # A scorer that never gives 1 has full marks of its own, which are not known.
            earns = _earns_all(score) if self._has_full_marks else score.total > 0
            if score.failure is not None or (is_right and not earns):
                unmet = Unmet(row.split, row.number, row.truth_json, answer, score.total, score.failure or "")
                found.setdefault((row.split, row.number), unmet)
        return list(found.values())

    def _scores(self, asked: Sequence[tuple[str, str]]) -> list[Score]:
        new = [pair for pair in dict.fromkeys(asked) if pair not in self._known]
        with self._pool.uncounted():
            scores = self._pool.score([answer for answer, _ in new], [truth for _, truth in new])
        self._known.update(zip(new, scores, strict=True))
        return [self._known[pair] for pair in asked]


def _earns_all(score: Score) -> bool:
    return score.failure is None and score.solved


def _reference(row: RowReference) -> str | None:
    """The ground truth as text; None where it is no text and no number."""
    truth = json.loads(row.truth_json)
    if isinstance(truth, dict) and set(truth) == {"answer"}:
        truth = truth["answer"]
    return str(truth) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None


# ---------------------------------------------------------------------- files and lines


def _place_rows(data: TaskData, found: Checked) -> Checked:
    """The result with file and line of the rows that it keeps."""
    shown = tuple(Unmet(**{**asdict(row), "where": place_of(data, row.split, row.number)}) for row in found.shown)
    return Checked(found.rows, found.total, found.unmet, shown)


def _read(path: Path) -> Checked | None:
    try:
        values: dict[str, Any] = parse_json(read_ordinary(path))
        return Checked(values["rows"], values["total"], values["unmet"], tuple(Unmet(**row) for row in values["shown"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
