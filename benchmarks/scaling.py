"""A model of a GRPO step on 1 to 64 GPUs, from parts measured on one and two; docs/scaling.md explains it.

    python -m benchmarks.scaling                          # the table of docs/scaling.md
    python -m benchmarks.scaling --run one.json two.json  # from other runs: what `benchmarks.grpo_step --out` writes

Runs, rates and what is assumed of a network stand in docs/results/scaling_parts.json.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

PARTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "scaling_parts.json"
SAMPLES = 5  # answers to a prompt
PHASES = ("gen", "ref", "update_actor", "update_weights", "rest")
COLUMNS = ("generation", "reference", "updates", "hand-over", "rest", "step")
GPUS = (1, 2, 4, 8, 16, 64)
DRAWS = 20  # batches over which a prediction is the mean


@dataclass(frozen=True, slots=True)
class Work:
    """A step: `prompts` of `prompt_tokens`, each with five answers of geometric lengths, cut at `longest`, which
    occurs; all of them that long where the mean is."""

    prompts: int
    prompt_tokens: int
    mean: float
    longest: int

    def lengths(self, seed: int) -> np.ndarray:
        """Int[prompts, answers]: tokens."""
        shape = (self.prompts, SAMPLES)
        if self.mean > 0.99 * self.longest:
            return np.full(shape, self.longest)
        drawn = np.random.default_rng(seed).geometric(1 / self.mean, shape).clip(1, self.longest)
        drawn[0, 0] = self.longest
        return drawn

    @property
    def tokens(self) -> float:
        """Of prompts and answers; each answer is trained beside its prompt."""
        answers = np.mean([self.lengths(seed).sum() for seed in range(DRAWS)])
        return float(self.prompts * SAMPLES * self.prompt_tokens + answers)

    @property
    def computed(self) -> float:
        """Of them those that a pass computes with `model.share_prompts`: each prompt once for its answers."""
        return self.tokens - self.prompts * (SAMPLES - 1) * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: medians of its phases in seconds, by the names of `PHASES`."""

    ranks: int
    work: Work
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What does not come from a run. `decode_ms`: (answers, milliseconds) of a decoding step of the engine;
    `bus_gb_s`: (GPUs of a node, bus bandwidth of a collective); `node_gb_s`: of a node's network cards together;
    `hop_us`: of a collective, for each GPU that it passes; `driver_us`: by phase, for each token of the whole batch."""

    weights: float
    tensors: int
    layers: int
    updates: int
    decode_ms: Sequence[tuple[float, float]]
    bus_gb_s: Sequence[tuple[int, float]]
    node_gb_s: float
    gpus_per_node: int
    hop_us: float
    driver_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the runs give. Of one GPU: seconds a computed token of reference and updates without the driver's, of a
    hand-over, of the rest; `gen`: measured generation over the sum of its decoding steps. What several ranks add, 0
    where no such run is known: `each_update`, `each_tensor` and `each_step` in seconds."""

    gen: float
    ref: float
    update: float
    hand_over: float
    rest: float
    each_update: float = 0.0
    each_tensor: float = 0.0
    each_step: float = 0.0


def decoding_s(parts: Parts, lengths: np.ndarray) -> float:
    """Seconds of the engine's decoding steps until the last of these answers ends: Int[n] tokens of each."""
    ended = np.bincount(lengths.ravel(), minlength=lengths.max() + 1)
    alive = lengths.size - np.cumsum(ended)[:-1]  # at step t: answers longer than t
    sizes, times = np.array(parts.decode_ms).T
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])  # beyond the largest batch that was measured
    over = np.maximum(alive - sizes[-1], 0)
    return float((np.interp(alive, sizes, times) + slope * over).sum() / 1e3)


def slowest_decoding_s(parts: Parts, work: Work, ranks: int) -> float:
    """Of the rank that ends last, prompts dealt out in equal numbers before anyone knows how long answers become."""
    batches = [np.array_split(work.lengths(seed), ranks) for seed in range(DRAWS)]
    return float(np.mean([max(decoding_s(parts, share) for share in shares) for shares in batches]))


def bus_gb_s(parts: Parts, ranks: int) -> float:
    """Bus bandwidth of a collective over so many GPUs: the node's, and across nodes no more than its cards give."""
    sizes, rates = np.array(parts.bus_gb_s).T
    inside = float(np.interp(min(ranks, parts.gpus_per_node), sizes, rates))
    return inside if ranks <= parts.gpus_per_node else min(inside, parts.node_gb_s)


def collectives_s(parts: Parts, ranks: int) -> float:
    """Seconds of all collectives of a step's updates with `model.zero_stage=1`, none of them beside arithmetic: in each
    update weights are gathered in bfloat16 and gradients reduced in float32: 6 bytes each."""
    moved = 6 * parts.weights * (ranks - 1) / ranks / (1e9 * bus_gb_s(parts, ranks))
    hops = 2 * (parts.layers + 1) * (ranks - 1) * parts.hop_us / 1e6
    return parts.updates * (moved + hops)


def predict(parts: Parts, rates: Rates, work: Work, ranks: int) -> dict[str, float]:
    """Seconds of each phase on so many GPUs. The driver's grow with the whole batch, not with a rank's share."""
    tokens, own, several = work.tokens, work.computed / ranks, ranks > 1
    prefill = rates.ref * work.prompts / ranks * work.prompt_tokens
    driver = {name: parts.driver_us.get(name, 0.0) * tokens / 1e6 for name in PHASES}
    together = collectives_s(parts, ranks)
    gathered = 2 * parts.weights * (ranks - 1) / ranks / (1e9 * bus_gb_s(parts, ranks))
    seconds = {
        "gen": rates.gen * (slowest_decoding_s(parts, work, ranks) + prefill),
        "ref": rates.ref * own,
        "update_actor": rates.update * own + several * parts.updates * rates.each_update + together,
        "update_weights": rates.hand_over + several * (parts.tensors * rates.each_tensor + gathered),
        "rest": rates.rest + several * rates.each_step,
    }
    return {name: value + driver[name] for name, value in seconds.items()}


def rates_of(parts: Parts, one: Run) -> Rates:
    """From a run on one GPU."""
    work = one.work
    alone = {name: one.seconds[name] - parts.driver_us.get(name, 0.0) * work.tokens / 1e6 for name in PHASES}
    ref = alone["ref"] / work.computed
    decoding = slowest_decoding_s(parts, work, 1) + ref * work.prompts * work.prompt_tokens
    update = alone["update_actor"] / work.computed
    return Rates(alone["gen"] / decoding, ref, update, alone["update_weights"], alone["rest"])


def fitted(parts: Parts, runs: Sequence[Run]) -> Rates:
    """Of the last run on one GPU; what several ranks add by the first such run, beside the first run of all."""
    *_, base = (rates_of(parts, run) for run in runs if run.ranks == 1)
    for run in runs:
        if run.ranks > 1:
            expected = predict(parts, rates_of(parts, runs[0]), run.work, run.ranks)
            more = {name: max(run.seconds[name] - expected[name], 0.0) for name in PHASES}
            update, tensor = more["update_actor"] / parts.updates, more["update_weights"] / parts.tensors
            return replace(base, each_update=update, each_tensor=tensor, each_step=more["rest"])
    return base


def scaled(parts: Parts, rates: Rates, work: Work, weak: bool, ranks: int) -> dict[str, float]:
    """A row of the table: phases, step, tokens/s a GPU and efficiency against one GPU; `weak`: as much work on each."""
    mine = replace(work, prompts=work.prompts * ranks) if weak else work
    phases, alone = predict(parts, rates, mine, ranks), predict(parts, rates, work, 1)
    step, alone_s = sum(phases.values()), sum(alone.values())
    speed = mine.tokens / step / ranks
    return phases | {"step": step, "tokens_per_s": speed, "efficiency": speed / (work.tokens / alone_s)}


def needed_gb_s(parts: Parts, rates: Rates, work: Work, ranks: int, share: float) -> float:
    """What a node's cards must give together, so that the collectives take no more than `share` of the step."""
    slow, fast = (replace(parts, bus_gb_s=((1, rate), (2, rate)), node_gb_s=rate, hop_us=0.0) for rate in (1.0, 1e9))
    return collectives_s(slow, ranks) / (share / (1 - share) * sum(predict(fast, rates, work, ranks).values()))


def read_parts(path: Path) -> tuple[Parts, list[Run], Work]:
    """Parts, measured runs, and the work whose scaling is asked for."""
    found = json.loads(path.read_text())
    return Parts(**found["parts"]), [run_of(one) for one in found["runs"]], Work(**found["work"])


def run_of(found: Mapping[str, Any]) -> Run:
    """From this page's runs, or from what `benchmarks.grpo_step --out` writes."""
    seconds = {name: found["phases_s"].get(name, 0.0) for name in PHASES}
    seconds["rest"] = found["step_s"] - sum(seconds.values())
    mean = found["answer_tokens"] / found["prompts"] / SAMPLES
    prompt = round(found["tokens"] / found["prompts"] / SAMPLES - mean)
    work = Work(found["prompts"], prompt, mean, found["longest"])
    return Run(found["ranks"], work, seconds)


def table(parts: Parts, rates: Rates, work: Work, weak: bool) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| GPUs | {' | '.join(COLUMNS)} | tokens/s a GPU | efficiency |", "| --- " * 9 + "|"]
    for ranks in GPUS:
        row = scaled(parts, rates, work, weak, ranks)
        seconds = " | ".join(f"{row[name]:.2f}" for name in (*PHASES, "step"))
        lines.append(f"| {ranks} | {seconds} | {row['tokens_per_s']:,.0f} | {row['efficiency']:.2f} |")
    return lines


def checks(parts: Parts, runs: Sequence[Run]) -> list[str]:
    """Each measured run beside what is predicted from the first, on one GPU, alone."""
    rates, lines = rates_of(parts, runs[0]), [f"| GPUs | prompts | | {' | '.join(COLUMNS)} |", "| --- " * 9 + "|"]
    for run in runs:
        found = predict(parts, rates, run.work, run.ranks)
        for said, seconds in (("measured", run.seconds), ("predicted", found)):
            values = [*(seconds[name] for name in PHASES), sum(seconds.values())]
            cells = " | ".join(f"{value:.3f}" for value in values)
            lines.append(f"| {run.ranks} | {run.work.prompts} | {said} | {cells} |")
    return lines


def draw(parts: Parts, rates: Rates, cases: Mapping[str, tuple[Work, bool]], target: Path) -> None:
    """Efficiency by the number of GPUs, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="GPUs", ylabel="tokens/s a GPU, one GPU = 1", ylim=(0, 1.05))
    for name, which in cases.items():
        axes.plot(GPUS, [scaled(parts, rates, *which, ranks)["efficiency"] for ranks in GPUS], "o-", label=name)
    axes.set_xticks(GPUS, [str(n) for n in GPUS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, nargs="+", help="measured runs in place of those in the parts")
    parser.add_argument("--picture", type=Path, help="where the picture goes, as SVG")
    arguments = parser.parse_args()
    parts, runs, work = read_parts(PARTS)
    if arguments.run:
        runs = [run_of(json.loads(path.read_text())) for path in arguments.run]
    rates, more = fitted(parts, runs), replace(work, prompts=8 * work.prompts)
    cases = {f"{one.prompts} prompts": (one, False) for one in (work, more)} | {f"{work.prompts} a GPU": (work, True)}
    tables = [checks(parts, runs), *(table(parts, rates, *which) for which in cases.values())]
    print("\n\n".join("\n".join(lines) for lines in tables))
    for prompts, ranks in ((work.prompts, 16), (16 * work.prompts, 16), (64 * work.prompts, 64)):
        needed = needed_gb_s(parts, rates, replace(work, prompts=prompts), ranks, 0.05)
        print(f"\n{ranks} GPUs, {prompts} prompts: {needed:,.0f} GB/s a node for collectives of 5% of the step", end="")
    print()
    if arguments.picture:
        draw(parts, rates, cases, arguments.picture)


if __name__ == "__main__":
    main()
