"""The books of short steps between two of vLLM's own, by hand. vLLM itself is not loaded."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlcore.rollout.vllm.short import _missing, _part, _unmet
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
