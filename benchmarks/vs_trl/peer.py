"""The part of `benchmarks.vs_trl` that runs TRL's GRPOTrainer. A callback measures the time.

python -m benchmarks.vs_trl.peer JOB.json  # started by benchmarks.vs_trl, with trl on the path
"""

import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as trl_version

from benchmarks.harness import watched_memory
from benchmarks.vs_trl.job import GRAD_CLIP, PROMPTS, SAMPLER_CLIP, WEIGHT_DECAY, Job, read_rows, write_report
from benchmarks.vs_trl.sides import now
from rlcore.config import RewardConfig
from rlcore.models.tokenizer import load_tokenizer
from rlcore.rollout.scoring import ScoringPool


class Clock(TrainerCallback):
    """A callback that records the seconds of each batch, from its generation to its last update."""

    def __init__(self, job: Job) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.cpu_s: list[float] = []
        self._job = job
        self._updates = job.updates
        self._begun = self._begun_cpu = 0.0
        self._seen = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self._begun, self._begun_cpu = now(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates == 0:
            self.seconds.append(now() - self._begun)
            self.cpu_s.append(time.process_time() - self._begun_cpu)
            self.tokens.append(int(state.num_input_tokens_seen) - self._seen)
            self._seen = int(state.num_input_tokens_seen)
            if len(self.seconds) in self._job.evaluated_steps:
                kwargs["model"].save_pretrained(self._job.weights(len(self.seconds)))
            print(f"trl: batch {len(self.seconds)}: {self.seconds[-1]:.2f} s, {self.tokens[-1]:,} tokens", flush=True)


def settings(job: Job) -> GRPOConfig:
    num_responses = job.prompts * job.samples
    accumulation = num_responses // job.updates // job.micro_batch
    if accumulation * job.updates * job.micro_batch != num_responses:
        raise SystemExit(
            f"--trl-micro {job.micro_batch} must divide the {num_responses // job.updates} responses of an update"
        )
    generation: dict[str, Any] = {}
    if job.lengths:
        most = max(job.lengths)
        generation = {"ignore_eos": True} if job.engine == "vllm" else {"min_new_tokens": most}
    on_gpu = job.device == "cuda"
    return GRPOConfig(
        output_dir=str(Path(job.folder) / "trl"),
        # the work
        num_generations=job.samples,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * job.updates,
        max_steps=job.updates * job.num_steps,
        max_completion_length=job.max_response_tokens,
        shuffle_dataset=False,
        seed=job.seed,
        # the algorithm
        loss_type="dapo",
        beta=job.beta,
        use_bias_correction_kl=False,
        epsilon=SAMPLER_CLIP,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=GRAD_CLIP,
        temperature=1.0,
        generation_kwargs=generation or None,
        # speed
        model_init_kwargs={
            "dtype": "float32" if job.precision == "fp32" else "bfloat16",
            "attn_implementation": "sdpa",
        },
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        use_vllm=job.engine == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=job.engine_share,
        vllm_max_model_length=job.max_prompt_tokens + job.max_response_tokens,
        # nothing else
        logging_steps=job.updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    rows = read_rows(Path(job.folder) / PROMPTS)
    data = Dataset.from_dict({"prompt": [row.text for row in rows], "ground_truth": [row.ground_truth for row in rows]})
    clock = Clock(job)
    rewards: list[float] = []
    with ScoringPool(job.scorer, RewardConfig(num_processes=job.num_scorers)) as scoring:

        def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
            found = [score.total for score in scoring.score(completions, ground_truth)]
            rewards.append(sum(found) / len(found))
            return found

        tokenizer = load_tokenizer(job.model)
        with watched_memory(every_s=0.2) as most:
            trainer = GRPOTrainer(
                model=job.model,
                reward_funcs=reward,
                args=settings(job),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[clock],
            )
            if job.engine == "vllm" and len(set(job.lengths)) > 1:
                _give_lengths(trainer, job.lengths)
            for row, ids in zip(rows, tokenizer([row.text for row in rows])["input_ids"], strict=True):
                assert tuple(ids) == row.token_ids, f"{row.text!r} reads {ids}, not {row.token_ids}"
            trainer.train()
            device_gb = most()
    report = {
        "version": f"trl {trl_version}, transformers {version('transformers')}, torch {torch.__version__}",
        "step_s": clock.seconds[job.warm_up :],
        "cpu_s": clock.cpu_s[job.warm_up :],
        "tokens": clock.tokens[job.warm_up :],
        "rewards": rewards,
        "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e9,
        "device_gb": device_gb,
    }
    if torch.cuda.is_available():
        report |= {
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
    return report


def _give_lengths(trainer: GRPOTrainer, lengths: tuple[int, ...]) -> None:
    llm = trainer.vllm_generation.llm
    plain = llm.generate

    def generate(prompts: Any, sampling_params: Any, **more: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for parameters, length in zip(each, lengths, strict=True):
            parameters.max_tokens = length
        return plain(prompts, sampling_params=each, **more)

    llm.generate = generate


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    the_job = Job.read(sys.argv[1])
    write_report(the_job, run(the_job))
    sys.stdout.flush()
    os._exit(0)  # the ends of vLLM and the process group may hang
