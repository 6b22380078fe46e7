"""Run policy and critic in a process with too little memory for one micro-batch.

python -m tests.workers.short_of_memory ROOT plain|sharded    sharded: FSDP on one rank; prints JSON
"""

import json
import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algos.aggregation import Denominator
from rlcore.models.parallel import gather_parameter
from rlcore.workers.actor import Actor, Critic
from rlcore.workers.device import choose_device, join_ranks
from tests.helpers.small_run import prepare
from tests.workers.ranks import random_batch

NUM_SEQUENCES = 64
SLACK_BYTES = 40 << 20  # additional memory: too little for one micro-batch, enough for eight


def norm(model: torch.nn.Module) -> float:
    """Return the 2-norm of all weights. Repeated or different updates change the norm."""
    return float(torch.stack([gather_parameter(parameter).norm() for parameter in model.parameters()]).norm())


def measure(actor: Actor, critic: Critic, number: int) -> dict[str, float]:
    data = random_batch(np.random.default_rng(5), NUM_SEQUENCES, (100, 101), (50, 150))
    denominator = Denominator(data.packed.num_loss_tokens, data.packed.num_sequences, 150)
    policy = actor.update(data, number, denominator, lr=1e-3, kl_coef=0.01)
    value = critic.update(data, number, denominator, lr=1e-3)
    return {
        "policy loss": float(policy.stats.pg_loss),
        "policy gradient": policy.grad_norm,
        "policy weights": norm(actor.model),
        "log-probabilities": float(policy.logprobs.sum()),
        "later log-probabilities": float(actor.logprobs(data.packed, number).sum()),
        "value loss": float(value.stats.vf_loss),
        "value gradient": value.grad_norm,
        "value weights": norm(critic.model),
        "later values": float(critic.values(data.packed, number).sum()),
    }


def main() -> None:
    root, kind = Path(sys.argv[1]).resolve(), sys.argv[2]
    torch.set_num_threads(1)
    run = prepare(root, "algo=ppo", "model.scratch.max_position_embeddings=512", "warm_start.enabled=false")
    config = run.config
    device = choose_device(config.runtime)
    mesh = None
    if kind == "sharded":
        join_ranks(f"file://{root / 'meeting'}", rank=0, world_size=1, device=device)
        mesh = init_device_mesh("cpu", (1,))

    def fresh() -> tuple[Actor, Critic]:
        directory = str(run.model_directory)
        assert config.critic is not None
        critic = Critic(config, config.critic, directory, device, mesh)
        torch.nn.init.constant_(critic.model.value_head.weight, 0.1)
        return Actor(config, directory, device, mesh), critic

    undisturbed = measure(*fresh(), NUM_SEQUENCES)  # also loads all code and starts all threads
    actor, critic = fresh()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SLACK_BYTES, resource.RLIM_INFINITY))
    forced = measure(actor, critic, 1)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    failures = {"policy": actor.update_pass.num_failures, "critic": critic.update_pass.num_failures}
    print(json.dumps({"undisturbed": undisturbed, "forced": forced, "failures": failures}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads


if __name__ == "__main__":
    main()
