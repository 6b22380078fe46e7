"""What a stage did, in a line for people."""

from data import StageResult
from flows.shown.progress import HEADLINE
from flows.work.stages import Chunk, Export, Judgement, StartModel


def describe_rows(result: StageResult) -> str:
    """Rows, and whether they were there already."""
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    return f"{counts} rows{_skipped(result.cached)} ({result.directory})"


def describe_start_model(model: StartModel) -> str:
    """What it can do, and whether it was there already."""
    if not model.steps:
        return f"no supervised steps: training starts from {model.directory}"
    return f"reward {model.reward:.3f} after {model.steps} steps{_skipped(model.cached)} ({model.directory})"


def describe_chunk(chunk: Chunk) -> str:
    """Its steps, and whether they were trained already."""
    reward = chunk.metrics.get("critic/score/mean")
    score = "" if reward is None else f", reward {reward:.3f}"
    return f"step {chunk.start}-{chunk.stop}{score}{_skipped(chunk.skipped)}"


def describe_judgement(one: Judgement) -> str:
    """Its main figures with their intervals, and whether they were known already."""
    return f"{judgement_figures(one)}{_skipped(one.cached)}"


def judgement_figures(one: Judgement) -> str:
    """Its main figures with their intervals."""
    shown = [name for name in one.summary if HEADLINE.search(name) and f"{name}/ci_low" in one.summary]
    several = len({_source_of(name) for name in shown}) > 1
    labels = {name: f"{_source_of(name)} " if several else "" for name in shown}
    figures = ", ".join(f"{labels[name]}{name.rpartition('/')[2]} {_interval(one, name)}" for name in shown)
    return f"{one.name} (step {one.step}): {figures}"


def _source_of(name: str) -> str:
    """The data source in a held-out metric's name.

    >>> _source_of("val-core/openai/gsm8k/reward/mean@4")
    'openai/gsm8k'
    """
    return name.partition("/")[2].rpartition("/reward/")[0]


def describe_export(export: Export) -> str:
    """Where the weights are."""
    return f"step {export.step}{_skipped(export.cached)} ({export.directory})"


def _interval(one: Judgement, name: str) -> str:
    low, high = one.summary[f"{name}/ci_low"], one.summary[f"{name}/ci_high"]
    return f"{one.summary[name]:.3f} [{low:.3f}, {high:.3f}]"


def _skipped(cached: bool) -> str:
    return ", skipped: done before" if cached else ""
