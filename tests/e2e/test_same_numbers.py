"""Offloading, profiling and a model of the hub do not change the numbers of a run."""

import gzip
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from tests.helpers.hub_server import HUB_ID, cache_of
from tests.helpers.running import assert_same, steps_of
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


def test_a_hub_model_trains_like_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepare(tmp_path)
    cache_of(made.model_directory, tmp_path / "hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    words = ("tracking.enabled=false", "warm_start.enabled=false")
    found = [prepare(tmp_path, *words, f"model.path={model}") for model in (HUB_ID, made.model_directory)]
    for run in found:
        run_to_the_end(run)
    assert_same(*found)
    assert len(steps_of(found[1])) == 3
