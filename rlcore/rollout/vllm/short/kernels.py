"""Triton kernels of a short step: what vLLM's runner does around its model for answers that grow by one token.

Shapes: a step has `count` answers in the first rows of a batch; the rows after them, up to the size of the CUDA graph,
are padding. `rows_ptr` holds each row's request slot of vLLM.
"""

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_block_argmax


@triton.jit
def _drawn_without_drafts(
    logits, at, inside, row, slots_ptr, ones_ptr, seeds_ptr, positions_ptr, size, USE_FP64: tl.constexpr
):
    """vLLM's draw, where its function has no place for a draft's logits: no temperature, nothing kept."""
    return gumbel_block_argmax(
        logits,
        at,
        inside,
        row,
        slots_ptr,
        ones_ptr,
        seeds_ptr,
        positions_ptr,
        None,
        0,
        None,
        size,
        APPLY_TEMPERATURE=False,
        USE_FP64=USE_FP64,
        PER_TOKEN_COL=False,
    )


@triton.jit
def _drawn_beside_drafts(
    logits, at, inside, row, slots_ptr, ones_ptr, seeds_ptr, positions_ptr, size, USE_FP64: tl.constexpr
):
    """vLLM's draw, where its function takes a draft's logits."""
    return gumbel_block_argmax(
        logits,
        at,
        inside,
        row,
        slots_ptr,
        ones_ptr,
        seeds_ptr,
        positions_ptr,
        None,
        0,
        0,
        None,
        None,
        0,
        size,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=False,
        USE_FP64=USE_FP64,
        PER_TOKEN_COL=False,
    )


largest_with_noise = _drawn_beside_drafts if "IS_DRAFTING" in gumbel_block_argmax.arg_names else _drawn_without_drafts


@triton.jit
def prepare_kernel(
    count_ptr,  # [1]
    rows_ptr,  # [size] request slot of each row
    columns_ptr,  # [size] place of a new cache block in the request's block table, -1: none
    blocks_ptr,  # [size] that block
    num_computed_ptr,  # [slots]
    last_tokens_ptr,  # [slots]
    tables_ptr,  # [slots, tables_stride] block tables of requests
    tables_stride,
    input_tables_ptr,  # [size, tables_stride] block tables of the batch, which the model reads, as all below
    input_ids_ptr,  # [size]
    positions_ptr,  # [size]
    seq_lens_ptr,  # [size]
    starts_ptr,  # [size + 1]
    slots_ptr,  # [size] place in the cache of the row's keys and values
    padding_ptr,  # [size] whether the row is padding: experts may leave it out
    BLOCK_TOKENS: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The model's inputs. One program a row; writes nothing of a request but its new block."""
    row = tl.program_id(0)
    count = tl.load(count_ptr).to(tl.int32)
    if row == 0:
        tl.store(starts_ptr, 0)
    tl.store(starts_ptr + row + 1, tl.minimum(row + 1, count))
    tl.store(padding_ptr + row, row >= count)
    input_table_ptr = input_tables_ptr + row.to(tl.int64) * tables_stride
    if row >= count:
        tl.store(seq_lens_ptr + row, 0)
        tl.store(slots_ptr + row, PAD_SLOT)
        for start in tl.range(0, tables_stride, TILE):
            at = start + tl.arange(0, TILE)
            tl.store(input_table_ptr + at, 0, mask=at < tables_stride)
        return
    slot = tl.load(rows_ptr + row)
    computed = tl.load(num_computed_ptr + slot)
    tl.store(seq_lens_ptr + row, computed + 1)
    tl.store(positions_ptr + row, computed)
    tl.store(input_ids_ptr + row, tl.load(last_tokens_ptr + slot))
    table_ptr = tables_ptr + slot * tables_stride
    column = tl.load(columns_ptr + row).to(tl.int32)
    new_block = tl.load(blocks_ptr + row).to(tl.int32)
    tl.store(table_ptr + column, new_block, mask=column >= 0)
    # `where`: other threads of this program may not see yet what it has just stored.
    last = computed // BLOCK_TOKENS
    block = tl.where(last == column, new_block, tl.load(table_ptr + last))
    tl.store(slots_ptr + row, block.to(tl.int64) * BLOCK_TOKENS + computed % BLOCK_TOKENS)
    for start in tl.range(0, last + 1, TILE):
        at = start + tl.arange(0, TILE)
        inside = at <= last
        blocks = tl.load(table_ptr + at, mask=inside, other=0)
        tl.store(input_table_ptr + at, tl.where(at == column, new_block, blocks), mask=inside)


@triton.jit
def draw_kernel(
    count_ptr,
    identity_ptr,  # [size] 0, 1, 2 ...
    seeds_ptr,  # [size]
    ones_ptr,  # [size] temperatures
    positions_ptr,  # [size]
    logits_ptr,  # [size, vocab_size]
    logits_stride,
    vocab_size,
    best_ptr,  # [size, NUM_PARTS] largest logit with noise of a part of the vocabulary
    tokens_ptr,  # [size, NUM_PARTS] whose it is
    tops_ptr,  # [size, NUM_PARTS] largest logit without noise
    sums_ptr,  # [size, NUM_PARTS] sum of exp(logit - that)
    NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """Read the logits once: the draw, by vLLM's own noise, and what the log-probability needs."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count_ptr):
        return
    part = tl.program_id(1)
    at = part * TILE + tl.arange(0, TILE)
    inside = at < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logits - base), axis=0)
    value, index = largest_with_noise(
        logits, at, inside, row, identity_ptr, ones_ptr, seeds_ptr, positions_ptr, vocab_size, USE_FP64
    )
    place = row * NUM_PARTS + part
    tl.store(best_ptr + place, value)
    tl.store(tokens_ptr + place, part * TILE + index)
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, total)


@triton.jit
def take_kernel(
    count_ptr,
    rows_ptr,
    logits_ptr,
    logits_stride,
    best_ptr,
    tokens_ptr,
    tops_ptr,
    sums_ptr,
    num_computed_ptr,  # [slots], as the three below
    last_tokens_ptr,
    total_lens_ptr,
    all_tokens_ptr,  # [slots, all_tokens_stride]
    all_tokens_stride,
    found_ptr,  # [size, 2] the token, and its log-probability bit by bit
    NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of each row and its log-probability; and what vLLM keeps of a request. One warp: it reads and writes
    the same places."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count_ptr):
        return
    part = tl.arange(0, TILE)
    inside = part < NUM_PARTS
    place = row * NUM_PARTS + part
    _, winner = tl.max(tl.load(best_ptr + place, mask=inside, other=float("-inf")), axis=0, return_indices=True)
    token = tl.load(tokens_ptr + row * NUM_PARTS + winner)
    tops = tl.load(tops_ptr + place, mask=inside, other=float("-inf"))
    top = tl.max(tops, axis=0)
    sums = tl.load(sums_ptr + place, mask=inside, other=0.0)
    total = tl.sum(sums * tl.exp(tops - top), axis=0)
    logit = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
    logprob = logit - top - tl.log(total)
    slot = tl.load(rows_ptr + row)
    length = tl.load(total_lens_ptr + slot)
    computed = tl.load(num_computed_ptr + slot)
    tl.store(last_tokens_ptr + slot, token)
    tl.store(all_tokens_ptr + slot * all_tokens_stride + length, token, mask=length < all_tokens_stride)
    tl.store(total_lens_ptr + slot, length + 1)
    tl.store(num_computed_ptr + slot, computed + 1)
    tl.store(found_ptr + 2 * row, token)
    tl.store(found_ptr + 2 * row + 1, logprob.to(tl.int32, bitcast=True))
