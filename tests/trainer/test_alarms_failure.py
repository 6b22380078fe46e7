"""A non-finite update stops the run, saves the batch that caused it and names its rows."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.errors import NonFiniteError
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.alarms import save_failed_batch
from rlcore.trainer.experience import Experience
from rlcore.types import Score, TrainBatch
from rlcore.workers.worker import Worker
from tests.batching.rows import packed as packed_batch
from tests.helpers.small_run import prepare, train


def test_a_loss_that_is_not_a_number_is_found_with_its_rows(tmp_path: Path) -> None:
    run = prepare(tmp_path, "algo.policy_loss=tests.trainer.broken_loss:log_of_advantage")
    group = LocalGroup(run.config, str(run.model_directory))
    before = {name: value.clone() for name, value in group.each(Worker.full_weights)[0].items()}
    try:
        with pytest.raises(NonFiniteError, match=r"loss is nan.*Batch saved to .*step-000001") as caught:
            train(run, group, 1)
        after = group.each(Worker.full_weights)[0]
        (gradients,) = group.each(lambda worker: [p.grad for p in worker.actor.model.parameters()])
    finally:
        group.close()
    assert all(torch.equal(before[name], after[name]) for name in before), "a step was taken all the same"
    assert all(gradient is None for gradient in gradients), "their memory is held until the next update"

    assert str(caught.value).endswith("non-finite inputs in no single row: its inputs are all finite.")
    file = run.layout.failures / "step-000001.safetensors"
    batch = load_file(file)
    lengths = batch["cu_seqlens"].diff()
    negative = torch.zeros(len(lengths), dtype=torch.bool)
    negative[torch.repeat_interleave(torch.arange(len(lengths)), lengths)[batch["advantages"] < 0]] = True
    guilty = sorted(set(batch["group_ids"][negative].tolist()))
    assert guilty
    assert f"the loss of prompts number {guilty} of the step is not finite" in str(caught.value)
    answers = json.loads(file.with_suffix(".json").read_text())
    assert [answer["row"] for answer in answers] == list(range(len(lengths)))
    assert [answer["score"] for answer in answers] == batch["scores"].tolist()


def test_rows_with_a_number_that_is_not_finite_are_marked(tmp_path: Path) -> None:
    """Tensors that share memory are no hindrance: the old log-probabilities may be the behavior's."""
    packed, rollouts = packed_batch([(2, 3), (1, 2), (2, 2)])
    ones = torch.ones(packed.num_tokens)
    bad = ones.clone()
    bad[packed.cu_seqlens[1] + 1] = float("nan")
    batch = TrainBatch(packed, packed.behavior_logprobs, None, None, bad, None, ones)
    scores = tuple(Score(total, {}) for total in packed.scores.tolist())
    experience = Experience(tuple(rollouts), scores, (0, 1, 2), ("a", "b", "c"), 3, 0, None)
    file, prompts = save_failed_batch(tmp_path, 7, experience, batch)
    assert prompts == [1]
    answers = json.loads(file.with_suffix(".json").read_text())
    assert [answer["non_finite"] for answer in answers] == [False, True, False]
