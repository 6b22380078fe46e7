"""Packed attention by length groups against a naive twin, shared prompts against separate prompts, and the choice of a
backend."""

import random
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlcore.batching.balance import Sizes
from rlcore.batching.pack import shared_prompts
from rlcore.config.model import ModelConfig
from rlcore.errors import ModelError
from rlcore.models.attention import build_layout, packed_attention
from rlcore.models.kernels import choose_attention, flash_package
from rlcore.models.load import load_value_model
from rlcore.workers.actor import token_logprobs
from rlcore.workers.group import LocalGroup
from rlcore.workers.trained_model import MicroBatch
from tests.helpers.small_run import prepare, train
from tests.models.tiny import (
    CONFIGS,
    CPU,
    answers,
    assert_close_gradients,
    attend,
    causal_attention,
    cumulated,
    gradients,
    inputs_of,
    outcome,
    policy_of,
    write_model,
)

MANY_LENGTHS = (*range(1, 70), 33, 12, 12, 100, 101, 64)


def heads(num_tokens: int, num_heads: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, num_heads, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(5, 1, 3, 5, 2), (4,), MANY_LENGTHS], ids=["few", "one", "many"])
def test_attention_matches_naive_twin_per_head(lengths: tuple[int, ...], window: int | None) -> None:
    num_tokens = sum(lengths)
    query, key, value = heads(num_tokens, 4, 0), heads(num_tokens, 2, 1), heads(num_tokens, 2, 2)
    layout = build_layout(cumulated(lengths), backend="sdpa", device=CPU)
    out = attend([query, key, value], layout, scaling=0.3, sliding_window=window)
    bounds = cumulated(lengths).tolist()
    for index in {0, 1, len(lengths) // 2, len(lengths) - 1} & set(range(len(lengths))):
        part = slice(bounds[index], bounds[index + 1])
        for head in range(4):
            rows = [x[part, h].tolist() for x, h in ((query, head), (key, head // 2), (value, head // 2))]
            expected = torch.tensor(causal_attention(*rows, scale=0.3, window=window))
            torch.testing.assert_close(out[part, head], expected, rtol=0, atol=1e-6)


def test_group_padding_changes_no_value_or_gradient() -> None:
    num_tokens = sum(MANY_LENGTHS)
    qkv = [heads(num_tokens, 2, seed) for seed in range(3)]
    weights = torch.randn(num_tokens, 2, 4, generator=torch.Generator().manual_seed(9))
    merged = build_layout(cumulated(MANY_LENGTHS), backend="sdpa", device=CPU)
    assert any(not group.is_exact for group in merged.groups)
    assert len(merged.groups) < len(set(MANY_LENGTHS))
    (attend(qkv, merged) * weights).sum().backward()
    found = [x.grad for x in qkv]
    bounds = cumulated(MANY_LENGTHS).tolist()
    for x in qkv:
        x.grad = None
    for index, length in enumerate(MANY_LENGTHS):
        part = slice(bounds[index], bounds[index + 1])
        alone = build_layout(torch.tensor([0, length]), backend="sdpa", device=CPU)
        (attend([x[part] for x in qkv], alone) * weights[part]).sum().backward()
    for x, gradient in zip(qkv, found, strict=True):
        torch.testing.assert_close(gradient, x.grad, rtol=0, atol=2e-6)


@given(seed=st.integers(0, 1_000), num_sequences=st.integers(1, 200), longest=st.sampled_from([3, 90, 2_000]))
@settings(max_examples=60, deadline=None)
def test_layout_permutes_whole_sequences(seed: int, num_sequences: int, longest: int) -> None:
    lengths = random.Random(seed).choices(range(longest + 1), k=num_sequences)
    layout = build_layout(cumulated(lengths), backend="sdpa", device=CPU)
    num_tokens = sum(lengths)
    assert layout.token_order.sort().values.tolist() == list(range(num_tokens))
    assert layout.token_order[layout.computed_index].tolist() == list(range(num_tokens))
    assert [group.start for group in layout.groups] == [0, *(group.stop for group in layout.groups)][:-1]
    assert sum(group.num_sequences for group in layout.groups) == sum(length > 0 for length in lengths)
    for group in layout.groups:
        if not group.is_exact:
            assert group.slots.numel() == group.stop - group.start
            assert group.slots.unique().numel() == group.slots.numel()
            assert group.slots.max() < group.num_sequences * group.length
            assert group.num_sequences * group.length <= 1.125 * (group.stop - group.start)
    assert len(layout.groups) <= 80
    # Neighboring tokens stay neighbors: sequences move whole.
    bounds = cumulated(lengths).tolist()
    for first, last in pairwise(bounds):
        assert (layout.computed_index[first:last].diff() == 1).all()


def test_flash_layout_keeps_order_and_rounds_max_length() -> None:
    layout = build_layout(cumulated((5, 300, 2)), backend="varlen", device=CPU)
    assert layout.token_order.tolist() == list(range(307))
    assert layout.cu_seqlens.tolist() == [0, 5, 305, 307]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.max_seqlen == 512
    assert layout.groups == ()


def test_choose_attention_on_cpu_is_sdpa() -> None:
    choice = choose_attention("auto", CPU, torch.float32, 32)
    assert choice.name == "sdpa"
    assert "flash_attn: needs CUDA" in choice.reason
    assert "varlen: needs CUDA" in choice.reason
    assert choose_attention("sdpa", CPU, torch.float32, 7).name == "sdpa"
    for requested in ("flash_attn", "varlen"):
        with pytest.raises(ModelError, match=rf"model\.attention: .*'{requested}'.*needs CUDA.*model\.attention=auto"):
            choose_attention(requested, CPU, torch.bfloat16, 64)


FLASH = "def flash_attn_varlen_func(): ...\n"


@pytest.mark.parametrize(
    ("installed", "capability", "found"),
    [
        ({"flash_attn/cute": FLASH}, 9, "flash_attn.cute"),
        ({"flash_attn/cute": FLASH}, 10, "flash_attn.cute"),
        ({"flash_attn": FLASH, "flash_attn/cute": FLASH}, 8, "flash_attn"),
        ({"flash_attn": FLASH, "flash_attn/cute": FLASH}, 10, "flash_attn"),
        ({"flash_attn/cute": FLASH, "flash_attn_interface": FLASH}, 9, "flash_attn_interface"),
        ({"flash_attn/cute": FLASH, "flash_attn_interface": FLASH}, 10, "flash_attn.cute"),
        ({}, 9, "flash_attn_interface: No module.*; flash_attn: No module.*; flash_attn.cute: No module"),
        ({"flash_attn/cute": FLASH}, 8, "flash_attn: module 'flash_attn' has no attribute"),
        ({"flash_attn/cute": "import no_such_compiler\n"}, 9, "flash_attn.cute: No module named 'no_such_compiler'"),
        ({"flash_attn_interface": "import gone\n"}, 9, "flash_attn_interface: No module named 'gone'"),
        ({"flash_attn": "raise RuntimeError('built for CUDA 11')\n"}, 8, "flash_attn: built for CUDA 11"),
    ],
)
def test_flash_package_by_installation(
    installed: dict[str, str], capability: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in installed.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of other cases
    if ":" in found:
        with pytest.raises(ImportError, match=found):
            flash_package(capability)
    else:
        assert flash_package(capability) == found


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}])
def test_unsupported_attention_options_raise(option: dict[str, object]) -> None:
    layout = build_layout(torch.tensor([0, 3]), backend="sdpa", device=CPU)
    with pytest.raises(ModelError, match=r"model\.path"):
        attend([heads(3, 2, seed) for seed in range(3)], layout, **option)
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ModelError, match=r"CausalPolicy\.forward or CausalPolicy\.decode"):
        packed_attention(nn.Identity(), x, x, x, None)


GROUPS = ((9, (3, 7, 1, 5)), (4, (6,)), (12, (2, 2, 8)), (1, (4, 3)))
"""Tokens of each prompt and of each of its responses."""


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("unscored", [frozenset(), frozenset({0}), frozenset({1, 6})])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_keep_logprobs_and_gradients(
    directory: Path, checkpointing: bool, unscored: frozenset[int]
) -> None:
    batch = answers(GROUPS, unscored=unscored)
    assert Sizes.from_batch(batch, share_prompts=True).num_computed() < batch.num_tokens
    shared = outcome(policy_of(directory, share_prompts=True, gradient_checkpointing=checkpointing), batch)
    alone = outcome(policy_of(directory), batch)
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


def test_shared_prompts_keep_values(directory: Path) -> None:
    batch, outcomes = answers(GROUPS), []
    for share in (shared_prompts(batch), None):
        model = load_value_model(directory, model=ModelConfig(), device=CPU)
        torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
        found = model(*inputs_of(batch)[:3], share)
        (found.square() * batch.loss_mask).sum().backward()
        outcomes.append((found.detach(), gradients(model)))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-5, atol=1e-5)  # values are up to 6
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
