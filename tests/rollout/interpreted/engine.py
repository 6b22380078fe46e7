"""vLLM's asynchronous scheduler, its engine core's step and its executor over the runner of `machine`."""

import queue
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rlcore.rollout.vllm.short import shortened_scheduler
from rlcore.rollout.vllm.short.runner import ShortRunner
from tests.rollout.interpreted.machine import BLOCK, MAX_LENGTH, MAX_REQUESTS, MAX_TOKENS, SPEC, VOCABULARY, new_runner


@dataclass
class Answers:
    """What a rollout has brought, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)


class _Worker:
    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @torch.inference_mode()
    def execute_model(self, order: Any) -> Any:
        return self._runner.execute_model(order)

    @torch.inference_mode()
    def sample_tokens(self, grammar: Any) -> Any:
        return self._runner.sample_tokens(grammar)


class Engine:
    """An engine with two steps under way, short ones where `short` asks for them."""

    def __init__(self, directory: Path, *, short: bool, num_blocks: int) -> None:
        self.runner = new_runner()
        self.short = ShortRunner(self.runner) if short else None
        if self.short is not None:
            self.short.install()
        model = ModelConfig(model=str(directory), dtype="float32", skip_tokenizer_init=True, max_model_len=MAX_LENGTH)
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_REQUESTS,
                max_num_batched_tokens=MAX_TOKENS,
                max_model_len=MAX_LENGTH,
                is_encoder_decoder=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.async_scheduling = True
        cache.block_size, cache.num_gpu_blocks = BLOCK, num_blocks
        self.scheduler = shortened_scheduler(AsyncScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], SPEC)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        self._core = _core(config, self.scheduler, _Worker(self.runner))

    def answers(self, requests: list[Any]) -> Answers:
        """All of them, to the end."""
        found = Answers()
        for request in requests:
            self.scheduler.add_request(request)
        for _ in range(300):
            outputs, _ = EngineCore.step_with_batch_queue(self._core)
            for group in (outputs or {}).values():
                for output in group.outputs:
                    found.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    rows = output.new_logprobs.logprobs[:, 0].tolist()
                    found.logprobs.setdefault(output.request_id, []).extend(rows)
                    if output.finish_reason is not None:
                        found.ends[output.request_id] = str(output.finish_reason)
            if len(found.ends) == len(requests):
                return found
        raise AssertionError(f"{len(found.ends)} of {len(requests)} answers have ended")


def _core(config: Any, scheduler: Any, worker: Any) -> Any:
    executor: Any = UniProcExecutor.__new__(UniProcExecutor)
    executor.driver_worker = worker
    core: Any = EngineCore.__new__(EngineCore)
    vars(core).update(
        vllm_config=config,
        scheduler=scheduler,
        model_executor=executor,
        batch_queue_size=2,
        batch_queue=deque(maxlen=2),
        is_mm_encoder_only=False,
        is_pooling_model=False,
        check_for_draft_tokens=False,
        async_scheduling=True,
        aborts_queue=queue.Queue(),
        log_stats=False,
        _weight_version=None,
    )
    return core


def some_requests(count: int, most_tokens: int, *, warm: frozenset[int] = frozenset()) -> list[Any]:
    """Prompts of which pairs are equal, each with a seed, a limit and tokens to stop at; `warm` at temperature 0.7
    and short."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(3, 11))] for _ in range(-(-count // 2))]
    return [
        Request(
            f"request {index}",
            list(prompts[index // 2]),
            SamplingParams(
                temperature=0.7 if index in warm else 1.0,
                seed=rng.randrange(2**62),
                max_tokens=3 if index in warm else rng.randrange(most_tokens // 2, most_tokens + 1),
                stop_token_ids=[rng.randrange(VOCABULARY) for _ in range(40)],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            ),
            None,
            block_hasher=hasher,
        )
        for index in range(count)
    ]


def write_config(directory: Path) -> Path:
    """What vLLM wants to know of a model before there is one."""
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
    ).save_pretrained(directory)
    return directory
