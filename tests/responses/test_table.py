"""Columns of stored responses, against a loop over tokens."""

import pytest

from rlcore.responses.store import SCHEMA
from tests.helpers.answers import Made


def naive(made: Made, step: int) -> list[dict[str, object]]:
    """Return the rows by a loop over responses and tokens."""
    found = []
    start = 0
    for index, rollout in enumerate(made.rollouts):
        row: dict[str, object] = {name: None for name in SCHEMA.names}
        score, num_prompt = made.scores[index], len(rollout.prompt.token_ids)
        places = [start + num_prompt - 1 + place for place in range(len(rollout.response_ids))]
        start += num_prompt + len(rollout.response_ids)
        learned = [place for place in places if made.batch.packed.loss_mask[place]]
        advantages = [float(made.batch.advantages[place]) for place in places]
        counted = [float(made.batch.advantages[place]) for place in learned]
        mean = sum(counted) / len(counted) if counted else 0.0
        whole = rollout.is_sampled
        drawn = [float(value) for value in rollout.behavior_logprobs]
        sampled = [value for place, value in enumerate(drawn) if whole is None or whole[place]]
        gaps = [
            abs(float(made.policy[place]) - value) for place, value in zip(places, drawn, strict=True)
            if place in learned
        ]  # fmt: skip
        row |= {
            "step": step,
            "greedy": False,
            "prompt_id": rollout.prompt.prompt_id,
            "sample_index": rollout.sample_index,
            "data_source": "made",
            "score": score.total if score.failure is None else None,
            "advantage": pytest.approx(mean, abs=1e-6),
            "num_tokens": len(rollout.response_ids),
            "finish_reason": rollout.finish_reason,
            "policy_version": 7,
            "logprob": pytest.approx(sum(sampled) / max(1, len(sampled)), abs=1e-6),
            "gap": pytest.approx(max(gaps, default=0.0), abs=1e-6),
            "prompt": " ".join(map(str, rollout.prompt.token_ids)),
            "ground_truth": '{"is": 1}',
            "answer": made.texts[index],
            "said": "a",
            "parts": list(score.parts.items()),
            "failure": score.failure,
            "token_ids": rollout.response_ids.tolist(),
            "is_sampled": None if whole is None else whole.tolist(),
            "behavior_logprobs": pytest.approx(drawn),
            "policy_logprobs": pytest.approx([float(made.policy[place]) for place in places]),
            "ref_logprobs": pytest.approx([float(made.ref[place]) for place in places]),
            "advantages": pytest.approx(advantages) if len({round(value, 6) for value in counted}) > 1 else None,
        }
        found.append(row)
    return found


@pytest.mark.parametrize("turns", [False, True])
def test_columns_match_loop_over_tokens(turns: bool) -> None:
    made = Made(3, groups=6, turns=turns)
    table = made.of_step(12)
    assert table.schema == SCHEMA
    found = table.to_pylist()
    assert found == naive(made, 12)
    assert found[0]["advantages"] is None, "equal for all tokens"
    assert any(row["advantages"] for row in found[1:])


def test_validation_has_no_advantages() -> None:
    made = Made(4)
    rows = made.of_validation(20, "step-000020", greedy=True).to_pylist()
    trained = {"advantage", "advantages", "gap", "policy_logprobs", "ref_logprobs"}
    expected = naive(made, 20)
    for row, one in zip(rows, expected, strict=True):
        assert row == one | dict.fromkeys(trained) | {"validation": "step-000020", "greedy": True}
