"""The evaluation of saved weights in `benchmarks.vs_trl`. One engine evaluates the weights of all trainers on the
held-out problems.

python -m benchmarks.vs_trl.evaluation DIR vllm  # started by benchmarks.vs_trl
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from benchmarks.vs_trl.job import HELD_OUT, Job, read_rows
from benchmarks.vs_trl.ours import as_prompts, settings
from rlcore.models.load import load_policy
from rlcore.models.tokenizer import load_tokenizer, text_decoder
from rlcore.rollout.scoring import ScoringPool
from rlcore.trainer.experience import ResponseSampler
from rlcore.trainer.validate import validate
from rlcore.workers.canary import NUM_PROMPTS
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker


def evaluate(jobs: Sequence[Job]) -> None:
    group = LocalGroup(settings(jobs[0]), jobs[0].model)
    try:
        for job in jobs:
            file = Path(job.folder).with_suffix(".json")
            report = json.loads(file.read_text()) if file.exists() else {"side": job.name, "seed": job.seed}
            report["held_out"] = []
            for step in filter(lambda step: job.weights(step).exists(), (0, *job.evaluated_steps)):
                point = _evaluate_step(job, group, step)
                print(f"{job.name}, seed {job.seed}: {json.dumps(point)}", flush=True)
                report["held_out"].append(point)
                file.write_text(json.dumps(report))
    finally:
        group.close()


def _evaluate_step(job: Job, group: LocalGroup, step: int) -> dict[str, float]:
    config = settings(job)
    weights = load_policy(job.weights(step), model=config.model, device=torch.device("cpu")).state_dict()
    set_model_state_dict(
        group.each(lambda worker: worker.actor.model)[0], weights, options=StateDictOptions(full_state_dict=True)
    )
    prompts = as_prompts(read_rows(Path(job.folder) / HELD_OUT), config.data.task)
    group.each(Worker.set_probe, prompts[:NUM_PROMPTS])
    group.each(Worker.sync_weights, step)
    with ScoringPool(job.scorer, config.reward) as scoring:
        sampler = ResponseSampler(config, group, scoring, text_decoder(load_tokenizer(job.model)))
        found = validate(sampler, prompts, name=f"step-{step}", step=step, policy_version=step)
    metrics = found.metrics()
    sampled = f"val-core/{found.data_source}/reward/mean_at_{found.num_samples}"
    return {
        "step": step,
        "sampled": metrics[sampled],
        "low": metrics[f"{sampled}/ci_low"],
        "high": metrics[f"{sampled}/ci_high"],
        "greedy": metrics[f"val-core/{found.data_source}/reward/greedy"],
    }


def saved_weights(out: Path, engine: str) -> list[Job]:
    """Return the jobs in the folder `out` that have saved weights. Each job's engine is replaced by `engine`."""
    jobs = [Job.read(folder.parent / "job.json") for folder in sorted(out.glob("*/step-0"))]
    return [replace(job, engine=engine, model=str(job.weights(0))) for job in jobs]


if __name__ == "__main__":
    evaluate(saved_weights(Path(sys.argv[1]), sys.argv[2]))
