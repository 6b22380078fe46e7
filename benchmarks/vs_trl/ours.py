"""The part of `benchmarks.vs_trl` that runs our trainer, in a separate process.

python -m benchmarks.vs_trl.ours JOB.json  # started by benchmarks.vs_trl
"""

import contextlib
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import FixedLengths, InOrder, compose, seconds_line, training_loop, watched_memory
from benchmarks.vs_trl.job import GRAD_CLIP, PROMPTS, SAMPLER_CLIP, WEIGHT_DECAY, Job, Row, read_rows, write_report
from rlcore.config import RunConfig
from rlcore.trainer.step import StepResult
from rlcore.types import Prompt
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker


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
    config, directory = settings(job), Path(job.model)
    prompts = as_prompts(read_rows(Path(job.folder) / PROMPTS), config.data.task)
    results: list[StepResult] = []
    cpu_s: list[float] = []
    with watched_memory(every_s=0.2) as most:
        fixed = FixedLengths(config, directory, job.lengths) if job.lengths else None
        with contextlib.closing(fixed or LocalGroup(config, job.model)) as group:
            # All trainers in the comparison use the prompts in the file's order.
            with training_loop(config, directory, group, real_prompts=prompts, stream=InOrder) as loop:
                for number in range(job.num_steps):
                    begun = time.process_time()
                    result = loop.step()
                    cpu_s.append(time.process_time() - begun)
                    results.append(result)
                    if number + 1 in job.evaluated_steps:
                        _save(job, number + 1, group.each(Worker.full_weights)[0])
                    if job.device == "cuda" or number % 10 == 9:
                        print(f"ours: batch {number + 1}: {seconds_line(result)}", flush=True)
            peak = group.each(Worker.memory_peak)[0]
            info = group.each(Worker.info)[0]
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
