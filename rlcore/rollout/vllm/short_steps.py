"""Short steps of vLLM's scheduler. A short step has no new request and gives every running response one token. vLLM's
`schedule` and `update_from_output` take 30 to 40 microseconds of Python per token. In a step of a small model with
hundreds of responses, this takes longer than the computation on the GPU. A short step updates all running responses as
rows of arrays. Only responses that may end or need a cache block are handled one by one. vLLM's own code runs all full
steps and ends all responses. vLLM's requests are updated before a full step (`_end_short_steps`). The tokens of short
steps are buffered until vLLM creates the next output of their response."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
_Scheduler: Any = object  # A placeholder for vLLM's scheduler class, the next base after `ShortSteps`
_MAX_SHORT_STEPS = 256  # number of short steps after which vLLM's requests are updated
SCHEDULER_NAMES = {
    "": "requests running finished_req_ids current_step max_model_len max_num_running_reqs log_stats num_spec_tokens "
    "num_lookahead_tokens lora_config connector ec_connector needs_kv_cache_zeroing defer_block_free dcp_world_size "
    "use_v2_model_runner prev_step_scheduled_req_ids",
    "kv_cache_config": "kv_cache_groups",
    "parallel_config": "pipeline_parallel_size",
    "kv_cache_manager": "new_step_starts allocate_slots",
    "kv_cache_manager.block_pool": "get_num_free_blocks",
}
"""The scheduler's attributes that short steps use, by object. A key is the path from the scheduler to the object."""
REQUEST_NAMES = (
    "request_id num_computed_tokens num_output_placeholders num_prompt_tokens max_tokens is_prefill_chunk "
    "sampling_params update_block_hashes _output_token_ids _all_token_ids"
)
"""The attributes of a request that short steps use."""
SAMPLING_NAMES = "all_stop_token_ids repetition_detection"  # attributes of a request's sampling parameters
REQUEST_CHANGES = frozenset(
    {"num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "next_decode_eligible_step"}
)
"""The attributes of a request that vLLM is expected to change when it schedules a token. `num_in_flight_tokens` exists
in releases after 0.25. If vLLM changes another attribute, short steps are disabled. Elements that are appended to a
list do not count as a change."""
SCHEDULER_CHANGES = frozenset({"current_step", "num_executed_steps", "prefill_capacity_bound"})
"""The numbers and texts in the scheduler that vLLM is expected to change when it schedules a token. If vLLM changes
another number or text, short steps are disabled. `num_executed_steps` exists in releases after 0.32."""


def unsupported_reason(scheduler: Any) -> str | None:
    """Return the reason why this scheduler does not support short steps, or None."""
    missing = _missing_names("scheduler", scheduler, SCHEDULER_NAMES) + _missing_request_names()
    if missing:
        import vllm

        return f"vLLM {vllm.__version__} has no {', '.join(missing)}"
    groups = scheduler.kv_cache_config.kv_cache_groups
    needs = {
        "full attention": len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec",
        "no speculation": scheduler.num_spec_tokens == 0 and scheduler.num_lookahead_tokens == 0,
        "no LoRA": scheduler.lora_config is None,
        "no cache connector": scheduler.connector is None and scheduler.ec_connector is None,
        "no zeroing of blocks": not scheduler.needs_kv_cache_zeroing,
        "blocks freed immediately": not scheduler.defer_block_free,
        "no statistics": not scheduler.log_stats,
        "no pipeline": scheduler.parallel_config.pipeline_parallel_size == 1,
        "no context parallelism": scheduler.dcp_world_size == 1,
    }
    return next((f"it needs {name}" for name, holds in needs.items() if not holds), None)


def _missing_names(kind: str, owner: Any, names: Mapping[str, str]) -> list[str]:
    wanted = [f"{path}.{name}".lstrip(".") for path, of_path in names.items() for name in of_path.split()]
    absent = object()
    return [
        f"{kind}.{name}"
        for name in wanted
        if reduce(lambda part, attribute: getattr(part, attribute, absent), name.split("."), owner) is absent
    ]


def _missing_request_names() -> list[str]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    defined = {*dir(Request), *Request.__init__.__code__.co_names}
    missing = [f"request.{name}" for name in REQUEST_NAMES.split() if name not in defined]
    return missing + _missing_names("sampling_params", SamplingParams(), {"": SAMPLING_NAMES})


class _Rows:
    """The running responses since the last full step, one per row of the arrays."""

    def __init__(self, requests: list[Any], longest: int, stop_token_ids: set[int]) -> None:
        self.requests = requests
        self.request_ids = np.array([request.request_id for request in requests], dtype=object)
        # The computed or scheduled tokens at this moment, and the short steps in which a response can take part.
        self.computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
        self.num_outputs = np.array(
            [len(one._output_token_ids) + one.num_output_placeholders for one in requests], dtype=np.int64
        )
        limits = [min(one.num_prompt_tokens + one.max_tokens, longest) for one in requests]
        self.to_come = np.array(limits, dtype=np.int64) - 1 - self.computed
        self.running = np.arange(len(requests))  # the rows of unfinished responses, in vLLM's order
        self.unfinished = np.ones(len(requests), dtype=bool)
        self.num_ordered = self.num_taken = 0  # scheduled and processed short steps
        self.token_ids = np.zeros((len(requests), _MAX_SHORT_STEPS), dtype=np.int64)
        self.logprobs = np.zeros((len(requests), _MAX_SHORT_STEPS), dtype=np.float32)
        self.stop_token_ids = np.array(sorted(stop_token_ids), dtype=np.int64)  # of all responses together

    def ready(self) -> Any:
        """Return the rows of the responses for which another token can be scheduled."""
        return self.running[self.to_come[self.running] > self.num_ordered]

    def ending(self, rows: Any, sampled: Any) -> Any:
        """Return a mask over `rows`, True for each response that ends with its new token in `sampled`."""
        ends = self.to_come[rows] - self.num_taken <= 1
        for at in np.flatnonzero((sampled[:, None] == self.stop_token_ids).any(1)):
            ends[at] |= sampled[at] in self.requests[rows[at]].sampling_params.all_stop_token_ids
        return ends

    def remove(self, rows: Any) -> None:
        self.unfinished[rows] = False
        self.running = self.running[self.unfinished[self.running]]


class ShortSteps(_Scheduler):  # type: ignore[misc]
    """A mixin for vLLM's scheduler class. Steps that only give one more token to each running request use arrays
    instead of vLLM's Python code for each request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = unsupported_reason(self)
        self.short_steps_allowed = True
        if reason is not None:
            self._disable_short_steps(reason)
        self._block_tokens = 1 if reason else self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._placeholders: int | None = None  # per scheduled token, None until a step shows it
        self._counts_in_flight = False  # in each request, after release 0.25
        self._example: Any = None  # vLLM's order of a step with one token each
        self._may_be_short = False  # whether the last full step allows a short one
        self._rows: _Rows | None = None
        self._short_steps: deque[tuple[Any, _Rows, Any]] = deque()  # orders in progress, with rows and indices
        self._hashes_behind = False
        self._kept: dict[str, tuple[list[int], list[float]]] = {}  # token ids and logprobs not yet in an output

    def _disable_short_steps(self, reason: str) -> None:
        log.warning("rollout.engine: short steps are disabled, which makes generation slower: %s", reason)
        self.short_steps_allowed = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next step, as a short step if possible."""
        if self.short_steps_allowed and self._may_be_short and self._example is not None and not self._admits_waiting():
            order = self._one_token_each()
            if order is not None:
                return order
        return self._full_step(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process the tokens of a step. A short step outputs only the responses that may have ended."""
        if self._short_steps and self._short_steps[0][0] is scheduler_output:
            _, rows, ordered = self._short_steps.popleft()
            if rows is self._rows:
                if model_runner_output.sampled_token_ids:
                    return self._buffer_tokens(rows, ordered, scheduler_output, model_runner_output)
                self._end_short_steps()
        outputs = self._prepend_buffered(super().update_from_output(scheduler_output, model_runner_output))
        if (now := self._rows) is not None:  # created while this step was in progress
            now.remove([row for row in now.running if now.request_ids[row] not in self.requests])
        return outputs

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Cancel requests and drop their buffered tokens."""
        self._end_short_steps()
        for request_id in (request_ids,) if isinstance(request_ids, str) else request_ids or list(self._kept):
            self._kept.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)

    def lower_limits(self, request_ids: Iterable[str], limit: int) -> None:
        """End the responses to `request_ids` at `limit` tokens. A longer response ends with its next token."""
        self._end_short_steps()
        for request in [self.requests[name] for name in request_ids if name in self.requests]:
            written = request.num_output_tokens + request.num_output_placeholders
            request.max_tokens = min(request.max_tokens, max(limit, written + 1))

    def _admits_waiting(self) -> bool:
        """Return whether requests are waiting and at most half of the maximum number of requests are running. Waiting
        requests start together, because a step that processes a prompt takes several times longer than other steps."""
        limit = min(self.max_num_running_reqs, getattr(self, "max_num_active_reqs", self.max_num_running_reqs))
        return len(self.requests) > len(self.running) and len(self.running) <= limit // 2

    def _full_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a full step of vLLM. The first schedule with one token per request is stored, and short steps use it as a
        template for their schedules."""
        self._end_short_steps()
        if self._hashes_behind:  # vLLM adds them per token, and reads them per block
            for request in self.running:
                request.update_block_hashes()
            self._hashes_behind = False
        seen: Any = self.running[0] if self.short_steps_allowed and self.running else None
        before = None if seen is None or self._example is not None else (dict(vars(seen)), _plain(vars(self)))
        order = super().schedule(*args, **kwargs)
        after = {} if before is None else _plain(vars(self))  # before our own changes
        self._may_be_short = not order.preempted_req_ids and self._all_decode(order)
        if before is None or not self._one_token_to_each(order) or seen.request_id not in order.num_scheduled_tokens:
            return order
        unknown = _changed(before[0], vars(seen)) - REQUEST_CHANGES | _changed(before[1], after) - SCHEDULER_CHANGES
        if unknown:
            import vllm

            self._disable_short_steps(f"vLLM {vllm.__version__} also changes {', '.join(sorted(unknown))} in each step")
            return order
        self._placeholders = seen.num_output_placeholders - before[0]["num_output_placeholders"]
        self._counts_in_flight = "num_in_flight_tokens" in before[0]
        shared = {"num_common_prefix_blocks": [0]} if hasattr(order, "num_common_prefix_blocks") else {}
        cached = replace(order.scheduled_cached_reqs, new_token_ids=[], all_token_ids={})
        self._example = replace(order, scheduled_new_reqs=[], scheduled_cached_reqs=cached, **shared)
        return order

    def _all_decode(self, order: Any) -> bool:
        """Return whether the prompts of all running requests are processed, and each request gets a token in this step
        or already has all its tokens."""
        counts = order.num_scheduled_tokens
        return all(
            not request.is_prefill_chunk
            and (
                request.request_id in counts
                or request.num_computed_tokens + 1 >= request.num_prompt_tokens + request.max_tokens
            )
            for request in self.running
        )

    def _one_token_to_each(self, order: Any) -> bool:
        counts = order.num_scheduled_tokens
        return (
            self._may_be_short
            and bool(counts)
            and max(counts.values()) == 1
            and not order.scheduled_new_reqs
            and not order.scheduled_cached_reqs.resumed_req_ids
        )

    def _one_token_each(self) -> Any:
        """Schedule one token for each running request. Return vLLM's schedule, or None if the step cannot be short."""
        if self._rows is not None and self._rows.num_ordered == _MAX_SHORT_STEPS:
            self._end_short_steps()
        rows = self._rows
        if rows is None:
            params = [request.sampling_params for request in self.running]
            if any(one.repetition_detection is not None for one in params):
                return None
            stop_token_ids = set[int]().union(*(one.all_stop_token_ids for one in params))
            rows = _Rows(list(self.running), self.max_model_len, stop_token_ids)
        ready = rows.ready()
        computed = rows.computed[ready] + rows.num_ordered
        crossing = np.flatnonzero(computed % self._block_tokens == 0).tolist()
        if not len(ready) or len(crossing) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self._rows = rows
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: list[Any] = [None] * len(ready)
        for index in crossing:
            request = rows.requests[ready[index]]
            previous, request.num_computed_tokens = request.num_computed_tokens, int(computed[index])
            # Blocks of responses are not cached, since the next weights invalidate them.
            new = self.kv_cache_manager.allocate_slots(request, 1, delay_cache_blocks=True)
            request.num_computed_tokens = previous
            blocks[index] = new.get_block_ids(allow_none=True)
        request_ids = rows.request_ids[ready].tolist()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(request_ids)
        order = replace(
            self._example,
            scheduled_cached_reqs=replace(
                self._example.scheduled_cached_reqs,
                req_ids=request_ids,
                new_block_ids=blocks,
                num_computed_tokens=computed.tolist(),
                num_output_tokens=(rows.num_outputs[ready] + rows.num_ordered).tolist(),
            ),
            num_scheduled_tokens=dict.fromkeys(request_ids, 1),
            total_num_scheduled_tokens=len(request_ids),
            finished_req_ids=self.finished_req_ids,
        )
        self.finished_req_ids: Any = set()
        rows.num_ordered += 1
        self._short_steps.append((order, rows, ready))
        return order

    def _buffer_tokens(self, rows: _Rows, ordered: Any, order: Any, output: Any) -> Any:
        """Buffer the new token of each response. If responses may have ended, pass their tokens to vLLM."""
        request_ids = order.scheduled_cached_reqs.req_ids
        sampled = np.array(output.sampled_token_ids, dtype=np.int64)[:, 0]
        logprobs = None if output.logprobs is None else output.logprobs.logprobs[:, 0]
        if output.req_ids != request_ids:  # the runner's order may differ
            at = [output.req_id_to_index[request_id] for request_id in request_ids]
            sampled, logprobs = sampled[at], None if logprobs is None else logprobs[at]
        here = rows.unfinished[ordered]  # the others ended in the previous step
        ordered, sampled = ordered[here], sampled[here]
        rows.token_ids[ordered, rows.num_taken] = sampled
        if logprobs is not None:
            rows.logprobs[ordered, rows.num_taken] = logprobs[here]
        ending = ordered[rows.ending(ordered, sampled)]
        self._update_requests(rows, ending)
        rows.remove(ending)
        rows.num_taken += 1
        if not len(ending):
            return {}
        names = rows.request_ids[ending].tolist()
        outputs = super().update_from_output(replace(order, num_scheduled_tokens=dict.fromkeys(names, 1)), output)
        if any(name in self.requests for name in names):  # vLLM did not end it
            self._end_short_steps()
        return self._prepend_buffered(outputs)

    def _update_requests(self, rows: _Rows, which: Any) -> None:
        """Append the tokens from short steps to vLLM's requests, for the rows `which`. Also keep these tokens for
        vLLM's next output of each request, which has to include them."""
        taken = rows.num_taken
        token_ids, logprobs = rows.token_ids[which, :taken].tolist(), rows.logprobs[which, :taken].tolist()
        num_ordered = np.minimum(rows.num_ordered, rows.to_come[which]).tolist()
        for row, written, values, count in zip(which, token_ids, logprobs, num_ordered, strict=True):
            request = rows.requests[row]
            request._output_token_ids.extend(written)
            request._all_token_ids.extend(written)
            request.num_computed_tokens += count
            request.num_output_placeholders += self._placeholders * (count - taken)
            if self._counts_in_flight:
                request.num_in_flight_tokens += count - taken
            kept_ids, kept_logprobs = self._kept.setdefault(request.request_id, ([], []))
            kept_ids.extend(written)
            kept_logprobs.extend(values)

    def _end_short_steps(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            self._update_requests(rows, rows.running)
            self._hashes_behind |= rows.num_taken > 0

    def _prepend_buffered(self, outputs: Any) -> Any:
        for group in outputs.values():
            for output in group.outputs:
                piece = self._kept.pop(output.request_id, None)
                if piece is None:
                    continue
                output.new_token_ids = [*piece[0], *output.new_token_ids]
                last = output.new_logprobs
                if last is not None:
                    values = np.array([*piece[1], *last.logprobs[:, 0].tolist()], dtype=np.float32)
                    output.new_logprobs = last._replace(
                        logprobs=values[:, None], logprob_token_ids=np.array(output.new_token_ids)[:, None]
                    )
        return outputs


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, int | str | float | None)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def shortened_scheduler(base: Any) -> Any:
    """Add short steps to `base`, which is vLLM's synchronous or asynchronous scheduler class. Return the subclass."""
    return type("ShortScheduler", (ShortSteps, base), {})
