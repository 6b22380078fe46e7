"""The golden runs: what five steps give, written down. A refactor leaves them as they are.

python -m tests.e2e.golden     # rewrites tests/e2e/golden.json: only for an intended change of numbers
"""

import json
import tempfile
from contextlib import closing
from pathlib import Path

from rlcore.workers.group import LocalGroup
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import prepare, train

FILE = Path(__file__).with_name("golden.json")
STEPS = 5
NAMES = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "critic/vf_loss",
    "critic/grad_norm",
    "response_length/mean",
)
CASES = {
    "grpo": ("algo=grpo", "trainer.total_steps=5"),
    "ppo": ("algo=ppo", "trainer.total_steps=5", "trainer.mini_batch_size=4"),
}


def run(case: str, root: Path) -> list[dict[str, float]]:
    small = prepare(root, *LEARNING, *CASES[case])
    with closing(LocalGroup(small.config, str(small.model_directory))) as group:
        steps = train(small, group, STEPS)
    return [{name: step[name] for name in NAMES if name in step} for step in steps]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {case: run(case, Path(folder)) for case in CASES}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
