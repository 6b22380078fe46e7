"""A check of each reference against its scorer before a run.

Each row is scored on two responses that must be correct. The first is the row's solution. The second is the row's
reference in a form that the scorer reads, such as `#### 18`. A row that has neither of them is scored on a wrong
response, which must not cause an error. A solution that the scorer cannot read is accepted if no warm start trains on
it. The result is stored next to the datasets and reused as long as the dataset and the scorer's code are the same.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from data.records import is_on_hub
from data.rows import SPLITS
from data.schema import read_rows
from data.tasks import dataset_directory, task_of
from rlcore import sandbox
from rlcore.config import RewardConfig, RunConfig
from rlcore.config.data import (
    BY_ROW,
    JUDGE,
    PROGRAMS,
    CountdownData,
    Gsm8kData,
    MappedData,
    ParquetData,
    ReasoningGymData,
    TaskData,
    VerifiersData,
    has_default_scorer,
    parts_of,
    scorer_of_row,
    scorers_of,
)
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool
from rlcore.rollout.scoring_worker import weights_problem
from rlcore.score import Score
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.publish import write_json_atomically
from rlcore.user_code import code_for

VERSION = 2  # increase it when the same rows and scorers give another result
BUDGET_S = 60.0  # time limit for one dataset; the rows that are checked within it are spread evenly over the file
SAMPLE = 64  # references for finding the form that a scorer reads
MAX_SHOWN = 5  # rows in a message
MAX_SAVED = 100  # rows in the stored result
WRONG = "0"  # response for rows without a known correct response
_BATCH = 128  # rows that are scored together, and lost if time runs out
Form = tuple[str, str]  # texts before and after a reference in a response
FORMS: Mapping[str, Form | None] = {
    "data.math:score": ("\\boxed{", "}"),
    "data.gsm8k:score": ("#### ", ""),
    "data.gsm8k:score_numeric": ("#### ", ""),
    "data.countdown:score": None,
    PROGRAMS: None,
}
"""The text before and after the reference in a correct response, by scorer. With None, only the solutions of the rows
are checked. For scorers that are not listed here, the check tries `USUAL_FORMS`.
"""
USUAL_FORMS: tuple[Form, ...] = (("", ""), ("\\boxed{", "}"), ("#### ", ""), ("<answer>", "</answer>"))


@dataclass(frozen=True, slots=True)
class RowReference:
    """A row to check. `number` is its index in the split, `where` its file and line."""

    split: str
    number: int
    where: str
    data_source: str
    truth_json: str
    solution: str


@dataclass(frozen=True, slots=True)
class ReferenceReport:
    """The result of a check. `rows`: the number of checked rows by split. `unmet`: for each split, the number of rows
    whose solution or reference does not get the full score. `total`: the number of all rows. `shown`: messages about
    the first of the rows that `unmet` counts."""

    rows: Mapping[str, int]
    unmet: Mapping[str, int]
    total: int
    shown: Sequence[str]

    @property
    def share(self) -> float:
        """Return the share of checked rows whose solution or reference does not get the full score. If the splits have
        different shares, return the largest."""
        return max((self.unmet[split] / self.rows[split] for split in self.unmet), default=0.0)

    def text(self, scorer: str) -> str:
        """Return a message about the rows whose solution or reference does not get the full score, or '' if there are
        none."""
        num_checked, num_unmet = sum(self.rows.values()), sum(self.unmet.values())
        if self.total and not num_checked:
            return f"data.scorer: {scorer} has scored no reference in {BUDGET_S:g} s, so none is checked"
        if not num_unmet:
            return ""
        part = "" if num_checked == self.total else f", of {num_checked:,} that were checked in {BUDGET_S:g} s"
        counts = " and ".join(
            f"{unmet:,} of {self.rows[split]:,} rows of {split} ({unmet / self.rows[split]:.1%})"
            for split, unmet in self.unmet.items()
        )
        lines = [
            f"data.scorer: must give full marks to the reference of each row and to its solution; {scorer} does not "
            f"for {counts}{part}:",
            *(f"  {row}" for row in self.shown[:MAX_SHOWN]),
        ]
        if num_unmet > MAX_SHOWN:
            lines.append(f"  and {num_unmet - MAX_SHOWN:,} more")
        return "\n".join(lines)


def check_references(config: RunConfig, splits: Sequence[str] = SPLITS) -> str:
    """Check that the scorer of each dataset gives the full score to the references. Return all warnings as one text.

    Environments, judges and generated problems are not checked. For a suite, `config` is the result of
    `suite_settings`. Raises DataError if more than `reward.max_unmet_references` of a split's rows miss the full score.
    Raises ConfigError if `reward.weights` names a part that the scorer does not return."""
    if config.data.environment:
        return ""
    sandbox.set_limits(config.sandbox)
    return "\n".join(filter(None, (_check_task(part.data, config, splits) for part in parts_of(config.data))))


def _check_task(data: TaskData, config: RunConfig, splits: Sequence[str]) -> str:
    is_generated = isinstance(data, CountdownData | ReasoningGymData | VerifiersData)
    if data.scorer == JUDGE or (is_generated and has_default_scorer(data)):
        return ""
    seed, reward, warm = config.data.seed, config.reward, config.warm_start
    is_taught = "train" in splits and warm.enabled and warm.demonstrations is None  # a warm start uses the solutions
    directory = dataset_directory(data, seed, Path(config.paths.root).resolve(), splits)
    code = {source.name: source.sha256 for name in scorers_of(data) for source in code_for(name)}
    payload = {
        "dataset": directory.name, "scorer": data.scorer, "code": code, "deadline_s": reward.deadline_s,
        "weights": sorted(reward.weights), "is_taught": is_taught, "version": VERSION,
    }  # fmt: skip
    file = directory.with_name(f"references-{fingerprint('references', payload)}.json")
    try:
        report = ReferenceReport(**parse_json(read_ordinary(file)))
    except (OSError, ValueError, TypeError):  # it is missing or damaged
        report = _check(data, reward, _rows(data, seed, directory, splits), is_taught=is_taught)
        write_json_atomically(file, asdict(report))
    text = report.text("the scorer of its data source" if data.scorer == BY_ROW else data.scorer)
    if report.share > reward.max_unmet_references:
        raise DataError(
            f"{text}\nreward.max_unmet_references={reward.max_unmet_references:g} is the share of a split that is "
            "accepted. Repair or remove these rows, name another column (data.answer, data.solution) or another "
            "data.scorer, or raise it"
        )
    return text and f"warning: {text}"


def _rows(data: TaskData, seed: int, directory: Path, splits: Sequence[str]) -> Iterator[RowReference]:
    """Read the rows from the user's local files, so that error messages can name file and line.

    If there are no local files, read the built dataset in `directory`."""
    if isinstance(data, ParquetData | Gsm8kData | MappedData) and not is_on_hub(data):
        made = task_of(data).build(data, seed)
        for split in splits:
            for number, row in enumerate(made.splits[split]):
                source, truth = row.data_source or made.data_source, json.dumps(row.ground_truth)
                yield RowReference(split, number, row.where, source, truth, row.solution)
        return
    for split in splits:
        path = directory / f"{split}.parquet"
        places = enumerate(read_rows(path, ["data_source", "reward_model", "extra_info"]))
        for number, (where, values) in places:
            truth = json.dumps(values["reward_model"]["ground_truth"])
            solution = values["extra_info"].get("solution") or ""
            yield RowReference(split, number, where, values["data_source"], truth, solution)


class _OutOfTimeError(Exception):
    pass


def _check(data: TaskData, reward: RewardConfig, rows: Iterable[RowReference], *, is_taught: bool) -> ReferenceReport:
    by_scorer: dict[str, list[RowReference]] = {}
    for row in rows:
        by_scorer.setdefault(scorer_of_row(data, row.data_source) or data.scorer, []).append(row)
    if programs := by_scorer.get(PROGRAMS):  # programs are slow, so only a sample of rows without a solution is tried
        step = -(-len(programs) // SAMPLE)
        by_scorer[PROGRAMS] = [row for n, row in enumerate(programs) if row.solution or n % step == 0]
    deadline = time.monotonic() + BUDGET_S
    settings = reward.model_copy(update={"num_processes": max(reward.num_processes, os.cpu_count() or 1)})
    checked, unmet = Counter[str](), dict[tuple[str, int], str]()
    with suppress(_OutOfTimeError):
        for scorer, own in by_scorer.items():
            with ScoringPool(scorer, settings, num_logged=0) as pool:
                checker = _Checker(scorer, pool, own, deadline, is_taught=is_taught)
                num_batches = -(-len(own) // _BATCH)
                for first in range(num_batches):
                    batch = own[first::num_batches]  # spread over the file, because time may run out
                    unmet |= checker.mismatches(batch)
                    checked.update(row.split for row in batch)
    ordered = sorted(unmet, key=lambda row: (row[0] != "train", row[1]))
    total = sum(map(len, by_scorer.values()))
    shown = [unmet[row] for row in ordered[:MAX_SAVED]]
    return ReferenceReport(dict(checked), dict(Counter(split for split, _ in ordered)), total, shown)


class _Checker:
    """A checker for the rows of one scorer. It scores each pair of a response and a reference once."""

    def __init__(
        self, scorer: str, pool: ScoringPool, rows: Sequence[RowReference], deadline: float, *, is_taught: bool
    ) -> None:
        self._scorer, self._pool, self._deadline = scorer, pool, deadline
        self._known: dict[tuple[str, str], Score] = {}
        self._has_full_marks = False
        sample = rows[:: -(-len(rows) // SAMPLE)]
        references = [(row, text) for row in sample if (text := _reference(row)) is not None]
        self._form = (FORMS[scorer] if scorer in FORMS else self._find_form(references)) if references else None
        is_solution_due = is_taught or (scorer in FORMS and self._form is None)
        self._reads_solutions = is_solution_due or any(
            score.failure is None and score.total > 0
            for score in self._scores([(row.solution, row.truth_json) for row in sample if row.solution])
        )

    def _find_form(self, references: Sequence[tuple[RowReference, str]]) -> Form | None:
        """Return the form in which the most references get the full score. Return None if, in this form, fewer than
        half of the references get the full score."""
        counts: dict[Form, int] = {}
        for before, after in USUAL_FORMS:
            scores = self._scores([(f"{before}{text}{after}", row.truth_json) for row, text in references])
            counts[before, after] = sum(map(_is_full_score, scores))
        best = max(counts, key=lambda form: counts[form])
        return best if 2 * counts[best] >= len(references) else None

    def mismatches(self, rows: Sequence[RowReference]) -> dict[tuple[str, int], str]:
        """Return a message for each row whose solution or reference does not get the full score, or on which the scorer
        fails. The keys are the split and the row number."""
        cases: list[tuple[RowReference, str, bool]] = []  # row, response, whether it is correct
        for row in rows:
            if row.solution:
                cases.append((row, row.solution, self._reads_solutions))
            if self._form is not None and (text := _reference(row)) is not None:
                cases.append((row, f"{self._form[0]}{text}{self._form[1]}", True))
            elif not row.solution:
                cases.append((row, WRONG, False))
        scored = list(zip(cases, self._scores([(text, row.truth_json) for row, text, _ in cases]), strict=True))
        self._has_full_marks |= any(is_right and _is_full_score(score) for (_, _, is_right), score in scored)
        found: dict[tuple[str, int], str] = {}
        for (row, text, is_right), score in scored:
            # The full score of a scorer that never gives 1 is unknown.
            is_full = _is_full_score(score) if self._has_full_marks else score.total > 0
            if score.failure is not None or (is_right and not is_full):
                what = f"fails: {score.failure[:200]}" if score.failure else f"scores {score.total:g}"
                shown = f"{row.where}: reference {row.truth_json[:120]}: the answer {text[-120:]!r} {what}"
                found.setdefault((row.split, row.number), shown)
        return found

    def _scores(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        scores = self._pool.submit([response for response, _ in new], [truth for _, truth in new])
        if wait(scores, max(0.0, self._deadline - time.monotonic())).not_done:
            raise _OutOfTimeError
        for pair, score in zip(new, [each.result() for each in scores], strict=True):
            if problem := weights_problem(score.failure):
                raise ConfigError(f"{problem}, by {self._scorer}")
            self._known[pair] = score
        return [self._known[pair] for pair in pairs]


def _is_full_score(score: Score) -> bool:
    return score.failure is None and score.solved


def _reference(row: RowReference) -> str | None:
    truth = json.loads(row.truth_json)
    if isinstance(truth, dict) and set(truth) == {"answer"}:
        truth = truth["answer"]
    return str(truth) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None
