r"""Compare TRL's DPOTrainer with our DPO stage on the same pairs and weights: the loss of each step, and the speed.

    python -m venv TRL && TRL/bin/pip install trl==1.16.0
    python -m benchmarks.vs_trl_dpo --trl-python TRL/bin/python                         # CPU: equal losses, in float32
    python -m benchmarks.vs_trl_dpo --shape llama3.2-1b --pairs 64 --prompt-tokens 512 --mean 256 --longest 1024 \
        --trl-micro 8 --trl-python TRL/bin/python --out dpo.json                        # GPU: bfloat16 products
    python -m benchmarks.vs_trl_dpo --trl-site FOLDER ...                               # trl from pip install --target

The weights are random and in float32 on both sides. The sides run one after the other, each in a new process. Both use
the same tokens in the same order, the same optimizer and the same reference model. Both compute the reference
log-probabilities before the first step. TRL pads, so `--lengths equal` is TRL's best case. Token counts include prompts
and responses but no padding.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.vs_trl import sides

BETA = 0.1
NAMES = {"margin": "rewards/margins", "chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected"}
"""Our name and TRL's name of each compared metric except the loss."""


def ours(job: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np

    from rlcore.batching.prompts import Demonstration
    from rlcore.config.compose import load_config
    from rlcore.run.initial_policy import stage_settings
    from rlcore.trainer.step import SupervisedTrainer
    from rlcore.workers.group import LocalGroup

    on_gpu = job["device"] == "cuda"
    overrides = [
        f"model.path={job['model']}", "runtime.backend=local", "tracking.enabled=false", "warm_start.enabled=true",
        "warm_start.loss=dpo", f"warm_start.dpo_beta={BETA}", f"warm_start.demonstrations={job['folder']}/rows.json",
        f"warm_start.batch_size={job['pairs']}", f"warm_start.max_tokens={job['prompt_tokens'] + job['longest'] + 1}",
        f"warm_start.max_steps={job['steps']}", f"warm_start.optim.lr={job['lr']}", "warm_start.optim.grad_clip=1.0",
        f"model.dtype={'bfloat16' if on_gpu else 'float32'}", f"model.compile={on_gpu}",
        f"trainer.max_tokens_per_micro_batch={job['tokens']}", "runtime.fit_memory=off", *job["overrides"],
    ]  # fmt: skip
    config = stage_settings(load_config(["experiment=countdown_demo", *overrides]))

    def response(row: dict[str, Any], name: str) -> Demonstration:
        return Demonstration.of(row["prompt"], row[name])

    def pair(row: dict[str, Any]) -> Demonstration:
        chosen, rejected = response(row, "chosen"), response(row, "rejected")
        reference = np.zeros(len(row["chosen"]) + len(row["rejected"]), dtype=np.float32)
        return Demonstration(chosen.token_ids, chosen.is_target, rejected=rejected, reference=reference)

    pairs, size = [pair(row) for row in rows], job["pairs"]
    group = LocalGroup(config, job["model"])
    trainer = SupervisedTrainer(config, group, lambda drawn, _: pairs[drawn % len(pairs) :][:size])
    begun = sides.now()
    for start in range(0, len(pairs), size):
        trainer.fill_reference(pairs[start : start + size])
    reference_s = sides.now() - begun
    metrics = sides.supervised_steps(trainer, job["steps"])
    group.close()
    found = {name: [one[f"sft/{name}"] for one in metrics] for name in ("loss", *NAMES)}
    return {**found, "step_s": [one["perf/time_per_step"] for one in metrics], "reference_s": reference_s} | peak()


def peak() -> dict[str, float]:
    if torch.cuda.is_available():
        return {"peak_gb": torch.cuda.max_memory_reserved() / 1e9}
    return {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e9}


def trl(job: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    on_gpu, found = job["device"] == "cuda", dict[str, Any]({name: [] for name in ("loss", *NAMES, "step_s")})
    num_micro = job["pairs"] // job["trl_micro"]
    trainer_class, clock = sides.measuring(DPOTrainer, found)

    class Means(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["loss"][-1] /= num_micro
            for name, theirs in NAMES.items():  # the Trainer rounds what it logs
                found[name].append(sum(trainer._metrics["train"][theirs][-num_micro:]) / num_micro)

    words = {name: [" ".join(f"w{token}" for token in row[name] if token > 3) for row in rows]
             for name in ("prompt", "chosen", "rejected")}  # fmt: skip
    words |= {name: [f" {text}" for text in words[name]] for name in ("chosen", "rejected")}
    begun = sides.now()
    trainer = trainer_class(
        model=job["model"],
        args=DPOConfig(
            output_dir=str(Path(job["folder"]) / "trl"), beta=BETA, max_length=None, max_steps=job["steps"],
            per_device_train_batch_size=job["trl_micro"], gradient_accumulation_steps=num_micro,
            train_sampling_strategy="sequential", learning_rate=job["lr"], lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, precompute_ref_log_probs=True, bf16=on_gpu, use_cpu=not on_gpu,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"}, gradient_checkpointing=False,
            optim="adamw_torch_fused", logging_steps=job["steps"] + 1, save_strategy="no", report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(words),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock, Means()],
    )  # fmt: skip
    for row, read in zip(rows, trainer.train_dataset, strict=True):
        assert all(read[f"{name}_ids"] == row[name] for name in words), "both sides must have the same tokens"
    found["reference_s"] = sides.now() - begun  # with the model's loading
    trainer.train()
    return found | peak()


def make_rows(arguments: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    """Return random pairs for the tokenizer of `benchmarks.shapes`. Each response ends with the end-of-sequence token
    (id 1)."""
    import numpy as np

    rng, rows = np.random.default_rng(arguments.seed), []
    for _ in range(arguments.pairs * arguments.batches):
        drawn = rng.geometric(1 / arguments.mean, 2).clip(2, arguments.longest)
        lengths = drawn.tolist() if arguments.lengths == "drawn" else [arguments.mean] * 2
        prompt, chosen, rejected = (
            rng.integers(4, vocab_size, count).tolist() for count in (arguments.prompt_tokens, *lengths)
        )
        rows.append({"prompt": prompt, "chosen": [*chosen, 1], "rejected": [*rejected, 1]})
    return rows


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.shapes import SHAPES, model_of

    rows = make_rows(arguments, SHAPES[arguments.shape]["vocab_size"])
    named = ("pairs", "steps", "device", "prompt_tokens", "longest", "lr", "tokens", "threads", "overrides")
    job = {"model": str(model_of(arguments, folder)), "folder": str(folder)}
    job |= {"trl_micro": arguments.trl_micro or arguments.pairs, **{name: getattr(arguments, name) for name in named}}
    counts = [2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) for row in rows]
    size = arguments.pairs
    tokens = [sum(counts[step % arguments.batches * size :][:size]) for step in range(arguments.steps)]
    reports = sides.run_both("benchmarks.vs_trl_dpo", arguments, folder, job, rows, tokens)
    differences = {name: sides.largest_difference(reports, name) for name in ("loss", *NAMES)}
    return {"job": job, "tokens": tokens, "differences": differences,
            "speed": reports["ours"]["tokens_per_s"] / reports["trl"]["tokens_per_s"], "sides": reports}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides.describe(parser, steps=12, warm_up=3, prompt_tokens=64, mean=48, longest=192)
    parser.add_argument("--pairs", type=int, default=16, help="pairs of an optimizer step")
    parser.add_argument("--batches", type=int, default=3, help="different batches, which are repeated")
    parser.add_argument("--lengths", choices=("drawn", "equal"), default="drawn")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--tokens", type=int, default=16_384, help="our token budget of a micro-batch")
    parser.add_argument("--trl-micro", type=int, help="pairs of TRL's micro-batch (all of a step)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    if arguments.side:
        sides.run_side({"trl": trl, "ours": ours}, arguments.side[0], Path(arguments.side[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(arguments, Path(scratch))
    for side, report in found["sides"].items():
        speed, last = f"{report['tokens_per_s']:,.0f} tokens/s", report["loss"][-1]
        print(f"{side}: loss {report['loss'][0]:.6f} to {last:.6f}, {speed}, reference {report['reference_s']:.1f} s, "
              f"peak {report['peak_gb']:.1f} GB")  # fmt: skip
    print(f"ours / trl: {found['speed']:.2f} times the speed; largest differences:")
    print(", ".join(f"{name} {value:.1e}" for name, value in found["differences"].items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
