"""Short steps of vLLM's scheduler: steps in which no request can start and every running answer gets one token.

vLLM's own `schedule` and `update_from_output` go through every request in general Python: 30 to 40 microseconds a
token, more than the GPU needs for it once a batch holds hundreds of answers of a small model. Nearly all steps of a
rollout are short ones, which are ordered and taken in here with as much work as they need; any other step, and every
end of an answer, is vLLM's own.

Tokens of short steps are kept here until vLLM next makes an output of their answer, and are put before it.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.rollout.vllm.short import REQUEST_CHANGES, SCHEDULER_CHANGES, scheduler_obstacle

log = logging.getLogger(__name__)

_Scheduler: Any = object
"""Stands for vLLM's scheduler class, which follows `ShortSteps` in the class that is made of both."""


class _Kept:
    """Tokens of one answer that no output has carried yet, with their log-probabilities."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []


class ShortSteps(_Scheduler):  # type: ignore[misc]
    """Methods that stand before those of vLLM's scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = scheduler_obstacle(self)
        if reason is not None:
            log.warning("rollout.engine: vLLM's own scheduler orders every step, which takes longer: %s", reason)
        self.short_steps_allowed = reason is None
        self._block_tokens = 1 if reason else self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._placeholders: int | None = None  # that a scheduled token leaves behind, once seen
        self._counts_in_flight = False  # releases after 0.25 do, in each request
        self._example: Any = None  # vLLM's own order of a step of this kind; None: the next step is vLLM's
        self._short_steps: deque[tuple[Any, int]] = deque()  # ordered, not yet answered; and preemptions before
        self.num_preempting_steps = 0
        self.num_short_steps = 0
        self._hashes_behind = False
        self._kept: dict[str, _Kept] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Order the next step."""
        if self._example is not None and not self._fills_up():
            order = self._one_token_each()
            if order is not None:
                return order
        return self._general(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's tokens; the outputs of a short step are those of the answers that may have ended."""
        if self._short_steps and self._short_steps[0][0] is scheduler_output:
            _, preempting = self._short_steps.popleft()
            if preempting == self.num_preempting_steps and model_runner_output.sampled_token_ids:
                return self._take(scheduler_output, model_runner_output)
        return self._with_kept(super().update_from_output(scheduler_output, model_runner_output))

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside and drop their kept tokens."""
        for request_id in (request_ids,) if isinstance(request_ids, str) else request_ids or list(self._kept):
            self._kept.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)

    def _fills_up(self) -> bool:
        """Whether waiting requests come in now: once half of the places are free. A step with a prompt in it is vLLM's
        own and takes several times as long, and answers end at almost every step. After such a step vLLM orders the
        next one too, so all places are taken."""
        limit = min(self.max_num_running_reqs, getattr(self, "max_num_active_reqs", self.max_num_running_reqs))
        return len(self.requests) > len(self.running) and len(self.running) <= limit // 2

    def _general(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own step. One that could have been short becomes the example of the short ones after it."""
        self._example = None
        if self._hashes_behind:  # vLLM adds them with every token, and reads them at the end of a block
            for request in self.running:
                request.update_block_hashes()
            self._hashes_behind = False
        seen = self.running[0] if self.short_steps_allowed and self.running else None
        before = None if seen is None or self._placeholders is not None else (dict(vars(seen)), _plain(vars(self)))
        order = super().schedule(*args, **kwargs)
        if order.preempted_req_ids:
            self.num_preempting_steps += 1
        if seen is None or not self._one_token_to_each(order) or seen.request_id not in order.num_scheduled_tokens:
            return order
        if before is not None:
            # Another release may keep more records than these: then all its steps are its own.
            if (
                _changed(before[0], vars(seen)) - REQUEST_CHANGES
                or _changed(before[1], _plain(vars(self))) - SCHEDULER_CHANGES
            ):
                self.short_steps_allowed = False
                return order
            self._placeholders = seen.num_output_placeholders - before[0]["num_output_placeholders"]
            self._counts_in_flight = "num_in_flight_tokens" in before[0]
        self._example = order
        return order

    def _one_token_to_each(self, order: Any) -> bool:
        counts = order.num_scheduled_tokens
        return (
            bool(counts)
            and max(counts.values()) == 1
            and not order.scheduled_new_reqs
            and not order.scheduled_cached_reqs.resumed_req_ids
            and not order.preempted_req_ids
            and not any(request.is_prefill_chunk for request in self.running)
        )

    def _one_token_each(self) -> Any:
        """Order of a short step: one token for each running request; None where that is not possible."""
        ready: list[Any] = []
        request_ids, computed_tokens, output_tokens = [], [], []
        crossing: list[int] = []
        for request in self.running:
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            # Nothing to order where a token that must be the last is under way.
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue
            if computed % self._block_tokens == 0:
                crossing.append(len(ready))
            ready.append(request)
            request_ids.append(request.request_id)
            computed_tokens.append(computed)
            output_tokens.append(len(request._output_token_ids) + placeholders)
        if not ready or len(crossing) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: list[Any] = [None] * len(ready)
        for index in crossing:
            # Blocks of answers are not put into the prefix cache: the next weights make them void.
            new = self.kv_cache_manager.allocate_slots(ready[index], 1, delay_cache_blocks=True)
            blocks[index] = new.get_block_ids(allow_none=True)
        left = self._placeholders
        in_flight = self._counts_in_flight
        for request in ready:
            request.num_computed_tokens += 1
            request.num_output_placeholders += left
            if in_flight:
                request.num_in_flight_tokens += 1
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(request_ids)
        order = replace(
            self._example,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=replace(
                self._example.scheduled_cached_reqs,
                req_ids=request_ids,
                new_block_ids=blocks,
                num_computed_tokens=computed_tokens,
                num_output_tokens=output_tokens,
            ),
            num_scheduled_tokens=dict.fromkeys(request_ids, 1),
            total_num_scheduled_tokens=len(request_ids),
            finished_req_ids=self.finished_req_ids,
        )
        self.finished_req_ids: Any = set()
        self._short_steps.append((order, self.num_preempting_steps))
        self.num_short_steps += 1
        return order

    def _take(self, order: Any, output: Any) -> Any:
        """Keep the token of each answer; vLLM takes in those of answers that may have ended."""
        rows = output.req_id_to_index
        sampled = output.sampled_token_ids
        logprobs = None if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        left = self._placeholders
        ending: dict[str, int] = {}
        kept = self._kept
        in_flight = self._counts_in_flight
        for request_id in order.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:  # ended one step ago, with this step already under way
                continue
            row = rows[request_id]
            (token,) = sampled[row]
            written = request._output_token_ids
            parameters = request.sampling_params
            if (
                len(written) + 1 >= request.max_tokens
                or len(request._all_token_ids) + 1 >= self.max_model_len
                or token in parameters.all_stop_token_ids
                or parameters.repetition_detection is not None
            ):
                ending[request_id] = 1
                continue
            written.append(token)
            request._all_token_ids.append(token)
            request.num_output_placeholders -= left
            if in_flight:
                request.num_in_flight_tokens -= 1
            piece = kept.get(request_id)
            if piece is None:
                piece = kept[request_id] = _Kept()
            piece.token_ids.append(token)
            if logprobs is not None:
                piece.logprobs.append(logprobs[row])
        self._hashes_behind = True
        if not ending:
            return {}
        return self._with_kept(super().update_from_output(replace(order, num_scheduled_tokens=ending), output))

    def _with_kept(self, outputs: Any) -> Any:
        """Put the kept tokens before those of vLLM's outputs."""
        for group in outputs.values():
            for output in group.outputs:
                piece = self._kept.pop(output.request_id, None)
                if piece is None:
                    continue
                output.new_token_ids = [*piece.token_ids, *output.new_token_ids]
                last = output.new_logprobs
                if last is not None:
                    values = np.array([*piece.logprobs, *last.logprobs[:, 0].tolist()], dtype=np.float32)
                    output.new_logprobs = last._replace(
                        logprobs=values[:, None], logprob_token_ids=np.array(output.new_token_ids)[:, None]
                    )
        return outputs


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, int | str | float | None)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names whose value differs; a list that has grown counts as the same."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
