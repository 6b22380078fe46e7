"""The short way beside vLLM's own, on vLLM's runner, scheduler and engine core; and what keeps it off."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm

from rlcore.rollout.vllm import short as door
from rlcore.rollout.vllm.short import runner as short_runner
from rlcore.rollout.vllm.short import runner_obstacle, shorten_runner
from rlcore.rollout.vllm.short.check import _same, disagreement
from rlcore.rollout.vllm.short.runner import BLOCKS, COLUMNS, SEEDS, ShortRunner
from tests.rollout.interpreted.engine import Engine, some_requests, write_config
from tests.rollout.interpreted.machine import new_runner


def answers_and_books_are_vllms_own() -> None:
    """More answers than the cache has room for, so that some are preempted and begun again; one of them at another
    temperature, whose steps are vLLM's own."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(Path(folder))
        own, short = (Engine(directory, short=way, num_blocks=9) for way in (False, True))
    expected, found = (engine.answers(some_requests(5, 12, warm=frozenset({3}))) for engine in (own, short))
    assert found.tokens == expected.tokens, _first_difference(found.tokens, expected.tokens)
    assert found.ends == expected.ends
    assert {"stop", "length"} == set(expected.ends.values())
    for name, logprobs in expected.logprobs.items():
        torch.testing.assert_close(torch.tensor(found.logprobs[name]), torch.tensor(logprobs), rtol=0, atol=2e-6)
    for name, books in _books(own.runner).items():
        assert torch.equal(_books(short.runner)[name], books), name
    assert own.scheduler.num_preempting_steps > 0
    assert short.scheduler.num_preempting_steps > 0
    assert short.scheduler.num_short_steps > 0
    assert short.short is not None
    assert short.short.num_short_steps > 4
    assert short.short.num_other_steps > 4


def _first_difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    return next(
        f"{name}: {found.get(name)}, expected {value}" for name, value in expected.items() if found[name] != value
    )


def _books(runner: Any) -> dict[str, Any]:
    states, tables = runner.req_states, runner.block_tables
    return {
        "tokens computed": states.num_computed_tokens.gpu,
        "lengths": states.total_len.gpu,
        "all tokens": states.all_token_ids.gpu,
        "last tokens": states.last_sampled_tokens,
        "block tables": tables.block_tables[0].gpu,
        "numbers of blocks": torch.from_numpy(tables.num_blocks.np),
    }


def an_engine_is_shortened_after_its_check() -> None:
    runner = new_runner()
    slots = list(runner.req_states.free_indices)
    short = shorten_runner(_engine(runner))
    assert isinstance(short, ShortRunner), short
    assert runner.execute_model == short.execute_model
    assert sorted(runner.req_states.free_indices) == sorted(slots), "the check leaves no request behind"
    short.remove()
    assert runner.execute_model.__func__ is type(runner).execute_model


def a_seed_of_another_row_is_found() -> None:
    def wrong(table: Any) -> None:
        table[SEEDS] = table[SEEDS].roll(1)

    assert "token of _short_step_check_" in _found_wrong(wrong)


def a_block_at_another_place_is_found() -> None:
    def wrong(table: Any) -> None:
        table[BLOCKS, table[COLUMNS] >= 0] += 1

    found = _found_wrong(wrong)
    assert "slot_mapping" in found or "block table" in found, found


def _found_wrong(wrong: Any) -> str:
    """What the check says of a way whose table of each step is changed so."""
    runner = new_runner()

    class Wrong(ShortRunner):
        def _update_table(self, *args: Any) -> None:
            super()._update_table(*args)
            wrong(self._graphs.table)

    found = disagreement(Wrong(runner), runner)
    assert found is not None, "nothing was found"
    assert found.startswith("step "), found
    return found


def an_engine_too_small_for_the_check_is_told() -> None:
    runner = new_runner()
    short = ShortRunner(runner)
    block = runner.block_tables.block_sizes[0]
    steps, lengths = block + 4, (block - 3, block, 2 * block - 1, 5)
    longest = max(lengths) + steps
    blocks = 4 * -(-longest // block)
    small = "the engine is too small for a check"
    for owner, name, least in (
        (runner, "max_num_reqs", 4),
        (runner, "max_num_tokens", sum(lengths)),
        (runner, "max_model_len", longest),
        (runner.kv_cache_config, "num_blocks", blocks + 1),
    ):
        with _instead(owner, **{name: least - 1}):
            assert disagreement(short, runner) == small, name
    with _instead(runner.kv_cache_config, num_blocks=blocks + 1):
        assert disagreement(short, runner) is None
    assert short.enabled


def values_are_the_same_within_the_bound() -> None:
    zero, whole = torch.zeros(2), torch.tensor([3, 4])
    assert _same(zero, torch.tensor([0.0, 0.02]))
    assert not _same(zero, torch.tensor([0.0, -0.021]))
    assert not _same(torch.tensor([0.021, 0.0]), zero)
    assert not _same(zero, torch.zeros(3))
    assert _same(whole, whole.clone())
    assert not _same(whole, torch.tensor([3, 5]))


def a_step_that_fails_leaves_vllm_as_it_was() -> None:
    runner = new_runner()

    class Failing(ShortRunner):
        def sample_tokens(self, grammar_output: Any) -> Any:
            if self.num_short_steps:
                raise RuntimeError("no more")
            return super().sample_tokens(grammar_output)

    with _instead(short_runner, ShortRunner=Failing):
        assert shorten_runner(_engine(runner)) == "RuntimeError: no more"
    assert "execute_model" not in vars(runner)
    assert not runner.req_states.req_id_to_index


def an_unknown_release_keeps_its_own_way() -> None:
    runner = new_runner()
    with _instead(vllm, __version__="0.99.1"):
        found = shorten_runner(_engine(runner))
    assert found == "vLLM 0.99.1 is not one of 0.25.1, 0.32.0"
    assert "execute_model" not in vars(runner)


def what_short_steps_cannot_do_is_named() -> None:
    runner = new_runner()
    assert runner_obstacle(runner) is None
    group = runner.kv_cache_config.kv_cache_groups[0]
    for reason, owner, change in (
        ("it needs one GPU", runner.parallel_config, {"world_size": 2}),
        ("it needs no LoRA", runner, {"lora_config": object()}),
        ("it needs no speculation", runner, {"num_speculative_steps": 2}),
        ("it needs text in, text out", runner, {"supports_mm_inputs": True}),
        ("it needs a plain model", runner.model_state, {"rope_state": object()}),
        ("it needs vLLM's sampler", runner.sampler, {"compute_nans": True}),
        ("it needs no cache connector", runner, {"kv_connector": object()}),
        ("it needs full attention", group, {"kv_cache_spec": object()}),
        ("it needs FlashAttention", runner, {"attn_groups": [[_NoPlanner()]]}),
        ("it needs one size of blocks", runner, {"kernel_block_sizes": [2]}),
        ("it needs full CUDA graphs", runner.cudagraph_manager, {"graphs": {}}),
        ("it needs no pcp_manager", runner, {"pcp_manager": object()}),
        ("it needs no sampler.trace_replay_state", runner.sampler, {"trace_replay_state": object()}),
    ):
        with _instead(owner, **change):
            assert runner_obstacle(runner) == reason, f"{runner_obstacle(runner)}, expected {reason}"


def names_that_a_release_lacks_are_told() -> None:
    runner = new_runner()
    expected = f"vLLM {vllm.__version__} has no runner.no_such_name, runner.sampler.no_such_state"
    names = {**door.RUNNER_NAMES, "": "device no_such_name", "sampler": "no_such_state"}
    with _instead(door, RUNNER_NAMES=names):
        assert shorten_runner(_engine(runner)) == expected
    assert "execute_model" not in vars(runner)


def a_scheduler_that_lacks_a_name_orders_its_own_steps() -> None:
    with tempfile.TemporaryDirectory() as folder, _instead(door, REQUEST_NAMES="request_id no_such_name"):
        engine = Engine(write_config(Path(folder)), short=False, num_blocks=40)
        assert door.scheduler_obstacle(engine.scheduler) == f"vLLM {vllm.__version__} has no request.no_such_name"
    assert len(engine.answers(some_requests(3, 6)).ends) == 3
    assert engine.scheduler.num_short_steps == 0


class _NoPlanner:
    def get_metadata_builder(self, _: int) -> Any:
        return self


def _engine(runner: Any) -> Any:
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))


@contextmanager
def _instead(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


CHECKS = (
    answers_and_books_are_vllms_own,
    an_engine_is_shortened_after_its_check,
    a_seed_of_another_row_is_found,
    a_block_at_another_place_is_found,
    an_engine_too_small_for_the_check_is_told,
    values_are_the_same_within_the_bound,
    a_step_that_fails_leaves_vllm_as_it_was,
    an_unknown_release_keeps_its_own_way,
    what_short_steps_cannot_do_is_named,
    names_that_a_release_lacks_are_told,
    a_scheduler_that_lacks_a_name_orders_its_own_steps,
)
