"""The model of docs/scaling.md: by a naive twin, in limiting cases, from the files that it names, as the page says."""

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks import scaling
from benchmarks.scaling import PARTS, PHASES, SAMPLES, Parts, Rates, Work, fitted, predict, rates_of, scaled

RESULTS = PARTS.parent
PAGE = RESULTS.parent / "scaling.md"


@pytest.fixture(scope="module")
def given() -> tuple[Parts, list[scaling.Run], Work]:
    return scaling.read_parts(PARTS)


def naive(parts: Parts, rates: Rates, work: Work, ranks: int) -> dict[str, float]:
    """Token by token and rank by rank, in Python's floats."""
    generation, answer_tokens = [], []
    for seed in range(scaling.DRAWS):
        drawn = work.lengths(seed).tolist()
        answer_tokens.append(sum(map(sum, drawn)))
        slowest, at = 0.0, 0
        for rank in range(ranks):
            count = len(drawn) // ranks + (rank < len(drawn) % ranks)
            answers = [length for prompt in drawn[at : at + count] for length in prompt]
            at += count
            took = 0.0
            for step in range(max(answers)):
                took += step_ms(parts, sum(length > step for length in answers)) / 1e3
            slowest = max(slowest, took)
        generation.append(slowest)
    batch = work.prompts * SAMPLES * work.prompt_tokens + statistics.mean(answer_tokens)
    known = [(size, rate) for size, rate in parts.bus_gb_s if size == min(ranks, parts.gpus_per_node)]
    bandwidth = 1e9 * (known[0][1] if ranks > 1 else parts.bus_gb_s[0][1])
    if ranks > parts.gpus_per_node:
        bandwidth = min(bandwidth, 1e9 * parts.node_gb_s)
    computed = work.prompts * work.prompt_tokens + statistics.mean(answer_tokens)
    updates = rates.update * computed / ranks
    hand_over = rates.hand_over
    if ranks > 1:
        others = (ranks - 1) / ranks
        for _ in range(parts.updates):
            updates += rates.each_update
            updates += (2 + 4) * parts.weights * others / bandwidth
            updates += (2 * parts.layers + 2) * (ranks - 1) * parts.hop_us * 1e-6
        hand_over += parts.tensors * rates.each_tensor + 2 * parts.weights * others / bandwidth
    prompts_s = rates.ref * work.prompts * work.prompt_tokens / ranks
    found = {
        "gen": rates.gen * (statistics.mean(generation) + prompts_s),
        "ref": rates.ref * computed / ranks,
        "update_actor": updates,
        "update_weights": hand_over,
        "rest": rates.rest + (rates.each_step if ranks > 1 else 0.0),
    }
    return {name: seconds + parts.driver_us.get(name, 0.0) * batch / 1e6 for name, seconds in found.items()}


def step_ms(parts: Parts, alive: int) -> float:
    """On the straight line between the two measured sizes around, or on the last one."""
    points = list(parts.decode_ms)
    if alive <= points[0][0]:
        return points[0][1]
    (below, first), (above, second) = next((two for two in pairwise(points) if alive <= two[1][0]), points[-2:])
    return first + (second - first) * (alive - below) / (above - below)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_a_prediction_is_that_of_the_naive_twin(given: Any, ranks: int) -> None:
    parts, runs, _ = given
    parts, rates = replace(parts, node_gb_s=70.0), fitted(parts, runs)
    work = Work(prompts=150, prompt_tokens=31, mean=23.0, longest=90)
    found, expected = predict(parts, rates, work, ranks), naive(parts, rates, work, ranks)
    assert found.keys() == expected.keys() == set(PHASES)
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(seconds, rel=1e-9), name


def test_a_run_on_one_gpu_is_given_back_and_so_is_the_one_on_two_that_was_fitted(given: Any) -> None:
    parts, runs, _ = given
    one, two = runs[:2]
    assert predict(parts, rates_of(parts, one), one.work, 1) == pytest.approx(one.seconds)
    both = predict(parts, fitted(parts, [one, two]), two.work, 2)
    assert both["update_weights"] == pytest.approx(two.seconds["update_weights"])
    assert both["rest"] == pytest.approx(two.seconds["rest"])
    for name in ("gen", "ref", "update_actor"):  # not fitted; updates of two are no slower than predicted from one
        assert both[name] == pytest.approx(two.seconds[name], rel=0.04)


def test_without_waits_every_gpu_does_as_much_as_one(given: Any) -> None:
    parts, runs, work = given
    free = replace(parts, bus_gb_s=((1, 1e12), (2, 1e12)), node_gb_s=1e12, hop_us=0.0, driver_us={})
    rates = rates_of(free, runs[0])
    equal = replace(work, mean=float(work.longest))
    for ranks in (2, 16, 64):
        assert scaled(free, rates, equal, True, ranks)["efficiency"] == pytest.approx(1, abs=1e-6)
    alone, shared = (predict(free, rates, equal, ranks) for ranks in (1, 4))
    for name in ("ref", "update_actor"):
        assert shared[name] == pytest.approx(alone[name] / 4)


def test_the_longest_answer_is_the_floor_of_generation(given: Any) -> None:
    parts, runs, work = given
    rates = fitted(parts, runs)
    steps_s = work.longest * parts.decode_ms[0][1] / 1e3
    generation = [predict(parts, rates, work, ranks)["gen"] / rates.gen for ranks in (1, 8, 64)]
    assert generation[0] > generation[1] > generation[2] > steps_s
    assert generation[2] == pytest.approx(steps_s, rel=0.1)


def test_a_network_that_gives_what_is_needed_takes_that_share_of_the_step(given: Any) -> None:
    parts, runs, work = given
    rates = fitted(parts, runs)
    needed = scaling.needed_gb_s(parts, rates, work, 16, 0.05)
    slow = replace(parts, bus_gb_s=((1, needed), (2, needed)), node_gb_s=needed, hop_us=0.0)
    step = sum(predict(slow, rates, work, 16).values())
    assert scaling.collectives_s(slow, 16) / step == pytest.approx(0.05, rel=0.01)


def test_the_parts_are_those_of_the_files_that_they_name() -> None:
    found = json.loads(PARTS.read_text())
    parts = found["parts"]
    assert parts["driver_us"] == json.loads((RESULTS / "driver_cost.json").read_text())["us_per_token"]
    rollouts = json.loads((RESULTS / "short_steps.json").read_text())["rollouts"]
    sizes = next(rollout["by_size"] for rollout in rollouts if rollout["way"] == "short")
    assert [ms for _, ms in parts["decode_ms"]] == [entry["ms"] for entry in list(sizes.values())[:-1]]
    assert [size for size, _ in parts["decode_ms"]] == [np.mean([*map(int, name.split(" to "))]) for name in sizes][:-1]
    for run in found["runs"]:
        file, _, name = run["what"].partition(": ")
        measured = json.loads((RESULTS.parents[1] / file).read_text())[name]
        for phase, seconds in run["phases_s"].items():
            assert seconds == pytest.approx(measured["phases_s"][phase], abs=1e-4)
        assert run["step_s"] == pytest.approx(measured["step_s"], abs=1e-4)
        for count in ("ranks", "prompts", "tokens", "answer_tokens", "longest"):
            assert run[count] == measured[count]


def test_the_page_has_the_tables_that_the_script_prints(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scaling"])
    scaling.main()
    page, rows = PAGE.read_text(), [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [row for row in rows if row not in page] == []
    balance = json.loads((RESULTS / "rank_balance.json").read_text())["waiting"]
    for row in balance:
        assert f"| {row['mini_batch']} | {row['ranks']} | {row['by_tokens']:.2%} | {row['by_cost']:.2%} |" in page
