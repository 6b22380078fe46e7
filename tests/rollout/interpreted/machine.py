"""vLLM's own V2 runner on a CPU. Its classes and kernels are the real ones; a CPU has no CUDA graphs, streams and
events, so what they hold is done at once. The model is a mean over cached keys: it sees tables, slots, positions and
lengths.

To be imported first in its process: vLLM asks once whether there is a Triton.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # the interpreter has no driver

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.worker.gpu import async_utils, buffer_utils, model_runner  # noqa: E402
from vllm.v1.worker.gpu.block_table import BlockTables  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBuffers  # noqa: E402
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR  # noqa: E402
from vllm.v1.worker.gpu.lora_utils import LoraState  # noqa: E402
from vllm.v1.worker.gpu.model_states.default import DefaultModelState  # noqa: E402
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker  # noqa: E402
from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup  # noqa: E402

from rlcore.rollout.vllm.short import runner as short_runner  # noqa: E402

CPU = torch.device("cpu")
VOCABULARY, BLOCK, WIDTH = 700, 4, 8
MAX_REQUESTS, MAX_TOKENS, MAX_LENGTH, NUM_BLOCKS = 8, 128, 32, 80
SIZES = (1, 2, 4, 8)
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)


class Event:
    """What was recorded has been done."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _done_at_once(work: Any, _pool: Any, _stream: Any) -> Any:
    work()
    return work


def replace_the_gpus_own() -> None:
    """Graphs, streams, events and pinned memory, of which a CPU has none."""
    torch.cuda.Event = Event  # type: ignore[misc, assignment]
    torch.cuda.Stream = lambda *_: None  # type: ignore[misc, assignment]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment]
    short_runner.captured = _done_at_once
    async_utils.stream = lambda *_: contextlib.nullcontext()
    model_runner.set_forward_context = lambda *_, **__: contextlib.nullcontext()
    buffer_utils.UvaBuffer = _Unpinned


class _Unpinned:
    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> Tensor:
        return self.cpu[:n]


class Graphs:
    """vLLM's graphs of the model for batches of `SIZES`."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self.graphs = dict.fromkeys(map(_descriptor, SIZES))
        self.hidden_states = torch.zeros(max(SIZES), WIDTH)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int | None, num_active_loras: int, **_: Any) -> Any:
        for one in self.graphs:
            if _is_compatible(one, num_reqs, num_tokens, uniform, num_active_loras, None, 1):
                return one
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)

    def run_fullgraph(self, descriptor: Any) -> Tensor:
        size = descriptor.num_tokens
        self.hidden_states[:size] = self._model.of_buffers(size, size)
        return self.hidden_states[:size]


def _descriptor(size: int) -> Any:
    return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, 1)


class Model:
    """Hidden state of a token: the mean of the keys cached up to it."""

    def __init__(self, runner: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._runner = runner
        self._embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self._head = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self._keys = torch.zeros(NUM_BLOCKS * BLOCK, WIDTH)

    def __call__(self, input_ids: Tensor, **_: Any) -> Tensor:
        starts = self._runner.input_buffers.query_start_loc  # up to the number of tokens, and that from there on
        return self.of_buffers(len(input_ids), int((starts < len(input_ids)).sum()))

    def of_buffers(self, num_tokens: int, num_rows: int) -> Tensor:
        buffers, tables = self._runner.input_buffers, self._runner.block_tables
        starts = buffers.query_start_loc[: num_rows + 1].tolist()
        positions, slots = buffers.positions.tolist(), tables.slot_mappings[0].tolist()
        lengths, planned = buffers.seq_lens.tolist(), self._runner.attn_groups[0][0].plan.tolist()
        hidden = torch.zeros(num_tokens, WIDTH)
        rows = [(row, at) for row in range(num_rows) for at in range(starts[row], starts[row + 1])]
        for _, at in rows:
            self._keys[slots[at]] = self._embedding[buffers.input_ids[at]] * (1 + 0.1 * positions[at])
        for row, at in rows:
            assert positions[at] < lengths[row] == planned[row]
            table = tables.input_block_tables[0][row].tolist()
            places = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(positions[at] + 1)]
            hidden[at] = torch.tanh(self._keys[places].mean(0))
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self._head.t()).to(torch.bfloat16)


class FlashAttentionMetadataBuilder:
    """Named as the one that it stands for."""

    supports_update_block_table = False

    def __init__(self) -> None:
        self.scheduler_metadata = torch.zeros(MAX_REQUESTS, dtype=torch.int32)


class Planner(AttentionGroup):
    """One layer's attention, which plans by the lengths."""

    def __init__(self) -> None:
        self.layer_names = ["layer"]
        self.kv_cache_spec = SPEC
        self._builder = FlashAttentionMetadataBuilder()
        self.plan = self._builder.scheduler_metadata

    def get_metadata_builder(self, ubatch_id: int = 0) -> Any:
        return self._builder

    def build_metadata(self, common: Any, *_: Any, **__: Any) -> Any:
        self.plan[: len(common.seq_lens)] = common.seq_lens
        self.plan[len(common.seq_lens) :] = 0
        return common

    def build_metadata_for_cudagraph_capture(self, common: Any, *_: Any) -> Any:
        return self.build_metadata(common)


def new_runner() -> Any:
    """vLLM's `GPUModelRunner` with a small model, no request in it."""
    runner: Any = model_runner.GPUModelRunner.__new__(model_runner.GPUModelRunner)
    nothing = (
        "pp_handler encoder_cache lora_config speculator rejection_sampler speculative_config kv_block_zeroer "
        "intermediate_tensors execute_model_state output_copy_stream vllm_config pcp_manager ubatch_runner "
        "adaptive_verification aux_output_connector batch_sharder fast_prefill pooling_runner"
    )
    off = (
        "use_pp use_dcp supports_mm_inputs uses_inputs_embeds is_encoder_decoder use_aux_hidden_state_outputs "
        "is_pooling_model check_ep_fault"
    )
    vars(runner).update(dict.fromkeys(nothing.split()), **dict.fromkeys(off.split(), False))
    vars(runner).update(
        device=CPU,
        max_num_reqs=MAX_REQUESTS,
        max_num_tokens=MAX_TOKENS,
        max_model_len=MAX_LENGTH,
        num_speculative_steps=0,
        decode_query_len=1,
        dcp_size=1,
        is_first_pp_rank=True,
        is_last_pp_rank=True,
        main_stream=SimpleNamespace(),
        output_copy_stream=SimpleNamespace(wait_stream=lambda _: None),
        model_config=SimpleNamespace(rswa_window=None, is_mm_prefix_lm=False, max_model_len=MAX_LENGTH),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_rank=0, enable_eplb=False),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        eplb=SimpleNamespace(step=lambda **_: None, prepare_forward=lambda *_: None),
        step_timing=async_utils.StepTimingCollector(),
        kv_connector=NO_OP_KV_CONNECTOR,
        ec_connector=model_runner.get_ec_connector(SimpleNamespace(ec_transfer_config=None), None),
        lora_state=LoraState(max_num_reqs=MAX_REQUESTS),
        req_states=RequestState(MAX_REQUESTS, MAX_LENGTH, MAX_TOKENS, 0, VOCABULARY, CPU),
        input_buffers=InputBuffers(MAX_REQUESTS, MAX_TOKENS, CPU),
        prompt_logprobs_worker=PromptLogprobsWorker(MAX_REQUESTS, CPU),
        block_tables=BlockTables([BLOCK], MAX_REQUESTS, MAX_TOKENS, [MAX_LENGTH // BLOCK], CPU),
        kernel_block_sizes=[BLOCK],
        kv_cache_config=SimpleNamespace(
            num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=["layer"], kv_cache_spec=SPEC)]
        ),
        attn_groups=[[Planner()]],
    )
    runner.sampler = Sampler(SimpleNamespace(reasoning_config=None), MAX_REQUESTS, VOCABULARY, CPU, runner.req_states)
    runner.model_state = _model_state(runner)
    runner.model = Model(runner)
    runner.cudagraph_manager = Graphs(runner.model)
    return runner


def _model_state(runner: Any) -> Any:
    state: Any = DefaultModelState.__new__(DefaultModelState)
    vars(state).update(
        rope_state=None,
        prompt_embeds_state=None,
        supports_mm_inputs=False,
        encoder_cache=None,
        model_config=runner.model_config,
    )
    return state
