"""Comparison of short steps with vLLM's own at an engine's start: a few answers written both ways.

The steps are ordered from the runner directly, as in vLLM's warm-up: four prompts, then steps over the end of a cache
block, the last of them with three answers in a graph of four.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm import SamplingParams, envs
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from rlcore.rollout.vllm.short.runner import ShortRunner

_NAME = "_short_step_check_"
_LOGPROB_BOUND = 0.02
"""The head's product may be another kernel in a padded batch; the logits are rounded to their type."""


def disagreement(short: ShortRunner, runner: Any) -> str | None:
    """In what short steps differ from vLLM's own; None where they agree."""
    block = runner.block_tables.block_sizes[0]
    steps = block + 4
    lengths = (block - 3, block, 2 * block - 1, 5)
    room = -(-(max(lengths) + steps) // block)
    if (
        runner.max_num_reqs < len(lengths)
        or runner.max_num_tokens < sum(lengths)
        or runner.max_model_len < max(lengths) + steps
        or runner.kv_cache_config.num_blocks <= room * len(lengths)
    ):
        return "the engine is too small for a check"
    was, before = short.enabled, short.num_short_steps
    try:
        with torch.inference_mode():
            # Short steps first: what they leave out must not be there from vLLM's own.
            short.enabled = True
            found = list(_written(short, runner, lengths, steps, room))
            short.enabled = False
            expected = list(_written(short, runner, lengths, steps, room))
    finally:
        short.enabled = was
        _remove_requests(runner)
    if short.num_short_steps - before != steps:
        return f"{short.num_short_steps - before} of {steps} steps were short ones"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for name in one | other:
            if not _same(one[name], other[name]):
                return f"step {number}: {name}: {other[name].tolist()}, vLLM's own: {one[name].tolist()}"
    return None


def _written(
    short: ShortRunner, runner: Any, lengths: tuple[int, ...], steps: int, room: int
) -> Iterator[dict[str, Any]]:
    """What each step read and wrote: the prompts' step first."""
    block = runner.block_tables.block_sizes[0]
    names = [f"{_NAME}{index}" for index in range(len(lengths))]
    blocks = [list(range(1 + index * room, 1 + (index + 1) * room)) for index in range(len(lengths))]
    order = SchedulerOutput.make_empty()
    for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
        prompt = [3 + (7 * index + place) % 50 for place in range(length)]
        order.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=SamplingParams(
                    temperature=1.0, seed=1_000_003 * index + 17, max_tokens=steps + 1, logprobs=0, detokenize=False
                ),
                pooling_params=None,
                block_ids=(blocks[index][: -(-length // block)],),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=prompt,
            )
        )
        order.num_scheduled_tokens[name] = length
    order.total_num_scheduled_tokens = sum(lengths)
    order.num_common_prefix_blocks = [0]
    yield _step(short, runner, order)
    running = list(zip(names, lengths, blocks, strict=True))
    for number in range(steps):
        order = SchedulerOutput.make_empty()
        order.num_common_prefix_blocks = [0]
        if number == steps // 2:
            order.finished_req_ids = {running.pop()[0]}
        cached = order.scheduled_cached_reqs
        for name, length, own in running:
            computed = length + number
            cached.req_ids.append(name)
            cached.new_block_ids.append(([own[computed // block]],) if computed % block == 0 else None)
            cached.num_computed_tokens.append(computed)
            cached.num_output_tokens.append(number + 1)
            order.num_scheduled_tokens[name] = 1
        order.total_num_scheduled_tokens = len(running)
        yield _step(short, runner, order)
    yield {f"{name} of {own}": value for own, _, _ in running for name, value in _records(runner, own).items()}
    _remove_requests(runner)


def _remove_requests(runner: Any) -> None:
    """Remove the check's requests, also after a failure."""
    order = SchedulerOutput.make_empty()
    order.finished_req_ids = {name for name in runner.req_states.req_id_to_index if name.startswith(_NAME)}
    runner.finish_requests(order)


def _step(short: ShortRunner, runner: Any, order: Any) -> dict[str, Any]:
    short.execute_model(order)
    inputs = _inputs(runner, len(order.num_scheduled_tokens)) if not order.scheduled_new_reqs else {}
    output = short.sample_tokens(None).get_output()
    rows = output.req_id_to_index
    read = {name: tensor.cpu() for name, tensor in inputs.items()}
    for name in order.num_scheduled_tokens:
        read[f"token of {name}"] = torch.tensor(output.sampled_token_ids[rows[name]])
        read[f"log-probability of {name}"] = torch.tensor(output.logprobs.logprobs[rows[name], 0])
    return read


def _inputs(runner: Any, count: int) -> dict[str, Any]:
    """Copies of what the model's graph has read."""
    size = runner.cudagraph_manager.dispatch(count, count, 1, num_active_loras=0).num_tokens
    buffers, tables = runner.input_buffers, runner.block_tables
    plan = getattr(runner.attn_groups[0][0].get_metadata_builder(0), "scheduler_metadata", None)
    read = {
        "input_ids": buffers.input_ids[:count],
        "positions": buffers.positions[:count],
        "seq_lens": buffers.seq_lens[:size],
        "query_start_loc": buffers.query_start_loc[: size + 1],
        "slot_mapping": tables.slot_mappings[0, :size],
        "padded block tables": tables.input_block_tables[0][count:size],
        **({"is_padding": buffers.is_padding[:size]} if envs.VLLM_MOE_SKIP_PADDING else {}),
        **({} if plan is None else {"scheduler_metadata": plan}),
    }
    lengths = buffers.seq_lens[:count].tolist()
    for row, length in enumerate(lengths):
        own = -(-length // tables.block_sizes[0])
        read[f"block table {row}"] = tables.input_block_tables[0][row, :own]
    return {name: tensor.clone() for name, tensor in read.items()}


def _records(runner: Any, name: str) -> dict[str, Any]:
    """vLLM's records of a request that later steps read."""
    states = runner.req_states
    slot = states.req_id_to_index[name]
    length = int(states.total_len.gpu[slot])
    return {
        "tokens": states.all_token_ids.gpu[slot, :length].clone(),
        "tokens computed": states.num_computed_tokens.gpu[slot].clone(),
        "last token": states.last_sampled_tokens[slot].clone(),
        "blocks": torch.tensor(runner.block_tables.num_blocks.np[0, slot]),
    }


def _same(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.is_floating_point:
        return bool(((one - other).abs() <= _LOGPROB_BOUND).all())
    return bool(torch.equal(one, other))
