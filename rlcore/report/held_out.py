"""Held-out problems: tables and pictures before and after, answers side by side, and the sample browser."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from rlcore.errors import DataError
from rlcore.evaluation.result import Answer, Comparison, ProblemResult, ValidationResult, compare, pass_curve
from rlcore.evaluation.stats import Interval
from rlcore.report import page
from rlcore.report.document import Column, SamplePair, Samples, Table, Tone, Value, table
from rlcore.report.numbers import score_parts, truth_text
from rlcore.report.page import LIGHT, Chart, legend, tidy
from rlcore.report.record import RunRecord, read_run
from rlcore.storage.publish import write_text_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLES_OF_A_KIND = 3
"""Problems shown of each kind: newly solved, lost, never solved, always solved."""

_MEANING: Mapping[str, str] = {
    "mean": "mean score of {k} sampled answers",
    "pass": "at least one of {k} samples is right (unbiased)",
    "pass_all": "all of {k} samples are right (unbiased)",
    "maj": "the most frequent of {k} answers is right",
    "greedy": "the greedy answer",
}


def result_table(comparisons: Sequence[Comparison]) -> Table:
    """Every statistic before and after, paired."""
    rows = [(*row, _meaning(found.statistic)) for row, found in zip(_compared(comparisons), comparisons, strict=True)]
    columns = (*_COMPARED, Column("Meaning"))
    count = comparisons[0].num_problems if comparisons else 0
    note = (
        f"{count} held-out problems; bootstrap intervals over problems. reward is the scorer's total, acc counts "
        "full marks only."
    )
    return table("held_out", "Held-out problems", columns, rows, note if rows else "")


_COMPARED = (Column("Figure", "code"), Column("Before", "number"), Column("After", "number"),
             Column("Paired difference", "difference"), Column("Better on", "number"),
             Column("Worse on", "number"))  # fmt: skip


def _compared(comparisons: Sequence[Comparison]) -> list[tuple[Value, ...]]:
    """A row a statistic, under these columns."""
    return [
        (row.statistic, row.first, row.second, row.paired.difference, row.paired.wins, row.paired.losses)
        for row in comparisons
    ]


def suite_table(record: RunRecord) -> Table | None:
    """Every statistic of every suite, before and after; None without suites."""
    rows: list[tuple[Value, ...]] = []
    for name, results in record.suites.items():
        match results.get("before"), results.get("after"):
            case ValidationResult() as before, ValidationResult() as after:
                rows += [(name, *row) for row in _compared(compare(before, after))]
            case ValidationResult() as before, None:
                rows += [(name, each, found, *(None,) * 4) for each, found in before.intervals.items()]
            case None, ValidationResult() as after:
                rows += [(name, each, None, found, *(None,) * 3) for each, found in after.intervals.items()]
    if not rows:
        return None
    columns = (Column("Suite", "code"), *_COMPARED)
    note = "Held-out sets without a training part; bootstrap intervals over the problems of each."
    return table("suites", "Suites", columns, rows, note)


def _meaning(statistic: str) -> str:
    kind, _, k = statistic.partition("/")[2].partition("@")
    return _MEANING.get(kind, "").format(k=k)


def single_table(result: ValidationResult) -> Table:
    """The figures of one validation, where there is no second one to compare it with."""
    rows = [(name, found, _meaning(name)) for name, found in result.intervals.items()]
    columns = (Column("Figure", "code"), Column(f"{result.name}, step {result.step}", "number"), Column("Meaning"))
    return table("held_out", "Held-out problems", columns, rows, f"{len(result.problems)} held-out problems.")


Curves = Mapping[str, Mapping[Any, Interval]]
"""Column title, then key of the row."""


def _grid(name: str, title: str, key: Column, curves: Curves, note: str = "") -> Table:
    """A row a key, a column a curve."""
    keys = sorted({each for curve in curves.values() for each in curve})
    rows = [(each, *(curve.get(each) for curve in curves.values())) for each in keys]
    return table(name, title, (key, *(Column(column, "number") for column in curves)), rows, note)


def progress_table(record: RunRecord) -> Table:
    """The held-out figures at every validation."""
    curves = {
        name.removeprefix("reward/"): dict(found) for name in record.core_statistics if (found := record.held_out(name))
    }
    grid = _grid("progress", "Held-out figures on the way", Column("Step", "number"), curves)
    return replace(grid, folded=len(grid.rows) > 12)


def pass_table(record: RunRecord) -> Table | None:
    """pass@k over k, before and after; None without several samples."""
    curves = {f"pass@k, {label}": pass_curve(result) for label, result in judged(record)}
    note = (
        "Where pass@k of many samples stays while pass@1 rises, training has sharpened what the model could do already."
    )
    found = _grid("pass_at_k", "pass@k", Column("k", "number"), curves, note)
    return found if len(found.rows) > 1 else None


def difficulty_table(record: RunRecord) -> Table | None:
    """Reward, pass@k and greedy by difficulty, before and after; None where the task has one difficulty."""
    parts = {label: result.by_difficulty() for label, result in judged(record)}
    note = "Difficulty is the task's own measure; for countdown the fewest operations that reach the target."
    return _parts_table(record, "difficulty", "By difficulty", Column("Difficulty", "number"), parts, note)


def source_table(record: RunRecord) -> Table | None:
    """The same of each data source; None where there is one."""
    parts = {label: result.by_source() for label, result in judged(record)}
    note = "Each dataset of the mixture, scored by its own scorer."
    return _parts_table(record, "source", "By data source", Column("Source", "code"), parts, note)


Parts = Mapping[str, Mapping[Any, ValidationResult]]
"""Before or after, then key of the row."""


def _parts_table(record: RunRecord, name: str, title: str, key: Column, parts: Parts, note: str) -> Table | None:
    """Problems and main figures of each part, before and after; None of fewer than two parts."""
    first = {each: part for found in reversed(list(parts.values())) for each, part in found.items()}
    if len(first) < 2:
        return None
    k = record.num_samples
    statistics = (f"reward/mean@{k}", f"reward/pass@{k}", "reward/greedy") if k else ("reward/greedy",)
    columns = (key, Column("Problems", "number"),
               *(Column(f"{statistic.removeprefix('reward/')}, {label}", "number")
                 for statistic in statistics for label in parts))  # fmt: skip
    rows = [
        (
            each,
            len(first[each].problems),
            *(
                found[each].intervals.get(statistic) if each in found else None
                for statistic in statistics
                for found in parts.values()
            ),
        )
        for each in sorted(first)
    ]
    return table(name, title, columns, rows, note)


def samples_of(before: ValidationResult | None, after: ValidationResult | None) -> Samples:
    """Answers to the same problems: newly solved, lost, unsolved and solved ones, the first of each by id."""
    if before is None or after is None:
        return Samples(())
    later = {problem.prompt_id: problem for problem in after.problems}
    kinds: dict[str, list[SamplePair]] = {kind: [] for kind, _ in _KINDS.values()}
    for problem in sorted(before.problems, key=lambda problem: problem.prompt_id):
        other = later.get(problem.prompt_id)
        if other is None or (was := shown_answer(problem)) is None or (became := shown_answer(other)) is None:
            continue
        kind, tone = _KINDS[was.solved, became.solved]
        if len(kinds[kind]) < SAMPLES_OF_A_KIND:
            truth = truth_text(problem.ground_truth_json)
            pair = SamplePair(kind, tone, problem.prompt_text, truth, was, became, _solved(problem), _solved(other))
            kinds[kind].append(pair)
    return Samples(tuple(pair for pairs in kinds.values() for pair in pairs))


_KINDS: Mapping[tuple[bool, bool], tuple[str, Tone]] = {
    (False, True): ("newly solved", "good"),
    (True, False): ("lost", "bad"),
    (False, False): ("still unsolved", ""),
    (True, True): ("solved both times", ""),
}


def shown_answer(problem: ProblemResult) -> Answer | None:
    """The greedy answer, else the first sample: not the best one."""
    return problem.greedy or next(iter(problem.samples), None)


def _solved(problem: ProblemResult) -> str:
    count = len(problem.samples)
    return f"{problem.num_solved} of {count} samples right" if count else ""


COLOURS = ("grey", "blue")
"""Before and after."""

MOST_BARS = 24
"""Lengths are put into so many bins at most."""

_BAR = 0.38
Draw = Callable[["Axes", list[tuple[str, ValidationResult]]], None]


def charts(record: RunRecord) -> tuple[Chart, ...]:
    """Every picture of held-out answers."""
    return tuple(
        Chart(name, title, caption, partial(_drawn, record, draw), 2.7) for name, title, caption, draw in _CHARTS
    )


def judged(record: RunRecord) -> list[tuple[str, ValidationResult]]:
    """The validations before and after, those that are there."""
    both = (("before", record.before), ("after", record.after))
    return [(label, result) for label, result in both if result is not None]


def _drawn(record: RunRecord, draw: Draw, figure: "Figure") -> None:
    if results := judged(record):
        axes = figure.subplots()
        draw(axes, results)
        legend(axes)


def _solve_rates(axes: "Axes", results: list[tuple[str, ValidationResult]]) -> None:
    k = results[0][1].num_samples
    if not k:
        return
    for place, (label, result) in enumerate(results):
        counts = np.bincount([problem.num_solved for problem in result.problems], minlength=k + 1)
        at = np.arange(len(counts)) + (place - 0.5) * _BAR * (len(results) > 1)
        axes.bar(at, 100 * counts / counts.sum(), _BAR, color=LIGHT[COLOURS[place]], label=label)
    tidy(axes, x=f"of {k} sampled answers solved", y="% of problems")


def _lengths(axes: "Axes", results: list[tuple[str, ValidationResult]]) -> None:
    lengths = [
        np.array([answer.num_tokens for problem in result.problems for answer in problem.samples])
        for _, result in results
    ]
    if not all(found.size for found in lengths):
        return
    low, high = min(found.min() for found in lengths), max(found.max() for found in lengths)
    step = max(1, -(-(high - low + 1) // MOST_BARS))
    edges = np.arange(low, high + step + 1, step)
    for place, ((label, _), found) in enumerate(zip(results, lengths, strict=True)):
        counts, _ = np.histogram(found, edges)
        at = edges[:-1] + step * (0.5 + (place - 0.5) * _BAR * (len(results) > 1)) - 0.5
        axes.bar(at, 100 * counts / counts.sum(), _BAR * step, color=LIGHT[COLOURS[place]], label=label)
    tidy(axes, x="tokens of a sampled answer", y="% of answers")
    axes.set_xlim(edges[0] - max(2.0, step), edges[-1] + max(1.0, step))


def _difficulty(axes: "Axes", results: list[tuple[str, ValidationResult]]) -> None:
    parts = [result.by_difficulty() for _, result in results]
    levels = sorted({level for found in parts for level in found})
    if len(levels) < 2:
        return
    for place, ((label, _), found) in enumerate(zip(results, parts, strict=True)):
        rewards = [part.intervals[part.reward_statistic] for part in found.values()]
        at = np.array([levels.index(level) for level in found]) + (place - 0.5) * _BAR * (len(results) > 1)
        values = np.array([reward.value for reward in rewards])
        ends = np.array([[reward.value - reward.low, reward.high - reward.value] for reward in rewards]).T
        axes.bar(at, values, _BAR, color=LIGHT[COLOURS[place]], label=label)
        axes.errorbar(
            at, values, yerr=np.clip(ends, 0, None), fmt="none", color=LIGHT["ink"], elinewidth=0.9, capsize=2.5
        )
    tidy(axes, x="difficulty", y="score", steps=False)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])


_CHARTS: tuple[tuple[str, str, str, Draw], ...] = (
    ("solve_rates", "How often problems are solved", "Held-out problems by how many of their samples are right.",
     _solve_rates),
    ("difficulty", "Reward by difficulty", "Mean of the samples with 95% intervals.", _difficulty),
    ("answer_lengths", "Length of held-out answers", "Sampled answers, end token included.", _lengths),
)  # fmt: skip


MOST_PROBLEMS = 2_000
"""Problems in one page at most, those that changed most first: more make a page that is slow to open."""

FILE_NAME = "samples.html"


def build_sample_browser(run_dir: Path, *, target: Path | None = None, max_problems: int = MOST_PROBLEMS) -> Path:
    """Write the sample browser of a run (default: `report/samples.html` in its folder).

    Raises:
        DataError: the folder holds no run, or the run has no validation with answers yet.
    """
    record = read_run(run_dir)
    results = at_each_step(record.validations)
    if not results:
        raise DataError(
            f"{run_dir / 'validation'}: holds no validation that can be read, so there are no answers to show; wait "
            "for the first one, or run millrace validate"
        )
    data, num_kept, num_left_out = browser_data(results, max_problems)
    path = target or run_dir / "report" / FILE_NAME
    html = page.scripted_page(
        "browser.html.j2",
        "browser.js.j2",
        title=record.run_id,
        data=page.trusted(embedded_json(data)),
        num_problems=num_kept,
        num_left_out=num_left_out,
    )
    write_text_atomically(path, html)
    return path


def at_each_step(validations: Mapping[str, ValidationResult]) -> list[ValidationResult]:
    """One validation for each step, in order: the one with the most problems, `before` and `after` by their step."""
    found: dict[int, ValidationResult] = {}
    for result in sorted(validations.values(), key=lambda result: (result.step, -len(result.problems), result.name)):
        found.setdefault(result.step, result)
    return list(found.values())


def browser_data(results: Sequence[ValidationResult], max_problems: int) -> tuple[dict[str, JsonValue], int, int]:
    """What the page's script reads, how many problems are in it, and how many left out. Equal texts are stored once."""
    answers: dict[int, dict[int, ProblemResult]] = {}
    for index, result in enumerate(results):
        for problem in result.problems:
            answers.setdefault(problem.prompt_id, {})[index] = problem
    kept = sorted(answers.values(), key=lambda seen: (-abs(_change(seen)), _first(seen).prompt_id))[:max_problems]
    texts: Texts = {}
    problems: list[JsonValue] = [_problem(seen, len(results), texts) for seen in kept]
    data: dict[str, JsonValue] = {
        "validations": [{"name": result.name, "step": result.step} for result in results],
        "problems": problems,
        "texts": list(texts),
    }
    return data, len(kept), len(answers) - len(kept)


Texts = dict[str, int]
"""Texts by number: an answer that is given a hundred times is in the file once."""


def _number(texts: Texts, text: str) -> int:
    return texts.setdefault(text, len(texts))


def _first(seen: Mapping[int, ProblemResult]) -> ProblemResult:
    return seen[min(seen)]


def _change(seen: Mapping[int, ProblemResult]) -> float:
    """Mean score at the last validation less that at the first."""
    return _score(seen[max(seen)]) - _score(seen[min(seen)])


def _score(problem: ProblemResult) -> float:
    if problem.samples:
        return problem.mean_score
    return problem.greedy.score if problem.greedy is not None else 0.0


def _problem(seen: Mapping[int, ProblemResult], num_validations: int, texts: Texts) -> dict[str, JsonValue]:
    first = _first(seen)
    return {
        "id": first.prompt_id,
        "difficulty": first.difficulty,
        "prompt": _number(texts, first.prompt_text),
        "truth": _number(texts, truth_text(first.ground_truth_json)),
        "first": _score(first),
        "last": _score(seen[max(seen)]),
        "at": [_judged(seen[index], texts) if index in seen else None for index in range(num_validations)],
    }


def _judged(problem: ProblemResult, texts: Texts) -> dict[str, JsonValue]:
    return {
        "score": _score(problem),
        "greedy": _answer(problem.greedy, texts) if problem.greedy is not None else None,
        "samples": [_answer(answer, texts) for answer in problem.samples],
    }


def _answer(answer: Answer, texts: Texts) -> dict[str, JsonValue]:
    return {
        "text": _number(texts, answer.text),
        "score": answer.score,
        "parts": dict(answer.parts),
        "tokens": answer.num_tokens,
        "cut": answer.finish_reason == "length",
        "solved": answer.solved,
        "logprob": answer.logprob,
    }


def embedded_json(value: Mapping[str, JsonValue]) -> str:
    """JSON that cannot end the script element it stands in: ASCII, with `<`, `>` and `&` written as escapes."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def answer_rows(run_dir: Path, most: int) -> list[dict[str, JsonValue]]:
    """The newest validation's problems, by id: prompt, answer (greedy, else the first sample), its score and parts, and
    how many samples are right; the score before training beside it where that is known.

    Raises:
        DataError: the folder holds no run.
    """
    record = read_run(run_dir)
    newest = record.after or record.before
    if newest is None:
        return []
    before = {} if record.before is None else {problem.prompt_id: problem for problem in record.before.problems}
    chosen = sorted(newest.problems, key=lambda problem: problem.prompt_id)[:most]
    return [_row(problem, before.get(problem.prompt_id), newest.step) for problem in chosen]


def _row(problem: ProblemResult, before: ProblemResult | None, step: int) -> dict[str, JsonValue]:
    answer = shown_answer(problem)
    earlier = None if before is None else shown_answer(before)
    return {
        "step": step,
        "problem": problem.prompt_id,
        "prompt": problem.prompt_text,
        "truth": truth_text(problem.ground_truth_json),
        "answer": None if answer is None else answer.text,
        "score": None if answer is None else answer.score,
        "parts": None if answer is None else score_parts(answer.parts),
        "logprob": None if answer is None else answer.logprob,
        "samples right": f"{problem.num_solved} of {len(problem.samples)}",
        "score before": None if earlier is None else earlier.score,
    }
