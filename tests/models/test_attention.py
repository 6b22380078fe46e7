"""Packed attention by length groups against a naive twin, and the choice of a backend."""

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlcore.errors import ModelError
from rlcore.models.attention import build_layout, packed_attention
from rlcore.models.kernels import choose_attention, flash_package
from tests.models.naive import causal_attention
from tests.models.tiny import CPU, attend, cumulated

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
    # Neighbouring tokens stay neighbours: sequences move whole.
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


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (("flash_attn/cute",), {9: "flash_attn.cute", 10: "flash_attn.cute"}),
        (("flash_attn", "flash_attn/cute"), {8: "flash_attn", 9: "flash_attn", 10: "flash_attn"}),
        (("flash_attn/cute", "flash_attn_interface"), {9: "flash_attn_interface", 10: "flash_attn.cute"}),
    ],
)
def test_flash_package_by_capability(
    installed: tuple[str, ...], chosen: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(dict.fromkeys(installed, "def flash_attn_varlen_func(): ...\n"), tmp_path, monkeypatch)
    assert {capability: flash_package(capability) for capability in chosen} == chosen


@pytest.mark.parametrize(
    ("installed", "capability", "problems"),
    [
        ({}, 9, ["flash_attn_interface: No module", "flash_attn: No module", "flash_attn.cute: No module"]),
        (
            {"flash_attn/cute": "def flash_attn_varlen_func(): ...\n"},
            8,
            ["flash_attn: module 'flash_attn' has no attribute"],
        ),
        ({"flash_attn/cute": "import no_such_compiler\n"}, 9, ["flash_attn.cute: No module named 'no_such_compiler'"]),
        ({"flash_attn_interface": "import gone\n"}, 9, ["flash_attn_interface: No module named 'gone'"]),
        ({"flash_attn": "raise RuntimeError('built for CUDA 11')\n"}, 8, ["flash_attn: built for CUDA 11"]),
    ],
)
def test_flash_package_reports_broken_installations(
    installed: dict[str, str], capability: int, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(installed, tmp_path, monkeypatch)
    with pytest.raises(ImportError) as caught:
        flash_package(capability)
    assert all(problem in str(caught.value) for problem in problems)


def install(packages: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write packages by folder and content; unload those of other tests."""
    for name, text in packages.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}])
def test_unsupported_attention_options_raise(option: dict[str, object]) -> None:
    layout = build_layout(torch.tensor([0, 3]), backend="sdpa", device=CPU)
    with pytest.raises(ModelError, match=r"model\.path"):
        attend([heads(3, 2, seed) for seed in range(3)], layout, **option)
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ModelError, match=r"CausalPolicy\.forward or CausalPolicy\.decode"):
        packed_attention(nn.Identity(), x, x, x, None)
