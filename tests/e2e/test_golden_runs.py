"""Five steps of GRPO and PPO give the recorded numbers. A refactor leaves them unchanged.

python -m tests.e2e.test_golden_runs     # rewrites tests/e2e/golden.json: only for an intended change of numbers
"""

import json
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from rlcore.workers.group import LocalGroup
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import prepare, train

FILE = Path(__file__).with_name("golden.json")
STEPS = 5
NAMES = (
    "critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm",
    "response_length/mean",
)  # fmt: skip
CASES = {
    "grpo": ("algo=grpo", "trainer.total_steps=5"),
    "ppo": ("algo=ppo", "trainer.total_steps=5", "trainer.mini_batch_size=4"),
}


def run(case: str, root: Path) -> list[dict[str, float]]:
    small = prepare(root, *LEARNING, *CASES[case])
    with closing(LocalGroup(small.config, str(small.model_directory))) as group:
        steps = train(small, group, STEPS)
    return [{name: step[name] for name in NAMES if name in step} for step in steps]


@pytest.mark.parametrize("case", CASES)
def test_golden_run(case: str, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())[case]
    found = run(case, tmp_path)
    assert len(found) == len(expected) == STEPS
    for number, (want, have) in enumerate(zip(expected, found, strict=True), start=1):
        # Another CPU may add in another order; a change of the algorithm moves these by far more.
        assert have == pytest.approx(want, rel=1e-3, abs=1e-6), f"step {number}"
    assert any(step["critic/score/mean"] > 0 for step in expected)
    assert sum(step["actor/grad_norm"] > 1e-3 for step in expected) >= STEPS - 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps({case: run(case, Path(folder)) for case in CASES}, indent=1) + "\n")
