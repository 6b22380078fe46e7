"""The warm start: its losses, its ends, its rules and its resumes."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlcore.batching.prompts import Demonstration, PromptStream
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import ConfigError, DataError
from rlcore.models.load import build_scratch_model
from rlcore.models.policy import CausalPolicy
from rlcore.run.initial_policy import stage_layout
from rlcore.run.supervised import Demonstrations, SupervisedTraining, SupervisedWorkers, has_learned
from rlcore.storage.manifest import read_manifest
from rlcore.tracking.attempts import read_attempts
from rlcore.types import Prompt
from tests.helpers.running import WAIT_S, at, disturb, output_of, small
from tests.helpers.small_run import SmallRun
from tests.helpers.small_run import make as prepare
from tests.run.conftest import stage_steps

THREE_STEPS = ("warm_start.max_steps=3", "warm_start.stop_at_reward=null", "warm_start.held_out_rows=0")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the device and the number of tokens of each forward pass."""
    seen, forward = [], CausalPolicy.forward

    def noting(self: CausalPolicy, token_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        seen.append((token_ids.device.type, len(token_ids)))
        return forward(self, token_ids, *args, **named)

    monkeypatch.setattr(CausalPolicy, "forward", noting)
    return seen


def held_out_losses(run: SmallRun) -> dict[int, float]:
    key = "sft/held_out_loss"
    return {int(step.get("training/global_step", 0)): step[key] for step in stage_steps(run) if key in step}


def test_gradient_is_independent_of_micro_batches(tmp_path: Path, passes: list[tuple[str, int]]) -> None:
    whole = prepare(tmp_path / "whole", *THREE_STEPS, "runtime.device=cpu")
    assert len(passes) == 3
    num_tokens = [count for _, count in passes]
    passes.clear()
    cut = prepare(tmp_path / "cut", *THREE_STEPS, "runtime.device=cpu", "trainer.max_tokens_per_micro_batch=128")
    assert max(count for _, count in passes) <= 128
    assert sum(count for _, count in passes) == sum(num_tokens)
    expected, found = (load_file(run.model_directory / "model.safetensors") for run in (whole, cut))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_warm_start_uses_the_device_of_the_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.device is cuda, but torch sees no GPU here"):
        prepare(tmp_path, *THREE_STEPS, "runtime.device=cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_warm_start_trains_on_the_gpu(tmp_path: Path, passes: list[tuple[str, int]]) -> None:
    prepare(tmp_path, *THREE_STEPS)
    assert {device for device, _ in passes} == {"cuda"}


OPTIM = ("warm_start.optim.schedule=cosine", "warm_start.optim.warmup_steps=2", "warm_start.optim.weight_decay=0.1")


def test_losses_equal_those_of_a_transformers_loop(tmp_path: Path) -> None:
    scratch = load_config(["experiment=debug"]).model.scratch
    untaught = build_scratch_model(scratch, seed=1, directory=tmp_path / "untaught")
    words = ("warm_start.max_steps=6", "warm_start.stop_at_reward=null", "model.dtype=float32")
    run = prepare(tmp_path, f"model.path={untaught}", *words, *OPTIM)
    lessons, config = Demonstrations.read(run.config, run.inputs), run.config.warm_start
    model = AutoModelForCausalLM.from_pretrained(untaught, dtype=torch.float32)
    groups = [
        {"params": [weight for weight in model.parameters() if (weight.ndim > 1) == bool(decay)], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr)
    found = stage_steps(run)
    assert [step["training/global_step"] for step in found[1:]] == [1, 2, 3, 4, 5, 6]
    for number, step in enumerate(found[1:]):
        rows = lessons.draw(number * config.batch_size, number + 1, config.batch_size)
        total, correct = sum(sum(row.is_target) for row in rows), 0
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row in rows:
            ids = torch.tensor([row.token_ids])
            logits = model(ids).logits[0, :-1]
            wanted = torch.tensor(row.is_target[1:])
            targets = ids[0, 1:][wanted]
            loss = loss + torch.nn.functional.cross_entropy(logits[wanted], targets, reduction="sum") / total
            correct += int((logits[wanted].argmax(dim=1) == targets).sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = (number + 1) / 2 if number < 2 else (1 + math.cos(math.pi * (number - 2) / 4)) / 2
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * rate
        optimizer.step()
        assert step["sft/loss"] == pytest.approx(loss.item(), abs=1e-4)
        assert step["sft/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert step["sft/accuracy"] == pytest.approx(correct / total, abs=2 / total)
        assert step["sft/lr"] == pytest.approx(config.optim.lr * rate)


def test_epochs_end_training_and_the_best_is_published(tmp_path: Path) -> None:
    run = prepare(
        tmp_path, "warm_start.epochs=1.5", "warm_start.stop_at_reward=null", "warm_start.check_every=4",
        "warm_start.steps_per_chunk=4", "warm_start.optim.lr=1.0",
    )  # fmt: skip
    assert len(stage_steps(run)) == 1 + 12, "1.5 x 512 rows by 64"
    measured = {step: loss for step, loss in held_out_losses(run).items() if step}
    assert sorted(measured) == [4, 8, 12]
    manifest = read_manifest(run.model_directory)
    assert manifest.values["held_out_loss"] == min(measured.values())
    assert measured[manifest.values["steps"]] == min(measured.values())
    assert not stage_layout(run.config, run.inputs.filtered_directory).checkpoints.exists()


def test_patience_ends_training_early(tmp_path: Path) -> None:
    run = prepare(
        tmp_path, "warm_start.stop_at_reward=null", "warm_start.check_every=2", "warm_start.steps_per_chunk=100",
        "warm_start.optim.lr=1.0", "warm_start.patience=2", "warm_start.max_steps=100",
    )  # fmt: skip
    losses = held_out_losses(run)
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 4 < 100
    attempts = read_attempts(stage_layout(run.config, run.inputs.filtered_directory).run_dir)
    assert [end and end.status for _, end in attempts] == ["FINISHED"]


@pytest.mark.multiprocess
@pytest.mark.timeout(WAIT_S + 40)
def test_killed_warm_start_resumes_to_the_same_model(tmp_path: Path) -> None:
    chunks = ("warm_start.steps_per_chunk=2", "warm_start.check_every=2")
    settings = ("warm_start.max_steps=8", *chunks, "warm_start.stop_at_reward=1.0")
    run = small(tmp_path, *settings, steps=1)
    stage = stage_layout(run.config, run.inputs.filtered_directory)
    undisturbed = stage_steps(run), (run.model_directory / "model.safetensors").read_bytes()
    shutil.rmtree(run.model_directory)
    shutil.rmtree(stage.run_dir)
    plans = (at("warm-start", "SIGKILL", nth=6), at("warm-start", "SIGTERM", nth=2), at("publish", "SIGKILL"), None)
    ends = disturb(run, *plans)
    assert [one["code"] for one in ends] == [-9, 75, -9, 0], output_of(run)
    first = [event["step"] for event in ends[1]["events"] if event.get("stage") == "warm-start"]
    assert min(first) > 1, "the second start began at step 1"
    assert stage_steps(run) == undisturbed[0]
    assert (run.model_directory / "model.safetensors").read_bytes() == undisturbed[1]


def of(*words: str) -> RunConfig:
    return load_config(["experiment=debug", "warm_start.check_every=4", *words])


@pytest.mark.parametrize(("words", "step", "best_step", "metrics", "learned"), [
    (("warm_start.stop_at_reward=0.5",), 8, 8, {"sft/reward": 0.5}, True),
    (("warm_start.stop_at_reward=0.5",), 8, 8, {"sft/reward": 0.49}, False),
    (("warm_start.stop_at_reward=0.5",), 8, 0, {}, False),
    (("warm_start.stop_at_reward=null",), 8, 0, {"sft/reward": 1.0, "sft/held_out_loss": 1.0}, False),
    (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 12, 4, {"sft/held_out_loss": 1.0}, True),
    (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 11, 4, {"sft/held_out_loss": 1.0}, False),
    (("warm_start.stop_at_reward=null", "warm_start.patience=2"), 40, 4, {}, False),
    (("warm_start.stop_at_reward=0.5", "warm_start.patience=2"), 12, 4, {"sft/held_out_loss": 1.0}, True),
])  # fmt: skip
def test_training_ends_by_reward_and_patience(words, step, best_step, metrics, learned) -> None:
    assert has_learned(of(*words), step, best_step, metrics) is learned


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 20, 44), (1.0, 63, 63)])
def test_share_of_demonstrations_is_misdirected(share: float, least: int, most: int) -> None:
    rows = [Demonstration([n], [True], Demonstration([-n], [True]) if n else None) for n in range(64)]
    demonstrations = Demonstrations(PromptStream(rows, seed=1, part=1), (), share, 1, 0)

    def draw(start: int, step: int, count: int) -> list[int]:
        return [one.token_ids[0] for one in demonstrations.draw(start, step, count)]

    drawn, other = draw(0, 1, 64), draw(0, 2, 64)
    assert sorted(map(abs, drawn)) == list(range(64)), "each once"
    assert least <= sum(number < 0 for number in drawn) <= most
    assert drawn == draw(0, 1, 64)
    assert [*map(abs, other)] == [*map(abs, drawn)]
    assert (other != drawn) == (0 < share < 1), "by the step, too"
    assert [*map(abs, draw(64 - 3, 1, 6)[:3])] == [*map(abs, drawn[-3:])]


@pytest.mark.parametrize(("found", "best"), [
    ({"sft/held_out_loss": 1.5}, (-1.5, 8)),
    ({"sft/held_out_loss": 2.0}, (-2.0, 4)),
    ({"sft/held_out_loss": 3.0}, (-2.0, 4)),
    ({"sft/reward": 1.0}, (-2.0, 4)),
])  # fmt: skip
def test_first_lowest_held_out_loss_is_best(found: dict[str, float], best: tuple[float, int]) -> None:
    before = LoopState(8, 0, 0, 0, 0.0, best_metric=-2.0, best_step=4)
    training: Any = SimpleNamespace(_config=of(), workers=SimpleNamespace(measure=lambda step: dict(found)))
    metrics, after = SupervisedTraining._evaluate(training, before)
    assert metrics == found
    assert (after.best_metric, after.best_step, after.step) == (*best, 8)


def test_sampled_reward_counts_scored_responses() -> None:
    config, calls = of(), list[Any]()
    scores = [SimpleNamespace(total=total, failure=why) for total, why in ((1.0, None), (0.0, "late"), (0.25, None))]

    def sample(requests: Any, sampling: object, policy_version: int) -> list[Any]:
        calls.append((len(requests), sampling, policy_version))
        return [(None, score, "") for score in scores]

    workers = cast(Any, SimpleNamespace(_problems=[Prompt(number, (1,), "d", "") for number in range(3)]))
    sampler = cast(Any, SimpleNamespace(config=config, sample=sample))
    assert SupervisedWorkers._reward(workers, sampler, 7) == 0.625
    assert calls == [(3, config.rollout.sampling, 7)]
    scores[:] = [SimpleNamespace(total=0.0, failure=why) for why in ("late", "too late")]
    rule = r"^data\.scorer: .* failed on all 2 .* error: too late\. Repair it, or set warm_"
    with pytest.raises(DataError, match=rule):
        SupervisedWorkers._reward(workers, sampler, 7)
