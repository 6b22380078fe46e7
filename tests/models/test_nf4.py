"""4-bit linear layers: format, product, gradient and saved tensors."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flows.work.checks import require_machine
from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.config.run import PathsConfig
from rlcore.errors import ModelError
from rlcore.models.load import load_policy
from rlcore.models.nf4 import Nf4Linear, nf4_linear, quantize_weight
from tests.helpers.nf4 import nearest_levels
from tests.models.tiny import CPU


def random_layer(rows: int, columns: int, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 32), (5, 96), (3, 7)], ids=str)
def test_nf4_picks_nearest_levels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = random_layer(*shape, dtype)
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[-1, 2] = -9
    found = Nf4Linear(layer, CPU)
    assert found.dequantized(Tensor.detach).dtype == dtype
    assert torch.equal(found.dequantized(Tensor.detach), nearest_levels(layer.weight.detach()))
    assert (len(found.packed), len(found.scales)) == (32 * len(found.scales), -(-shape[0] * shape[1] // 64))
    assert not found.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_format_is_bitsandbytes(dtype: torch.dtype) -> None:
    """Others use adapters with a base that bitsandbytes quantized."""
    weight = random_layer(96, 160, dtype).weight.detach()
    weight[0, :64] = 0
    packed, scales = quantize_weight(weight)
    codes, largest = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    assert torch.equal(packed, codes.view(-1))
    assert torch.equal(scales, largest)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("compiled", [False, True])
def test_nf4_product_and_gradient_match_the_rounded_weight(compiled: bool) -> None:
    layer = random_layer(48, 32, bias=True)
    own = Nf4Linear(layer, CPU)

    def product(x: Tensor) -> Tensor:
        return nf4_linear(x, own.packed, own.scales, own.bias, 48)

    with torch.no_grad():
        layer.weight.copy_(nearest_levels(layer.weight))
    x = torch.randn(1, 7, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda t: t):
        # This backend splits a graph as the default one does, without a C compiler.
        output = (torch.compile(product, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else own)(x)
    assert torch.equal(output, layer(x))
    (found,) = torch.autograd.grad(output.square().sum(), x)
    assert torch.equal(found, expected)
    assert kept
    assert max(kept) < 48 * 32  # the weight


def test_nf4_without_package_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check before the start and in a worker."""
    config = RunConfig(model=ModelConfig(path="m", lora=LoraConfig(base="nf4")), paths=PathsConfig(root=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # Python's marker of a missing module
    for refused in (lambda: require_machine(config), lambda: load_policy("m", model=config.model, device=CPU)):
        with pytest.raises(ModelError, match=r"model\.lora\.base: nf4 needs the package bitsandbytes.*-e '\.\[nf4\]'"):
            refused()
