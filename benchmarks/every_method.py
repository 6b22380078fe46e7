"""Train the demo briefly with every loss, advantage and correction.

    nice python -m benchmarks.every_method                      # the methods without a result, one by one
    python -m benchmarks.every_method --jobs 25                 # 25 runs at the same time, with 25 cores
    nice python -m benchmarks.every_method --only gspo gdpo     # these methods, even if they have results
    python -m benchmarks.every_method paths.root=/tmp/tried --steps 2 --only gspo --to /tmp/tried.json

Each run begins with a supervised warm start. All warm starts stop at the same reward. Finished runs are not repeated.
When a run ends, its result is added to build/results/every_method.json. At the end, a Markdown table is printed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.seeds import RESULTS, read_seed, table
from rlcore.config.algo import ADVANTAGES, POLICY_LOSSES
from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout

DEMO = ("experiment=countdown_demo", "runtime.backend=local", "tracking.enabled=false", "seed=1")
LENGTHS = ("trainer.total_steps", "trainer.steps_per_chunk", "validation.every_steps")
TWO_UPDATES = "trainer.mini_batch_size=32"  # with one, every probability ratio is 1
SETTINGS = {
    **{name: (TWO_UPDATES, f"algo.policy_loss={name}") for name in POLICY_LOSSES},
    "gspo": (TWO_UPDATES, "algo=gspo"),
    "cispo": (TWO_UPDATES, "algo=cispo"),
    **{name: (f"algo.advantage={name}",) for name in ADVANTAGES},
    "gae": ("algo=ppo", "algo.lam=0.95", "critic.optim.lr=1e-3", "critic.warmup_steps=5"),
    "gdpo": ("algo.advantage=gdpo", "reward.weights={correct: 1.0, format: 0.2}"),
    "clip_cov": (TWO_UPDATES, "algo.clip_cov.share=0.0002"),
    "top_entropy": (TWO_UPDATES, "algo.top_entropy=0.2"),
    "off_policy_mask": (TWO_UPDATES, "algo.off_policy_mask=0.1"),
    "importance_mask": (TWO_UPDATES, "algo.importance.mode=mask", "algo.importance.level=sequence"),
    "rejection": (TWO_UPDATES, "algo.rejection.level=sequence-sum"),
    "mask_truncated": (TWO_UPDATES, "algo.mask_truncated=true"),
    "entropy_target": (TWO_UPDATES, "algo.entropy_control.target=0.5"),
}


def train(name: str, overrides: list[str]) -> dict[str, object]:
    arguments = [*DEMO, f"name=every_method_{name}", *SETTINGS[name], *overrides]
    begun = time.perf_counter()
    command = [sys.executable, "-m", "flows.cli", "train", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-3_000:]}")
    run = {"method": name, "settings": list(SETTINGS[name]), **read_seed(RunLayout.of(load_config(arguments)))}
    return {**run, "command_s": round(time.perf_counter() - begun, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings as on the command line, for each method")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="these methods, also those that the file has")
    parser.add_argument("--steps", type=int, default=30, help="of each training; validated before and after")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent trainings")
    parser.add_argument("--to", type=Path, default=RESULTS / "every_method.json", metavar="FILE", help="merged into")
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # torch uses runtime.threads_per_worker
    done = {run["method"]: run for run in json.loads(given.to.read_text())} if given.to.exists() else {}
    failed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        wanted = given.only or [name for name in SETTINGS if name not in done]
        overrides = [*(f"{key}={given.steps}" for key in LENGTHS), *given.overrides]
        for future in as_completed([pool.submit(train, name, overrides) for name in wanted]):
            try:
                run = future.result()
            except RuntimeError as error:
                failed += 1
                print(error, file=sys.stderr, flush=True)
                continue
            done[run["method"]] = run
            given.to.parent.mkdir(parents=True, exist_ok=True)
            given.to.write_text(json.dumps([done[each] for each in SETTINGS if each in done], indent=1) + "\n")
            print(f"{run['method']}: {run['command_s']} s", flush=True)
    print(table([done[each] for each in SETTINGS if each in done], "method", lambda run: f"`{run['method']}`"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
