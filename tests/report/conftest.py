"""Reports that are made once for all tests that only read them."""

from pathlib import Path

import pytest

from rlcore.report.build import ReportFiles, build_report
from tests.helpers.reports import write_run


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished GRPO run of 60 steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "countdown_demo-s1-0a1b2c3d"
    write_run(run_dir, num_steps=60, overrides=("trainer.total_steps=60",))
    return run_dir


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run with KL in the reward, 30 of 100 steps so far."""
    run_dir = tmp_path_factory.mktemp("runs") / "countdown_ppo_demo-s1-0a1b2c3d"
    write_run(run_dir, experiment="countdown_ppo_demo", overrides=("algo.kl.where=reward",), num_steps=30, seed=2)
    return run_dir


@pytest.fixture(scope="session")
def grpo_report(grpo_run: Path) -> ReportFiles:
    return build_report(grpo_run)


@pytest.fixture(scope="session")
def ppo_report(ppo_run: Path) -> ReportFiles:
    return build_report(ppo_run)
