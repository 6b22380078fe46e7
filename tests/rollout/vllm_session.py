"""Observe the real vLLM in a separate process: `python -m tests.rollout.vllm_session FOLDER`.

vLLM changes its process (threads, process group, torch's hooks), so tests do not import it. One process runs it for all
of `test_vllm_engine.py` and writes JSON for the tests.
"""

import gc
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlcore.batching.pack import pack
from rlcore.config import ModelConfig, SamplingConfig
from rlcore.config.rollout import RolloutConfig
from rlcore.errors import EngineError, WorkerLostError
from rlcore.models.load import load_policy
from rlcore.rollout.engine import SamplingRequest, TailCut, make_requests
from rlcore.rollout.vllm import short_steps as short_scheduler
from rlcore.rollout.vllm.engine import VllmEngine
from rlcore.rollout.vllm.start import EngineShape, allow_sleep_on_shared_gpu
from rlcore.rollout.vllm.weights import SentWeights
from rlcore.types import Prompt, Rollout, Score

CPU = torch.device("cpu")
VOCAB, END = 96, 1
SETTINGS = RolloutConfig(engine="vllm", max_num_seqs=32, memory_share=0.3)
SAMPLING = SamplingConfig(temperature=0.7)
MAX_TOKENS = 12
CUT_TOKENS = 200
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # wide, so that a wrong tensor shows
}


def write_model(kind: str, directory: Path, seed: int) -> Path:
    """Write a random model: Qwen2 with tied embeddings and biases, or Llama with grouped heads and an untied head."""
    torch.manual_seed(seed)
    if kind == "tied":
        config: Any = Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    else:
        config = LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def some_requests(num_prompts: int, num_samples: int, length: int) -> list[SamplingRequest]:
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(index, tuple(rng.integers(3, VOCAB, size=length - index % 2).tolist()), "x", "{}")
        for index in range(num_prompts)
    ]
    return make_requests(prompts, num_samples, run_seed=1, stream=1, step=5)


def build(
    directory: Path,
    settings: RolloutConfig = SETTINGS,
    *,
    max_model_len: int = 240,
    dtype: torch.dtype = torch.float32,
) -> VllmEngine:
    shape = EngineShape(str(directory), max_model_len, settings.max_num_seqs, device=CPU, dtype=dtype)
    return VllmEngine(shape, settings, eos_token_ids=frozenset({END}))


def weights_of(directory: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_file(directory / "model.safetensors").items()


def answers(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


def in_order(rollouts: list[Rollout], requests: list[SamplingRequest]) -> bool:
    return [(r.prompt, r.sample_index) for r in rollouts] == [(r.prompt, r.sample_index) for r in requests]


def differing(engine: VllmEngine, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    sent = SentWeights(engine.model)
    for _ in sent.record(weights):
        pass
    return list(sent.compare().differing)


def mean_difference(directory: Path, rollouts: list[Rollout], temperature: float) -> float:
    policy = load_policy(directory, model=ModelConfig(), device=CPU)
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    with torch.no_grad():
        inputs = (batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.target_ids, batch.loss_mask)
        found = policy(*inputs, temperature=temperature, entropy="none").logprobs
    return float((found - batch.behavior_logprobs)[batch.loss_mask].abs().mean())


def keep_frozen() -> None:
    """Exclude imported objects from garbage collections, which would take 1.5 s at each engine's end."""
    gc.unfreeze = lambda: None


def message(action: Any, kind: type[Exception] = EngineError) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def engine_facts(folder: Path) -> dict[str, Any]:
    """Observe one engine on the tied model, from its first weight sync to its faults."""
    from vllm.platforms import current_platform

    first, second = write_model("tied", folder / "first", 1), write_model("tied", folder / "second", 2)
    facts: dict[str, Any] = {}
    long = some_requests(8, 4, 200)
    fresh = _loaded_by_vllm(second)
    facts["fresh"] = answers(fresh.generate(long, SAMPLING, MAX_TOKENS))
    fresh.close()  # one engine at a time: they share vLLM's process groups
    threads = torch.get_num_threads()
    engine = build(first)
    torch.set_num_threads(threads + 1)
    facts["threads"] = [threads + 1, torch.get_num_threads()]
    facts["compiles_with"] = current_platform.simple_compile_backend
    torch.set_num_threads(threads)

    requests = some_requests(8, 4, 20)
    facts["before_hand_over"] = message(lambda: engine.generate(requests, SAMPLING, MAX_TOKENS))
    engine.update_weights(weights_of(first), version=3)
    found = engine.generate(requests, SAMPLING, MAX_TOKENS)
    facts["in_order"] = in_order(found, requests)
    facts["versions"] = [rollout.policy_version for rollout in found]
    facts["finish"] = [(r.finish_reason, len(r.response_ids), int(r.response_ids[-1])) for r in found]
    facts["answers"] = answers(found)
    backwards = answers(engine.generate(requests[::-1], SAMPLING, MAX_TOKENS))
    facts["backwards"] = backwards[::-1]
    facts["other_seeds"] = answers(
        engine.generate([replace(r, seed=r.seed ^ 1) for r in requests], SAMPLING, MAX_TOKENS)
    )
    facts["difference"] = {str(t): mean_difference(first, _at(engine, requests, t), t) for t in (1.0, 0.7)}
    greedy = _at(engine, requests, 0.0)
    facts["greedy"] = answers(greedy)
    facts["difference"]["0"] = mean_difference(first, greedy, 1.0)

    limited = [replace(request, max_tokens=1 + i % 5) for i, request in enumerate(requests)]
    facts["limited"] = [len(r.response_ids) for r in engine.generate(limited, SAMPLING, MAX_TOKENS)]
    order = [index for index, _ in engine.stream(limited, SAMPLING, MAX_TOKENS)]
    facts["streamed"] = order
    stopped = engine.stream(requests, SAMPLING, MAX_TOKENS)
    next(stopped)
    stopped.close()
    facts["after_a_stopped_stream"] = answers(engine.generate(requests, SAMPLING, MAX_TOKENS))
    facts["short_steps"] = short_steps_facts(engine)

    engine.generate(long, SAMPLING, MAX_TOKENS)  # fills the prefix cache with the first weights
    engine.update_weights(weights_of(second), version=4)
    facts["handed_over"] = answers(engine.generate(long, SAMPLING, MAX_TOKENS))

    facts["stale_prefix"] = _with_stale_prefix(engine, first, long)
    facts["tensor_left_out"] = message(
        lambda: engine.update_weights(_without(weights_of(first), "model.layers.1.self_attn.k_proj.weight"), 6)
    )
    facts["after_a_failed_hand_over"] = engine.policy_version
    facts["unknown_tensor"] = message(lambda: engine.update_weights([("model.extra", torch.zeros(2))], 7))
    engine.update_weights(weights_of(first), version=8)
    facts["differing_when_right"] = differing(engine, weights_of(first))
    facts["differing_when_wrong"] = len(differing(engine, weights_of(second)))
    engine.close()
    return facts


def short_steps_facts(engine: VllmEngine) -> dict[str, Any]:
    """Compare responses with and without short steps: with room for all, without, and with five times as many requests
    as places."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    most_tokens = 100  # answers that go over the end of a cache block
    most_steps, short_scheduler._MAX_SHORT_STEPS = short_scheduler._MAX_SHORT_STEPS, 24
    pool = scheduler.kv_cache_manager.block_pool
    facts: dict[str, Any] = {}
    for room in ("enough", "scarce", "many"):
        requests = some_requests(40 if room == "many" else 8, 4, 118)
        if room == "many":  # that end one after the other
            requests = [replace(request, max_tokens=20 + i % 31) for i, request in enumerate(requests)]
        held = pool.get_new_blocks(pool.get_num_free_blocks() - 40) if room == "scarce" else []
        for way in ("short", "own"):
            scheduler.short_steps_allowed = way == "short"
            orders = list[Any]()
            with patch.object(scheduler, "schedule", counting(scheduler.schedule, orders)):
                found = engine.generate(requests, SamplingConfig(temperature=1.0), most_tokens)
            facts[f"{room} {way}"] = {
                "answers": answers(found),
                "logprobs": [rollout.behavior_logprobs.tolist() for rollout in found],
                "reasons": [rollout.finish_reason for rollout in found],
                "steps": sum(is_short for is_short, _ in orders),
                "preempting": sum(preempts for _, preempts in orders),
                "left": len(scheduler.requests),
            }
            engine._engine.reset_prefix_cache()
        pool.free_blocks(held)
    scheduler.short_steps_allowed = True
    short_scheduler._MAX_SHORT_STEPS = most_steps
    facts["unknown"] = unknown_change_facts(engine, scheduler)
    return facts


def unknown_change_facts(engine: VllmEngine, scheduler: Any) -> dict[str, Any]:
    """Generate responses while vLLM's own `schedule` changes a number that short steps do not know."""
    base, example = type(scheduler).__mro__[2], scheduler._example

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.a_new_count = getattr(self, "a_new_count", 0) + 1
        return own(self, *args, **kwargs)

    own, scheduler._example = base.schedule, None
    with patch.object(base, "schedule", schedule), patch.object(short_scheduler.log, "warning") as warning:
        found = engine.generate(some_requests(8, 4, 118), SamplingConfig(temperature=1.0), 20)
    facts = {
        "answers": answers(found),
        "allowed": scheduler.short_steps_allowed,
        "warnings": [call.args[0] % call.args[1:] for call in warning.call_args_list],
    }
    scheduler.short_steps_allowed, scheduler._example = True, example
    engine._engine.reset_prefix_cache()
    return facts


def counting(schedule: Any, orders: list[Any]) -> Any:
    """Return `schedule`, and record whether each step is short and whether it preempts requests."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        order = schedule(*args, **kwargs)
        orders.append((any(order is one[0] for one in schedule.__self__._short_steps), bool(order.preempted_req_ids)))
        return order

    return wrapped


def tail_cut_facts(folder: Path) -> dict[str, Any]:
    """Compare a stream with a tail cut with whole responses, with and without short steps, and with few places."""
    engine = build(write_model("tied", folder / "seventh", 1))
    engine.update_weights(weights_of(folder / "seventh"), version=0)
    scheduler = engine._engine.engine_core.engine_core.scheduler
    facts: dict[str, Any] = {}
    for case in ("short", "own", "many"):
        scheduler.short_steps_allowed = case != "own"
        found = some_requests(16 if case == "many" else 7, 4, 20)
        requests = [replace(request, group=index // 4) for index, request in enumerate(found)]
        requests += [replace(request, seed=request.seed ^ 1) for request in found[:4]]  # these have to finish
        whole = engine.generate(requests, SamplingConfig(), CUT_TOKENS)
        facts[case] = cut_facts(engine, requests, whole, wanted=4) | {"left": len(scheduler.requests)}
    engine.close()
    return facts


def cut_facts(
    engine: VllmEngine, requests: list[SamplingRequest], whole: list[Rollout], *, wanted: int, world_size: int = 1
) -> dict[str, Any]:
    groups = [request.group for request in requests]
    cut = TailCut(groups, wanted, CUT_TOKENS, world_size, CPU)
    found: dict[int, Rollout] = {}
    for index, rollout in engine.stream(requests, SamplingConfig(), CUT_TOKENS, cut):
        found[index] = rollout
        if not rollout.is_cut:
            cut.end(groups[index], rollout.sample_index, len(rollout.response_ids))
    while cut.agree(busy=False):
        pass
    pairs = [(found[index], rollout) for index, rollout in enumerate(whole)]
    return {
        "bound": cut.bound,
        "groups": groups,
        "whole": [len(rollout.response_ids) for rollout in whole],
        "lengths": [len(rollout.response_ids) for rollout, _ in pairs],
        "is_cut": [rollout.is_cut for rollout, _ in pairs],
        "prefixes": [r.response_ids.tolist() == w.response_ids[: len(r.response_ids)].tolist() for r, w in pairs],
        "logprobs_off": max(
            float(np.abs(r.behavior_logprobs - w.behavior_logprobs[: len(r.behavior_logprobs)]).max()) for r, w in pairs
        ),
    }


def sleep_facts() -> dict[str, Any]:
    """Let vLLM's GPU worker sleep while free memory falls from 5 to 3, with its code and ours, without a device."""
    from vllm.v1.worker.gpu_worker import Worker

    worker = Worker.__new__(Worker)
    worker._sleep_mode_backend = suspended = Mock()
    worker.vllm_config = Mock(model_config=Mock(enable_nccl_comm_suspend=False))

    with (
        patch.object(torch.accelerator, "synchronize"),
        patch.object(torch.accelerator, "get_memory_info", side_effect=[(5, 10), (3, 10)] * 2),
    ):
        by_itself = message(lambda: worker.sleep(1), AssertionError)
        allow_sleep_on_shared_gpu()
        allow_sleep_on_shared_gpu()
        return {
            "by_itself": by_itself,
            "by_ours": message(lambda: worker.sleep(1), AssertionError),
            "suspended": suspended.suspend.call_count,
        }


def refusal_facts(folder: Path) -> dict[str, Any]:
    first = write_model("tied", folder / "fifth", 5)
    unknown = write_model("tied", folder / "sixth", 5)
    config = json.loads((unknown / "config.json").read_text(encoding="utf-8"))
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["SomeoneElsesForCausalLM"]}))
    none_left = SETTINGS.model_copy(update={"memory_share": 1e-9})
    while_others_end = RuntimeError(  # vLLM's own text, as two runs on one GPU got it; a CPU's vLLM has no such check
        "Error in memory profiling. Initial free memory 126.44 GiB, current free memory 135.74 GiB. This happens when "
        "other processes sharing the same container release GPU memory while vLLM is profiling during initialization."
    )
    with patch("vllm.LLMEngine", side_effect=while_others_end):
        others_freed = message(lambda: build(first), WorkerLostError)  # a run retries such a start
    return {
        "others_freed": others_freed,
        "unknown_architecture": message(lambda: build(unknown)),
        "too_long": message(lambda: build(first, max_model_len=SHAPE["max_position_embeddings"] + 1)),
        "dtype": message(lambda: build(first, dtype=torch.float64)),
        "no_cache": message(lambda: build(first, none_left)),
        "sleep": sleep_facts(),
    }


def _at(engine: VllmEngine, requests: list[SamplingRequest], temperature: float) -> list[Rollout]:
    return engine.generate(requests, SamplingConfig(temperature=temperature), MAX_TOKENS)


def _without(weights: Iterator[tuple[str, Tensor]], left_out: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in weights if name != left_out)


def _loaded_by_vllm(directory: Path) -> VllmEngine:
    """Return an engine whose weights vLLM read from files, without a weight sync."""
    from rlcore.rollout.vllm import start

    plain = start.engine_arguments

    def from_files(shape: EngineShape, settings: RolloutConfig) -> dict[str, Any]:
        return {**plain(shape, settings), "load_format": "safetensors"}

    with patch.object(start, "engine_arguments", from_files):
        engine = build(directory)
    engine.policy_version = 0
    return engine


def _with_stale_prefix(engine: VllmEngine, directory: Path, requests: list[SamplingRequest]) -> dict[str, Any]:
    """Sync weights and keep the prefix cache; return the error, and responses next to correct ones."""
    with patch.object(engine._engine, "reset_prefix_cache", lambda: True):
        refused = message(lambda: engine.update_weights(weights_of(directory), version=5))
        engine.policy_version = 5
        found = answers(engine.generate(requests, SAMPLING, MAX_TOKENS))
    engine._engine.reset_prefix_cache()
    return {
        "refused": refused,
        "stale": found,
        "right": answers(engine.generate(requests, SAMPLING, MAX_TOKENS)),
    }


def main(folder: Path) -> None:
    from tests.rollout import vllm_training

    keep_frozen()
    parts = {
        "engine": engine_facts,
        "tail_cut": tail_cut_facts,
        "training": vllm_training.training_facts,
        "adapters": vllm_training.adapter_facts,
        "episodes": vllm_training.episode_facts,
        "carrying": vllm_training.carrying_facts,
        "bfloat16": vllm_training.bfloat16_facts,
        "refusals": refusal_facts,
    }
    for name, part in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(part(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
