"""A hub id as `model.path`: read from a real hub cache on disk, without the network."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.hub_model import HUB_ID, cache_of
from tests.helpers.running import finish, steps_of, write_record
from tests.small_run import prepare


def test_a_model_of_the_hub_trains_like_its_directory(tmp_path: Path) -> None:
    made = prepare(tmp_path)
    cache_of(made.model_directory, tmp_path / "hf")
    program = (
        "import runpy, sys; from pathlib import Path; from tests.small_run import prepare; "
        "from tests.helpers.running import write_record; "
        "run_dir = write_record(prepare(Path(sys.argv[1]), *sys.argv[2:])); print(run_dir, flush=True); "
        "sys.argv = ['process', '--run', str(run_dir)]; "
        "runpy.run_module('tests.helpers.whole_run', run_name='__main__', alter_sys=True)"
    )
    overrides = ["tracking.enabled=false", "warm_start.enabled=false", f"model.path={HUB_ID}"]
    trained = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *overrides],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert trained.returncode == 0, trained.stderr
    run_dir = Path(trained.stdout.split()[0])

    local = prepare(tmp_path, *overrides[:2], f"model.path={made.model_directory}")
    finish(write_record(local), tmp_path / "out.log")
    weights = [folder / "model.safetensors" for folder in (run_dir / "model", local.layout.exported_model)]
    # By digest: pytest would compare megabytes line by line, for hours.
    first, second = (hashlib.sha256(file.read_bytes()).hexdigest() for file in weights)
    assert first == second
    assert len(steps_of(local)) == local.config.trainer.total_steps + 1
