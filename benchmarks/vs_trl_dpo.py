r"""Compare TRL's DPOTrainer with our DPO stage on the same pairs and weights: the loss of each step, and the speed.

    python -m venv TRL && TRL/bin/pip install trl==1.16.0
    python -m benchmarks.vs_trl_dpo --trl-python TRL/bin/python                         # CPU: equal losses, in float32
    python -m benchmarks.vs_trl_dpo --shape llama3.2-1b --pairs 64 --prompt-tokens 512 --mean 256 --longest 1024 \
        --trl-micro 8 --trl-python TRL/bin/python --out dpo.json                        # GPU: bfloat16 products
    python -m benchmarks.vs_trl_dpo --trl-site FOLDER ...                               # trl from pip install --target

The weights are random and in float32 on both sides. The sides run one after the other, each in a new process. Both use
the same tokens in the same order, the same optimizer and the same reference model. Both compute the reference
log-probabilities before the first step. TRL pads, so `--lengths equal` is its best case. The tokens of prompts and
responses are counted, without padding.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BETA = 0.1
NAMES = {
    "loss": "loss",
    "margin": "rewards/margins",
    "chosen_logprob": "logps/chosen",
    "rejected_logprob": "logps/rejected",
}


def run_ours(job: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np

    from rlcore.batching.prompts import Demonstration
    from rlcore.checkpoint.state import LoopState
    from rlcore.config.compose import load_config
    from rlcore.run.initial_policy import stage_settings
    from rlcore.trainer.supervised import SupervisedTrainer
    from rlcore.workers.group import LocalGroup

    on_gpu = job["device"] == "cuda"
    overrides = [
        f"model.path={job['model']}", "runtime.backend=local", "tracking.enabled=false", "warm_start.enabled=true",
        "warm_start.loss=dpo", f"warm_start.dpo_beta={BETA}", f"warm_start.demonstrations={job['rows']}",
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
    begun = _now()
    for start in range(0, len(pairs), size):
        trainer.fill_reference(pairs[start : start + size])
    reference_s, state, metrics = _now() - begun, LoopState(0, 0, 0, 0, 0.0), []
    for _ in range(job["steps"]):
        result = trainer.step(state, epoch=0)
        state = result.state
        metrics.append(result.metrics)
    group.close()
    found = {name: [one[f"sft/{name}"] for one in metrics] for name in NAMES}
    return {**found, "step_s": [one["perf/time_per_step"] for one in metrics], "reference_s": reference_s}


def run_trl(job: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    on_gpu, found = job["device"] == "cuda", dict[str, Any]({name: [] for name in (*NAMES, "step_s")})
    num_micro = job["pairs"] // job["trl_micro"]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = _now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["step_s"].append(_now() - self.begun)
            for name, theirs in NAMES.items():  # the Trainer rounds what it logs
                values = losses if name == "loss" else trainer._metrics["train"][theirs]
                found[name].append(sum(values[-num_micro:]) / num_micro)

    class Recorded(DPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            losses.append(float(loss.detach()))
            return loss

    losses: list[float] = []
    words = {name: [" ".join(f"w{token}" for token in row[name] if token > 3) for row in rows]
             for name in ("prompt", "chosen", "rejected")}  # fmt: skip
    words |= {name: [f" {text}" for text in words[name]] for name in ("chosen", "rejected")}
    begun = _now()
    trainer = Recorded(
        model=job["model"],
        args=DPOConfig(
            output_dir=str(Path(job["rows"]).parent / "trl"), beta=BETA, max_length=None, max_steps=job["steps"],
            per_device_train_batch_size=job["trl_micro"], gradient_accumulation_steps=num_micro,
            train_sampling_strategy="sequential", learning_rate=job["lr"], lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, precompute_ref_log_probs=True, bf16=on_gpu, use_cpu=not on_gpu,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"}, gradient_checkpointing=False,
            optim="adamw_torch_fused", logging_steps=job["steps"] + 1, save_strategy="no", report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(words),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Clock()],
    )  # fmt: skip
    for row, read in zip(rows, trainer.train_dataset, strict=True):
        assert all(read[f"{name}_ids"] == row[name] for name in words), "both sides must have the same tokens"
    found["reference_s"] = _now() - begun  # with the model's loading
    trainer.train()
    return found


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_rows(arguments: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    """Return random pairs for the tokenizer of `benchmarks.shapes`. A response ends with the end token 1."""
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


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from benchmarks.shapes import SHAPES, model_of

    rows = make_rows(arguments, SHAPES[arguments.shape]["vocab_size"])
    (file := scratch / "rows.json").write_text(json.dumps(rows))
    job = {name: value for name, value in vars(arguments).items() if name in _JOB}
    job |= {"model": str(model_of(arguments, scratch)), "rows": str(file)}
    job["trl_micro"] = arguments.trl_micro or arguments.pairs
    reports = {}
    for side, python, site in (("trl", arguments.trl_python, arguments.trl_site), ("ours", sys.executable, None)):
        (described := scratch / f"{side}.json").write_text(json.dumps(job | {"side": side}))
        path = [str(site.resolve()) if site else "", str(Path(__file__).resolve().parents[1])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
        subprocess.run([python, __file__, "--job", str(described)], env=environment, check=True)
        reports[side] = json.loads(described.with_suffix(".report").read_text())
    counts = [2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) for row in rows]
    size = arguments.pairs
    tokens = [sum(counts[step % arguments.batches * size :][:size]) for step in range(arguments.steps)]
    for report in reports.values():
        timed = slice(arguments.warm_up, None)
        report["tokens_per_s"] = sum(tokens[timed]) / sum(report["step_s"][timed])
    ours, trl = reports["ours"], reports["trl"]
    differences = {name: max(abs(a - b) for a, b in zip(ours[name], trl[name], strict=True)) for name in NAMES}
    return {"job": job, "tokens": tokens, "differences": differences,
            "speed": ours["tokens_per_s"] / trl["tokens_per_s"], "sides": reports}  # fmt: skip


_JOB = ("pairs", "steps", "device", "prompt_tokens", "longest", "lr", "tokens", "threads", "overrides")


def run_side(file: Path) -> None:
    job = json.loads(file.read_text())
    torch.set_num_threads(job["threads"])
    found = (run_trl if job["side"] == "trl" else run_ours)(job, json.loads(Path(job["rows"]).read_text()))
    on_gpu = torch.cuda.is_available()
    found["peak_gb"] = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e9
    )  # fmt: skip
    file.with_suffix(".report").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has trl")
    parser.add_argument("--trl-site", type=Path, help="folder with trl, added to the path of its process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of an optimizer step")
    parser.add_argument("--batches", type=int, default=3, help="different batches, which are repeated")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that are not timed")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--mean", type=int, default=48, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--lengths", choices=("drawn", "equal"), default="drawn")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--tokens", type=int, default=16_384, help="our token budget of a micro-batch")
    parser.add_argument("--trl-micro", type=int, help="pairs of TRL's micro-batch (all of a step)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="settings of our side, as on the command line")
    arguments = parser.parse_args()
    if arguments.job:
        run_side(arguments.job)
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
