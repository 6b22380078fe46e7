"""The stage of pass rates beside vLLM alone: answer tokens a second on the same prompts, with the same sampling.

    python -m benchmarks.pass_rates_speed --root /tmp/speed --out speed.json --experiment smollm2_countdown \\
        data.train_size=8192 pass_rates.samples=4                                            # one GPU, 3 minutes
    python -m benchmarks.pass_rates_speed --root /tmp/speed --experiment countdown_demo data.train_size=512 \\
        rollout=vllm runtime.device=cpu                                                      # rehearsal
    python -m benchmarks.pass_rates_speed --root /tmp/speed --experiment countdown_demo runtime=local \\
        runtime.device=cpu data.train_size=2048 rollout=vllm rollout.max_num_seqs=1024 warm_start.enabled=false \\
        rollout.max_response_tokens=160 model.scratch.max_position_embeddings=256    # the host's time of a token

The stage as a run does it, from the first request to the published table: sampling, scoring, parts on disk; without the
start of the engine. Then `vllm.LLM` in a process of its own, with the same limits on answers at a time, memory and
graphs, all prompts in one call. Both have answered a few prompts before. With `runtime=local` also how long vLLM's
scheduler, with our short steps, orders and takes in a token. Exit code 1 if the stage has less than 0.9 of vLLM's
tokens a second.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.pass_rates import FAR_AWAY
from rlcore.config import RunConfig
from rlcore.models.tokenizer import end_of_text_ids
from rlcore.rollout.vllm.short.scheduler import ShortSteps
from rlcore.rollout.vllm.start import EngineShape, engine_arguments
from rlcore.run.pass_rates import TABLE, planned_pass_rates, read_table
from tests.run.sessions import session_of
from tests.small_run import make

LEAST = 0.9
WARM_UP = 64
"""Prompts."""


@contextmanager
def timed_scheduler() -> Iterator[list[float]]:
    """Seconds of each call of the short steps' two methods, while it is open, for an engine in this process."""
    found: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = method(*args, **kwargs)
            found.append(time.perf_counter() - begun)
            return result

        return call

    with patch.multiple(
        ShortSteps, schedule=timed(ShortSteps.schedule), update_from_output=timed(ShortSteps.update_from_output)
    ):
        yield found


def stage(
    root: Path, experiment: str, overrides: Sequence[str]
) -> tuple[dict[str, float], RunConfig, Path, list[list[int]]]:
    """Figures of the stage; the run's settings, its start model and the prompts."""
    run = make(root, "pass_rates.samples=4", *overrides, "tracking.enabled=false", experiment=experiment)
    with session_of(run) as session:
        workers = session._workers
        workers.load("start")
        prompts = [prompt for part in workers.problems.train for prompt in part]
        workers.training_answers(prompts[:WARM_UP], 1, FAR_AWAY)
        begun = time.perf_counter()
        with timed_scheduler() as scheduler_s:
            session.measure_pass_rates()
        seconds = time.perf_counter() - begun
    table = read_table(planned_pass_rates(run.config, run.inputs.filtered_directory) / TABLE)
    tokens = float(table.column("mean_tokens").to_numpy().sum()) * run.config.pass_rates.samples
    figures = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
    if scheduler_s:
        figures["scheduler_us_per_token"] = 1e6 * sum(scheduler_s) / tokens
    return figures, run.config, run.model_directory, [list(prompt.token_ids) for prompt in prompts]


def alone(config: RunConfig, model: Path, prompts: list[list[int]]) -> dict[str, float]:
    """Figures of vLLM by itself, whose engine lives in this process as it does in a run."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        current_platform.simple_compile_backend = "eager"  # as `start_vllm` does
    on_gpu = torch.cuda.is_available()
    shape = EngineShape(
        str(model),
        config.filter.max_prompt_tokens + config.rollout.max_response_tokens,
        config.answers_together,
        torch.device("cuda" if on_gpu else "cpu"),
        torch.bfloat16 if on_gpu else torch.float32,
    )
    arguments = engine_arguments(shape, config.rollout) | {"load_format": "auto", "skip_tokenizer_init": False}
    engine = LLM(**arguments)
    sampling = SamplingParams(
        n=config.pass_rates.samples,
        temperature=config.rollout.sampling.temperature,
        top_p=config.rollout.sampling.top_p,
        max_tokens=config.rollout.max_response_tokens,
        stop_token_ids=sorted(end_of_text_ids(model)),
        detokenize=False,
    )
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine.generate(asked[:WARM_UP], sampling, use_tqdm=False)
    begun = time.perf_counter()
    found = engine.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = float(sum(len(answer.token_ids) for output in found for answer in output.outputs))
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def main() -> int:
    """Measure both, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="write the figures as JSON to this file")
    parser.add_argument("--experiment", default="smollm2_countdown")
    parser.add_argument("overrides", nargs="*", help="settings as on the command line")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    found["stage"], config, model, prompts = stage(given.root.resolve(), given.experiment, given.overrides)
    print(json.dumps(found), flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found["vllm_alone"] = pool.submit(alone, config, model, prompts).result()
    found["share"] = found["stage"]["tokens_per_s"] / found["vllm_alone"]["tokens_per_s"]
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["share"] >= LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
