"""The `RolloutEngine` with vLLM in the worker's process. Responses to one prompt share the prefill through the prefix
cache. Neighboring ranks may share an engine (`rollout.tensor_parallel_size`). Each of these ranks then holds a part of
every matrix. Each also runs vLLM's scheduler with the same requests, order and seeds, so all ranks make the same
decisions."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.config.rollout import RolloutConfig, SamplingConfig
from rlcore.errors import EngineError
from rlcore.models.load import parameter_names
from rlcore.models.memory import release_cached_memory
from rlcore.rollout.engine import ROUND_TOKENS, Requests, RolloutEngine, SamplingRequest, TailCut, WeightSyncResult
from rlcore.rollout.vllm import weights as sync
from rlcore.rollout.vllm.start import EngineShape, give_float32_logits, start_vllm
from rlcore.types import Rollout

_MAX_IDLE_STEPS = 10_000  # maximum number of consecutive vLLM steps without output while responses are missing


@dataclass(frozen=True, slots=True)
class _Response:
    index: int
    token_ids: list[int]
    logprobs: list[float]

    def append(self, output: Any) -> None:
        self.token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            # There is one row per token, with only the sampled token.
            self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())


class VllmEngine(RolloutEngine):
    """A rollout engine that runs vLLM."""

    def __init__(self, shape: EngineShape, settings: RolloutConfig, *, eos_token_ids: frozenset[int]) -> None:
        self._sleep_level = settings.sleep_level if shape.device.type == "cuda" else 0
        self._eos_token_ids = sorted(eos_token_ids)
        self._expected = parameter_names(shape.model_directory)
        self.policy_version = -1
        self._asleep = False
        self._names = itertools.count()
        self._engine = start_vllm(shape, settings)
        self._places: dict[str, Tensor] | None = None
        self._sharing_ranks: Any = None  # vLLM's group of the ranks that share this engine
        if settings.tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self._sharing_ranks = get_tp_group()
            self._sharing_ranks.mq_broadcaster = None  # its shared memory would remain after a kill
        if shape.dtype != torch.float32:
            give_float32_logits(self.model)

    @property
    def model(self) -> nn.Module:
        """The model inside vLLM."""
        model: nn.Module = self._engine.model_executor.driver_worker.worker.get_model()
        return model

    def stream(
        self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int, cut: TailCut | None = None
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with its request's index. All ranks of a shared engine must consume the whole stream."""
        everyones, mine = self._gather(requests)
        if not everyones:
            return
        if self.policy_version < 0:
            raise EngineError("the engine got requests before a weight sync (the first one, or the one after a sleep)")
        self._wake()
        # Bypasses `LLMEngine.step`, which creates text, statistics and log-probability objects for every token.
        core = self._engine.engine_core
        writing: dict[str, _Response] = {}
        num_idle = num_steps = 0
        most_idle = _MAX_IDLE_STEPS + max_response_tokens  # the scheduler keeps tokens until a response ends
        try:
            for index, prepared in enumerate(self._prepare_requests(everyones, sampling, max_response_tokens)):
                core.add_request(prepared)
                writing[prepared.request_id] = _Response(index, [], [])
            while writing:
                if cut is not None and num_steps % ROUND_TOKENS == 0:
                    self._agree(cut, [name for name, one in writing.items() if everyones[one.index].group >= 0])
                num_steps += 1
                outputs = core.get_output().outputs
                num_idle = 0 if outputs else num_idle + 1
                if num_idle > most_idle:
                    raise EngineError(f"vLLM returned no response to {len(writing)} requests")
                for output in outputs:
                    answer = writing.get(output.request_id)
                    if answer is None:  # a request cancelled by an earlier call
                        continue
                    answer.append(output)
                    if output.finish_reason is not None:
                        del writing[output.request_id]
                        if answer.index in mine:
                            index = answer.index - mine.start
                            request, reason = requests[index], str(output.finish_reason)
                            yield index, self._rollout(request, answer, reason, request.limit(max_response_tokens))
        finally:
            if writing:  # the caller stopped, or a step failed
                core.abort_requests(list(writing))

    def _gather(self, requests: Requests) -> tuple[Requests, range]:
        """Return the requests of all ranks in rank order, and the range of this rank's requests. All ranks that share
        the engine must call this method together."""
        ranks = self._sharing_ranks
        if ranks is None:
            return requests, range(len(requests))
        shares: list[Requests] = [()] * ranks.world_size
        dist.all_gather_object(shares, list(requests), group=ranks.cpu_group)
        before = sum(map(len, shares[: ranks.rank_in_group]))
        return [one for share in shares for one in share], range(before, before + len(requests))

    def _agree(self, cut: TailCut, names: Sequence[str]) -> None:
        """Exchange the lengths of finished responses with the other ranks. If this lowers `cut.bound`, make the new
        bound the token limit of the requests with the ids `names`."""
        before = cut.bound
        cut.agree()
        if cut.bound < before:
            self._engine.engine_core.engine_core.scheduler.lower_limits(names, cut.bound)

    def _prepare_requests(
        self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[Any]:
        """Yield vLLM's request objects. vLLM prepares and checks only the first object. The other objects are copies of
        it with other ids, prompts, seeds and limits."""
        from msgspec.structs import replace
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=requests[0].seed,
            max_tokens=requests[0].limit(max_response_tokens),
            stop_token_ids=self._eos_token_ids,
            ignore_eos=True,  # only the ids above end a response
            logprobs=0,  # only of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        first = self._engine.input_processor.process_inputs(
            str(next(self._names)),
            {"type": "token", "prompt_token_ids": list(requests[0].prompt.token_ids)},
            params,
            supported_tasks=self._engine.get_supported_tasks(),
        )
        yield first
        for request in requests[1:]:
            yield replace(
                first,
                request_id=str(next(self._names)),
                prompt_token_ids=list(request.prompt.token_ids),
                sampling_params=replace(
                    first.sampling_params, seed=request.seed, max_tokens=request.limit(max_response_tokens)
                ),
            )

    def _rollout(self, request: SamplingRequest, answer: "_Response", reason: str, limit: int) -> Rollout:
        token_ids = np.array(answer.token_ids, dtype=np.int32)
        logprobs = np.array(answer.logprobs, dtype=np.float32)
        if reason not in ("stop", "length") or len(logprobs) != len(token_ids):
            raise EngineError(
                f"vLLM's response to prompt {request.prompt.prompt_id} ended by {reason!r} with "
                f"{len(token_ids)} tokens and {len(logprobs)} log-probabilities"
            )
        return Rollout(
            prompt=request.prompt,
            sample_index=request.sample_index,
            response_ids=token_ids,
            behavior_logprobs=logprobs,
            finish_reason="stop" if reason == "stop" else "length",
            policy_version=self.policy_version,
            is_cut=reason == "length" and len(token_ids) < limit,
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Copy all weights into vLLM, and compare vLLM's weights with the sent ones. Raises EngineError if the name of
        a weight is unknown or missing."""
        self.policy_version = -1  # an interrupted weight sync leaves no valid version
        if self._asleep:
            release_cached_memory()
            self._engine.wake_up(["weights"])
        sent = sync.SentWeights(self.model)
        sync.load_weights(self.model, self._engine.model_config, sent.record(weights), self._expected, self._places)
        with torch.no_grad():
            taken = sent.compare()
            if self._places is None and taken == WeightSyncResult():
                self._places = sent.storages()
        self._wake(["kv_cache"])
        cached = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        if not self._engine.reset_prefix_cache() or len(cached.cached_block_hash_to_block):
            raise EngineError("weight sync: vLLM kept its prefix cache, which has values of the old weights")
        self.policy_version = version
        return taken

    def sleep(self) -> None:
        """Release memory according to `rollout.sleep_level`. At level 2, the weights are discarded, so the engine needs
        a weight sync before it generates again."""
        if self._asleep or self._sleep_level == 0:
            return
        torch.cuda.synchronize()  # vLLM unmaps memory that kernels may still read
        self._engine.sleep(self._sleep_level)
        self._asleep = True
        if self._sleep_level == 2:
            self.policy_version = -1

    def _wake(self, tags: list[str] | None = None) -> None:
        if not self._asleep:
            return
        release_cached_memory()  # vLLM maps memory itself and cannot use torch's reserved memory
        self._engine.wake_up(tags)
        self._asleep = False

    def close(self) -> None:
        """End vLLM and release its memory."""
        engine, self._engine = self._engine, None
        if engine is not None:
            from vllm.platforms import current_platform

            engine.engine_core.shutdown()
            # The pool of CUDA graphs ends with the last graph. vLLM keeps its id, so a later engine would use it.
            type(current_platform)._global_graph_pool = None
