"""Compare TRL's SFTTrainer with our supervised steps on the same batches: the loss of each step, and tokens/s.

    pip install --target TRL_FOLDER --no-deps trl==1.16.0
    python -m benchmarks.vs_trl_sft --trl-site TRL_FOLDER --write   # on the GPU if there is one, else on the CPU
    python -m benchmarks.vs_trl_sft --trl-site TRL_FOLDER --device cpu --steps 10 --shape qwen2.5-0.5b
    python -m benchmarks.vs_trl_sft --trl-python OTHER_ENVIRONMENT/bin/python

Both sides start from the same random weights, take the same rows in the same order, and update with AdamW at the same
constant rate. A row has a prompt without a loss and a response of random length. The sides run one after the other,
each in a new process. On a CPU both compute in float32, and the command fails if two losses differ by more than 1e-4.
On a GPU both keep float32 weights and compute in bfloat16. TRL pads its batches, unless `--padding-free` is given (with
FlashAttention). The tokens of the rows are counted, without padding.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4  # of two losses in float32, in nats per token
LR, GRAD_CLIP = 1e-3, 1.0
Rows = list[tuple[list[int], int]]  # token ids and the length of the prompt


def ours(job: dict[str, Any], rows: Rows) -> dict[str, list[float]]:
    from rlcore.batching.prompts import Demonstration
    from rlcore.checkpoint.state import LoopState
    from rlcore.config.compose import load_config
    from rlcore.run.initial_policy import stage_settings
    from rlcore.trainer.supervised import SupervisedTrainer
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
    state, losses, seconds = LoopState(0, 0, 0, 0, 0.0), [], []
    for _ in range(job["steps"]):
        begun = _now()
        result = trainer.step(state, epoch=0)
        seconds.append(_now() - begun)
        losses.append(result.metrics["sft/loss"])
        state = result.state
    group.close()
    return {"loss": losses, "step_s": seconds}


def trl(job: dict[str, Any], rows: Rows) -> dict[str, list[float]]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    seconds: list[float] = []

    class Measured(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            found = super().compute_loss(*args, **named)
            losses[-1] += found.detach() if torch.is_tensor(found) else found[0].detach()
            return found

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            losses.append(0.0)
            seconds.append(-_now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[-1] += _now()

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
        trainer = Measured(job["model"], settings, train_dataset=Dataset.from_dict(data),
                           processing_class=tokenizer, callbacks=[Clock()])  # fmt: skip
        trainer.train()
    return {"loss": [float(loss) for loss in losses], "step_s": seconds}


SIDES: dict[str, Callable[[dict[str, Any], Rows], dict[str, list[float]]]] = {"trl": trl, "ours": ours}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_side(side: str, folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    found: dict[str, Any] = dict(SIDES[side](job, json.loads((folder / "rows.json").read_text())))
    if job["device"] == "cuda":
        found["allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
    (folder / f"{side}.json").write_text(json.dumps(found))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides on the same rows, and return the measurements of both."""
    import numpy as np

    from benchmarks.harness import draw_lengths
    from benchmarks.shapes import SHAPES, model_of

    model = model_of(arguments, folder)
    count = arguments.batch * arguments.steps
    rng, vocabulary = np.random.default_rng(arguments.seed), SHAPES[arguments.shape]["vocab_size"]
    rows: Rows = [
        (rng.integers(4, vocabulary, arguments.prompt_tokens + length).tolist(), arguments.prompt_tokens)
        for length in draw_lengths(count, arguments.mean, arguments.longest)
    ]
    named = ("batch", "steps", "device", "threads", "trl_micro", "padding_free", "overrides")
    job = {"model": str(model), **{name: getattr(arguments, name) for name in named}}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "rows.json").write_text(json.dumps(rows))
    tokens = [sum(len(ids) for ids, _ in rows[at : at + arguments.batch]) for at in range(0, count, arguments.batch)]
    sides: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        site = str(arguments.trl_site.resolve()) if side == "trl" and arguments.trl_site else ""
        path = os.pathsep.join(filter(None, [site, str(ROOT), os.environ.get("PYTHONPATH", "")]))
        python = arguments.trl_python if side == "trl" and arguments.trl_python else sys.executable
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(arguments.threads),
                       "CUDA_VISIBLE_DEVICES": "0" if arguments.device == "cuda" else ""}  # fmt: skip
        command = [python, "-m", "benchmarks.vs_trl_sft", "--side", side, "--folder", str(folder)]
        subprocess.run(command, env=environment, check=True, cwd=ROOT)
        found = json.loads((folder / f"{side}.json").read_text())
        measured = slice(arguments.warm_up, None)
        found["tokens_per_s"] = sum(tokens[measured]) / sum(found["step_s"][measured])
        sides[side] = found
    difference = max(abs(a - b) for a, b in zip(sides["trl"]["loss"], sides["ours"]["loss"], strict=True))
    about = {"shape": arguments.shape, "mean_tokens": sum(tokens) / count, **job}
    faster = sides["ours"]["tokens_per_s"] / sides["trl"]["tokens_per_s"]
    return {"job": about, "largest_loss_difference": difference, "times_as_fast": faster, **sides}


def main() -> None:
    arguments = _parse()
    if arguments.side:
        run_side(arguments.side, arguments.folder)
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
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-site", type=Path, help="folder with trl, added to the path of its process")
    parser.add_argument("--trl-python", help="interpreter of another environment that has trl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", default="llama3.2-1b" if on_gpu else "tiny")
    parser.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=12 if on_gpu else 8)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--prompt-tokens", type=int, default=107 if on_gpu else 20)
    parser.add_argument("--mean", type=int, default=300 if on_gpu else 60, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=1_500 if on_gpu else 300, help="most tokens of a response")
    parser.add_argument("--trl-micro", type=int, default=8, help="rows of TRL's micro-batch; must divide --batch")
    parser.add_argument("--padding-free", action="store_true", help="TRL with flash_attention_2 and without padding")
    parser.add_argument("--threads", type=int, default=4 if on_gpu else 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the results to build/results")
    parser.add_argument("overrides", nargs="*", help="settings of our side, as on the command line")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
