"""Training steps of the real trainer that all do the same amount of work. Prompts and weights are random."""

import argparse
import contextlib
import itertools
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlcore.batching.prompts import PromptStream
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.models.tokenizer import Decode, load_tokenizer, text_decoder
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.environment import TurnTokens
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.training import start_workers
from rlcore.trainer.episodes import Episodes
from rlcore.trainer.experience import ExperienceCollector, ResponseSampler
from rlcore.trainer.step import StepResult, Trainer
from rlcore.types import Prompt, Rollout
from rlcore.workers.canary import NUM_PROMPTS, WeightSync
from rlcore.workers.device import MemoryPeak
from rlcore.workers.group import Pending, WorkerGroup
from rlcore.workers.worker import Worker

PROMPT_TOKENS, GROUND_TRUTH = 107, '{"answer": "18"}'
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


class FixedLengths:
    """A `WorkerGroup` whose responses have the given lengths in each step. The order of lengths changes from step to
    step, so that no step repeats an earlier one. If `real` is False, no engine runs, and responses are random."""

    def __init__(self, config: RunConfig, directory: Path, lengths: Sequence[int], *, real: bool = True):
        self._group = start_workers(config, str(directory))
        self.world_size = self._group.world_size
        self.lengths = lengths
        self._vocab_size = vocab_size_of(directory)
        self._real = real
        self._version = 0

    def each(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if verb is Worker.sync_weights:
            return self.begin(verb, [args] * self.world_size).result()
        return self._group.each(verb, *args, **kwargs)

    def begin(self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Pending[Any]:
        if verb is Worker.sync_weights:
            self._version = arguments[0][0]
            if not self._real:
                return Pending(lambda: [WeightSync(0.0)] * self.world_size)
        return self._group.begin(verb, arguments)

    def send(self, values: Sequence[Any]) -> Sequence[Any]:
        return self._group.send(values)

    def stream(
        self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, Any], None]
    ) -> None:
        arguments = self._limited(arguments)
        if self._real:
            self._group.stream(verb, arguments, take)
            return
        for rank, (requests, *_) in enumerate(arguments):
            take(rank, [(index, self._random(request)) for index, request in enumerate(requests)])

    def close(self) -> None:
        self._group.close()

    def _limited(self, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        lengths = iter(self.lengths)  # the requests of rank 0 come first
        limited = []
        for requests, *more in arguments:
            own = np.roll(list(itertools.islice(lengths, len(requests))), self._version).tolist()
            limited.append(([replace(one, max_tokens=most) for one, most in zip(requests, own, strict=True)], *more))
        assert next(lengths, None) is None, "one length per request"
        return limited

    def _random(self, request: SamplingRequest) -> Rollout:
        drawn = np.random.default_rng(request.seed)
        return Rollout(
            request.prompt,
            request.sample_index,
            drawn.integers(4, self._vocab_size, request.max_tokens, dtype=np.int32),
            np.full(request.max_tokens, -np.log(self._vocab_size), dtype=np.float32),
            "length",
            self._version,
        )


def vocab_size_of(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def compose(base: Sequence[str], overrides: Sequence[str], experiment: str = "verl_gsm8k_grpo") -> RunConfig:
    """Compose the settings of an experiment from `base` and `overrides`. If both set a key, `overrides` wins."""
    given = {line.partition("=")[0] for line in overrides}
    base = [line for line in base if line.partition("=")[0] not in given]
    return load_config([*base, *overrides], experiment=experiment)


def draw_lengths(count: int, mean: float, longest: int) -> list[int]:
    """Draw geometric lengths with the mean `mean`. No length is above `longest`, and the first length is `longest`."""
    drawn = np.random.default_rng(7).geometric(1 / mean, count).clip(1, longest)
    drawn = (drawn * (mean * count / drawn.sum())).round().astype(int).clip(1, longest)
    drawn[0] = longest
    return [int(length) for length in drawn]


def describe_lengths(parser: argparse.ArgumentParser, *, mean: float = 183.0, longest: int = 1_024) -> None:
    parser.add_argument("--mean", type=float, default=mean, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=longest, help="most tokens of a response")


class InOrder(PromptStream[Prompt]):
    """A stream of prompts in the order in which they are given."""

    def take(self, position: int, count: int) -> tuple[Prompt, ...]:
        """Return `count` consecutive prompts from `position` on."""
        return tuple(self._prompts[place % len(self)] for place in range(position, position + count))


class Loop:
    def __init__(self, trainer: Trainer, kl_coef: float) -> None:
        self._trainer = trainer
        self._state = LoopState(0, 0, 0, 0, kl_coef)

    @property
    def version(self) -> int:
        return self._state.policy_version

    def step(self) -> StepResult:
        result = self._trainer.step(self._state, epoch=0)
        self._state = result.state
        return result


@contextlib.contextmanager
def training_loop(
    config: RunConfig,
    directory: Path,
    group: WorkerGroup,
    *,
    real_prompts: Sequence[Prompt] = (),
    stream: type[PromptStream[Prompt]] = PromptStream,
) -> Iterator[Loop]:
    """Open a training loop that continues from the workers' current weights and counts from step 0. If `real_prompts`
    is empty, the prompts are random. `stream`: gives the order of the prompts."""
    rng, vocab_size = np.random.default_rng(3), vocab_size_of(directory)
    prompts = list(real_prompts) or [
        Prompt(i, tuple(rng.integers(4, vocab_size, PROMPT_TOKENS).tolist()), config.data.task, GROUND_TRUTH)
        for i in range(config.trainer.batch_size)
    ]
    tokenizer = load_tokenizer(directory)
    decode = text_decoder(tokenizer)
    with contextlib.ExitStack() as opened:
        scoring = opened.enter_context(ScoringPool(config.data.scorer, config.reward))
        failures = opened.enter_context(tempfile.TemporaryDirectory())
        group.each(Worker.set_probe, prompts[:NUM_PROMPTS])
        group.each(Worker.sync_weights, 0)
        episodes = opened.enter_context(_episodes(config, tokenizer, decode))
        collector = ExperienceCollector(
            ResponseSampler(config, group, scoring, decode, episodes), stream(prompts, seed=1)
        )
        yield Loop(Trainer(config, group, collector, failures=Path(failures)), config.algo.kl.coef)


def _episodes(config: RunConfig, tokenizer: Any, decode: Decode) -> contextlib.AbstractContextManager[Episodes | None]:
    if not config.data.environment:
        return contextlib.nullcontext()
    turns = TurnTokens(tokenizer, chat=False, max_reply_tokens=config.episode.max_tool_tokens)
    return Episodes(config, turns, decode)


@dataclass(frozen=True, slots=True)
class Steps:
    results: list[StepResult]
    peak: MemoryPeak


def run_steps(
    config: RunConfig, directory: Path, group: FixedLengths, *, warm_up: int, measured: int, trace: bool = False
) -> Steps:
    """Run `warm_up` steps and then `measured` steps, and print a line for each. Close the workers. Return the results
    of the measured steps and the peak memory."""
    results: list[StepResult] = []
    with contextlib.closing(group):
        with training_loop(config, directory, group) as loop:
            for number in range(warm_up + measured):
                with _profiled(trace and number == warm_up + measured - 1):
                    result = loop.step()
                kind = "warm-up" if number < warm_up else "measured"
                print(f"step {number + 1} ({kind}): {seconds_line(result)}", flush=True)
                if number >= warm_up:
                    results.append(result)
        peak = max(group.each(Worker.memory_peak), key=lambda one: one.reserved_gb)
    return Steps(results, peak)


@contextlib.contextmanager
def watched_memory(*, every_s: float = 0.02) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the peak GPU memory in units of 1e9 bytes. The peak covers all processes on the GPU
    since the `with` block began."""
    if not torch.cuda.is_available():
        yield lambda: 0.0
        return
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(every_s):
            free, total = torch.cuda.mem_get_info()
            most = max(most, total - free)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most / 1e9
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        yield
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=40), flush=True)


def seconds_line(result: StepResult) -> str:
    seconds = {name: result.metrics.get(f"timing_s/{name}") for name in PHASES}
    phases = (f"{name} {value:.2f}" for name, value in seconds.items() if value is not None)
    return f"{result.metrics['perf/time_per_step']:.2f} s = {', '.join(phases)}"
