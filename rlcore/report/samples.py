"""Held-out answers: a searchable page of all of them at every validation, and rows of a table for MLflow."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from rlcore.errors import DataError
from rlcore.evaluation import Answer, ProblemResult, ValidationResult
from rlcore.report import page
from rlcore.report.held_out import shown_answer
from rlcore.report.numbers import score_parts, truth_text
from rlcore.report.record import read_run
from rlcore.storage.publish import write_text_atomically

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
    write_text_atomically(path, _page(record.run_id, data, num_kept, num_left_out))
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
    texts = _Texts()
    problems: list[JsonValue] = [_problem(seen, len(results), texts) for seen in kept]
    data: dict[str, JsonValue] = {
        "validations": [{"name": result.name, "step": result.step} for result in results],
        "problems": problems,
        "texts": texts.in_order(),
    }
    return data, len(kept), len(answers) - len(kept)


class _Texts:
    """Texts by number: an answer that is given a hundred times is in the file once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def in_order(self) -> list[JsonValue]:
        return list(self._numbers)


def _first(seen: Mapping[int, ProblemResult]) -> ProblemResult:
    return seen[min(seen)]


def _change(seen: Mapping[int, ProblemResult]) -> float:
    """Mean score at the last validation less that at the first."""
    return _score(seen[max(seen)]) - _score(seen[min(seen)])


def _score(problem: ProblemResult) -> float:
    if problem.samples:
        return problem.mean_score
    return problem.greedy.score if problem.greedy is not None else 0.0


def _problem(seen: Mapping[int, ProblemResult], num_validations: int, texts: _Texts) -> dict[str, JsonValue]:
    first = _first(seen)
    return {
        "id": first.prompt_id,
        "difficulty": first.difficulty,
        "prompt": texts(first.prompt_text),
        "truth": texts(truth_text(first.ground_truth_json)),
        "first": _score(first),
        "last": _score(seen[max(seen)]),
        "at": [_judged(seen[index], texts) if index in seen else None for index in range(num_validations)],
    }


def _judged(problem: ProblemResult, texts: _Texts) -> dict[str, JsonValue]:
    return {
        "score": _score(problem),
        "greedy": _answer(problem.greedy, texts) if problem.greedy is not None else None,
        "samples": [_answer(answer, texts) for answer in problem.samples],
    }


def _answer(answer: Answer, texts: _Texts) -> dict[str, JsonValue]:
    return {
        "text": texts(answer.text),
        "score": answer.score,
        "parts": dict(answer.parts),
        "tokens": answer.num_tokens,
        "cut": answer.finish_reason == "length",
        "solved": answer.solved,
        "logprob": answer.logprob,
    }


def _page(title: str, data: Mapping[str, JsonValue], num_problems: int, num_left_out: int) -> str:
    script = page.source("browser.js.j2")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.page(
        "browser.html.j2",
        title=title,
        script=page.trusted(script),
        digest=digest,
        data=page.trusted(embedded_json(data)),
        num_problems=num_problems,
        num_left_out=num_left_out,
    )


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
