"""The part of `benchmarks.vs_trl` that runs our trainer, in a separate process.

python -m benchmarks.vs_trl.ours JOB.json  # started by benchmarks.vs_trl
"""

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import FixedLengths, compose, seconds_line, watched_memory
from benchmarks.vs_trl.job import GRAD_CLIP, PROMPTS, SAMPLER_CLIP, WEIGHT_DECAY, Job, Row, read_rows, write_report
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.models.tokenizer import load_tokenizer, text_decoder
from rlcore.rollout.scoring import ScoringPool
from rlcore.trainer.experience import ExperienceCollector, ResponseSampler
from rlcore.trainer.step import StepResult, Trainer
from rlcore.types import Prompt
from rlcore.workers.canary import NUM_PROMPTS
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker


class InOrder:
    """A stream of prompts in file order, so that all trainers in the comparison use the same prompts."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def take(self, position: int, count: int) -> tuple[Prompt, ...]:
        return tuple(self._prompts[place % len(self._prompts)] for place in range(position, position + count))


def settings(job: Job) -> RunConfig:
    overrides = [
        f"model.path={job.model}", f"seed={job.seed}", "runtime=local", "runtime.num_workers=1",
        f"runtime.device={job.device}", f"runtime.threads_per_worker={job.threads}", "tracking.enabled=false",
        f"filter.max_prompt_tokens={job.max_prompt_tokens}",
        f"trainer.batch_size={job.prompts}", f"trainer.mini_batch_size={job.prompts // job.updates}",
        f"rollout={job.engine}", f"rollout.samples_per_prompt={job.samples}", "rollout.tensor_parallel_size=1",
        f"rollout.max_response_tokens={job.max_response_tokens}", f"reward.num_processes={job.num_scorers}",
        f"algo.kl.where={'loss' if job.beta else 'off'}", f"algo.kl.coef={job.beta}", "algo.kl.offload=false",
        f"algo.clip_low={SAMPLER_CLIP}", f"algo.clip_high={SAMPLER_CLIP}", "algo.dual_clip=null",
        f"optim.lr={job.lr}", f"optim.weight_decay={WEIGHT_DECAY}", f"optim.grad_clip={GRAD_CLIP}",
        "model.gradient_checkpointing=false",
    ]  # fmt: skip
    if job.evaluated_steps:
        overrides += ["warm_start.enabled=false"]
    if job.device == "cpu":
        overrides += ["model.compile=false"]
    else:
        overrides += [f"rollout.max_num_seqs={job.prompts * job.samples}", f"rollout.memory_share={job.engine_share}"]
    if job.device == "cuda" and not job.evaluated_steps:
        overrides += [
            "model.compile=true", "trainer.max_tokens_per_micro_batch=8192", "trainer.old_logprobs=behavior",
            "rollout.sleep_level=2",
        ]  # fmt: skip
    return compose(overrides, job.overrides, job.experiment)


def as_prompts(rows: Sequence[Row], task: str) -> list[Prompt]:
    return [Prompt(i, row.token_ids, task, row.ground_truth) for i, row in enumerate(rows)]


def run(job: Job) -> dict[str, Any]:
    config = settings(job)
    prompts = as_prompts(read_rows(Path(job.folder) / PROMPTS), config.data.task)
    tokenizer = load_tokenizer(Path(job.model))
    results: list[StepResult] = []
    cpu_s: list[float] = []
    with watched_memory(every_s=0.2) as most:
        fixed = FixedLengths(config, Path(job.model), job.lengths) if job.lengths else None
        group = fixed or LocalGroup(config, job.model)
        try:
            group.each(Worker.set_probe, prompts[:NUM_PROMPTS])
            group.each(Worker.sync_weights, 0)
            with ScoringPool(job.scorer, config.reward) as scoring, tempfile.TemporaryDirectory() as failures:
                sampler = ResponseSampler(config, group, scoring, text_decoder(tokenizer))
                collector = ExperienceCollector(sampler, InOrder(prompts))
                trainer = Trainer(config, group, collector, failures=Path(failures))
                state = LoopState(0, 0, 0, 0, config.algo.kl.coef)
                for number in range(job.num_steps):
                    begun = time.process_time()
                    result = trainer.step(state, epoch=0)
                    cpu_s.append(time.process_time() - begun)
                    state = result.state
                    results.append(result)
                    if number + 1 in job.evaluated_steps:
                        _save(job, number + 1, group.each(Worker.full_weights)[0])
                    if job.device == "cuda" or number % 10 == 9:
                        print(f"ours: batch {number + 1}: {seconds_line(result)}", flush=True)
            peak = group.each(Worker.memory_peak)[0]
            info = group.each(Worker.info)[0]
        finally:
            group.close()
        device_gb = most()
    measured = [result.metrics for result in results[job.warm_up :]]
    phases = sorted({name for one in measured for name in one if name.startswith("timing_s/")})
    return {
        "version": f"torch {torch.__version__}, attention {info.attention}",
        "step_s": [one["perf/time_per_step"] for one in measured],
        "cpu_s": cpu_s[job.warm_up :],
        "tokens": [int(one["perf/total_num_tokens"]) for one in measured],
        "phases_s": {name: [one.get(name) for one in measured] for name in phases},
        "rewards": [result.metrics["critic/score/mean"] for result in results],
        "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e9,
        "device_gb": device_gb,
        "allocated_gb": peak.allocated_gb,
        "reserved_gb": peak.reserved_gb,
    }


def _save(job: Job, step: int, weights: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.save_pretrained(job.weights(step))


if __name__ == "__main__":
    the_job = Job.read(sys.argv[1])
    write_report(the_job, run(the_job))
