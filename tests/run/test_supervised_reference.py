"""DPO through the real stage: its start at log 2, what it learns, its twin, splits, ranks, and the stored reference."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from rlcore.models.load import build_scratch_model
from rlcore.run.initial_policy import REFERENCE, stage_layout
from rlcore.run.supervised import Demonstrations
from rlcore.storage.manifest import read_manifest
from tests.helpers.running import WAIT_S, disturb, output_of, small
from tests.helpers.small_run import SmallRun, make
from tests.run.conftest import stage_steps

BETA = 0.2
DPO = (
    "warm_start.loss=dpo", f"warm_start.dpo_beta={BETA}", "warm_start.batch_size=16", "warm_start.misdirected_share=0",
    "warm_start.stop_at_reward=null", "warm_start.check_every=2", "warm_start.steps_per_chunk=2", "runtime.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the setting of a file of 48 pairs, where sums are preferred to shorter differences."""
    rows = [
        {"prompt": f"{a} {b} {c} : {d} =", "chosen": f"{a} + {b} + {c}", "rejected": f"{b} - {a}"}
        for a, b, c, d in np.random.default_rng(1).integers(1, 20, (48, 4)).tolist()
    ]
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"warm_start.demonstrations={file}"


def assert_equal_stages(one: SmallRun, other: SmallRun) -> None:
    for step, found in zip(stage_steps(one), stage_steps(other), strict=True):
        expected = {name: pytest.approx(value, abs=2e-5) for name, value in step.items() if name.startswith("sft/")}
        assert {name: value for name, value in found.items() if name.startswith("sft/")} == expected
    weights, others = (load_file(run.model_directory / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=2e-5)


def test_chosen_responses_become_likelier(tmp_path: Path, pairs: str) -> None:
    run = make(tmp_path, *DPO, pairs, "warm_start.max_steps=12")
    steps = stage_steps(run)
    log_2 = float(torch.tensor(2.0).log())
    for step, prefix in ((steps[0], "sft/held_out_"), (steps[1], "sft/")):
        assert step[f"{prefix}loss"] == log_2
        assert [step[prefix + name] for name in ("margin", "chosen_reward", "rejected_reward", "accuracy")] == [0.0] * 4
    last = steps[-1]
    assert last["sft/loss"] < 0.5 < last["sft/margin"]
    assert last["sft/accuracy"] == last["sft/held_out_accuracy"] == 1.0
    assert last["sft/held_out_chosen_reward"] > 0.1 > last["sft/held_out_rejected_reward"]
    manifest = read_manifest(run.model_directory)
    assert manifest.values["held_out_loss"] == min(step.get("sft/held_out_loss", 1.0) for step in steps[1:])
    left = [path.name for path in stage_layout(run.config, run.inputs.filtered_directory).run_dir.iterdir()]
    assert REFERENCE not in left, "it is needed no more"


def test_steps_equal_those_of_a_transformers_loop(tmp_path: Path, pairs: str) -> None:
    """Each response is computed alone, and the reference is a second model."""
    run = make(tmp_path, *DPO, pairs, "warm_start.max_steps=4", "warm_start.held_out_rows=0", "model.dtype=float32")
    lessons, config = Demonstrations.read(run.config, run.inputs), run.config.warm_start
    untaught = build_scratch_model(run.config.model.scratch, seed=run.config.seed, directory=tmp_path / "untaught")
    model = AutoModelForCausalLM.from_pretrained(untaught, dtype=torch.float32)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=0.0)

    def logprob(of: Any, row: Any) -> Tensor:
        ids = torch.tensor(row.token_ids)
        found = log_softmax(of(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        return (found * torch.tensor(row.is_target[1:])).sum()

    for number, step in enumerate(stage_steps(run)[1:]):
        optimizer.zero_grad()
        losses, rewards = [], []
        for pair in lessons.draw(16 * number, number + 1, 16):
            chosen, rejected = (BETA * (logprob(model, one) - logprob(reference, one)) for one in (pair, pair.rejected))
            losses.append(torch.log1p(torch.exp(rejected - chosen)))
            rewards.append([chosen.item(), rejected.item()])
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        margins = [chosen - rejected for chosen, rejected in rewards]
        expected = {"loss": loss.item(), "grad_norm": norm.item(), "margin": np.mean(margins)}
        expected |= dict(zip(("chosen_reward", "rejected_reward"), np.mean(rewards, axis=0), strict=True))
        for name, value in expected.items():
            assert step[f"sft/{name}"] == pytest.approx(value, abs=1e-5, rel=1e-4), name
        if number:
            assert step["sft/accuracy"] == np.mean([margin > 0 for margin in margins])


def test_numbers_do_not_depend_on_micro_batches(tmp_path: Path, pairs: str) -> None:
    words = (*DPO, pairs, "warm_start.max_steps=3", "warm_start.optim.lr=1e-3")
    whole = make(tmp_path / "whole", *words)
    cut = make(tmp_path / "cut", *words, "trainer.max_tokens_per_micro_batch=60")
    assert_equal_stages(whole, cut)


@pytest.mark.needs_ray
@pytest.mark.multiprocess
def test_two_ranks_equal_one(tmp_path: Path, pairs: str) -> None:
    """The held-out pairs are odd in number, and one of them is padding on the second rank."""
    words = (*DPO, pairs, "warm_start.max_steps=2", "warm_start.held_out_rows=3", "warm_start.optim.lr=1e-3")
    one = make(tmp_path / "one", *words)
    two = make(tmp_path / "two", *words, "runtime.backend=ray", "runtime.num_workers=2")
    assert_equal_stages(one, two)


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S + 40)
def test_killed_stage_resumes_with_the_stored_reference(tmp_path: Path, pairs: str) -> None:
    run = small(tmp_path, *DPO, pairs, "warm_start.max_steps=6", steps=1)
    stage = stage_layout(run.config, run.inputs.filtered_directory)
    undisturbed = stage_steps(run), (run.model_directory / "model.safetensors").read_bytes()
    for folder in (run.model_directory, stage.run_dir):
        shutil.rmtree(folder)
    file = stage.run_dir / REFERENCE / "logprobs.npy"

    def start(plan: dict[str, Any] | None) -> tuple[int, int]:
        """Return the exit code, and how often the reference was computed by all starts so far."""
        (found,) = disturb(run, plan)
        notes = [event for event in found["events"] if "computes the reference" in str(event.get("text"))]
        return found["code"], len(notes)

    assert start({"at": "warm-start", "nth": 3, "signals": ["SIGKILL"]}) == (-9, 1), output_of(run)
    stored = file.read_bytes()
    assert start({"at": "warm-start", "nth": 2, "signals": ["SIGKILL"]}) == (-9, 1), "the stored reference is used"
    file.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    assert start(None) == (0, 2), "a damaged reference is computed again"
    assert stage_steps(run) == undisturbed[0]
    assert (run.model_directory / "model.safetensors").read_bytes() == undisturbed[1]
