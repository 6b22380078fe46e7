"""Offloading, profiling and a model of the hub do not change the numbers of a run."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from tests.helpers.hub_server import HUB_ID, cache_of
from tests.helpers.running import assert_same, finish, steps_of, write_record
from tests.helpers.sessions import elsewhere, run_to_the_end, session_of
from tests.helpers.small_run import prepare

SHORT = ("validation.every_steps=0", "tracking.enabled=false", "runtime.stop_deadline_s=200")
PPO = (
    *SHORT, "algo=ppo", "algo.kl.where=loss", "trainer.steps_per_chunk=1", "trainer.total_steps=3", "optim.lr=1e-3",
)  # fmt: skip
OFFLOAD = ("optim.offload=true", "critic.optim.offload=true", "algo.kl.offload=true")
TWO_STEPS = (
    *SHORT, "trainer.steps_per_chunk=2", "trainer.total_steps=2", "trainer.batch_size=4", "trainer.mini_batch_size=4",
    "rollout.max_response_tokens=8", "validation.max_problems=2",
)  # fmt: skip
HUB_RUN = """
import runpy, sys
from pathlib import Path
from tests.helpers.small_run import prepare
from tests.helpers.running import write_record
run_dir = write_record(prepare(Path(sys.argv[1]), *sys.argv[2:]))
print(run_dir, flush=True)
sys.argv = ['process', '--run', str(run_dir)]
runpy.run_module('tests.helpers.whole_run', run_name='__main__', alter_sys=True)
"""


def test_offload_switched_from_chunk_to_chunk(tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", *PPO)
    run_to_the_end(plain)
    for to_step, offload in ((1, OFFLOAD), (2, ()), (3, OFFLOAD)):
        changed = elsewhere(plain, tmp_path / "changed", *PPO, *offload)
        with session_of(changed) as session:
            assert session.train(to_step)["step"] == to_step
            if to_step == 3:
                session.export("last")
    assert run_id(changed.config) == run_id(load_config(["experiment=debug", *PPO]))
    assert_same(changed, plain)


def test_profiled_steps_have_traces(tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", *TWO_STEPS)
    run_to_the_end(plain)
    assert not plain.layout.profile.exists()
    profile = ("runtime.profile.first_step=1", "runtime.profile.num_steps=2")
    profiled = elsewhere(plain, tmp_path / "profiled", *TWO_STEPS, *profile)
    texts: list[str] = []
    run_to_the_end(profiled, lambda event: texts.append(str(event.get("text", ""))))
    files = sorted(profiled.layout.profile.iterdir())
    assert [file.name for file in files] == ["step-1-rank-0.json.gz", "step-2-rank-0.json.gz"]
    assert sum("profile of step" in text for text in texts) == 2
    with gzip.open(files[0], "rt") as packed:
        operators = {str(event.get("name")) for event in json.load(packed)["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= operators
    assert_same(profiled, plain)


def test_a_hub_model_trains_like_its_directory(tmp_path: Path) -> None:
    made = prepare(tmp_path)
    cache_of(made.model_directory, tmp_path / "hf")
    overrides = ["tracking.enabled=false", "warm_start.enabled=false"]
    command = [sys.executable, "-c", HUB_RUN, str(tmp_path), *overrides, f"model.path={HUB_ID}"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    trained = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert trained.returncode == 0, trained.stderr
    run_dir = Path(trained.stdout.split()[0])
    local = prepare(tmp_path, *overrides, f"model.path={made.model_directory}")
    finish(write_record(local), tmp_path / "out.log")
    weights = [folder / "model.safetensors" for folder in (run_dir / "model", local.layout.exported_model)]
    # Compared by digest: pytest would compare megabytes line by line, for hours.
    first, second = (hashlib.sha256(file.read_bytes()).hexdigest() for file in weights)
    assert first == second
    assert len(steps_of(local)) == local.config.trainer.total_steps + 1
