"""The short steps of vLLM's runner without a GPU: vLLM's and our own kernels run by Triton's interpreter.

In a process of their own, and a Triton of its own: where torch and vLLM can import one they behave otherwise.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rollout.real_vllm import real_vllm

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "triton"
CHECKS = (
    "a_batch_is_prepared_as_row_by_row",
    "a_draw_is_vllms_own_and_its_log_probability_is_right",
    "a_draw_in_float64_is_vllms_own_too",
    "answers_and_books_are_vllms_own",
    "an_engine_is_shortened_after_its_check",
    "a_seed_of_another_row_is_found",
    "a_block_at_another_place_is_found",
    "an_engine_too_small_for_the_check_is_told",
    "values_are_the_same_within_the_bound",
    "a_step_that_fails_leaves_vllm_as_it_was",
    "an_unknown_release_keeps_its_own_way",
    "what_short_steps_cannot_do_is_named",
    "names_that_a_release_lacks_are_told",
    "a_scheduler_that_lacks_a_name_orders_its_own_steps",
)

pytestmark = real_vllm(timeout_s=600)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check failed with."""
    assert (TRITON / "triton").is_dir(), f"there is no Triton in {TRITON}, which `make install-vllm` puts there"
    file = tmp_path_factory.mktemp("interpreted") / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.interpreted", str(file)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{TRITON}",
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert file.exists(), done.stdout[-4_000:] + done.stderr[-8_000:]
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_of_short_steps(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]


def test_all_checks_are_told_here(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)


def test_the_interpreters_triton_is_nobody_elses() -> None:
    found = find_spec("triton")
    assert found is None or TRITON not in Path(str(found.origin)).parents
