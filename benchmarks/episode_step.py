"""What turns cost: a GRPO step whose answers are written at once, and in 1, 3 and 8 turns of an environment.

    python -m benchmarks.episode_step                                   # on a GPU, with vLLM
    python -m benchmarks.episode_step --shape=tiny --engine=hf --prompts=4 --mean=24 --longest=48    # rehearsal

The work of `benchmarks.grpo_step` (veRL's GRPO benchmark, one GPU's share, random weights). With t turns an answer's
tokens are shared out over them: each turn's lengths are drawn once, for a mean of mean / t. The environment answers at
once with 16 words. One engine for all; tokens a second count the answers' own tokens, which are equally many, and those
of prompts and replies once. Cache hits: of the tokens that a turn's request begins with, those whose keys and values
the engine kept from earlier turns or from the group's other answers.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.grpo_step import PROMPT_TOKENS, SAMPLES, describe_step, settings
from benchmarks.harness import FixedLengths, draw_lengths, seconds_line, training_loop, worker_group
from benchmarks.shapes import SHAPES, model_of
from rlcore.config import RunConfig
from rlcore.rollout.environment import Turn
from rlcore.trainer.step import StepResult

TURNS = (0, 1, 3, 8)
"""0: without an environment."""
REPLY = " ".join(f"w{token}" for token in range(10, 26))


class Replies:
    """An environment that always says the same, and rewards a few answers."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin."""

    def step(self, text: str) -> Turn:
        """Reply; the reward depends on the text, so groups differ."""
        return Turn(REPLY, reward=float(sum(map(ord, text)) % 4 == 0))


class CacheHits:
    """Counts the tokens of requests and those that vLLM had in its prefix cache, as vLLM tells them."""

    def __init__(self, group: FixedLengths) -> None:
        self.asked = self.cached = 0
        engine = group.each(lambda worker: worker._engine)[0]
        core = getattr(getattr(engine, "_engine", None), "engine_core", None)
        if core is None:  # transformers' generation has no cache between calls
            return
        told = core.get_output

        def noted() -> Any:
            found = told()
            for output in found.outputs:
                if (stats := output.prefill_stats) is not None:
                    self.asked += stats.num_prompt_tokens
                    self.cached += stats.num_cached_tokens
            return found

        core.get_output = noted

    def share(self) -> float | None:
        """Since the last call."""
        asked, cached, self.asked, self.cached = self.asked, self.cached, 0, 0
        return cached / asked if asked else None


def of_turns(config: RunConfig, turns: int) -> RunConfig:
    """The settings for so many turns."""
    data = config.data.model_copy(update={} if turns else {"environment": ""})
    episode = config.episode.model_copy(update={"max_turns": max(turns, 1)})
    return config.model_copy(update={"data": data, "episode": episode})


def run(arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """A row for each number of turns."""
    most = arguments.longest + max(arguments.turns) * (len(REPLY.split()) + 1)
    arguments.overrides = [
        "data.environment=benchmarks.episode_step:Replies",
        f"rollout.max_response_tokens={most}", *arguments.overrides,
    ]  # fmt: skip
    config = settings(arguments, directory)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    rows = []
    with worker_group(config, directory, (), vocab_size=vocab_size) as group:
        hits = CacheHits(group)
        for turns in arguments.turns:
            parts = max(turns, 1)
            group.lengths = draw_lengths(
                arguments.prompts * SAMPLES, arguments.mean / parts, max(arguments.longest // parts, 1)
            )
            results = []
            with training_loop(
                of_turns(config, turns), directory, group, prompt_tokens=PROMPT_TOKENS, vocab_size=vocab_size,
                ground_truth='{"answer": "18"}',
            ) as loop:  # fmt: skip
                for number in range(arguments.warm_up + arguments.steps):
                    hits.share()
                    result = loop.step()
                    print(f"{turns} turns, step {number + 1}: {seconds_line(result)}", flush=True)
                    if number >= arguments.warm_up:
                        results.append((result, hits.share()))
            rows.append(row(turns, results))
    return rows


def row(turns: int, results: Sequence[tuple[StepResult, float | None]]) -> dict[str, Any]:
    """Medians over the measured steps."""

    def median(name: str) -> float:
        return statistics.median(result.metrics.get(name, 0.0) for result, _ in results)

    written = [
        sum(int(one.is_sampled.sum()) if one.is_sampled is not None else len(one.response_ids) for one in answers)
        for answers in (result.experience.rollouts for result, _ in results)
    ]
    shares = [share for _, share in results if share is not None]
    step_s = median("perf/time_per_step")
    return {
        "turns": turns,
        "step_s": step_s,
        "gen_s": median("timing_s/gen"),
        "environment_s": median("timing_s/environment"),
        "update_s": median("timing_s/update_actor"),
        "tokens": median("perf/total_num_tokens"),
        "written": statistics.median(written),
        "tokens_per_s": median("perf/total_num_tokens") / step_s,
        "written_per_s": statistics.median(written) / step_s,
        "cached": statistics.median(shares) if shares else None,
        "canary": median("training/canary_logprob_diff"),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table, as Markdown."""
    print("| turns | step | generation | waiting | tokens/s | written tokens/s | cache hits | canary |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in rows:
        cached = "" if one["cached"] is None else f"{one['cached']:.1%}"
        print(
            f"| {one['turns'] or 'no environment'} | {one['step_s']:.2f} s | {one['gen_s']:.2f} s | "
            f"{one['environment_s']:.2f} s | {one['tokens_per_s']:,.0f} | {one['written_per_s']:,.0f} | {cached} | "
            f"{one['canary']:.4f} |"
        )


def main() -> None:
    """Run and print; with --out also as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_step(parser)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(arguments, model_of(arguments, Path(scratch)))
    show(rows)
    if arguments.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        found = {"device": device, "torch": torch.__version__, "shape": arguments.shape, "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
