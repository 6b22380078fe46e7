"""Gradients do not depend on the micro-batch split, the order or the number of ranks."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlcore.config.algo import POLICY_LOSSES
from tests.helpers.forked import run_side_by_side
from tests.helpers.small_run import SmallRun, prepare
from tests.workers.ranks import NUM_SEQUENCES, UNSCORED, random_batch

ALGORITHMS = {
    "grpo": ["algo=grpo", "algo.kl.where=loss"],
    "ppo": ["algo=ppo"],
    "sft": ["algo=grpo"],
    "dpo": ["algo=grpo", "warm_start.loss=dpo"],
    "kl_cov": [
        "algo=grpo", "algo.policy_loss=kl_cov", "algo.policy_loss_options.share=0.3", "trainer.mini_batch_size=4",
    ],
}  # fmt: skip
"""Settings of each; sft: the supervised loss on the same responses; dpo: on pairs of neighboring responses."""
OTHERS = {
    **{name: [f"algo.policy_loss={name}"] for name in POLICY_LOSSES if name not in ("ppo_clip", "kl_cov")},
    "off_policy_mask": ["algo.off_policy_mask=0.5"],
}
"""Settings of losses tested in few splits."""
STRAIGHT, SHUFFLED = list(range(NUM_SEQUENCES)), np.random.default_rng(1).permutation(NUM_SEQUENCES).tolist()
CASES = {
    "whole": (STRAIGHT, 10_000, False),
    "split": (STRAIGHT, 30, False),
    "single": (STRAIGHT, 1, False),
    "shuffled": (SHUFFLED, 60, False),
    "scored-alone": ([index for index in STRAIGHT if index not in UNSCORED], 60, False),
    "checkpointed": (STRAIGHT, 60, True),
    "zero-1": (STRAIGHT, 60, False),
}
"""Order of the sequences, maximum tokens of a micro-batch, gradient checkpointing."""
ON_RANKS = {
    1: [(algo, case) for algo in ALGORITHMS for case in CASES if (algo, case) != ("dpo", "scored-alone")]
    + [(algo, "whole") for algo in OTHERS],
    2: [(algo, "split") for algo in ALGORITHMS]
    + [(algo, "scored-alone") for algo in ALGORITHMS if algo != "dpo"]
    + [("grpo", "checkpointed"), ("ppo", "zero-1")]
    + [(algo, "shuffled") for algo in OTHERS],
    4: [(algo, case) for algo in ALGORITHMS for case in ("single", "shuffled")],
    8: [(algo, case) for algo in ALGORITHMS for case in ("single", "shuffled")],
}
"""Cases by number of ranks: all on one; on more each algorithm, and each kind of split once."""
SEVERAL = [2, 4, pytest.param(8, marks=pytest.mark.lengthy)]
RELATIVE = 1e-5
"""Tolerance relative to the largest entry, in float32. Key biases differ most (4.1e-6 on some processors), since their
gradients are cancelling sums."""


def compute_gradients(folder: Path, world_size: int) -> Path:
    cases = folder / f"cases-{world_size}.json"
    if not cases.exists():
        cases.write_text(json.dumps([_case(folder, algo, name) for algo, name in ON_RANKS[world_size]]))
        run_side_by_side(
            *(["tests.workers.ranks", str(rank), str(world_size), str(folder)] for rank in range(world_size))
        )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    torch.save(random_batch(np.random.default_rng(7)), folder / "batch.pt")
    return folder


@functools.cache
def _run(folder: Path, algo: str, checkpointing: bool, zero_stage: int) -> SmallRun:
    return prepare(
        folder,
        "algo.entropy_coef=0.01",
        "optim.grad_clip=1000.0",
        f"model.gradient_checkpointing={checkpointing}",
        f"model.zero_stage={zero_stage}",
        "model.scratch.num_layers=2",
        "warm_start.enabled=false",
        *(ALGORITHMS | OTHERS)[algo],
    )


def _case(folder: Path, algo: str, name: str) -> dict[str, object]:
    order, max_tokens, checkpointing = CASES[name]
    run = _run(folder, algo, checkpointing, 1 if name == "zero-1" else 3)
    return {
        "name": f"{algo}-{name}",
        "supervised": algo in ("sft", "dpo"),
        "config": run.config.model_dump(mode="json"),
        "model": str(run.model_directory),
        "order": order,
        "max_tokens": max_tokens,
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world_size", "algo", "case"),
    [
        pytest.param(size, *one, marks=pytest.mark.lengthy if size == 8 else ())
        for size, wanted in ON_RANKS.items()
        for one in wanted
    ],
)
def test_gradient_is_independent_of_split_and_ranks(folder: Path, algo: str, case: str, world_size: int) -> None:
    expected = load_file(compute_gradients(folder, 1) / f"{algo}-whole-1.safetensors")
    found = load_file(compute_gradients(folder, world_size) / f"{algo}-{case}-{world_size}.safetensors")
    assert found.keys() == expected.keys()
    assert any(name.startswith("critic.") for name in found) == (algo == "ppo")
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, f"{name}: a gradient of zero shows nothing"
        difference = (found[name] - value).abs().max().item()
        assert difference <= RELATIVE * scale, f"{name}: {difference / scale:.2e}"


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", SEVERAL)
def test_nan_loss_on_one_rank_stops_all(folder: Path, world_size: int) -> None:
    outcomes = [
        (compute_gradients(folder, world_size) / f"outcome-{rank}-of-{world_size}").read_text()
        for rank in range(world_size)
    ]
    steps, messages = zip(*(outcome.split("\n") for outcome in outcomes), strict=True)
    assert [*steps] == ["0 steps, NonFiniteError, weights as before; 2 steps, NoneType, weights changed"] * world_size
    named = [
        re.findall(r"the loss of prompts number (\[\d[\d, ]*\]) of the step is not finite", text) for text in messages
    ]
    assert named[0]
    assert named == [named[0]] * world_size, "each rank reports all prompts"
