"""Two gloo ranks of which one, or each, is refused memory somewhere in a pass, at every place that there is.

python -m tests.workers.leaving_ranks RANK FOLDER [OVERRIDE ...]       prints what was found as JSON
"""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlcore.algos.aggregation import Denominator
from rlcore.batching.pack import select_train
from rlcore.errors import DeviceMemoryError
from rlcore.models.parallel import CountedCollectives, gathered
from rlcore.workers.actor import Actor
from rlcore.workers.critic import Critic
from rlcore.workers.device import choose_place, join_ranks
from rlcore.workers.passes import PassBudget
from tests.small_run import prepare
from tests.workers.ranks import batch_from
from tests.workers.test_gradients import NUM_SEQUENCES, random_batch

NUM_MICRO = 2


def collectives_of(budget: PassBudget) -> CountedCollectives:
    assert budget._ranks is not None
    return budget._ranks.collectives


@contextlib.contextmanager
def refused_at(counter: CountedCollectives, places: list[int]) -> Iterator[None]:
    """Torch refuses memory in place of the n-th collective ordered from here on, for each n (from 1)."""
    order, ordered = counter.order, 0

    def refusing(send: Callable[[], object]) -> object:
        nonlocal ordered
        ordered += 1
        if ordered in places:
            torch.empty(1 << 60, dtype=torch.uint8)
        return order(send)

    counter.order = refusing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del counter.order


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    words = ("warm_start.enabled=false", "model.scratch.num_layers=2", *sys.argv[3:])
    run = prepare(folder / f"rank-{rank}", "algo=ppo", *words)
    lora = prepare(folder / f"adapted-{rank}", "model.lora.rank=2", *words)
    place = choose_place(run.config.runtime, run.config.model)
    join_ranks(f"file://{folder / 'meeting'}", rank=rank, world_size=2, device=place.device)
    mesh = init_device_mesh("cpu", (2,))
    assert run.config.critic is not None
    whole = batch_from(random_batch(np.random.default_rng(7)))
    mine = select_train(whole, range(rank, NUM_SEQUENCES, 2))
    counts = Denominator(whole.packed.num_loss_tokens, whole.packed.num_sequences, 8)
    actor = Actor(run.config, str(run.model_directory), place, mesh)
    critic = Critic(run.config, run.config.critic, str(run.model_directory), place, mesh)
    torch.nn.init.constant_(critic.model.value_head.weight, 0.1)
    start = {name: value.detach().clone() for one in (actor, critic) for name, value in weights(one.model)}

    def restart(one: Actor | Critic) -> None:
        one.model.reshard()  # type: ignore[operator]  # FSDP2's
        for name, value in weights(one.model):
            value.data.copy_(start[name])
        one.optimizer.state.clear()
        # FSDP2 leaves the outermost weights together after passes like these
        one.logprobs(mine.packed, 1) if isinstance(one, Actor) else one.values(mine.packed, 1)

    def policy_update() -> list[float]:
        found = actor.update(mine, NUM_MICRO, counts, lr=1e-3, kl_coef=0.01)
        return [found.grad_norm, float(found.stats.pg_loss), *norms(actor.model)]

    def critic_update() -> list[float]:
        found = critic.update(mine, NUM_MICRO, counts, lr=1e-3)
        return [found.grad_norm, float(found.stats.vf_loss), *norms(critic.model)]

    passes: dict[str, tuple[Actor | Critic, PassBudget, Callable[[], list[float]]]] = {
        "policy_update": (actor, actor.update_pass, policy_update),
        "critic_update": (critic, critic.update_pass, critic_update),
        "logprobs": (actor, actor.forward_pass, lambda: actor.logprobs(mine.packed, NUM_MICRO).tolist()),
        "values": (critic, critic.forward_pass, lambda: critic.values(mine.packed, NUM_MICRO).tolist()),
    }
    gc.freeze()  # each refusal collects garbage
    found: dict[str, object] = {}
    for name, (one, budget, work) in passes.items():
        counter = collectives_of(budget)
        restart(one)
        expected = work()
        number = counter._reached
        differences, redone = [], []
        for place_of_0, place_of_1 in cases(number):
            restart(one)
            budget.factor = 1
            before = budget.num_failures
            with refused_at(counter, [place_of_1 if rank else place_of_0]):
                differences.append(float(np.abs(np.subtract(work(), expected)).max()))
            assert budget.factor == 2, "the cut is the same on both ranks"
            redone.append(budget.num_failures - before)
        found[name] = {"collectives": number, "differences": differences, "redone": redone}
    found["handed_over"] = [handed_over(actor, dtype) for dtype in (torch.float32, torch.bfloat16)]
    found["adapters_whole"] = handed_over(Actor(lora.config, str(lora.model_directory), place, mesh), place.dtype)[0]
    # A sequence in each micro-batch, and still refused: all ranks are told.
    budget, counter = actor.update_pass, collectives_of(actor.update_pass)
    budget.factor = NUM_SEQUENCES
    with refused_at(counter, [5] if rank else []):
        found["told"] = told(policy_update)
    print(json.dumps(found), flush=True)
    # Refused again while it makes up for the rest: the other waits for it until it is gone.
    budget.factor = 1
    with refused_at(counter, [3, 4] if rank else []):
        print(json.dumps(told(policy_update)), flush=True)


def handed_over(actor: Actor, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether the weights are whole around a hand-over in this type, and whether each is given as it is, or cast."""
    exact = {name: gathered(value) for name, value in actor.model.model.named_parameters()}
    with actor.gathered(dtype):
        is_whole = not any(isinstance(value, DTensor) for value in actor.model.parameters())
        given = {name: value.to(dtype, copy=True) for name, value in actor.weights(dtype)}
    names = given.keys() & exact.keys()
    is_right = all(torch.equal(given[name], exact[name].to(dtype)) for name in names)
    is_sharded = all(isinstance(value, DTensor) for value in actor.model.parameters())
    assert is_sharded or not is_whole, "again, without a pass too"
    return is_whole, is_right and given.keys() == exact.keys()


def told(work: Callable[[], object]) -> str:
    """How a pass ends."""
    try:
        work()
    except (DeviceMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it went through"


def weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """This rank's shards."""
    return [
        (f"{type(model).__name__}.{name}", value.to_local() if isinstance(value, DTensor) else value)
        for name, value in model.named_parameters()
    ]


def norms(model: torch.nn.Module) -> list[float]:
    """Of each whole tensor."""
    return [float(gathered(value).norm()) for value in model.parameters()]


def cases(number: int) -> list[tuple[int, int]]:
    """Places (0: none) at which rank 0 and rank 1 are refused memory."""
    alone = [(0, place) for place in range(1, number + 1)]
    return [*alone, (3, 0), (1, number), (number, 1), (2, 2), (number // 2, number // 2 + 1)]


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads
