"""The books of short steps between two of vLLM's own, by hand. vLLM itself is not loaded."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlcore.rollout.vllm.short import scheduler as short_scheduler
from rlcore.rollout.vllm.short.names import _missing, _part, _unmet
from rlcore.rollout.vllm.short.scheduler import ShortSteps, _changed, _Kept, _plain, _Rows


def request(name: str, *, prompt: int, outputs: int, most: int, stops: tuple[int, ...] = (9,)) -> Any:
    """A running request that has written `outputs` tokens, all of them but the last computed."""
    return SimpleNamespace(
        request_id=name,
        num_computed_tokens=prompt + outputs - 1,
        num_output_placeholders=0,
        num_in_flight_tokens=0,
        num_prompt_tokens=prompt,
        max_tokens=most,
        is_prefill_chunk=False,
        sampling_params=SimpleNamespace(all_stop_token_ids=set(stops), repetition_detection=None),
        _output_token_ids=list(range(outputs)),
        _all_token_ids=list(range(prompt + outputs)),
    )


def rows_of(*requests: Any, longest: int = 100) -> _Rows:
    stops = set().union(*(one.sampling_params.all_stop_token_ids for one in requests))
    return _Rows(list(requests), longest, stops)


def test_rows_know_how_many_tokens_are_to_come() -> None:
    rows = rows_of(
        request("a", prompt=3, outputs=1, most=4),
        request("b", prompt=5, outputs=2, most=2),
        request("c", prompt=5, outputs=1, most=90),
        longest=20,
    )
    assert rows.computed.tolist() == [3, 6, 5]
    assert rows.num_outputs.tolist() == [1, 2, 1]
    assert rows.to_come.tolist() == [3, 0, 14], "by its limit, and by the model's"
    assert rows.request_ids.tolist() == ["a", "b", "c"]
    assert (rows.running.tolist(), rows.num_ordered, rows.num_taken) == ([0, 1, 2], 0, 0)
    assert rows.stop_token_ids.tolist() == [9]


def test_an_answer_is_ready_until_its_last_token_is_under_way() -> None:
    rows = rows_of(request("a", prompt=3, outputs=1, most=3), request("b", prompt=3, outputs=1, most=4))
    assert rows.to_come.tolist() == [2, 3]
    ready = []
    for rows.num_ordered in range(4):
        ready.append(rows.ready().tolist())
    assert ready == [[0, 1], [0, 1], [1], []]


def test_an_answer_ends_at_its_limit_or_with_a_token_of_its_own_that_ends_it() -> None:
    rows = rows_of(
        request("a", prompt=3, outputs=1, most=9, stops=(7,)),
        request("b", prompt=3, outputs=1, most=9, stops=(8,)),
        request("c", prompt=3, outputs=1, most=3, stops=(8,)),
    )
    every = np.arange(3)
    assert rows.ending(every, np.array([1, 1, 1])).tolist() == [False, False, False]
    assert rows.ending(every, np.array([7, 7, 1])).tolist() == [True, False, False]
    assert rows.ending(np.array([1, 2]), np.array([8, 8])).tolist() == [True, True]
    rows.num_taken = 1
    assert rows.ending(every, np.array([1, 1, 1])).tolist() == [False, False, True]
    rows.remove(np.array([0, 2]))
    assert rows.running.tolist() == [1]


def steps(*running: Any, **more: Any) -> Any:
    """The short steps of a scheduler with these running requests."""
    found: Any = object.__new__(ShortSteps)
    requests = {one.request_id: one for one in running}
    vars(found).update(
        running=list(running), requests=requests, _rows=None, _kept={}, _placeholders=1, _counts_in_flight=True,
        _hashes_behind=False, max_model_len=100, max_num_running_reqs=8,
    )  # fmt: skip
    vars(found).update(more)
    return found


def test_vllms_requests_are_told_what_short_steps_have_done() -> None:
    first, second = request("a", prompt=3, outputs=1, most=3), request("b", prompt=3, outputs=2, most=9)
    scheduler = steps(first, second)
    rows = scheduler._started()
    rows.num_ordered, rows.num_taken = 3, 2
    rows.token_ids[:, :2], rows.logprobs[:, :2] = [[5, 6], [7, 8]], [[-0.5, -0.25], [-1.0, -2.0]]
    scheduler._rows = rows
    scheduler._settle()
    assert (first._output_token_ids, second._output_token_ids) == ([0, 5, 6], [0, 1, 7, 8])
    assert (first._all_token_ids[-2:], second._all_token_ids[-2:]) == ([5, 6], [7, 8])
    assert (first.num_computed_tokens, second.num_computed_tokens) == (3 + 2, 4 + 3), "no more than to come"
    assert (first.num_output_placeholders, second.num_output_placeholders) == (0, 1)
    assert (first.num_in_flight_tokens, second.num_in_flight_tokens) == (0, 1)
    assert {name: (kept.token_ids, kept.logprobs) for name, kept in scheduler._kept.items()} == {
        "a": ([5, 6], [-0.5, -0.25]),
        "b": ([7, 8], [-1.0, -2.0]),
    }
    assert scheduler._rows is None
    assert scheduler._hashes_behind
    scheduler._settle()
    assert first._output_token_ids == [0, 5, 6], "there is nothing to tell twice"


def test_a_release_that_counts_no_tokens_in_flight_is_told_none() -> None:
    one = request("a", prompt=3, outputs=1, most=9)
    scheduler = steps(one, _counts_in_flight=False, _placeholders=2)
    scheduler._rows = scheduler._started()
    scheduler._rows.num_ordered = 1
    scheduler._settle()
    assert (one.num_in_flight_tokens, one.num_output_placeholders, one.num_computed_tokens) == (0, 2, 4)
    assert not scheduler._hashes_behind, "no token has come yet"


def test_answers_that_may_end_by_more_than_their_tokens_have_no_rows() -> None:
    one = request("a", prompt=3, outputs=1, most=9)
    one.sampling_params.repetition_detection = object()
    assert steps(request("b", prompt=3, outputs=1, most=9), one)._started() is None


class Logprobs(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any


def output(name: str, token_ids: list[int], logprobs: list[float] | None) -> Any:
    given = None if logprobs is None else Logprobs(np.array(token_ids)[:, None], np.array(logprobs)[:, None])
    return SimpleNamespace(request_id=name, new_token_ids=token_ids, new_logprobs=given)


def test_kept_tokens_are_put_before_those_of_the_next_output() -> None:
    scheduler = steps()
    for name in ("a", "b", "d"):
        scheduler._kept[name] = kept = _Kept()
        kept.token_ids, kept.logprobs = [5, 6], [-0.5, -0.25]
    written = output("a", [7], [-1.0])
    plain, other = output("b", [8], None), output("c", [4], [-4.0])
    outputs = {0: SimpleNamespace(outputs=[written, plain]), 1: SimpleNamespace(outputs=[other])}
    assert scheduler._with_kept(outputs) is outputs
    assert written.new_token_ids == [5, 6, 7]
    assert written.new_logprobs.logprobs.tolist() == [[-0.5], [-0.25], [-1.0]]
    assert written.new_logprobs.logprob_token_ids.tolist() == [[5], [6], [7]]
    assert (plain.new_token_ids, plain.new_logprobs) == ([5, 6, 8], None)
    assert (other.new_token_ids, other.new_logprobs.logprobs.tolist()) == ([4], [[-4.0]])
    assert list(scheduler._kept) == ["d"]


@pytest.mark.parametrize(
    ("running", "waiting", "limits", "fills_up"),
    [(4, 1, {}, True), (4, 0, {}, False), (5, 3, {}, False), (3, 9, {}, True),
     (2, 9, {"max_num_active_reqs": 4}, True), (3, 9, {"max_num_active_reqs": 4}, False)],
)  # fmt: skip
def test_waiting_requests_come_in_once_half_of_the_places_are_free(
    running: int, waiting: int, limits: dict[str, int], fills_up: bool
) -> None:
    scheduler = steps(*(request(str(index), prompt=1, outputs=1, most=9) for index in range(running)), **limits)
    scheduler.requests |= {f"waiting {index}": None for index in range(waiting)}
    assert scheduler._fills_up() is fills_up


def test_a_step_may_be_short_where_every_running_request_writes() -> None:
    first, second = request("a", prompt=3, outputs=1, most=9), request("b", prompt=3, outputs=2, most=9)
    scheduler = steps(first, second)
    both = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1})
    alone = SimpleNamespace(num_scheduled_tokens={"a": 1})
    assert scheduler._all_write(both)
    assert not scheduler._all_write(alone), "b waits for room"
    second.num_computed_tokens = 3 + 9 - 1
    assert scheduler._all_write(alone), "the last token of b is under way"
    second.num_computed_tokens = 3 + 9 - 2
    assert not scheduler._all_write(alone)
    second.num_computed_tokens, first.is_prefill_chunk = 3 + 9 - 1, True
    assert not scheduler._all_write(both)


@pytest.mark.parametrize(
    ("change", "is_example"),
    [
        ({}, True),
        ({"num_scheduled_tokens": {}}, False),
        ({"num_scheduled_tokens": {"a": 1, "b": 2}}, False),
        ({"scheduled_new_reqs": ["c"]}, False),
        ({"scheduled_cached_reqs": SimpleNamespace(resumed_req_ids={"a"})}, False),
    ],
)
def test_an_example_has_one_token_for_each(change: dict[str, Any], is_example: bool) -> None:
    order = {
        "num_scheduled_tokens": {"a": 1, "b": 1},
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=set()),
    }
    scheduler = steps(_may_be_short=True)
    assert scheduler._one_token_to_each(SimpleNamespace(**order | change)) is is_example
    assert not steps(_may_be_short=False)._one_token_to_each(SimpleNamespace(**order))


def test_what_has_changed_of_a_record_is_named() -> None:
    grown = [1]
    before = {"a": 1, "b": 2, "c": grown, "gone": 0}
    grown.append(2)
    assert _changed(before, {"a": 1, "b": 3, "c": grown, "new": None}) == {"b", "gone"}
    assert _plain({"a": 1, "b": "x", "c": None, "d": 0.5, "e": [1], "f": object()}) == {
        "a": 1, "b": "x", "c": None, "d": 0.5,
    }  # fmt: skip


def test_names_that_an_object_lacks_are_told_with_their_place() -> None:
    owner = SimpleNamespace(here=SimpleNamespace(one=1, nothing=None))
    assert _part(owner, "here.one") == 1
    assert _part(owner, "") is owner
    assert (_part(owner, "there.one"), _part(owner, "there.one", 5)) == (None, 5)
    assert _missing("thing", owner, {"": "here there", "here": "one two nothing"}) == ["thing.there", "thing.here.two"]
    assert _unmet({"a": True, "b": False, "c": False}) == "it needs b"
    assert _unmet({"a": True}) is None


@dataclass
class Cached:
    """vLLM's order for requests that it knows."""

    req_ids: list[str]
    new_block_ids: list[Any]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class Order:
    """vLLM's order of a step."""

    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]


class Plain:
    """A scheduler of vLLM that has started."""

    def __init__(self, block_tokens: int) -> None:
        spec = SimpleNamespace(block_size=block_tokens)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


class Started(ShortSteps, Plain):  # type: ignore[misc]
    """Short steps before that."""


@pytest.mark.parametrize("reason", [None, "it needs no LoRA"])
def test_a_scheduler_that_cannot_take_short_steps_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str | None
) -> None:
    monkeypatch.setattr(short_scheduler, "scheduler_obstacle", lambda _: reason)
    scheduler = Started(4)
    words = f"rollout.engine: vLLM's own scheduler orders every step, which takes longer: {reason}"
    assert caplog.messages == [words] * (reason is not None)
    assert scheduler.short_steps_allowed is (reason is None)
    assert scheduler._block_tokens == (4 if reason is None else 1)
    assert (scheduler.num_short_steps, scheduler.num_preempting_steps) == (0, 0)
    assert (scheduler._may_be_short, scheduler._hashes_behind, scheduler._counts_in_flight) == (False, False, False)


class Blocks:
    """The cache, of blocks of four tokens: which requests were given one, and how much of them was computed then."""

    def __init__(self, free: int) -> None:
        self.free, self.given, self.steps = free, list[tuple[str, int]](), 0
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)

    def new_step_starts(self) -> None:
        self.steps += 1

    def allocate_slots(self, request: Any, num_tokens: int, *, delay_cache_blocks: bool) -> Any:
        assert (num_tokens, delay_cache_blocks) == (1, True)
        self.given.append((request.request_id, request.num_computed_tokens))
        return SimpleNamespace(get_block_ids=lambda allow_none: ([70 + len(self.given)],))


class Own:
    """vLLM's own way to take in a step: the requests of its order are told their token, and those named `ends` end."""

    requests: dict[str, Any]
    running: list[Any]

    def update_from_output(self, order: Any, output: Any) -> Any:
        found = []
        for name in order.num_scheduled_tokens:
            at = output.req_id_to_index[name]
            request, token = self.requests[name], output.sampled_token_ids[at][0]
            request._output_token_ids.append(token)
            values = Logprobs(np.array([[token]]), output.logprobs.logprobs[at : at + 1])
            found.append(SimpleNamespace(request_id=name, new_token_ids=[token], new_logprobs=values))
            del self.requests[name]
            self.running.remove(request)
        return {0: SimpleNamespace(outputs=found)}


class Made(ShortSteps, Own):  # type: ignore[misc]
    """Short steps before that."""


@dataclass
class Ordered(Order):
    """vLLM's order of a step of its own."""

    preempted_req_ids: set[str] | None = None
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    num_common_prefix_blocks: list[int] = field(default_factory=lambda: [3])


@dataclass
class Known(Cached):
    """vLLM's order for requests that it knows, with what a short step leaves out."""

    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[Any] = field(default_factory=lambda: [[1]])
    all_token_ids: dict[str, Any] = field(default_factory=lambda: {"a": [1]})


class Steps:
    """A scheduler whose own step does what the test gives it."""

    def schedule(self) -> Any:
        return self.step(self)  # type: ignore[attr-defined]

    def update_from_output(self, order: Any, output: Any) -> Any:
        return {}


class OfBoth(ShortSteps, Steps):  # type: ignore[misc]
    """Short steps before that."""


def general(*running: Any, step: Any, **more: Any) -> Any:
    scheduler: Any = object.__new__(OfBoth)
    vars(scheduler).update(vars(made(*running)))
    vars(scheduler).update({"_example": None, "_placeholders": None, "_may_be_short": False, "step": step} | more)
    scheduler.num_preempting_steps = 0
    return scheduler


def one_each(scheduler: Any, **changes: Any) -> Any:
    """A step of vLLM's own in which every running request gets a token."""
    for one in scheduler.running:
        one.num_computed_tokens += 1
        one.num_output_placeholders += 1
    names = [one.request_id for one in scheduler.running]
    scheduler.current_step += 1
    return Ordered(Known(names, [None] * len(names), [], []), dict.fromkeys(names, 1), len(names), set(), **changes)


def test_a_step_of_vllms_own_becomes_the_example_of_short_ones() -> None:
    scheduler = general(request("a", prompt=3, outputs=1, most=9), step=one_each)
    scheduler.running[0].num_output_placeholders = 2
    order = scheduler._general()
    example = scheduler._example
    assert (scheduler._placeholders, scheduler._counts_in_flight, scheduler._may_be_short) == (1, True, True)
    assert scheduler.short_steps_allowed, "though it is the first that may be short"
    assert (example.scheduled_new_reqs, example.num_common_prefix_blocks) == ([], [0])
    cached = example.scheduled_cached_reqs
    assert (cached.new_token_ids, cached.all_token_ids) == ([], {})
    assert order.num_common_prefix_blocks == [3]
    scheduler._general()
    assert scheduler._example is example, "one is enough"
    assert scheduler.num_preempting_steps == 0


def test_without_an_example_or_a_wish_every_step_is_vllms_own() -> None:
    for changes in ({}, {"short_steps_allowed": False, "_may_be_short": True}, {"_may_be_short": True}):
        scheduler = general(request("a", prompt=3, outputs=1, most=9), step=one_each, **changes)
        assert scheduler.schedule().num_common_prefix_blocks == [3]
        assert scheduler.num_short_steps == 0
    scheduler = general(request("a", prompt=3, outputs=1, most=9), step=one_each)
    steps_of_vllm = [scheduler.schedule().num_common_prefix_blocks == [3] for _ in range(3)]
    assert steps_of_vllm == [True, False, False], "the first one is the example of the others"
    scheduler.requests |= {f"waiting {index}": None for index in range(9)}
    assert scheduler.schedule().num_common_prefix_blocks == [3], "a request that waits comes in"
    assert scheduler.num_short_steps == 2


def test_a_step_that_preempts_is_counted_and_makes_no_short_one_possible() -> None:
    scheduler = general(
        request("a", prompt=3, outputs=1, most=9), step=lambda self: one_each(self, preempted_req_ids={"b"})
    )
    scheduler._general()
    assert (scheduler.num_preempting_steps, scheduler._may_be_short, scheduler._example) == (1, False, None)


@pytest.mark.parametrize("where", ["request", "scheduler", "both"])
def test_a_record_that_short_steps_do_not_know_keeps_them_off(where: str) -> None:
    def step(scheduler: Any) -> Any:
        if where in ("request", "both"):
            scheduler.running[0].something_new = 1
        if where in ("scheduler", "both"):
            scheduler.something_new = 1
        return one_each(scheduler)

    scheduler = general(request("a", prompt=3, outputs=1, most=9), step=step)
    scheduler._general()
    assert (scheduler.short_steps_allowed, scheduler._example) == (False, None)


def test_a_step_without_a_token_for_the_first_request_is_no_example() -> None:
    first, second = request("a", prompt=3, outputs=9, most=9), request("b", prompt=3, outputs=1, most=9)
    first.num_computed_tokens = 3 + 9 - 1  # its last token is under way

    def step(scheduler: Any) -> Any:
        order = one_each(scheduler)
        del order.num_scheduled_tokens["a"]
        return order

    scheduler = general(first, second, step=step)
    scheduler._general()
    assert (scheduler._may_be_short, scheduler._example) == (True, None)


def test_a_scheduler_that_is_not_shortened_is_not_watched() -> None:
    scheduler = general(request("a", prompt=3, outputs=1, most=9), step=one_each, short_steps_allowed=False)
    scheduler._general()
    assert scheduler._example is None
    nobody = general(step=one_each)
    nobody._general()
    assert nobody._example is None


def test_hashes_of_blocks_are_made_up_for_before_vllms_own_step() -> None:
    hashed: list[str] = []
    one = request("a", prompt=3, outputs=1, most=9)
    one.update_block_hashes = lambda: hashed.append("a")
    scheduler = general(one, step=one_each, _hashes_behind=True)
    scheduler._general()
    scheduler._general()
    assert (hashed, scheduler._hashes_behind) == (["a"], False)


def test_the_output_of_a_step_of_vllms_own_is_vllms() -> None:
    one = request("a", prompt=3, outputs=1, most=9)
    scheduler = general(one, request("b", prompt=3, outputs=1, most=9), step=one_each)
    assert scheduler.update_from_output(object(), object()) == {}
    scheduler._rows = scheduler._started()
    del scheduler.requests["a"]
    assert scheduler.update_from_output(object(), object()) == {}
    assert scheduler._rows.running.tolist() == [1], "an answer that has ended meanwhile has no row"


def test_requests_that_are_ended_from_outside_lose_what_was_kept() -> None:
    class Ending:
        def finish_requests(self, request_ids: Any) -> Any:
            return request_ids

    scheduler: Any = object.__new__(type("Both", (ShortSteps, Ending), {}))
    vars(scheduler).update(vars(steps()))
    for given, left in (("a", ["b", "c"]), (["b"], ["c"]), (None, [])):
        if given == "a":
            scheduler._kept = {name: _Kept() for name in "abc"}
        assert scheduler.finish_requests(given) == given
        assert list(scheduler._kept) == left


def made(*running: Any, free: int = 9, v2: bool = True) -> Any:
    scheduler: Any = object.__new__(Made)
    vars(scheduler).update(vars(steps(*running)))
    vars(scheduler).update(
        short_steps_allowed=True, _may_be_short=True, _block_tokens=4, _short_steps=deque(), current_step=5,
        num_short_steps=0, kv_cache_manager=Blocks(free), use_v2_model_runner=v2, prev_step_scheduled_req_ids={"old"},
        finished_req_ids={"gone"}, _example=Order(Cached([], [], [], []), {}, 0, set()),
    )  # fmt: skip
    return scheduler


def test_a_short_step_orders_a_token_for_each_and_a_block_where_one_begins() -> None:
    first, second = request("a", prompt=3, outputs=1, most=9), request("b", prompt=4, outputs=1, most=2)
    scheduler = made(first, second)
    order = scheduler.schedule()
    cached = order.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids) == (["a", "b"], [None, ([71],)])
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([3, 4], [1, 1])
    assert (order.num_scheduled_tokens, order.total_num_scheduled_tokens) == ({"a": 1, "b": 1}, 2)
    assert (order.finished_req_ids, scheduler.finished_req_ids) == ({"gone"}, set())
    again = scheduler.schedule()
    assert (again.scheduled_cached_reqs.req_ids, again.scheduled_cached_reqs.new_block_ids) == (["a"], [([72],)])
    assert again.scheduled_cached_reqs.num_computed_tokens == [4], "the last token of b is under way"
    assert again.scheduled_cached_reqs.num_output_tokens == [2]
    assert scheduler.kv_cache_manager.given == [("b", 4), ("a", 4)]
    assert (first.num_computed_tokens, second.num_computed_tokens) == (3, 4), "vLLM is told later"
    assert (scheduler.current_step, scheduler.num_short_steps, scheduler.kv_cache_manager.steps) == (7, 2, 2)
    assert scheduler.prev_step_scheduled_req_ids == {"old"}


def test_vllms_first_runner_is_told_which_requests_ran() -> None:
    scheduler = made(request("a", prompt=3, outputs=1, most=9), v2=False)
    scheduler.schedule()
    assert scheduler.prev_step_scheduled_req_ids == {"a"}


def test_without_room_for_the_blocks_that_begin_a_step_is_vllms() -> None:
    both = [request(name, prompt=4, outputs=1, most=9) for name in "ab"]
    assert made(*both, free=2)._one_token_each() is not None
    assert made(*both, free=1)._one_token_each() is None
    assert made(request("c", prompt=4, outputs=1, most=1))._one_token_each() is None, "its last token is under way"


def taken(order: Any, *tokens: int, mixed: bool = False) -> Any:
    """What the runner wrote for an order; `mixed`: in an order of its own."""
    names = order.scheduled_cached_reqs.req_ids
    pairs = list(zip(names, tokens, strict=True))
    pairs = pairs[::-1] if mixed else pairs
    values = np.array([[-token / 10] for _, token in pairs], dtype=np.float32)
    return SimpleNamespace(
        req_ids=[name for name, _ in pairs],
        req_id_to_index={name: at for at, (name, _) in enumerate(pairs)},
        sampled_token_ids=[[token] for _, token in pairs],
        logprobs=SimpleNamespace(logprobs=values),
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_tokens_are_kept_until_an_answer_ends(mixed: bool) -> None:
    first, second = request("a", prompt=3, outputs=1, most=9), request("b", prompt=3, outputs=1, most=9)
    scheduler = made(first, second)
    orders = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.update_from_output(orders[0], taken(orders[0], 4, 5, mixed=mixed)) == {}
    assert first._output_token_ids == [0]
    outputs = scheduler.update_from_output(orders[1], taken(orders[1], 9, 6, mixed=mixed))
    ((output,),) = (group.outputs for group in outputs.values())
    assert (output.request_id, output.new_token_ids) == ("a", [4, 9])
    assert output.new_logprobs.logprobs[:, 0].tolist() == pytest.approx([-0.4, -0.9])
    assert scheduler._rows.running.tolist() == [1]
    assert first._output_token_ids == [0, 4, 9]
    assert second._output_token_ids == [0]
    scheduler._settle()
    assert second._output_token_ids == [0, 5, 6]


def test_where_vllm_lets_an_answer_go_on_its_requests_are_told_everything() -> None:
    class Keeping:
        def update_from_output(self, order: Any, output: Any) -> Any:
            return {}

    one, other = request("a", prompt=3, outputs=1, most=9), request("b", prompt=3, outputs=1, most=9)
    scheduler: Any = object.__new__(type("Both", (ShortSteps, Keeping), {}))
    vars(scheduler).update(vars(made(one, other)))
    order = scheduler.schedule()
    assert scheduler.update_from_output(order, taken(order, 9, 5)) == {}
    assert scheduler._rows is None
    assert other._output_token_ids == [0, 5]


def test_a_short_step_without_tokens_is_vllms() -> None:
    scheduler = made(request("a", prompt=3, outputs=1, most=9))
    order = scheduler.schedule()
    empty = SimpleNamespace(sampled_token_ids=[], req_id_to_index={"a": 0}, logprobs=None)
    with pytest.raises(IndexError):  # the stand-in looks for a token; vLLM knows that there is none
        scheduler.update_from_output(order, empty)
    assert scheduler._rows is None


def test_a_step_that_was_under_way_when_its_answer_ended_counts_for_the_others_alone() -> None:
    first, second = request("a", prompt=3, outputs=1, most=9), request("b", prompt=3, outputs=1, most=9)
    scheduler = made(first, second)
    orders = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update_from_output(orders[0], taken(orders[0], 9, 5))
    assert scheduler.update_from_output(orders[1], taken(orders[1], 3, 6)) == {}
    assert first._output_token_ids == [0, 9]
    scheduler._settle()
    assert second._output_token_ids == [0, 5, 6]


def test_after_so_many_short_steps_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_scheduler, "_MOST_STEPS", 2)
    one = request("a", prompt=3, outputs=1, most=90)
    scheduler = made(one)
    for token in (4, 5):
        order = scheduler.schedule()
        scheduler.update_from_output(order, taken(order, token))
    assert one._output_token_ids == [0]
    scheduler.schedule()
    assert one._output_token_ids == [0, 4, 5]
    assert scheduler._rows.num_ordered == 1
