"""Shared prompts give the results of separate prompts."""

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlcore.batching.balance import Balancer, Sizes, micro_batches
from rlcore.batching.pack import select, shared_prompts
from rlcore.config.model import PUBLISHED, LoraConfig, ModelConfig
from rlcore.models.attention import build_layout
from rlcore.models.load import load_policy, load_value_model
from rlcore.models.lora import add_adapters
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch
from rlcore.workers.actor import token_logprobs
from rlcore.workers.group import LocalGroup
from rlcore.workers.trained_model import MicroBatch
from tests.helpers.small_run import prepare, train
from tests.models.tiny import CONFIGS, CPU, answers, assert_close_gradients, gradients, policy_of, write_model

GROUPS = ((9, (3, 7, 1, 5)), (4, (6,)), (12, (2, 2, 8)), (1, (4, 3)))
"""Tokens of each prompt and of each of its responses."""


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp("model"))


def run_policy(
    directory: Path, batch: PackedBatch, *, share: bool, **settings: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities, and gradients of a loss on them and the entropy."""
    policy = load_policy(directory, model=ModelConfig(share_prompts=share, **settings), device=CPU)
    out = token_logprobs(policy, MicroBatch(batch, batch), temperature=0.8, entropy="grad")
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    ((out.logprobs + 0.1 * out.entropy) * weights).sum().backward()
    return out.logprobs.detach(), gradients(policy)


@pytest.mark.parametrize("unscored", [frozenset(), frozenset({0}), frozenset({1, 6})])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_keep_logprobs_and_gradients(
    directory: Path, checkpointing: bool, unscored: frozenset[int]
) -> None:
    batch = answers(GROUPS, unscored=unscored)
    assert Sizes.from_batch(batch, share_prompts=True).num_computed() < batch.num_tokens
    shared = run_policy(directory, batch, share=True, gradient_checkpointing=checkpointing)
    alone = run_policy(directory, batch, share=False)
    torch.testing.assert_close(shared[0], alone[0], rtol=0, atol=1e-5)
    assert_close_gradients(shared[1], alone[1], 1e-5)


def test_layers_compute_shared_prompt_once(directory: Path) -> None:
    batch = answers(GROUPS)
    policy = policy_of(directory, share_prompts=True)
    seen: list[Tensor] = []
    policy.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    token_logprobs(policy, MicroBatch(batch, batch), temperature=1.0, entropy="none")
    # all but the last token of each prompt, and that token with each response
    expected = sum(length - 1 + sum(1 + count for count in lengths) for length, lengths in GROUPS)
    assert seen[0].shape[1] == expected == Sizes.from_batch(batch, share_prompts=True).num_computed()


@pytest.mark.parametrize("kind", ["values", "adapters"])
def test_shared_prompts_keep_values_and_adapter_gradients(kind: str, directory: Path) -> None:
    batch, outcomes = answers(GROUPS), []
    lora = LoraConfig(rank=4)
    for share in (True, False):
        settings = ModelConfig(share_prompts=share, lora=lora if kind == "adapters" else None, dtype="float32")
        if kind == "values":
            model = load_value_model(directory, model=settings, device=CPU)
            shared = shared_prompts(batch) if share else None
        else:
            model = add_adapters(load_policy(directory, model=settings, device=CPU), lora, seed=3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and not parameter.any():
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        if kind == "values":
            found = model(batch.token_ids, batch.position_ids, batch.cu_seqlens.numpy(), shared)
        else:
            found = token_logprobs(model, MicroBatch(batch, batch), temperature=1.0, entropy="none").logprobs
        (found.square() * batch.loss_mask).sum().backward()
        outcomes.append((found.detach(), gradients(model)))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=0, atol=1e-5)
    assert_close_gradients(outcomes[0][1], outcomes[1][1], 1e-5)


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=5)), min_size=1))
def test_expand_matches_naive_twin(groups: list[tuple[int, list[int]]]) -> None:
    """Twin: one row per token, in batch order and attention order."""
    batch = answers(groups)
    bounds, shared = batch.cu_seqlens.numpy(), shared_prompts(batch)
    if not shared.any():
        return
    by_length = sorted(pairwise(bounds.tolist()), key=lambda ends: ends[1] - ends[0])
    for backend, order in (("varlen", None), ("sdpa", [t for ends in by_length for t in range(*ends)])):
        layout = build_layout(bounds, backend=backend, device=CPU, shared=shared)
        computed = torch.randn(len(layout.token_order), 2, dtype=torch.float64, requires_grad=True)
        rows: list[int] = []  # of each token
        first = num_rows = 0
        for i, (start, stop) in enumerate(pairwise(bounds.tolist())):
            first = first if shared[i] else start
            for at in range(stop - start):
                is_new = at >= shared[i]
                rows.append(num_rows if is_new else rows[first + at])
                num_rows += is_new
        assert num_rows == len(computed)
        expected = computed[torch.tensor(rows)]
        expected = expected if order is None else expected[order]
        weights = torch.randn(expected.shape, dtype=torch.float64)
        (wanted,) = torch.autograd.grad((expected * weights).sum(), computed)
        assert layout.shared is not None
        spread = layout.shared.expand(computed)
        assert torch.equal(spread, expected)
        (got,) = torch.autograd.grad((spread * weights).sum(), computed)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # sums are made in float32


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=6)), min_size=1),
    st.integers(1, 80),
)
def test_micro_batches_stay_within_budget(groups: list[tuple[int, list[int]]], max_tokens: int) -> None:
    batch = answers(groups)
    dealer = Balancer(num_ranks=1, max_tokens=max_tokens, shape=None, share_prompts=True)
    shares = dealer.assign(batch, batch.num_sequences).whole
    parts = micro_batches(batch, shares.num_micro, share_prompts=True)
    assert len(parts) == shares.num_micro
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(batch.num_sequences))
    for part in parts:
        assert len(part) == 1 or Sizes.from_batch(select(batch, part), share_prompts=True).num_computed() <= max_tokens


def test_prompts_stay_in_one_micro_batch() -> None:
    batch = answers([(20, (3,) * 4)] * 6)
    for part in micro_batches(batch, 3, share_prompts=True):
        assert np.bincount(batch.group_ids[part], minlength=6).tolist().count(4) == 2
    dealt = Balancer(num_ranks=2, max_tokens=1_000, shape=None, share_prompts=True).assign(batch, 24).whole
    for mine in dealt.sequences:
        assert np.bincount(batch.group_ids[list(mine)], minlength=6).tolist().count(4) == 3


def test_micro_batches_by_cost_or_tokens_stay_within_budget() -> None:
    """A sharded pass is split by cost and the reference's by tokens, with one number of micro-batches."""
    shape = ModelShape.of_config(PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"])
    drawn = np.random.default_rng(15)
    batch = answers(
        [(int(drawn.integers(40, 400)), (3_000 * drawn.pareto(2, size=4) + 1).astype(int)) for _ in range(12)]
    )
    for budget in (18_000, 24_000, 34_000):  # by tokens alone one micro-batch less would do
        dealt = Balancer(num_ranks=2, max_tokens=budget, shape=shape, share_prompts=True).assign(batch, 48).whole
        for mine in dealt.sequences:
            own = select(batch, mine)
            for cut_by in (shape, None):
                for part in micro_batches(own, dealt.num_micro, cut_by, share_prompts=True):
                    assert (
                        len(part) == 1
                        or Sizes.from_batch(select(own, part), share_prompts=True).num_computed() <= budget
                    )


def test_shared_prompts_keep_training_metrics(tmp_path: Path) -> None:
    found = {}
    for share in (True, False):
        overrides = ["algo=ppo", "algo.kl.where=loss", f"model.share_prompts={share}", "optim.lr=1e-3"]
        run = prepare(tmp_path, *overrides, "rollout.samples_per_prompt=4", "trainer.max_tokens_per_micro_batch=160")
        with closing(LocalGroup(run.config, str(run.model_directory))) as group:
            found[share] = train(run, group, 2)
    for with_it, without in zip(found[True], found[False], strict=True):
        assert with_it.keys() == without.keys()
        for name, value in without.items():
            assert with_it[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
