"""A run whose optimizers' moments and reference wait on the host has the numbers of one that keeps them beside it."""

from pathlib import Path

from rlcore.config.compose import load_config
from rlcore.config.fingerprint import run_id
from tests.helpers.running import steps_of, weights_of
from tests.helpers.sessions import elsewhere, run_to_the_end, session_of
from tests.small_run import prepare

SETTINGS = (
    "algo=ppo", "algo.kl.where=loss", "trainer.steps_per_chunk=1", "trainer.total_steps=3", "validation.every_steps=0",
    "tracking.enabled=false", "runtime.stop_deadline_s=200", "optim.lr=1e-3",
)  # fmt: skip
OFFLOAD = ("optim.offload=true", "critic.optim.offload=true", "algo.kl.offload=true")


def test_switched_on_and_off_from_chunk_to_chunk(tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", *SETTINGS)
    run_to_the_end(plain)
    for to_step, offload in ((1, OFFLOAD), (2, ()), (3, OFFLOAD)):
        changed = elsewhere(plain, tmp_path / "changed", *SETTINGS, *offload)
        with session_of(changed) as session:
            assert session.train(to_step)["step"] == to_step
            if to_step == 3:
                session.export("last")
    assert run_id(changed.config) == run_id(load_config(["experiment=debug", *SETTINGS]))
    assert steps_of(changed) == steps_of(plain)
    assert weights_of(changed) == weights_of(plain)
