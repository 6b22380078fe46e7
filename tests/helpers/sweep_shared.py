"""One process of a sweep that several share: python -m tests.helpers.sweep_shared ROOT NAME, which writes
ROOT/log.jsonl.
"""

import json
import sys
from pathlib import Path

from prefect.logging import disable_run_logger

from flows import chain
from flows.stages.train import Train
from flows.sweep.flow import SweepWorker
from flows.sweep.study import Member
from flows.work.open_run import open_run
from rlcore.config.sweep import Sweep, load_sweep
from rlcore.storage.publish import write_text_atomically
from tests.helpers.share_of_digits import LEARNING

SPEC = f"""
name: shared
experiment: debug
overrides: [trainer.total_steps=2, tracking.enabled=false, {", ".join(LEARNING)}]
grid: {{optim.lr: [3e-3, 1.0]}}
"""


def shared_sweep(root: Path) -> Sweep:
    file = root / "shared.yaml"
    write_text_atomically(file, SPEC)
    return load_sweep(str(file), [f"paths.root={root}"])


def main(root: Path, name: str) -> None:
    def log(what: str, run_id: str) -> None:
        with (root / "log.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps({"what": what, "run": run_id, "by": name}).encode() + b"\n")

    def train(member: Member, to_step: int, label: str) -> None:
        with open_run(member.config) as run:
            log("begun", run.run_id)
            for stage in chain.stages_until(run.config, Train.name, to_step):
                chain.run_on_console(stage, run)
            log("ended", run.run_id)

    with disable_run_logger():
        SweepWorker(shared_sweep(root), train, name).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
