"""Groups that are cut and continued, compared with responses that are generated whole."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.batching.pack import pack
from rlcore.rollout import engine
from rlcore.run.problems import Problems
from rlcore.trainer.experience import ResponseSampler
from rlcore.types import Prompt, Rollout
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.carrying import CARRYING, collect_steps, step_facts
from tests.helpers.small_run import SmallRun, prepare

STEPS = 2
PROMPT = Prompt(3, (5, 6), "countdown", '{"target": 7}', difficulty=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return prepare(tmp_path_factory.mktemp("artifacts"), *CARRYING)


@pytest.fixture(scope="module")
def group(run: SmallRun) -> Iterator[LocalGroup]:
    with closing(LocalGroup(run.config, str(run.model_directory))) as group:
        yield group


def naive_steps(run: SmallRun, group: LocalGroup) -> list[list[Any]]:
    """Return the responses of each step from whole responses, which are cut and continued one by one."""
    config, steps = run.config, list[list[Any]]()
    problems, limit = Problems.read(config, run.inputs), config.rollout.max_response_tokens
    sampler = ResponseSampler(config, group, problems.scoring_pool(), problems.decode)
    position, waiting = 0, list[dict[str, Any]]()

    def whole(prompt: Prompt, seeds: list[int], tokens: list[int]) -> list[tuple[list[int], str]]:
        longer = Prompt(prompt.prompt_id, (*prompt.token_ids, *tokens), prompt.data_source, prompt.ground_truth_json)
        requests = [engine.SamplingRequest(longer, 0, seed, limit - len(tokens)) for seed in seeds]
        found = sampler.generate(requests, config.rollout.sampling, policy_version=len(steps))
        return [(tokens + each.response_ids.tolist(), each.finish_reason) for each in found]

    for step in range(STEPS):
        group.each(Worker.sync_weights, step)
        trained = []
        for one in waiting:
            responses = []
            for seed, part in zip(one["seeds"], one["parts"], strict=True):
                is_cut = part[1] == "cut"
                ended = whole(one["prompt"], [engine.turn_seed(seed, 1)], part[0])[0] if is_cut else part
                responses.append((*ended, len(part[0])))
            trained.append([one["prompt"].prompt_id, responses])
        new = []
        for number in range(8 - len(waiting)):
            (prompt,) = problems.stream.take(position + number, 1)
            place = (config.seed, engine.TRAINING_STREAM, step + 1, number)
            seeds = [engine.response_seed(*place, sample) for sample in range(2)]
            parts = whole(prompt, seeds, [])
            new.append({"prompt": prompt, "seeds": seeds, "parts": parts, "longest": max(len(t) for t, _ in parts)})
        position += len(new)
        order = sorted(range(len(new)), key=lambda number: (new[number]["longest"], number))
        chosen = order[: 6 - len(waiting)]
        cut = new[chosen[-1]]["longest"]
        for number in sorted(chosen):
            trained.append([new[number]["prompt"].prompt_id, [(*part, 0) for part in new[number]["parts"]]])
        waiting = [new[number] for number in sorted(set(order) - set(chosen))]
        for one in waiting:
            one["parts"] = [(tokens[:cut], reason if len(tokens) <= cut else "cut") for tokens, reason in one["parts"]]
        steps.append([trained, [(one["prompt"].prompt_id, one["parts"]) for one in waiting], cut])
    return steps


def test_steps_match_whole_responses(run: SmallRun, group: LocalGroup) -> None:
    found = []
    for state, experience in collect_steps(run, group, STEPS):
        rollouts = experience.rollouts
        whole = [(r.response_ids.tolist(), r.finish_reason, r.num_stale) for r in rollouts]
        trained = [[rollouts[at].prompt.prompt_id, whole[at : at + 2]] for at in range(0, len(rollouts), 2)]
        parts = [each.rollout(state.policy_version) for each in experience.carried]
        ends = [(part.response_ids.tolist(), "cut" if part.is_cut else part.finish_reason) for part in parts]
        carried = [(parts[at].prompt.prompt_id, ends[at : at + 2]) for at in range(0, len(parts), 2)]
        found.append([trained, carried, experience.cut_length])
        assert not any(rollout.is_cut for rollout in rollouts)
        assert {rollout.policy_version for rollout in rollouts} == {state.policy_version}
        assert experience.num_prompts_drawn == (6 if state.step else 8)
        assert experience.group_ids == tuple(np.repeat(range(6), 2))
    assert found == naive_steps(run, group)
    cuts = [cut for *_, cut in found]
    assert min(cuts) < run.config.rollout.max_response_tokens, "no step was cut"
    continued = [r for trained, *_ in found[1:] for _, pair in trained for r in pair if 0 < r[2] < len(r[0])]
    assert continued, "no response was continued"


def test_continued_logprobs_are_of_their_tokens(run: SmallRun, group: LocalGroup) -> None:
    """The weights stay as they are, so the trainer finds the log-probability of every token."""
    _, (_, experience), *_ = collect_steps(run, group, 2)
    assert 0 < experience.num_stale_tokens < experience.num_response_tokens
    packed = pack(experience.rollouts, experience.scores, experience.group_ids)
    (found,) = group.begin(Worker.old_logprobs, [(packed, 1)]).result()
    np.testing.assert_allclose(found[packed.loss_mask], packed.behavior_logprobs[packed.loss_mask], atol=1e-4)


def test_places_and_scorers_change_no_response(run: SmallRun, group: LocalGroup, tmp_path: Path) -> None:
    other = prepare(tmp_path, *CARRYING, "rollout.max_num_seqs=7", "reward.num_processes=1")
    with closing(LocalGroup(other.config, str(other.model_directory))) as own:
        assert step_facts(other, own, STEPS) == step_facts(run, group, STEPS)


def written(length: int, sample: int = 0, *, is_cut: bool = False) -> Rollout:
    ids, logprobs = np.arange(length, dtype=np.int32), np.linspace(-2, -0.1, length, dtype=np.float32)
    return Rollout(PROMPT, sample, ids, logprobs, "length" if is_cut else "stop", 4, is_cut=is_cut)


def test_first_finished_groups_in_order_of_equal_lengths() -> None:
    groups = [[written(9)], [written(5)], [written(7, is_cut=True)], [written(3)], [written(5)]]
    assert engine.first_finished(groups, 1) == ([3], 3)
    assert engine.first_finished(groups, 2) == ([1, 3], 5)
    assert engine.first_finished(groups, 4) == ([0, 1, 3, 4], 9)


def test_text_keeps_every_bit() -> None:
    carried = tuple(engine.Carried.of(written(4, sample), 2**62 + sample, 3 + sample) for sample in range(2))
    assert engine.carried_from_text(engine.carried_to_text(carried)) == carried
    assert (engine.carried_from_text(""), engine.carried_to_text(())) == ((), "")
    first, second = (each.rollout(9) for each in carried)
    assert (first.response_ids.tolist(), second.response_ids.tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    assert second.behavior_logprobs.tobytes() == written(4).behavior_logprobs.tobytes()
    facts = [(r.policy_version, r.num_stale, r.is_cut, r.finish_reason) for r in (first, second)]
    assert facts == [(9, 3, True, "length"), (9, 4, False, "stop")]
    request = carried[0].request(10)
    assert request.prompt.token_ids == (5, 6, 0, 1, 2)
    assert (request.sample_index, request.seed, request.max_tokens) == (0, engine.turn_seed(2**62, 1), 7)
    assert request.group == -1, "it may not be cut again"


def test_finished_carried_group_needs_no_token() -> None:
    carried = [engine.Carried.of(written(4, sample), sample, 4) for sample in range(2)]
    groups = engine.GroupsInProgress(carried, [engine.SamplingRequest(PROMPT, i, i) for i in range(2)], 2, 7)
    assert [place for place, _ in groups.finished()] == [0, 1]
    assert groups.add(0, written(3)) == []
    assert [place for place, _ in groups.add(1, written(2, 1))] == [2, 3]
    trained, left, cut_length = groups.settle(1)
    assert (sorted(trained), left, cut_length) == ([0, 1, 2, 3], (), 3)
