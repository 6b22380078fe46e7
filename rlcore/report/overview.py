"""The head of a run's report: what ran, key figures, state."""

import numpy as np

from rlcore.evaluation import Comparison
from rlcore.report import numbers
from rlcore.report.document import Tile, Tone
from rlcore.report.record import RunRecord

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
