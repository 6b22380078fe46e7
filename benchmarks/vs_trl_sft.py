"""Compare TRL's SFTTrainer with our supervised steps on the same batches: the loss of each step, and tokens/s.

    pip install --target TRL_FOLDER --no-deps trl==1.16.0
    python -m benchmarks.vs_trl_sft --trl-site TRL_FOLDER --write   # on the GPU if there is one, else on the CPU
    python -m benchmarks.vs_trl_sft --trl-site TRL_FOLDER --device cpu --steps 10 --shape qwen2.5-0.5b
    python -m benchmarks.vs_trl_sft --trl-python OTHER_ENVIRONMENT/bin/python

Both sides start from the same random weights, take the same rows in the same order, and update with AdamW at the same
constant learning rate. A row has a prompt and a response of random length. The loss covers only the response. The sides
run one after the other, each in a new process. On a CPU both compute in float32, and the command fails if two losses
differ by more than 1e-4. On a GPU both keep float32 weights and compute in bfloat16. TRL pads its batches, unless
`--padding-free` is given (with FlashAttention). Token counts exclude padding.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.vs_trl import sides

TOLERANCE = 1e-4  # of two losses in float32, in nats per token
LR, GRAD_CLIP = 1e-3, 1.0
Rows = list[tuple[list[int], int]]  # token ids and the length of the prompt


def ours(job: dict[str, Any], rows: Rows) -> dict[str, Any]:
    from rlcore.batching.prompts import Demonstration
    from rlcore.config.compose import load_config
    from rlcore.run.initial_policy import stage_settings
    from rlcore.trainer.step import SupervisedTrainer
    from rlcore.workers.group import LocalGroup

    longest = max(len(ids) for ids, _ in rows)
    settings = [
        "trainer.total_steps=0", "warm_start.enabled=true", "tracking.enabled=false", f"model.path={job['model']}",
        f"warm_start.batch_size={job['batch']}", f"warm_start.max_steps={job['steps']}",
        f"warm_start.max_tokens={longest}", f"warm_start.optim.lr={LR}", "warm_start.optim.weight_decay=0",
        f"warm_start.optim.grad_clip={GRAD_CLIP}", f"trainer.max_tokens_per_micro_batch={max(8_192, longest)}",
        f"runtime.device={job['device']}", f"runtime.threads_per_worker={job['threads']}",
        f"model.compile={job['device'] == 'cuda'}", *job["overrides"],
    ]  # fmt: skip
    config = stage_settings(load_config(settings))
    lessons = [Demonstration(ids, [place >= prompt for place in range(len(ids))]) for ids, prompt in rows]
    group = LocalGroup(config, job["model"])
    size = config.warm_start.batch_size
    trainer = SupervisedTrainer(config, group, lambda drawn, _: lessons[drawn : drawn + size])
    metrics = sides.supervised_steps(trainer, job["steps"])
    group.close()
    found = {"loss": [one["sft/loss"] for one in metrics], "step_s": [one["perf/time_per_step"] for one in metrics]}
    return found | allocated(job)


def allocated(job: dict[str, Any]) -> dict[str, float]:
    return {"allocated_gb": torch.cuda.max_memory_allocated() / 1e9} if job["device"] == "cuda" else {}


def trl(job: dict[str, Any], rows: Rows) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    found: dict[str, list[float]] = {"loss": [], "step_s": []}
    trainer_class, clock = sides.measuring(SFTTrainer, found)
    on_gpu, micro = job["device"] == "cuda", job["trl_micro"]
    data = {
        "input_ids": [ids for ids, _ in rows],
        "labels": [[-100] * prompt + ids[prompt:] for ids, prompt in rows],
    }
    with tempfile.TemporaryDirectory() as out:
        settings = SFTConfig(
            output_dir=out, max_steps=job["steps"], per_device_train_batch_size=micro,
            gradient_accumulation_steps=job["batch"] // micro, train_sampling_strategy="sequential",
            max_length=None, padding_free=job["padding_free"], dataset_kwargs={"skip_prepare_dataset": True},
            learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=GRAD_CLIP,
            optim="adamw_torch_fused", gradient_checkpointing=False, bf16=on_gpu, use_cpu=not on_gpu,
            model_init_kwargs={
                "dtype": "float32", "attn_implementation": "flash_attention_2" if job["padding_free"] else "sdpa",
            },
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        trainer = trainer_class(job["model"], settings, train_dataset=Dataset.from_dict(data),
                                processing_class=tokenizer, callbacks=[clock])  # fmt: skip
        trainer.train()
    return found | allocated(job)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import numpy as np

    from benchmarks.harness import draw_lengths
    from benchmarks.shapes import SHAPES, model_of

    count = arguments.batch * arguments.steps
    rng, vocabulary = np.random.default_rng(arguments.seed), SHAPES[arguments.shape]["vocab_size"]
    rows: Rows = [
        (rng.integers(4, vocabulary, arguments.prompt_tokens + length).tolist(), arguments.prompt_tokens)
        for length in draw_lengths(count, arguments.mean, arguments.longest)
    ]
    named = ("batch", "steps", "device", "threads", "trl_micro", "padding_free", "overrides")
    job = {"model": str(model_of(arguments, folder)), **{name: getattr(arguments, name) for name in named}}
    tokens = [sum(len(ids) for ids, _ in rows[at : at + arguments.batch]) for at in range(0, count, arguments.batch)]
    found = sides.run_both("benchmarks.vs_trl_sft", arguments, folder, job, rows, tokens)
    about = {"shape": arguments.shape, "mean_tokens": sum(tokens) / count, **job}
    faster = found["ours"]["tokens_per_s"] / found["trl"]["tokens_per_s"]
    difference = sides.largest_difference(found, "loss")
    return {"job": about, "largest_loss_difference": difference, "times_as_fast": faster, **found}


def main() -> None:
    arguments = _parse()
    if arguments.side:
        sides.run_side({"trl": trl, "ours": ours}, arguments.side[0], Path(arguments.side[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    print(json.dumps(found, indent=1))
    if arguments.write:
        from benchmarks.results import write_result

        print(write_result(f"vs_trl_sft_{arguments.device}", found))
    if arguments.device == "cpu" and found["largest_loss_difference"] > TOLERANCE:
        sys.exit(f"the losses differ by {found['largest_loss_difference']:.1e}, more than {TOLERANCE:g}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = {"shape": "tiny", "steps": 8, "prompt_tokens": 20, "mean": 60, "longest": 300}
    large = {"shape": "llama3.2-1b", "steps": 12, "prompt_tokens": 107, "mean": 300, "longest": 1_500, "threads": 4}
    on_gpu = torch.cuda.is_available()
    sides.describe(parser, **(large if on_gpu else small), warm_up=2)
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 16, help="rows of a step")
    parser.add_argument("--trl-micro", type=int, default=8, help="rows of TRL's micro-batch; must divide --batch")
    parser.add_argument("--padding-free", action="store_true", help="TRL with flash_attention_2 and without padding")
    parser.add_argument("--write", action="store_true", help="write the results to build/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
