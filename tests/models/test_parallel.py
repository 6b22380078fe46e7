"""Real gloo ranks give the loss, gradient, norm and weights of one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.forked import run_side_by_side
from tests.models.ranks import CASES, MODEL_OF, ROUNDED, SPLIT, run_case
from tests.models.tiny import write_model

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
EVERYTHING = tuple(sequences for rank in SPLIT[2] for sequences in rank)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for kind in set(MODEL_OF.values()):
        write_model(kind, directory / kind)
    return directory


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.lengthy) for n in (4, 8))], ids=str)
def ranks(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of so many processes, run once for all tests."""
    out = tmp_path_factory.mktemp("ranks")
    run_side_by_side(
        *(
            ["tests.models.ranks", str(rank), str(request.param), str(models), str(out)]
            for rank in range(request.param)
        ),
        timeout_s=500,
    )
    return out


def load_all(ranks: Path, name: str) -> list[dict[str, Tensor]]:
    """Load each rank's file of this name."""
    return [load_file(file) for file in sorted(ranks.glob(f"{name}-[0-9].safetensors"))]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        # With B at 0 the first gradient of A is exactly 0, on two ranks as on one.
        assert scale > 0 or "lora_A" in name, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ROUNDED])
def test_ranks_match_one_process(case: str, models: Path, ranks: Path) -> None:
    expected = run_case(case, models, EVERYTHING, None)
    assert len(expected) > 40
    assert_equal(load_file(ranks / f"{case}-0.safetensors"), expected, 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_ranks_gather_equal_state(case: str, ranks: Path) -> None:
    first, *others = load_all(ranks, case)
    assert len(others) in (1, 3, 7)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_bfloat16_compute_keeps_float32_master_weights(models: Path, ranks: Path) -> None:
    found = load_file(ranks / "bfloat16-0.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    expected = run_case("tied", models, EVERYTHING, None)
    assert not torch.equal(found["loss.0"], expected["loss.0"])
    torch.testing.assert_close(found["loss.0"], expected["loss.0"], rtol=0.02, atol=0.5)


def test_bfloat16_base_matches_float32(ranks: Path) -> None:
    found, expected = (load_file(ranks / f"{case}-0.safetensors") for case in ("lora-bfloat16", "lora-float32-base"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("weight."):
            assert tensor.dtype == torch.float32
            assert torch.equal(found[name], tensor), name
    assert {found[name].dtype for name in found if name.startswith("weight.")} == {torch.bfloat16}


def test_full_state_of_sharded_policy(models: Path, ranks: Path) -> None:
    expected = load_file(models / MODEL_OF["tied"] / "model.safetensors")
    for state in load_all(ranks, "state"):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
