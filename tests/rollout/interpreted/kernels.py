"""The three kernels of a short step beside naive twins."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from rlcore.rollout.vllm.short.kernels import draw_kernel, prepare_kernel, take_kernel
from tests.rollout.interpreted.machine import BLOCK

NOTHING = -(2**31) + 5
"""In a place that nothing may be written to."""
TILE = 1_024


def a_batch_is_prepared_as_row_by_row() -> None:
    """Answers in the middle of a block, at a block's begin and at the table's end; two rows of padding; tiles of 4."""
    torch.manual_seed(0)
    num_slots, width, count, size = 6, 10, 4, 6
    slots, computed = torch.tensor([4, 0, 5, 2]), [4 * BLOCK, 2 * BLOCK + 3, BLOCK - 1, width * BLOCK - 1]
    columns, blocks = torch.tensor([4, 2, -1, -1]), torch.tensor([77, 55, 0, 0])
    tables = torch.randint(1, 50, (num_slots, width), dtype=torch.int32)
    num_computed = torch.full((num_slots,), NOTHING, dtype=torch.int32)
    num_computed[slots] = torch.tensor(computed, dtype=torch.int32)
    last_tokens = torch.arange(100, 100 + num_slots).view(-1, 1)
    before = tables.clone()
    found: dict[str, Tensor] = {
        "tables": torch.full((size, width), NOTHING, dtype=torch.int32),
        "tokens": torch.full((size,), NOTHING, dtype=torch.int32),
        "positions": torch.full((size,), NOTHING),
        "lengths": torch.full((size,), NOTHING, dtype=torch.int32),
        "starts": torch.full((size + 1,), NOTHING, dtype=torch.int32),
        "slots": torch.full((size,), NOTHING),
        "padding": torch.tensor([True, False] * 3),
    }
    expected = {name: tensor.clone() for name, tensor in found.items()}
    prepare_kernel[(size,)](
        torch.tensor([count]),
        _padded(slots, size),
        _padded(columns, size),
        _padded(blocks, size),
        num_computed,
        last_tokens,
        tables,
        width,
        *found.values(),
        BLOCK_TOKENS=BLOCK,
        PAD_SLOT=PAD_SLOT_ID,
        TILE=4,
    )
    for row, (slot, column, block) in enumerate(zip(slots, columns, blocks, strict=True)):
        if column >= 0:
            before[slot, column] = block
        at = computed[row]
        expected["tables"][row, : at // BLOCK + 1] = before[slot, : at // BLOCK + 1]
        expected["tokens"][row] = last_tokens[slot, 0]
        expected["positions"][row] = at
        expected["lengths"][row] = at + 1
        expected["slots"][row] = before[slot, at // BLOCK] * BLOCK + at % BLOCK
    expected["tables"][count:], expected["lengths"][count:], expected["slots"][count:] = 0, 0, PAD_SLOT_ID
    expected["padding"][:] = torch.arange(size) >= count
    expected["starts"][:] = torch.tensor([0, 1, 2, 3, 4, 4, 4])
    _same({**found, "tables of requests": tables}, {**expected, "tables of requests": before})


def a_draw_is_vllms_own_and_its_log_probability_is_right() -> None:
    """Logits in bfloat16 over two tiles and a bit, with tiles and all but one token ruled out; a row of padding."""
    _draw(torch.bfloat16, 2 * TILE + 300, use_fp64=False)


def a_draw_in_float64_is_vllms_own_too() -> None:
    _draw(torch.float32, TILE + 1, use_fp64=True)


def _draw(dtype: torch.dtype, vocabulary: int, *, use_fp64: bool) -> None:
    torch.manual_seed(1)
    count, size, num_slots, length = 4, 5, 7, 9
    wide = (3 * torch.randn(size, vocabulary + 20)).to(dtype)  # vLLM cuts the padding of its vocabulary off
    logits = wide[:, :vocabulary]
    logits[1, :TILE] = float("-inf")
    logits[2] = float("-inf")
    logits[2, vocabulary - 1] = 0.5
    logits[3, ::2] = float("-inf")
    slots, positions = torch.tensor([6, 1, 3, 0]), torch.tensor([11, 0, 4_000_000_000, 7, NOTHING])
    seeds = torch.tensor([5, 2**62 + 3, -17, 0])
    parts = -(-vocabulary // TILE)
    best = torch.zeros(size, parts, dtype=torch.float64 if use_fp64 else torch.float32)
    tokens, tops, sums = torch.zeros(size, parts, dtype=torch.int32), torch.zeros(size, parts), torch.zeros(size, parts)
    found: dict[str, Tensor] = {
        "tokens computed": torch.full((num_slots,), 20, dtype=torch.int32),
        "last tokens": torch.full((num_slots, 1), NOTHING),
        "lengths": torch.full((num_slots,), length - 4, dtype=torch.int32),
        "all tokens": torch.full((num_slots + 1, length), NOTHING, dtype=torch.int32),
        "found": torch.full((size, 2), NOTHING, dtype=torch.int32),
    }
    found["lengths"][3] = length  # as vLLM's last token may be: there is no room
    expected = {name: tensor.clone() for name, tensor in found.items()}
    told = torch.tensor([count])
    draw_kernel[(size, parts)](
        told,
        torch.arange(size, dtype=torch.int32),
        _padded(seeds, size),
        torch.ones(size),
        positions,
        logits,
        logits.stride(0),
        vocabulary,
        best,
        tokens,
        tops,
        sums,
        NUM_PARTS=parts,
        TILE=TILE,
        USE_FP64=use_fp64,
    )
    take_kernel[(size,)](
        told,
        _padded(slots, size),
        logits,
        logits.stride(0),
        best,
        tokens,
        tops,
        sums,
        found["tokens computed"],
        found["last tokens"],
        found["lengths"],
        found["all tokens"],
        length,
        found["found"],
        NUM_PARTS=parts,
        TILE=4,
        num_warps=1,
    )
    rows = torch.arange(count)
    own = gumbel_sample(
        logits[:count], rows, torch.ones(count), seeds, positions[:count], False, is_drafting=False, use_fp64=use_fp64
    )
    assert own[2] == vocabulary - 1
    for row, slot in enumerate(slots):
        expected["tokens computed"][slot] += 1
        expected["last tokens"][slot] = own[row]
        if expected["lengths"][slot] < length:
            expected["all tokens"][slot, expected["lengths"][slot]] = own[row]
        expected["lengths"][slot] += 1
    logprobs = found["found"][:count, 1].contiguous().view(torch.float32)
    softmax = torch.log_softmax(logits[:count].float(), dim=1)[rows, own]
    torch.testing.assert_close(logprobs, softmax, rtol=0, atol=2e-6)
    expected["found"][:count, 0] = own
    expected["found"][:count, 1] = found["found"][:count, 1]
    _same(found, expected)


def _padded(values: Tensor, size: int) -> Tensor:
    """As the table on the device: what stands behind the batch is of an earlier step."""
    padded: Any = torch.full((size,), 3, dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: {found[name].tolist()}, expected {tensor.tolist()}"


CHECKS = (
    a_batch_is_prepared_as_row_by_row,
    a_draw_is_vllms_own_and_its_log_probability_is_right,
    a_draw_in_float64_is_vllms_own_too,
)
