"""One vLLM engine over two ranks: `python -m tests.rollout.vllm_spanning ranks FOLDER`.

Training with such an engine under Ray: `python -m tests.rollout.vllm_spanning training FOLDER`. As in `vllm_session`
the processes write JSON for the tests.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from rlcore.config import RunConfig, SamplingConfig
from rlcore.run.training import start_workers
from rlcore.trainer.metrics import Metrics
from rlcore.types import Prompt
from rlcore.workers.canary import NUM_PROMPTS
from rlcore.workers.device import join_ranks
from rlcore.workers.worker import Worker
from tests.helpers.small_run import SmallRun, prepare, train
from tests.rollout.vllm_session import (
    CPU,
    CUT_TOKENS,
    MAX_TOKENS,
    SAMPLING,
    SETTINGS,
    answers,
    build,
    cut_facts,
    differing,
    in_order,
    keep_frozen,
    mean_difference,
    some_requests,
    weights_of,
    write_model,
)
from tests.rollout.vllm_training import raised, sending

NUM_RANKS = 2
SPANNING = SETTINGS.model_copy(update={"tensor_parallel_size": NUM_RANKS})
DEADLINE_S = 450.0
WRONG = "model.layers.0.mlp.down_proj.weight"


def spanning_run(folder: Path) -> SmallRun:
    return prepare(
        folder / "artifacts",
        "rollout.engine=vllm",
        f"rollout.tensor_parallel_size={NUM_RANKS}",
        "rollout.max_num_seqs=64",
        "rollout.memory_share=0.3",
        "runtime.backend=ray",
        f"runtime.num_workers={NUM_RANKS}",
        "reward.num_processes=1",
        "model.scratch.num_heads=2",
        "model.scratch.hidden_size=64",
        "warm_start.enabled=false",
    )


def engine_facts(folder: Path, kind: str, rank: int) -> dict[str, Any]:
    """Return responses to shares of different sizes, and the tensors of each rank."""
    requests = some_requests(8, 4, 20)
    right, other = folder / f"{kind}-right", folder / f"{kind}-other"
    engine = build(right, SPANNING)
    engine.update_weights(weights_of(right), version=7)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    facts: dict[str, Any] = {"shared_memory": [line for line in maps.splitlines() if "/dev/shm" in line]}
    for name, mine in (
        ("shares", requests[:12] if rank == 0 else requests[12:]),
        ("first rank alone", requests if rank == 0 else []),
        ("second rank alone", [] if rank == 0 else requests),
        ("no rank", []),
    ):
        rollouts = engine.generate(mine, SAMPLING, MAX_TOKENS)
        facts[name] = answers(rollouts)
        if name == "shares":
            facts["versions"] = sorted({rollout.policy_version for rollout in rollouts})
            facts["difference"] = mean_difference(right, rollouts, SAMPLING.temperature)
            facts["in_order"] = in_order(rollouts, mine)
    grouped = [replace(request, group=index // 4) for index, request in enumerate(requests)]
    mine = grouped[:12] if rank == 0 else grouped[12:]
    whole = engine.generate(mine, SamplingConfig(), CUT_TOKENS)
    facts["cut"] = cut_facts(engine, mine, whole, wanted=4, world_size=NUM_RANKS)
    facts["differing_when_right"] = differing(engine, weights_of(right))
    facts["differing_when_wrong"] = differing(engine, weights_of(other))
    facts["sent"] = [name for name, _ in weights_of(right)]
    engine.close()
    return facts


def canary_facts(config: RunConfig, model_directory: Path, rank: int, address: str) -> dict[str, Any]:
    """Return each rank's message for a weight sync that fails only on the second rank."""
    worker = Worker(config, str(model_directory), rank=rank, world_size=NUM_RANKS)
    worker.setup(address)
    worker.set_probe([Prompt(i, tuple(range(5 + i, 29 + i)), "canary", "{}") for i in range(NUM_PROMPTS)])
    facts: dict[str, Any] = {"right": worker.sync_weights(0).difference}
    fault = sending(lambda name, tensor: tensor * (name != WRONG)) if rank == 1 else nullcontext()
    facts["wrong"] = raised(fault, lambda: worker.sync_weights(1))
    facts["right again"] = worker.sync_weights(2).difference
    return facts


def training_facts(folder: Path) -> list[Metrics]:
    run = spanning_run(folder)
    with closing(start_workers(run.config, str(run.model_directory))) as group:
        return train(run, group, 3)


def write_models(folder: Path) -> None:
    for kind, seed in (("tied", 1), ("untied", 3)):
        write_model(kind, folder / f"{kind}-right", seed)
        write_model(kind, folder / f"{kind}-other", seed + 10)
    spanning_run(folder)


def rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    keep_frozen()
    run = spanning_run(folder)
    parts: dict[str, Callable[[], Any]] = {
        "tied": lambda: engine_facts(folder, "tied", rank),
        "untied": lambda: engine_facts(folder, "untied", rank),
        "canary": lambda: canary_facts(run.config, run.model_directory, rank, f"file://{folder}/met-canary"),
    }
    for name, part in parts.items():
        if name != "canary":  # whose worker meets the others by itself
            join_ranks(f"file://{folder}/met-{name}", rank=rank, world_size=NUM_RANKS, device=CPU)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(part()), encoding="utf-8")


def both_ranks(folder: Path) -> None:
    """Fork a process for each rank from this one, which has imported vLLM."""
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"  # as `start_vllm` does before it imports the rest
    import vllm.v1.executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    context, deadline = multiprocessing.get_context("fork"), time.monotonic() + DEADLINE_S
    ranks = [context.Process(target=rank_main, args=(folder, rank)) for rank in range(NUM_RANKS)]
    for one in ranks:
        one.start()
    try:
        while left := [one for one in ranks if one.exitcode is None]:
            wait([one.sentinel for one in left], max(deadline - time.monotonic(), 0))
            if any(one.exitcode for one in ranks) or time.monotonic() > deadline:
                sys.exit(f"exit codes of the ranks: {[one.exitcode for one in ranks]}")
    finally:
        for one in ranks:
            one.kill()


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "ranks":
        both_ranks(folder)
    else:
        (folder / "training.json").write_text(json.dumps(training_facts(folder)))
