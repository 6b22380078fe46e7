"""Metrics of a step, computed by hand for four responses."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import rlcore.trainer
from rlcore.batching.balance import Assignment, RankShares
from rlcore.config import LoraConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.models.shape import ModelShape
from rlcore.trainer import PhaseClock, metrics
from rlcore.trainer.update import Update
from rlcore.types import Score
from rlcore.workers.device import MemoryPeak, OomRetry
from rlcore.workers.worker import WorkerInfo
from tests.trainer.batches import HALF, QUARTER, make_estimate, make_experience, pack_experience


def make_config(*overrides: str, answer: int = 3) -> RunConfig:
    words = ["filter.max_prompt_tokens=3", f"rollout.max_response_tokens={answer}"]
    return load_config(["experiment=debug", *words, *overrides])


def spread(name: str, *values: float) -> dict[str, float]:
    return {f"{name}/{end}": value for end, value in zip(("mean", "max", "min"), values, strict=True)}


def test_length_metrics() -> None:
    found = metrics.length_metrics(make_config(), make_experience())
    lengths = spread("prompt_length", 2.5, 3.0, 2.0) | spread("response_length", 2.25, 3.0, 1.0)
    assert found == {**lengths, "prompt_length/clip_ratio": 0.5, "response_length/clip_ratio": 0.25}
    shorter = metrics.length_metrics(make_config(answer=2), make_experience())
    assert shorter["response_length/clip_ratio"] == 0.5
    rollouts = make_experience().rollouts
    sampled = (replace(rollouts[0], is_sampled=np.array([True, False, False])), *rollouts[1:])
    read = metrics.length_metrics(make_config(), replace(make_experience(), rollouts=sampled))
    assert read.items() - found.items() == spread("environment_length", 2.0, 2.0, 2.0).items()


def test_group_metrics() -> None:
    found, dropped = make_experience(), {"reward/equal_group_share": 0.5, "reward/groups_dropped": 3.0}
    assert (found.num_response_tokens, found.num_generated_tokens) == (9, 12)
    assert metrics.group_metrics(pack_experience(found), found) == {
        **dropped, "pass_rates/mean": 0.25, "reward/tokens_dropped_share": 0.25, "reward/unscored_share": 0.25,
        "reward/correct/mean": 0.5, "reward/format/mean": 0.5,
    }  # fmt: skip
    whole = replace(found, scores=(Score(1.0, {}), *[Score(0.0, {})] * 3), num_tokens_dropped=0, pass_metrics={})
    assert metrics.group_metrics(pack_experience(whole), whole) == dropped


def test_balance_metrics() -> None:
    assert metrics.balance_metrics(pack_experience(make_experience()), [[0, 3], [1, 2]]) == {
        "global_seqlen/min": 8.0, "global_seqlen/max": 11.0, "global_seqlen/mean": 9.5,
        "global_seqlen/minmax_diff": 3.0, "global_seqlen/balanced_min": 9, "global_seqlen/balanced_max": 10,
    }  # fmt: skip


def test_mismatch_metrics() -> None:
    packed = pack_experience(make_experience())
    places, weights = packed.loss_mask.nonzero()[:, 0], torch.zeros(packed.num_tokens)
    old = torch.full((packed.num_tokens,), HALF)
    old[places[:3]] = QUARTER  # three of six tokens are off by a quarter
    found = metrics.mismatch_metrics(packed, old, None)
    assert len(places) == 6
    names = [f"training/rollout_probs_diff_{what}" for what in ("mean", "max", "std")]
    assert [found[name] for name in names] == pytest.approx([0.125, 0.25, 0.125])
    assert [*found] == names
    weights[places] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
    with_weights = metrics.mismatch_metrics(packed, old, weights)
    assert with_weights.items() - found.items() == spread("rollout_corr/weight", 4.0, 9.0, 1.0).items()
    none = replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))
    assert metrics.mismatch_metrics(none, old, weights) == {}


def test_timing_metrics() -> None:
    packed = pack_experience(make_experience())
    seconds = {"gen": 6.0, "ref": 1.9, "reward": 1.0, "step": 38.0}
    found = metrics.timing_metrics(seconds, packed, num_response_tokens=12, num_devices=2)
    used = psutil.virtual_memory().used / 1e9
    assert found.pop("perf/cpu_memory_used_gb") == pytest.approx(used, rel=0.5)
    assert found == {
        **{f"timing_s/{phase}": value for phase, value in seconds.items()},
        "timing_per_token_ms/gen": 500.0, "timing_per_token_ms/ref": pytest.approx(100.0),
        "perf/total_num_tokens": 19.0, "perf/time_per_step": 38.0, "perf/throughput": 0.25,
    }  # fmt: skip
    assert "timing_per_token_ms/gen" not in metrics.timing_metrics(
        {"step": 1.0}, packed, num_response_tokens=1, num_devices=1
    )


SHAPE = ModelShape(
    hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocab=50, tied=True, qkv_bias=True,
    qk_norm=False,
)  # fmt: skip
CRITIC = replace(SHAPE, layers=3)
INFO = WorkerInfo("CPU", "float32", "sdpa", 1, SHAPE, CRITIC, 1e6, 1)


def test_mfu_metrics() -> None:
    packed = pack_experience(make_experience())
    shares = RankShares(((0, 3), (1, 2)), 1)
    deal, config = Assignment((shares,), shares, 4), make_config("trainer.epochs_per_batch=3")
    lengths, targets, peak = [5, 3, 6, 5], int(packed.loss_mask.sum()), 2 * 1e6
    of_actor = {
        "perf/mfu/actor": 3 * SHAPE.update_flops(lengths, num_targets=targets, num_shared=4) / (2.0 * peak),
        "perf/mfu_verl/actor": 3 * SHAPE.verl_flops(lengths) / (2.0 * peak),
    }
    seconds = {"update_actor": 2.0, "update_critic": 4.0}
    critic = 3 * CRITIC.update_flops(lengths, num_targets=0, num_shared=4) / (4.0 * peak)
    assert metrics.mfu_metrics(config, packed, deal, seconds, INFO) == {**of_actor, "perf/mfu/critic": critic}
    assert metrics.mfu_metrics(config, packed, deal, {"supervise": 2.0}, INFO) == of_actor
    adapted = make_config("trainer.epochs_per_batch=3", "model.lora.rank=2")
    work = SHAPE.update_flops(lengths, num_targets=targets, num_shared=4, lora=LoraConfig(rank=2))
    found = metrics.mfu_metrics(adapted, packed, deal, {"update_actor": 2.0}, INFO)
    assert found == {**of_actor, "perf/mfu/actor": 3 * work / (2.0 * peak)}
    for unknown in (replace(INFO, peak_flops=None), replace(INFO, shape=None, critic_shape=None)):
        assert metrics.mfu_metrics(config, packed, deal, seconds, unknown) == {}
    full = {**seconds, "gen": 6.0, "step": 38.0}
    found = metrics.cost_metrics(config, packed, 12, deal, full, INFO)
    assert found == {
        **metrics.balance_metrics(packed, shares.sequences),
        **metrics.mfu_metrics(config, packed, deal, full, INFO),
        **metrics.timing_metrics(full, packed, num_response_tokens=12, num_devices=2),
        "perf/cpu_memory_used_gb": found["perf/cpu_memory_used_gb"],
    }


def test_memory_metrics() -> None:
    again = OomRetry("a pass", 1, 2, 2, "no room")
    peaks = [MemoryPeak(1.5, 2.0, 1, (again,)), MemoryPeak(1.0, 3.0, 2)]
    names = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/num_passes_redone")
    assert metrics.memory_metrics(peaks) == dict(zip(names, (1.5, 3.0, 3.0), strict=True))
    assert metrics.memory_metrics([MemoryPeak(0.0, 0.0, 0)]) == {}


def test_reward_metrics() -> None:
    packed = pack_experience(make_experience())
    found = make_estimate(packed)
    assert packed.loss_mask.nonzero()[:, 0].tolist() == [1, 2, 3, 6, 16, 17]
    expected = {
        "reward": 0.5,
        **spread("critic/score", 0.5, 1.0, 0.0),
        **spread("critic/rewards", 0.0, 0.5, -0.5),
        **spread("critic/advantages", 7.5, 17.0, 1.0),
        **spread("critic/returns", 15.0, 34.0, 2.0),
    }
    assert metrics.reward_metrics(found) == expected
    values = 2.0 * torch.arange(packed.num_tokens)
    by_critic = replace(found, batch=replace(found.batch, old_values=values))
    of_values = {**spread("critic/values", 15.0, 34.0, 2.0), "critic/vf_explained_var": 1.0}
    assert metrics.reward_metrics(by_critic) == expected | of_values
    none = replace(by_critic.batch, packed=replace(packed, loss_mask=torch.zeros_like(packed.loss_mask)))
    assert [*metrics.reward_metrics(replace(by_critic, batch=none))] == [*expected][:7]


def test_step_metrics() -> None:
    found = make_experience()
    packed = pack_experience(found)
    plain = metrics.step_metrics(make_config(), found, make_estimate(packed), Update())
    of_answers = metrics.length_metrics(make_config(), found) | metrics.group_metrics(packed, found)
    assert plain == metrics.reward_metrics(make_estimate(packed)) | of_answers
    more = replace(make_estimate(packed), kl_in_reward=0.125, masked_share=0.0)
    old = torch.full((packed.num_tokens,), QUARTER)
    of_step = metrics.step_metrics(make_config(), found, more, Update(share_skipped=0.5, logprobs_before=old))
    assert {name: value for name, value in of_step.items() if name not in plain} == {
        metrics.SKIPPED: 0.5, "rollout_corr/left_out_share": 0.0, "actor/reward_kl_penalty": 0.125,
        **metrics.mismatch_metrics(packed, old, None),
    }  # fmt: skip
    kept = replace(packed, loss_mask=packed.loss_mask & (packed.sequence_ids() > 0))
    varied = old + torch.arange(packed.num_tokens) / 10
    for of_pass, compared in ((varied, packed), (None, kept)):  # the update does not compute masked tokens
        less = replace(more, batch=replace(more.batch, packed=kept, old_logprobs=of_pass))
        of_step = metrics.step_metrics(make_config(), found, less, Update(logprobs_before=varied))
        assert metrics.mismatch_metrics(compared, varied, None).items() <= of_step.items()
    weighted = make_config("algo.importance.mode=truncate")
    assert "rollout_corr/weight/mean" in metrics.step_metrics(weighted, found, more, Update(logprobs_before=old))


def test_phases_add_up_inside_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    monkeypatch.setattr(rlcore.trainer, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    seen: list[str] = []

    @contextmanager
    def enter(name: str) -> Iterator[None]:
        seen.append(f"into {name}")
        yield
        seen.append(f"out of {name}")

    clock = PhaseClock(enter)
    with clock.phase("gen"):
        seen.append("at work")
    assert seen == ["into gen", "at work", "out of gen"]
    with pytest.raises(ValueError, match="broken"), clock.phase("adv"):
        raise ValueError("broken")
    assert clock.seconds() == {"gen": 1, "adv": 1, "step": 5}
    with clock.phase("gen"):
        assert clock.seconds() == {"gen": 1, "adv": 1, "step": 7}, "a running phase does not count yet"
    assert clock.seconds() == {"gen": 3, "adv": 1, "step": 9}
