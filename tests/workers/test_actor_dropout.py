"""Dropout of LoRA adapters: only in updates, and the same wherever the run was killed before."""

from pathlib import Path

import numpy as np
import torch

from rlcore.algos.aggregation import Denominator
from rlcore.batching.pack import select_train
from rlcore.runtime.local import LocalGroup
from rlcore.workers.trained_model import MiniBatch
from tests.helpers.small_run import prepare
from tests.workers.ranks import batch_from, random_batch


def test_dropout_follows_from_the_place_in_the_run(tmp_path: Path) -> None:
    run = prepare(tmp_path, "model.lora.rank=4", "model.lora.dropout=0.5", "optim.lr=0.05")
    whole = batch_from(random_batch(np.random.default_rng(7)))
    batch = select_train(whole, range(whole.packed.num_sequences))
    counts = Denominator(batch.packed.num_loss_tokens, batch.packed.num_sequences, 8)
    mini_batch = MiniBatch(range(batch.packed.num_sequences), 2, counts)
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        (worker,) = group.each(lambda worker: worker)

        def updated(torch_seed: int, version: int) -> list[torch.Tensor]:
            """Log-probabilities of three updates of a new hand-over, and after them."""
            worker.reset()
            worker.sync_weights(version)
            torch.manual_seed(torch_seed)
            found = [worker.update_policy(batch, [mini_batch], 0.05, 0.0).steps[0].logprobs for _ in range(3)]
            return [*found, worker.old_logprobs(batch.packed, 2)]

        first, again, other = updated(1, version=3), updated(2, version=3), updated(1, version=4)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[-1], other[-1])
        assert torch.equal(worker.old_logprobs(batch.packed, 2), other[-1])  # measured without dropout
    finally:
        group.close()


def test_dropout_of_a_repeated_pass_depends_on_its_cut(tmp_path: Path) -> None:
    loss = "algo.policy_loss=tests.helpers.harmful:at_most_four"
    run = prepare(tmp_path, "model.lora.rank=4", "model.lora.dropout=0.5", "optim.lr=0.05", loss)
    whole = batch_from(random_batch(np.random.default_rng(7)))
    counts = Denominator(whole.packed.num_loss_tokens, whole.packed.num_sequences, 8)
    group = LocalGroup(run.config, str(run.model_directory))
    try:
        (worker,) = group.each(lambda worker: worker)

        def after_update(num_micro: int) -> tuple[torch.Tensor, int]:
            """Log-probabilities after one update, and in how many micro-batches it was done."""
            worker.reset()
            worker.sync_weights(3)
            mini_batch = MiniBatch(range(whole.packed.num_sequences), num_micro, counts)
            worker.update_policy(whole, [mini_batch], 0.05, 0.0)
            return worker.old_logprobs(whole.packed, 1), num_micro * worker.actor.update_pass.factor

        redone, num_micro = after_update(1)
        assert num_micro > 1
        at_once, same_number = after_update(num_micro)
        assert same_number == num_micro
        assert torch.equal(redone, at_once)
    finally:
        group.close()
