"""The CUDA graphs of a short step: one before vLLM's graph of the model, one after it, for each size vLLM has captured.

The first writes the inputs where vLLM's graph reads them; the second makes logits, draw and log-probability, and keeps
vLLM's own books of a request (tokens computed, last token, length, all tokens).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch

from rlcore.rollout.vllm.short.kernels import draw_kernel, prepare_kernel, take_kernel

COUNT, ROWS, SEEDS, COLUMNS, BLOCKS = range(5)
"""Rows of the table that the kernels are told: answers in the batch; of each its slot in vLLM's books, its seed, where
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
        table: int64 [5, size] on the device, what the kernels are told.
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
        inputs, plan = self._inputs(size), self._plan(size)

        def before() -> None:
            inputs()
            plan()

        return StepGraphs(captured(before, pool, stream), descriptor, captured(self._after(size), pool, stream))

    def _inputs(self, size: int) -> Callable[[], None]:
        """The model's inputs, in the buffers that vLLM's graph reads."""
        buffers, tables, told = self._buffers, self._block_tables, self.table
        own = tables.block_tables[0].gpu

        def work() -> None:
            prepare_kernel[(size,)](
                told[COUNT],
                told[ROWS],
                told[COLUMNS],
                told[BLOCKS],
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

        return work

    def _plan(self, size: int) -> Callable[[], None]:
        """What attention plans on the device from those inputs, as vLLM does it when it captures its own graph."""
        runner, tables = self._runner, self._block_tables
        batch = InputBatch.make_dummy(size, size, self._buffers)
        inputs = tables.get_dummy_block_tables(size)
        slots = tables.get_dummy_slot_mappings(size)

        def work() -> None:
            runner.model_state.prepare_attn(
                batch,
                CUDAGraphMode.FULL,
                inputs,
                slots,
                runner.attn_groups,
                runner.kv_cache_config,
                for_capture=True,
            )

        return work

    def _after(self, size: int) -> Callable[[], None]:
        """The work after the model: logits, draw, log-probability, vLLM's books."""
        hidden = self._runner.cudagraph_manager.hidden_states[:size]
        told, states = self.table, self._states
        all_tokens = states.all_token_ids.gpu

        def work() -> None:
            logits = self._runner.model.compute_logits(hidden)
            draw_kernel[(size, self._num_parts)](
                told[COUNT],
                self._identity,
                told[SEEDS],
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
                told[COUNT],
                told[ROWS],
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

        return work


def captured(work: Callable[[], None], pool: Any, stream: Any) -> Callable[[], None]:
    """That work as a CUDA graph's replay. It is done once before, so that kernels are compiled and loaded."""
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
