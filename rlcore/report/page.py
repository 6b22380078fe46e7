"""Pages rendered from templates, the head of a report as Markdown, and sample responses as a table or a page."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as html_escape
from pydantic import JsonValue

from rlcore.errors import DataError
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.report.document import Cell, Kind, Report, Row, Table, Tone, compact, table
from rlcore.report.plots import DARK, LIGHT
from rlcore.report.record import RunRecord, read_run
from rlcore.storage.publish import write_text_atomically

_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\`*_\[\]!|~$]|^[-+#=])")
_LIST_NUMBER = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_MAIL = re.compile(r"(@[\w-]+)\.(?=\w)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def page(template: str, **values: Any) -> str:
    """Render a template of the folder `templates/`."""
    return _TEMPLATES.get_template(template).render(light=LIGHT, dark=DARK, **values)


def responses_page(title: str = "", data: JsonValue = None, num_left_out: int = 0) -> str:
    """Return the page of responses, with embedded `data` or for use with a server. Its content security policy permits
    only the script of the page."""
    script = _TEMPLATES.get_template("answers.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"title": title, "data": data, "num_left_out": num_left_out}
    return page("answers.html.j2", script=Markup(script), digest=digest, **values)


def markdown_of(report: Report) -> str:
    """Return the title, the key metrics and the findings of a report as Markdown."""
    lines = [f"# {escape(report.title)}", escape(report.subtitle)]
    lines += [f"**{escape(text)}**" for text in (report.state, report.failure) if text]
    lines += [escape(" · ".join(report.facts))] if report.facts else []
    lines += [f"- {escape(tile.label)}: **{escape(tile.text)}** {escape(tile.detail)}" for tile in report.tiles]
    lines += [f"- Missing: {escape(text)}" for text in report.missing]
    lines.append("## Findings")
    for found in report.findings:
        lines.append(f"- **{escape(found.topic)}: {escape(found.verdict)}.** {escape(found.statement)}")
        lines.append(f"  Rule: {escape(found.rule)}")
    return "\n\n".join(lines) + "\n"


def escape(text: str) -> str:
    r"""Escape a text for one line of Markdown, so that nothing in it is markup, HTML or a link.

    >>> escape("a|b\n<img src=x> ![x](y)")
    'a\\|b ⏎ &lt;img src=x&gt; \\!\\[x\\](y)'
    """
    text = text.replace("\r\n", "\n").replace("\n", " ⏎ ")
    text = _CONTROL.sub(" ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))
    # Most readers link bare addresses. Prefect's page shows numeric entities literally, so none are used.
    return _MAIL.sub(r"\1\\.", text.replace("://", "\\://").replace("www.", "www\\."))


def prose(text: str) -> Markup:
    """Convert a text to HTML. Text in backticks becomes code.

    >>> prose("over all, as `val-core/all` <b>")
    Markup('over all, as <code>val-core/all</code> &lt;b&gt;')
    """
    return Markup(_CODE_SPAN.sub(r"<code>\1</code>", str(html_escape(text))))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["prose"] = prose
_TEMPLATES.filters["kind"] = lambda block: type(block).__name__
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
SAMPLES_OF_A_KIND = 3
"""The number of problems for each kind: newly solved, lost, still unsolved, solved both times."""
MAX_PROBLEMS = 2_000
"""The maximum number of problems in a page. The largest changes come first. Larger pages open slowly."""
FILE_NAME = "samples.html"
_KINDS: Mapping[tuple[bool, bool], tuple[str, Tone]] = {
    (False, True): ("newly solved", "good"),
    (True, False): ("lost", "bad"),
    (False, False): ("still unsolved", ""),
    (True, True): ("solved both times", ""),
}


def sample_table(record: RunRecord) -> Table:
    """Return a table of scored responses before and after training, grouped by change, such as newly solved."""
    rows: dict[str, list[Row]] = {kind: [] for kind, _ in _KINDS.values()}
    later = {problem.prompt_id: problem for problem in record.after.problems} if record.after is not None else {}
    before = record.before.problems if record.before is not None else ()
    for problem in sorted(before, key=lambda problem: problem.prompt_id):
        if (other := later.get(problem.prompt_id)) is None:
            continue
        # the greedy response, or the first sample without one
        was, became = (each.greedy or each.samples[0] for each in (problem, other))
        if was.failure is not None or became.failure is not None:
            continue
        kind, tone = _KINDS[was.solved, became.solved]
        if len(rows[kind]) < SAMPLES_OF_A_KIND:
            truth = truth_text(problem.ground_truth_json)
            shown = (f"{each.text}\n({_words(each)})" for each in (was, became))
            rows[kind].append((Cell(kind, kind, tone), problem.prompt_text, truth, *shown))
    columns: dict[str, Kind] = {"": "text", "Problem": "code", "Reference": "code", "Before": "code", "After": "code"}
    note = f"The greedy response or the first sample. `{FILE_NAME}` next to this page has every response."
    return table(
        "samples", "Responses before and after", columns, [row for found in rows.values() for row in found], note
    )


def _words(answer: Response) -> str:
    parts = "".join(f", {name} {compact(value, 3)}" for name, value in answer.parts.items())
    cut = ", truncated" if answer.finish_reason == "length" else ""
    return f"score {answer.score:.3g}{parts}, {answer.num_tokens} tokens{cut}"


def truth_text(ground_truth_json: str) -> str:
    """Return a ground truth in one line.

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


def build_sample_browser(run_dir: Path, *, target: Path | None = None, max_problems: int = MAX_PROBLEMS) -> Path:
    """Write the page of a run's held-out responses, by default to `report/samples.html` in its folder. Raises DataError
    if the folder is not a run, or if the run has no validation yet."""
    record = read_run(run_dir)
    results = validations_by_step(record.validations)
    if not results:
        raise DataError(
            f"{run_dir / 'validation'}: no readable validation, so there are no responses to show; wait for the first "
            "one, or run millrace validate"
        )
    data, num_left_out = _page_data(results, max_problems)
    path = target or run_dir / "report" / FILE_NAME
    write_text_atomically(path, responses_page(record.run_id, data, num_left_out))
    return path


def validations_by_step(validations: Mapping[str, ValidationResult]) -> list[ValidationResult]:
    """Return one validation per step, sorted by step. Of several validations, the one with the most problems is
    used."""
    found: dict[int, ValidationResult] = {}
    for result in sorted(validations.values(), key=lambda result: (result.step, -len(result.problems), result.name)):
        found.setdefault(result.step, result)
    return list(found.values())


def _page_data(results: Sequence[ValidationResult], max_problems: int) -> tuple[dict[str, JsonValue], int]:
    """Return the data of the page's script, and the number of omitted problems. Texts are referenced by index."""
    seen: dict[int, dict[int, ProblemResult]] = {}
    for at, result in enumerate(results):
        for problem in result.problems:
            seen.setdefault(problem.prompt_id, {})[at] = problem
    changes = {prompt_id: _change(list(found.values())) for prompt_id, found in seen.items()}
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def document(answer: Response, greedy: bool) -> dict[str, JsonValue]:
        return {
            "text": number(answer.text),
            "greedy": greedy,
            "score": answer.score if answer.failure is None else None,
            "failure": answer.failure,
            "parts": dict(answer.parts),
            "num_tokens": answer.num_tokens,
            "finish_reason": answer.finish_reason,
            "solved": answer.solved,
            "logprob": answer.logprob,
        }

    def encode_result(problem: ProblemResult | None) -> JsonValue:
        if problem is None:
            return None
        greedy = [] if problem.greedy is None else [document(problem.greedy, True)]
        answers: list[JsonValue] = [*greedy, *(document(answer, False) for answer in problem.samples)]
        return {"score": problem.mean_score if problem.scored_samples else None, "answers": answers}

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
                "at": [encode_result(found.get(at)) for at in range(len(results))],
            }
        )
    data: dict[str, JsonValue] = {
        "validations": [{"validation": result.name, "step": result.step} for result in results],
        "problems": problems,
        "texts": list(texts),
    }
    return data, len(seen) - len(problems)


def _change(seen: Sequence[ProblemResult]) -> float | None:
    """Return the mean sample score at the last step minus the mean at the first step, or None without scores."""
    scores = [problem.mean_score for problem in seen if problem.scored_samples]
    return scores[-1] - scores[0] if scores else None
