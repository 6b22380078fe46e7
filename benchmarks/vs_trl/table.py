"""The table of `benchmarks.vs_trl`: the measurements of each trainer, and our speed and peak memory relative to TRL's.

For each of these two ratios, the table also has the required value.
"""

import statistics
from collections.abc import Sequence
from typing import Any

BARS = {"trl-fp32": 1.35, "trl-bf16": 1.25, "trl": 1.5}  # required ratios of our speed to TRL's
MEMORY_BAR = 0.5  # largest ratio of our peak memory to TRL's on a GPU


def summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of measurements for each trainer, and ratios that compare our trainer with every other trainer. The
    ratios are those of speed, processor time and peak memory."""
    if not reports:
        raise SystemExit("no side was measured")
    sides = {name: _row([one for one in reports if one["side"] == name]) for name in _in_order(reports)}
    ours = sides.get("ours")
    ratios = {name: _ratio(ours, row, name) for name, row in sides.items() if ours and name != "ours"}
    return {"sides": sides, "ratios": ratios, "runs": list(reports)}


def _in_order(reports: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({one["side"] for one in reports}, key=lambda name: (name == "ours", name))


def _row(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one trainer. `peak_gb`: the peak memory of the GPU, or the peak resident memory on a CPU."""
    first = runs[0]
    on_gpu = first["device"] == "cuda"
    peaks = [one["device_gb"] or one["reserved_gb"] if on_gpu else one["rss_gb"] for one in runs]
    row = {
        "what": ", ".join(sorted({one["version"] for one in runs})),
        "lengths": first["lengths"],
        "batches": sum(len(one["step_s"]) for one in runs),
        "batch_s": statistics.median(statistics.median(one["step_s"]) for one in runs),
        "batch_cpu_s": statistics.median(statistics.median(one["cpu_s"]) for one in runs),
        "tokens_per_s": statistics.median(_rate(one, one["tokens"]) for one in runs),
        "samples_per_s": statistics.median(_rate(one, [one["responses"]] * len(one["step_s"])) for one in runs),
        "peak_gb": max(peaks),
        "reward_first": statistics.fmean(one["rewards"][0] for one in runs),
        "reward_last": statistics.fmean(statistics.fmean(one["rewards"][-5:]) for one in runs),
    }
    evaluated = [one["held_out"] for one in runs if "held_out" in one]  # an interrupted evaluation has fewer points
    if evaluated:
        row["held_out"] = [
            {name: statistics.fmean(one[name] for one in points) for name in points[0]}
            for points in zip(*evaluated, strict=False)
        ]
    return row


def _rate(run: dict[str, Any], counts: Sequence[int]) -> float:
    """Return the median rate over the batches of a run. The rate of a batch is its number of tokens or responses
    (`counts`) divided by its seconds."""
    return statistics.median(count / seconds for count, seconds in zip(counts, run["step_s"], strict=True))


def _ratio(ours: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, Any]:
    speed = "samples_per_s" if name == "trl" else "tokens_per_s"
    found = {
        "speed": ours[speed] / other[speed],
        "cpu_time": other["batch_cpu_s"] / ours["batch_cpu_s"],
        "bar": BARS[name],
        "peak_memory": ours["peak_gb"] / other["peak_gb"],
    }
    if "held_out" in ours:
        found["held_out_reward"] = ours["held_out"][-1]["sampled"] - other["held_out"][-1]["sampled"]
    return found


def show(table: dict[str, Any]) -> None:
    speeds = f"{'batch s':>9}{'cpu s':>8}{'tokens/s':>11}{'samples/s':>11}"
    print(f"\n{'side':<10}{speeds}{'peak GB':>9}{'reward':>17}{'held out':>10}")
    for name, row in table["sides"].items():
        reward = f"{row['reward_first']:.3f} -> {row['reward_last']:.3f}"
        held_out = f"{row['held_out'][-1]['sampled']:.3f}" if "held_out" in row else ""
        print(
            f"{name:<10}{row['batch_s']:>9.3f}{row['batch_cpu_s']:>8.3f}{row['tokens_per_s']:>11,.0f}{row['samples_per_s']:>11,.0f}"
            f"{row['peak_gb']:>9.1f}{reward:>17}{held_out:>10}"
        )
    for name, row in table["sides"].items():
        print(f"{name}: {row['what']}; responses {row['lengths']}; {row['batches']} batches")
        for point in row.get("held_out", ()):
            print(
                f"  step {point['step']:.0f}: {point['sampled']:.3f} [{point['low']:.3f}, {point['high']:.3f}], "
                f"greedy {point['greedy']:.3f}"
            )
    for name, ratio in table["ratios"].items():
        line = f"ours / {name}: {ratio['speed']:.2f} times the speed (bar {ratio['bar']})"
        line += f", {ratio['cpu_time']:.2f} by processor time" if name == "trl" else ""
        line += f", {ratio['peak_memory']:.2f} of the peak memory"
        line += f" (bar {MEMORY_BAR})" if name != "trl" else ""
        if "held_out_reward" in ratio:
            line += f", held-out reward {ratio['held_out_reward']:+.3f}"
        print(line)
