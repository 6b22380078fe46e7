"""Answers to held-out problems: a few in the report, and all of them in a page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from rlcore.errors import DataError
from rlcore.evaluation.result import Answer, ProblemResult, ValidationResult
from rlcore.report import numbers, page
from rlcore.report.document import Cell, Kind, Row, Table, Tone, table
from rlcore.report.record import RunRecord, read_run
from rlcore.storage.publish import write_text_atomically

SAMPLES_OF_A_KIND = 3
"""Problems shown of each kind: newly solved, lost, never solved, always solved."""

MOST_PROBLEMS = 2_000
"""Problems in one page at most, those that changed most first: more make a page that is slow to open."""

FILE_NAME = "samples.html"

_KINDS: Mapping[tuple[bool, bool], tuple[str, Tone]] = {
    (False, True): ("newly solved", "good"),
    (True, False): ("lost", "bad"),
    (False, False): ("still unsolved", ""),
    (True, True): ("solved both times", ""),
}


def sample_table(record: RunRecord) -> Table:
    """Scored answers to the same problems: newly solved, lost, unsolved and solved ones, the first of each by id."""
    rows: dict[str, list[Row]] = {kind: [] for kind, _ in _KINDS.values()}
    later = {problem.prompt_id: problem for problem in record.after.problems} if record.after is not None else {}
    before = record.before.problems if record.before is not None else ()
    for problem in sorted(before, key=lambda problem: problem.prompt_id):
        if (other := later.get(problem.prompt_id)) is None:
            continue
        # The greedy answer, else the first sample: not the best one.
        was, became = (each.greedy or each.samples[0] for each in (problem, other))
        if was.failure is not None or became.failure is not None:
            continue
        kind, tone = _KINDS[was.solved, became.solved]
        if len(rows[kind]) < SAMPLES_OF_A_KIND:
            truth = truth_text(problem.ground_truth_json)
            shown = (f"{each.text}\n({_words(each)})" for each in (was, became))
            rows[kind].append((Cell(kind, kind, tone), problem.prompt_text, truth, *shown))
    columns: dict[str, Kind] = {"": "text", "Problem": "code", "Wanted": "code", "Before": "code", "After": "code"}
    note = f"By the greedy answer or the first sample. `{FILE_NAME}` beside this page has every answer."
    return table(
        "samples", "Answers before and after", columns, [row for found in rows.values() for row in found], note
    )


def _words(answer: Answer) -> str:
    parts = "".join(f", {name} {numbers.compact(value, 3)}" for name, value in answer.parts.items())
    cut = ", cut" if answer.finish_reason == "length" else ""
    return f"score {answer.score:.3g}{parts}, {answer.num_tokens} tokens{cut}"


def _score(answer: Answer) -> float | None:
    return answer.score if answer.failure is None else None


def truth_text(ground_truth_json: str) -> str:
    """A ground truth in one line: `target 7, numbers 3 4`.

    >>> truth_text('{"target": 7, "numbers": [3, 4]}')
    'target 7, numbers 3 4'
    """
    try:
        truth = json.loads(ground_truth_json)
    except ValueError:
        return ground_truth_json
    if not isinstance(truth, dict):
        return str(truth)
    plain = {key: " ".join(map(str, each)) if isinstance(each, list) else each for key, each in truth.items()}
    return ", ".join(f"{key} {value}" for key, value in plain.items())


# ------------------------------------------------------------------ the page of answers as a file


def build_sample_browser(run_dir: Path, *, target: Path | None = None, max_problems: int = MOST_PROBLEMS) -> Path:
    """Write the page of a run's held-out answers, which asks no server (default: `report/samples.html` in its folder).

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
    data, num_left_out = _data_of(results, max_problems)
    path = target or run_dir / "report" / FILE_NAME
    write_text_atomically(path, page.answers_page(record.run_id, data, num_left_out))
    return path


def at_each_step(validations: Mapping[str, ValidationResult]) -> list[ValidationResult]:
    """One validation for each step, in order: the one with the most problems, `before` and `after` by their step."""
    found: dict[int, ValidationResult] = {}
    for result in sorted(validations.values(), key=lambda result: (result.step, -len(result.problems), result.name)):
        found.setdefault(result.step, result)
    return list(found.values())


def _data_of(results: Sequence[ValidationResult], max_problems: int) -> tuple[dict[str, JsonValue], int]:
    """What the page's script reads, and how many problems are left out. A text that occurs a hundred times is in the
    file once: answers have its number."""
    seen: dict[int, dict[int, ProblemResult]] = {}
    for at, result in enumerate(results):
        for problem in result.problems:
            seen.setdefault(problem.prompt_id, {})[at] = problem
    changes = {prompt_id: _change(list(found.values())) for prompt_id, found in seen.items()}
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def document(answer: Answer, greedy: bool) -> dict[str, JsonValue]:
        return {
            "text": number(answer.text),
            "greedy": greedy,
            "score": _score(answer),
            "failure": answer.failure,
            "parts": dict(answer.parts),
            "num_tokens": answer.num_tokens,
            "finish_reason": answer.finish_reason,
            "solved": answer.solved,
            "logprob": answer.logprob,
        }

    def judged(problem: ProblemResult | None) -> JsonValue:
        if problem is None:
            return None
        greedy = [] if problem.greedy is None else [document(problem.greedy, True)]
        answers: list[JsonValue] = [*greedy, *(document(answer, False) for answer in problem.samples)]
        return {"score": problem.mean_score if problem.scored else None, "answers": answers}

    problems: list[JsonValue] = []
    for prompt_id in sorted(seen, key=lambda one: (-abs(changes[one] or 0.0), one))[:max_problems]:
        found = seen[prompt_id]
        first = next(iter(found.values()))
        problems.append(
            {
                "id": prompt_id,
                "difficulty": first.difficulty,
                "prompt": number(first.prompt_text),
                "truth": number(truth_text(first.ground_truth_json)),
                "change": changes[prompt_id],
                "at": [judged(found.get(at)) for at in range(len(results))],
            }
        )
    data: dict[str, JsonValue] = {
        "validations": [{"validation": result.name, "step": result.step} for result in results],
        "problems": problems,
        "texts": list(texts),
    }
    return data, len(seen) - len(problems)


def _change(seen: Sequence[ProblemResult]) -> float | None:
    """The mean score of the samples at the last step less that at the first, of those with a score; None without."""
    scores = [problem.mean_score for problem in seen if problem.scored]
    return scores[-1] - scores[0] if scores else None
