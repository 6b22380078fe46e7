"""Program of each gloo rank of the gradient test: updates of real workers, each of a new one.

python -m tests.workers.ranks RANK WORLD_SIZE FOLDER
"""

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.algos.aggregation import Denominator
from rlcore.batching.balance import Balancer, Sizes
from rlcore.batching.pack import pack, select_train
from rlcore.config import RunConfig
from rlcore.models.parallel import gather_parameter
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch
from rlcore.workers.device import choose_device, join_ranks
from rlcore.workers.trained_model import MiniBatch
from rlcore.workers.worker import Worker

LR = 1e-3
NUM_SEQUENCES = 16
UNSCORED = (2, 5, 8, 11)  # responses without a score, which have no gradient


def random_batch(
    rng: np.random.Generator,
    count: int = NUM_SEQUENCES,
    prompt_tokens: tuple[int, int] = (2, 9),
    answer_tokens: tuple[int, int] = (1, 9),
) -> TrainBatch:
    rollouts = []
    for index in range(count):
        prompt = Prompt(
            index, tuple(rng.integers(3, 60, size=rng.integers(*prompt_tokens)).tolist()), "countdown", "{}"
        )
        answer = rng.integers(3, 60, size=rng.integers(*answer_tokens))
        behavior = -rng.random(len(answer)).astype(np.float32) * 4
        rollouts.append(Rollout(prompt, 0, answer, behavior, "stop", 0))
    scores = [Score(float(rng.random()), {}, failure="failed" if index in UNSCORED else None) for index in range(count)]
    packed = pack(rollouts, scores, [index // 4 for index in range(count)])
    mask = packed.loss_mask.float()

    def on_answers(scale: float, shift: float) -> Tensor:
        return (torch.from_numpy(rng.standard_normal(packed.num_tokens).astype(np.float32)) * scale + shift) * mask

    return TrainBatch(
        packed,
        old_logprobs=on_answers(0.3, -4.0),
        ref_logprobs=on_answers(0.3, -4.0),
        old_values=on_answers(0.2, 0.0),
        advantages=on_answers(1.0, 0.0),
        returns=on_answers(1.0, 0.0),
        importance_weights=mask,
        covariance_rank=torch.from_numpy(rng.random(packed.num_tokens)),
    )


def as_pairs(packed: PackedBatch) -> PackedBatch:
    """Return a batch whose neighboring sequences are preference pairs, with their reference."""
    names = ("cu_seqlens", "scores", "score_mask", "group_ids")
    return replace(packed, **{name: getattr(packed, name)[::2] for name in names})


def watch_gradients(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return a dict that receives whole gradients by parameter name at the optimizer's step; a collective."""
    found: dict[str, Tensor] = {}

    def take(*_: object) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = gather_parameter(parameter.grad).clone()

    optimizer.register_step_pre_hook(take)
    return found


def has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def one_rank_without_a_number(worker: Worker, batch: TrainBatch, mini_batch: MiniBatch, is_wrong: bool) -> str:
    """Take two optimizer steps with a NaN loss on one rank, though its gradient is finite, then two normal ones.

    The second line is the error's text."""
    bad = replace(batch, ref_logprobs=torch.full_like(batch.ref_logprobs, torch.nan)) if is_wrong else batch
    before = [parameter.detach().clone() for parameter in worker.actor.model.parameters()]
    outcomes, message = [], ""
    for given in (bad, batch):
        found = worker.update_policy(given, [mini_batch] * 2, LR, 0.01)
        after = worker.actor.model.parameters()
        same = all(
            torch.equal(gather_parameter(old), gather_parameter(new)) for old, new in zip(before, after, strict=True)
        )
        error = type(found.failure).__name__
        message = message or str(found.failure)
        outcomes.append(f"{len(found.steps)} steps, {error}, weights {'as before' if same else 'changed'}")
    return f"{'; '.join(outcomes)}\n{message}"


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    gc.freeze()  # exclude imported modules from garbage collection
    whole: TrainBatch = torch.load(folder / "batch.pt", weights_only=False)
    for number, case in enumerate(json.loads((folder / f"cases-{world_size}.json").read_text())):
        config = RunConfig.model_validate(case["config"])
        device = choose_device(config.runtime)
        if world_size > 1 and not torch.distributed.is_initialized():
            join_ranks(f"file://{folder / f'meeting-{world_size}'}", rank=rank, world_size=world_size, device=device)
        worker = Worker(config, case["model"], rank=rank, world_size=world_size)
        worker.setup("")
        if config.critic is not None:
            # A zero value head has zero gradients below it.
            torch.nn.init.constant_(worker.critic.model.value_head.weight, 0.1)
        batch, order = whole, case["order"]
        if config.warm_start.loss == "dpo":
            batch = replace(batch, packed=as_pairs(batch.packed))
            order = [index for index in order if index < batch.packed.num_sequences]
        dealer = Balancer(num_ranks=world_size, max_tokens=case["max_tokens"], shape=worker.info().shape)
        shares = dealer.shares(batch.packed, Sizes.from_batch(batch.packed, share_prompts=False), order)
        mine = select_train(batch, shares.sequences[rank])
        denominator = Denominator(batch.packed.num_loss_tokens, int(batch.packed.score_mask.sum()), 8)
        mini_batch = MiniBatch(range(mine.packed.num_sequences), shares.num_micro, denominator)
        seen = watch_gradients(worker.actor.optimizer, worker.actor.model)
        if case["supervised"]:
            total = denominator.num_tokens if config.warm_start.loss == "nll" else batch.packed.num_sequences
            worker.supervise(mine.packed, shares.num_micro, total, LR)
        else:
            worker.update_policy(mine, [mini_batch], LR, 0.01)
        found = {f"policy.{name}": value for name, value in seen.items()}
        assert not has_gradients(worker.actor.model), "gradients must be released before the next model's update"
        if config.critic is not None:
            assert worker.critic is not None
            seen = watch_gradients(worker.critic.optimizer, worker.critic.model)
            worker.update_critic(mine, [mini_batch], LR)
            found |= {f"critic.{name}": value for name, value in seen.items()}
            assert not has_gradients(worker.critic.model)
        if rank == 0:
            save_file(found, folder / f"{case['name']}-{world_size}.safetensors")
        if number == 0 and world_size > 1:
            scored = [bool(batch.packed.score_mask[list(part)].any()) for part in shares.sequences]
            is_wrong = rank == max(number for number, has_loss in enumerate(scored) if has_loss)
            outcome = one_rank_without_a_number(worker, mine, mini_batch, is_wrong)
            (folder / f"outcome-{rank}-of-{world_size}").write_text(outcome)


if __name__ == "__main__":
    main()
    # A running gloo thread would end the process by std::terminate at interpreter shutdown.
    os._exit(0)
