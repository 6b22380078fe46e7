"""The Hugging Face model card (README.md) of exported weights: origin, scores, settings and use."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rlcore.config.base import covers, expand_path
from rlcore.config.model import SMOLLM2
from rlcore.config.problems import mask_secrets
from rlcore.evaluation.result import ValidationResult
from rlcore.report.document import interval
from rlcore.report.record import RunRecord
from rlcore.report.run_sections import defaults_of, settings_of

_PUBLISHED = {SMOLLM2: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""The hub id and the license of each model that Millrace installs as a Python package."""
_PRIVATE = ("paths", "tracking", "runtime", "reward.judge", "tags")
"""The settings that a card omits, because they describe a machine, an account or a service."""
_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
```

```
vllm serve {name}
```"""


def model_card(record: RunRecord, step: int, name: str, evaluations: Sequence[ValidationResult] = ()) -> ModelCard:
    """Return the model card of a run's weights after `step`. `name`: a hub id, or the name of the exported folder.
    `evaluations`: results from evaluating these weights after the run."""
    config, origin = record.config, record.lineage
    base_id, base, license_name = _base_model(config.model.path)
    results = [*_results_of(record, step), *evaluations]
    metadata = ModelCardData(
        base_model=base_id,
        license=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["millrace", "reinforcement-learning", config.algo.advantage],
        model_name=name.rpartition("/")[2],
        eval_results=[each for result in results for each in _eval_results(result)] or None,
    )
    facts = {
        "run": f"`{record.run_id}`",
        "step": f"{step:,} of {config.trainer.total_steps:,}",
        "base model": base,
        "license of the base model": license_name or ("not stated in its files" if config.model.path else "none"),
        "task": f"`{config.data.task}`",
        "code": f"Millrace, commit {origin.git_commit or 'unknown'}{' with changes' * origin.git_dirty}",
    }
    scores = [
        (result.data_source, statistic, interval(found), len(result.scored_only.problems))
        for result in results
        for statistic, found in result.intervals.items()
    ]
    curve = [(f"{at:,}", interval(found)) for at, found in record.held_out(record.reward_statistic) if at <= step]
    defaults = defaults_of(config)
    settings = {
        key: _public(value)
        for key, value in settings_of(config).items()
        if defaults.get(key, ...) != value and not any(covers(section, key) for section in _PRIVATE)
    }
    parts = (
        f"# {name}\n\n{base} after {step:,} steps of reinforcement learning with Millrace.",
        _table(("", ""), facts.items()),
        f"## Scores\n\nMeans over problems with {config.validation.confidence:.0%} intervals.",
        _table(("set", "figure", "value", "problems"), scores) if scores else "These weights were not evaluated.",
        f"## Held-out {record.reward_statistic}",
        _table(("step", "value"), curve) if curve else "The run has no validation.",
        f"## Settings that differ from the defaults\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```",
        f"## Use\n\n{_USE.format(name=name)}",
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _base_model(path: str | None) -> tuple[str | None, str, str | None]:
    """Return the hub id, the name, and the license of a run's base model. The hub id and the license may be None."""
    if path is None:
        return None, "A randomly initialized model", None
    if path in _PUBLISHED:
        return _PUBLISHED[path][0], *_PUBLISHED[path]
    folder = expand_path(path)
    base_id, base = (None, folder.name) if folder.is_dir() else (path, path)
    try:
        card = ModelCard.load(base_id or folder / "README.md", ignore_metadata_errors=True)
    except Exception:  # no card or no network: classes of the client and of its HTTP library
        return base_id, base, None
    return base_id, base, card.data.license


def _results_of(record: RunRecord, step: int) -> Iterator[ValidationResult]:
    """Yield the validation result at `step` for the held-out set and for each suite, if there is one. If a set has
    several results at `step`, yield the result with the most problems."""
    for results in (record.validations, *record.suites.values()):
        if of_step := [result for result in results.values() if result.step == step]:
            yield max(of_step, key=lambda result: len(result.problems))


def _eval_results(result: ValidationResult) -> Iterator[EvalResult]:
    for statistic, found in result.intervals.items():
        yield EvalResult(
            task_type="text-generation",
            dataset_type=result.data_source,
            dataset_name=result.data_source,
            metric_type=statistic,
            metric_value=round(found.value, 6),
            metric_name=f"{statistic} {interval(found)}",
            metric_args={"confidence": result.settings.confidence, "low": found.low, "high": found.high},
        )


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _public(value: Any) -> Any:
    """Return a setting's value. An absolute path is cut to its last component, and secrets in a URL are masked.

    >>> _public([{"source": "/home/me/problems"}, "https://me:key@host/v1", "openai/gsm8k", "/", 0.5])
    [{'source': 'problems'}, 'https://me:***@host/v1', 'openai/gsm8k', '/', 0.5]
    """
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    return (Path(value).name or value) if value.startswith(("/", "~")) else mask_secrets(value)
