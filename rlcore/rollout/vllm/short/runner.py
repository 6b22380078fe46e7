"""Short steps of vLLM's model runner: steps in which every answer grows by one token.

Around its CUDA graph of the model vLLM's own runner launches some 35 small kernels and copies from Python in every step
(inputs before it; logits, the draw, the log-probability and its records of requests after it), which takes the host
three times as long as the GPU needs for a small model. Here those kernels are CUDA graphs too, one before the model and
one after it for each size that vLLM has captured: a step is three replays and one copy to the host.

The first graph writes the inputs where vLLM's graph reads them, and reads vLLM's records of a request (tokens
computed, last token, block table), so any step can be of either kind. Steps with a prompt, a preemption, grammars,
penalties, a temperature, top-k or top-p are vLLM's own. An answer's draw is by its seed and position alone, with vLLM's
own function of both.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from rlcore.rollout.vllm.short.kernels import draw_kernel, prepare_kernel, take_kernel

COUNT, ROWS, SEEDS, COLUMNS, BLOCKS = range(5)
"""Rows of the table that the kernels read: answers in the batch; of each its slot in vLLM's records, its seed, where
in its block table a new block goes (-1: nowhere), and that block."""
_VOCABULARY_TILE = 1_024
_TABLE_TILE = 256


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """A step's work for one size of batch: vLLM's graph, by its descriptor, and those around it."""

    before: Callable[[], None]
    model: Any
    after: Callable[[], None]


class GraphSet:
    """Graphs for every number of answers that vLLM has one for.

    Attributes:
        size: most answers of a short step.
        table: int64 [5, size] on the device, what the kernels read.
        found: int32 [size, 2] on the device, tokens and the bits of their float32 log-probabilities.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._states = runner.req_states
        self._sampler = runner.sampler
        self._buffers = runner.input_buffers
        self._block_tables = runner.block_tables
        manager = runner.cudagraph_manager
        descriptors = [manager.dispatch(n, n, 1, num_active_loras=0) for n in range(1, runner.max_num_reqs + 1)]
        usable = [one if one in manager.graphs and one.num_reqs == one.num_tokens else None for one in descriptors]
        sizes = {one.num_tokens: one for one in usable if one is not None}
        self.size: int = max(sizes, default=0)
        self._allocate(runner.device)
        graphs = self._capture_all(sizes)
        self._by_count = [None, *(None if one is None else graphs[one.num_tokens] for one in usable)]

    def of(self, count: int) -> StepGraphs | None:
        """The graphs for that many answers; None: vLLM has none."""
        return self._by_count[count] if 0 < count < len(self._by_count) else None

    def _allocate(self, device: Any) -> None:
        size = self.size
        self._num_parts = triton.cdiv(self._sampler.sampling_states.vocab_size, _VOCABULARY_TILE)
        noise = torch.float64 if self._sampler.use_fp64_gumbel else torch.float32
        parts = (size, self._num_parts)
        self.table = torch.zeros(5, size, dtype=torch.int64, device=device)
        self.found = torch.zeros(size, 2, dtype=torch.int32, device=device)
        self._identity = torch.arange(size, dtype=torch.int32, device=device)
        self._ones = torch.ones(size, dtype=torch.float32, device=device)
        self._best = torch.zeros(parts, dtype=noise, device=device)
        self._tokens = torch.zeros(parts, dtype=torch.int32, device=device)
        self._tops = torch.zeros(parts, dtype=torch.float32, device=device)
        self._sums = torch.zeros(parts, dtype=torch.float32, device=device)

    def _capture_all(self, descriptors: dict[int, Any]) -> dict[int, StepGraphs]:
        """Graphs by size, the largest captured first, since all share their memory. The table says 0 answers."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        with torch.inference_mode():
            return {
                size: self._capture(size, descriptor, pool, stream)
                for size, descriptor in sorted(descriptors.items(), reverse=True)
            }

    def _capture(self, size: int, descriptor: Any, pool: Any, stream: Any) -> StepGraphs:
        plan = self._plan(size)

        def before() -> None:
            self._write_inputs(size)
            plan()

        return StepGraphs(
            captured(before, pool, stream), descriptor, captured(partial(self._take_tokens, size), pool, stream)
        )

    def _write_inputs(self, size: int) -> None:
        """Write the model's inputs into the buffers that vLLM's graph reads."""
        buffers, tables, table = self._buffers, self._block_tables, self.table
        own = tables.block_tables[0].gpu
        prepare_kernel[(size,)](
            table[COUNT],
            table[ROWS],
            table[COLUMNS],
            table[BLOCKS],
            self._states.num_computed_tokens.gpu,
            self._states.last_sampled_tokens,
            own,
            own.stride(0),
            tables.input_block_tables[0],
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.query_start_loc,
            tables.slot_mappings[0],
            buffers.is_padding,
            BLOCK_TOKENS=tables.block_sizes[0],
            PAD_SLOT=PAD_SLOT_ID,
            TILE=_TABLE_TILE,
        )

    def _plan(self, size: int) -> Callable[[], None]:
        """What attention plans on the device from those inputs, as vLLM does it when it captures its own graph."""
        runner, tables = self._runner, self._block_tables
        return partial(
            runner.model_state.prepare_attn,
            InputBatch.make_dummy(size, size, self._buffers),
            CUDAGraphMode.FULL,
            tables.get_dummy_block_tables(size),
            tables.get_dummy_slot_mappings(size),
            runner.attn_groups,
            runner.kv_cache_config,
            for_capture=True,
        )

    def _take_tokens(self, size: int) -> None:
        """The work after the model: logits, draw, log-probability, vLLM's records."""
        hidden = self._runner.cudagraph_manager.hidden_states[:size]
        table, states = self.table, self._states
        all_tokens = states.all_token_ids.gpu
        logits = self._runner.model.compute_logits(hidden)
        draw_kernel[(size, self._num_parts)](
            table[COUNT],
            self._identity,
            table[SEEDS],
            self._ones,
            self._buffers.positions,
            logits,
            logits.stride(0),
            logits.shape[1],
            self._best,
            self._tokens,
            self._tops,
            self._sums,
            NUM_PARTS=self._num_parts,
            TILE=_VOCABULARY_TILE,
            USE_FP64=self._sampler.use_fp64_gumbel,
        )
        take_kernel[(size,)](
            table[COUNT],
            table[ROWS],
            logits,
            logits.stride(0),
            self._best,
            self._tokens,
            self._tops,
            self._sums,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            states.total_len.gpu,
            all_tokens,
            all_tokens.stride(0),
            self.found,
            NUM_PARTS=self._num_parts,
            TILE=triton.next_power_of_2(self._num_parts),
            num_warps=1,
        )


def captured(work: Callable[[], None], pool: Any, stream: Any) -> Callable[[], None]:
    """The work as a replay of its CUDA graph. It runs once before: kernels are compiled and loaded then."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of a trainer may use the GPU meanwhile: only this one is held to a capture's rules.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


_SERVED = {
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "finished_req_ids",
    "num_common_prefix_blocks",  # vLLM's runner makes nothing of it
}
_OTHER_WORK = attrgetter(*(field.name for field in fields(SchedulerOutput) if field.name not in _SERVED))
"""All else that this release's scheduler may ask of a step: prompts, preemptions, drafts, grammars, copied blocks."""
_AT_ONCE = 3
"""Steps under way for which there is memory at once: vLLM orders one ahead. More is made when needed."""


@dataclass(slots=True)
class _Slot:
    """Host memory of one step under way, in use until its tokens are read."""

    table: Any  # pinned int64 [5, size]: what the kernels read
    found: Any  # pinned int32 [size, 2]: tokens and log-probabilities
    event: Any


class ShortOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A short step's tokens, on their way to the host."""

    def __init__(self, slot: _Slot, req_ids: list[str], req_id_to_index: dict[str, int], free: list[_Slot]) -> None:
        self._slot = slot
        self._req_ids = req_ids
        self._req_id_to_index = req_id_to_index
        self._free = free

    def get_output(self) -> Any:
        """Wait for them. Ranks are not counted: 0."""
        self._slot.event.synchronize()
        count = len(self._req_ids)
        found = self._slot.found.numpy()[:count].copy()
        self._free.append(self._slot)
        token_ids = found[:, :1]
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index=self._req_id_to_index,
            sampled_token_ids=token_ids.tolist(),
            logprobs=LogprobsLists(token_ids, found[:, 1:].view(np.float32), np.zeros(count, dtype=np.int64)),
        )


class ShortRunner:
    """Replaces two methods of vLLM's runner; see the module."""

    def __init__(self, runner: Any) -> None:
        self.enabled = True
        self.num_short_steps = 0
        self.num_other_steps = 0
        self._runner = runner
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        self._states = runner.req_states
        self._sampler = runner.sampler
        self._processed = _processed(runner.sampler)
        self._block_tables = runner.block_tables
        self._manager = runner.cudagraph_manager
        self._req_ids: list[str] | None = None  # of the table on the device; None: vLLM had a step since
        self._req_id_to_index: dict[str, int] = {}
        self._slots_of_rows = np.zeros(0, dtype=np.int64)
        self._under_way: tuple[StepGraphs, _Slot] | None = None
        self._graphs = GraphSet(runner)
        self._table = np.zeros((5, self._graphs.size), dtype=np.int64)
        self._free = [self._new_slot() for _ in range(_AT_ONCE)]

    def _new_slot(self) -> _Slot:
        size, pinned = self._graphs.size, self._graphs.table.is_cuda
        return _Slot(
            torch.zeros(5, size, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(size, 2, dtype=torch.int32, pin_memory=pinned),
            torch.cuda.Event(blocking=True),
        )

    def install(self) -> None:
        """Put these two methods in the place of the runner's."""
        self._runner.execute_model = self.execute_model
        self._runner.sample_tokens = self.sample_tokens

    def remove(self) -> None:
        """Restore the runner's own methods, so that it can release its memory."""
        del self._runner.execute_model, self._runner.sample_tokens

    def execute_model(self, order: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Inputs and model of one step; None: `sample_tokens` returns its tokens."""
        plan = None
        if self.enabled and intermediate_tensors is None and not args and not kwargs:
            plan = self._plan_of(order)
        if plan is None:
            self._req_ids = None
            self.num_other_steps += 1
            return self._execute_model(order, intermediate_tensors, *args, **kwargs)
        graphs, slots_of_rows = plan
        if order.finished_req_ids:
            self._runner.finish_requests(order)
        slot = self._free.pop() if self._free else self._new_slot()
        self._update_table(order, slots_of_rows, slot)
        graphs.before()
        self._manager.run_fullgraph(graphs.model)
        self._under_way = graphs, slot
        self.num_short_steps += 1
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Tokens of the step whose model was just run."""
        if self._under_way is None:
            return self._sample_tokens(grammar_output)
        (graphs, slot), self._under_way = self._under_way, None
        graphs.after()
        assert self._req_ids is not None
        count = len(self._req_ids)
        slot.found[:count].copy_(self._graphs.found[:count], non_blocking=True)
        slot.event.record()
        return ShortOutput(slot, self._req_ids, self._req_id_to_index, self._free)

    def _plan_of(self, order: Any) -> tuple[StepGraphs, Any] | None:
        """The graphs for this step, and the request slot of each row if they are others than before. None: it is
        vLLM's. Changes nothing."""
        cached = order.scheduled_cached_reqs
        req_ids = cached.req_ids
        count = len(req_ids)
        if order.total_num_scheduled_tokens != count or cached.resumed_req_ids or any(_OTHER_WORK(order)):
            return None
        graphs = self._graphs.of(count)
        if graphs is None or any(ids is not None and len(ids[0]) != 1 for ids in cached.new_block_ids):
            return None
        if req_ids == self._req_ids:
            return graphs, None
        if list(order.num_scheduled_tokens) != req_ids:
            return None
        slot_of = self._states.req_id_to_index
        slots = np.array([slot_of[req_id] for req_id in req_ids], dtype=np.int64)
        return (graphs, slots) if self._plain(slots, np.array(cached.num_computed_tokens)) else None

    def _plain(self, slots: Any, computed: Any) -> bool:
        """Whether these requests are past their prompts and drawn from the model's own distribution."""
        sampler = self._sampler
        sampling = sampler.sampling_states
        return bool(
            (computed >= self._states.prefill_len.np[slots]).all()
            and (sampling.temperature.np[slots] == 1.0).all()
            and (sampling.top_k.np[slots] == sampling.vocab_size).all()
            and (sampling.top_p.np[slots] == 1.0).all()
            and not sampling.min_p.np[slots].any()
            and not sampling.num_logprobs[slots].any()  # 0: of the token alone
            and not any(flags[slots].any() for flags in self._processed)
            and not sampler.logprob_token_ids_state.num_token_ids.np[slots].any()
            and not self._runner.prompt_logprobs_worker.uses_prompt_logprobs[slots].any()
        )

    def _update_table(self, order: Any, slots: Any, slot: _Slot) -> None:
        """Copy the table to the device, where anything but lengths has changed since the step before.

        A new block that stays in the table is written again to its place.
        """
        table = self._table
        cached = order.scheduled_cached_reqs
        crossing = [(row, ids[0][0]) for row, ids in enumerate(cached.new_block_ids) if ids is not None]
        if slots is not None:
            count = len(slots)
            self._req_ids = cached.req_ids
            self._req_id_to_index = {req_id: row for row, req_id in enumerate(cached.req_ids)}
            self._slots_of_rows = slots
            table[COUNT, 0] = count
            table[ROWS, :count] = slots
            table[SEEDS, :count] = self._sampler.sampling_states.seeds.np[slots]
        elif not crossing:
            return
        table[COLUMNS] = -1
        num_blocks = self._block_tables.num_blocks.np[0]
        for row, block in crossing:
            where = self._slots_of_rows[row]
            table[COLUMNS, row] = num_blocks[where]
            table[BLOCKS, row] = block
            num_blocks[where] += 1
        slot.table.numpy()[:] = table
        self._graphs.table.copy_(slot.table, non_blocking=True)


def _processed(sampler: Any) -> tuple[Any, ...]:
    """Flags of each request slot: whether vLLM changes its logits before the draw."""
    at_once = getattr(sampler, "needs_logits_processing", None)
    if at_once is not None:
        return (at_once,)
    return (
        sampler.penalties_state.use_penalty,
        sampler.logit_bias_state.use_logit_bias,
        sampler.bad_words_state.num_bad_words.np,
    )
