"""The head of a run's report: what ran, key figures, state; the same as one picture for a README."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcore.evaluation import Comparison
from rlcore.report import numbers
from rlcore.report.curves import plot_held_out, plot_series
from rlcore.report.document import Tile, Tone
from rlcore.report.page import LIGHT, house_style, legend, tidy
from rlcore.report.record import RunRecord, read_run
from rlcore.storage.publish import temporary_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


ALGORITHMS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++ (group baseline)",
    "remax": "ReMax",
    "opo": "OPO",
}


def algorithm_of(record: RunRecord) -> str:
    """The algorithm's usual name."""
    algo = record.config.algo
    name = ALGORITHMS.get(algo.advantage, algo.advantage)
    return name if algo.policy_loss == "ppo_clip" else f"{name} with {algo.policy_loss}"


def model_of(record: RunRecord) -> str:
    """The model, in a few words."""
    model = record.config.model
    if model.path is not None:
        return model.path.rstrip("/").rpartition("/")[2]
    layers = f"{model.scratch.num_layers} layer{'' if model.scratch.num_layers == 1 else 's'}"
    return f"a model from nothing ({layers} of {model.scratch.hidden_size})"


def subtitle_of(record: RunRecord) -> str:
    """What ran, in a line."""
    config = record.config
    workers = config.runtime.num_workers
    return (
        f"{algorithm_of(record)} · {config.data.task} · {model_of(record)} · seed {config.seed} · "
        f"{config.trainer.batch_size} prompts × {config.rollout.samples_per_prompt} answers a step · "
        f"{workers} worker{'s' if workers > 1 else ''} ({config.runtime.backend})"
    )


def state_of(record: RunRecord) -> tuple[str, Tone]:
    """How far the run is."""
    total = record.config.trainer.total_steps
    if record.is_complete:
        return f"all {total} steps", "good"
    return f"step {record.last_step} of {total}", "watch"


def tiles_of(record: RunRecord) -> tuple[Tile, ...]:
    """The key figures."""
    rows = {row.statistic: row for row in record.paired}
    k = record.num_samples
    wanted = ((record.reward_statistic, "Held-out reward"), ("reward/greedy", "Greedy answer"),
              (f"reward/pass@{k}", f"pass@{k}"))  # fmt: skip
    tiles = [_gain(label, rows[name]) for name, label in dict(wanted).items() if name in rows]
    if not tiles:
        tiles = _without_pairs(record)
    return (*tiles, *_effort(record))


def _gain(label: str, row: Comparison) -> Tile:
    gain = row.paired.difference
    tone: Tone = "" if not gain.excludes_zero else "good" if gain.value > 0 else "bad"
    shown = f"{numbers.fixed(row.first.value)} → {numbers.fixed(row.second.value)}"
    unit = row.statistic.partition("/")[2]
    title = label if unit == label or label == "Greedy answer" else f"{label} ({unit})"
    return Tile(title, shown, numbers.signed_interval(gain), tone)


def _without_pairs(record: RunRecord) -> list[Tile]:
    """One held-out figure alone, or the training reward."""
    held_out = record.held_out(record.reward_statistic)
    if held_out:
        step, found = held_out[-1]
        ends = f"[{numbers.fixed(found.low)}, {numbers.fixed(found.high)}], step {step}"
        return [Tile("Held-out reward", numbers.fixed(found.value), ends)]
    reward = record.series("critic/score/mean")
    if reward is None:
        return []
    first, last = float(reward.head(0.1).mean()), reward.tail(0.1).mean()
    return [Tile("Training reward", f"{numbers.fixed(first)} → {numbers.fixed(last)}", "first and last tenth of steps")]


def _effort(record: RunRecord) -> list[Tile]:
    tiles = []
    tokens, seconds = record.tokens, record.seconds
    if seconds is not None:
        detail = f"{numbers.amount(tokens.last)} tokens" if tokens is not None else ""
        count = len(record.training_steps)
        label = f"{count} training step{'s' if count != 1 else ''}"
        tiles.append(Tile(label, numbers.duration(seconds.last), detail))
    throughput, step_s = record.series("perf/throughput"), record.series("perf/time_per_step")
    if throughput is not None:
        detail = f"{numbers.duration(float(np.median(step_s.values)))} a step" if step_s is not None else ""
        tiles.append(Tile("Tokens/s/device", numbers.compact(float(np.median(throughput.values)), 3), detail))
    return tiles


_SIZE_IN = (10.0, 4.4)
_DPI = 200
_MOST_TILES = 5


def hero_png(run_dir: Path, path: Path) -> Path:
    """Draw the head of a run's report into a PNG of 2000 x 880 pixels.

    Raises:
        DataError: the folder holds no run.
    """
    from matplotlib.figure import Figure

    record = read_run(run_dir)
    with house_style():
        figure = Figure(figsize=_SIZE_IN, facecolor=LIGHT["surface"])
        plot, side = figure.subfigures(1, 2, width_ratios=(2.35, 1), squeeze=False)[0]
        _title(figure, record)
        _curve(plot, record)
        _figures(side, tiles_of(record)[:_MOST_TILES])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        figure.savefig(temporary, dpi=_DPI, format="png", metadata={})
    temporary.replace(path)
    return path


def _title(figure: "Figure", record: RunRecord) -> None:
    config = record.config
    figure.text(0.045, 0.925, config.name, fontsize=15, fontweight="bold", va="center")
    line = f"{algorithm_of(record)} on {config.data.task}, {model_of(record)}, seed {config.seed}"
    figure.text(0.045, 0.862, line, fontsize=9.5, color=LIGHT["muted"], va="center")


def _curve(figure: "SubFigure", record: RunRecord) -> None:
    axes = figure.add_axes((0.085, 0.125, 0.885, 0.62))
    train, held_out = record.series("critic/score/mean"), record.held_out(record.reward_statistic)
    greedy = record.held_out("reward/greedy")
    if train is not None:
        plot_series(axes, train, "grey", "training reward")
    if greedy and greedy != held_out:
        plot_held_out(axes, greedy, "orange", "held-out, greedy")
    if held_out:
        plot_held_out(axes, held_out, "blue", "held-out, sampled (95% interval)")
    tidy(axes, y="score")
    legend(axes, 3)


def _figures(figure: "SubFigure", tiles: tuple[Tile, ...]) -> None:
    tones = {"good": LIGHT["green"], "bad": LIGHT["red"], "watch": LIGHT["orange"]}
    step = 0.82 / _MOST_TILES
    for place, tile in enumerate(tiles):
        top = 0.925 - place * step * 1.08
        figure.text(0.08, top, tile.label, fontsize=8.5, color=LIGHT["muted"], va="center")
        figure.text(0.08, top - 0.055, tile.text, fontsize=15.5, fontweight="bold", va="center")
        figure.text(
            0.08, top - 0.108, tile.detail, fontsize=8.5, color=tones.get(tile.tone, LIGHT["muted"]), va="center"
        )
