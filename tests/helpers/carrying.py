"""A small run whose steps cut and carry groups, and its responses with weights that stay as they are."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlcore.checkpoint.catalog import LoopState
from rlcore.rollout.engine import carried_to_text
from rlcore.run.problems import Problems
from rlcore.trainer import PhaseClock
from rlcore.trainer.experience import Experience, ExperienceCollector
from rlcore.types import Rollout
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import SmallRun

CARRYING = (
    *LEARNING, "rollout.finish_share=0.75", "algo.importance.mode=truncate", "rollout.samples_per_prompt=2",
    "trainer.batch_size=6", "trainer.mini_batch_size=6", "rollout.max_response_tokens=200", "optim.lr=1e-2",
    "model.scratch.max_position_embeddings=256", "validation.max_problems=2",
)  # fmt: skip
"""Random weights, whose responses have all lengths. Six of eight groups finish, and two are carried."""


def collect_steps(run: SmallRun, group: WorkerGroup, count: int) -> list[tuple[LoopState, Experience]]:
    problems, found = Problems.read(run.config, run.inputs), []
    state = LoopState(0, 0, 0, 0, 0.0)
    with ExitStack() as opened:
        sampler = problems.build_sampler(run.inputs, opened)(group)
        for _ in range(count):
            group.each(Worker.sync_weights, state.policy_version)
            experience = ExperienceCollector(sampler, problems.stream).collect(state, PhaseClock())
            found.append((state, experience))
            state = replace(
                state,
                step=state.step + 1,
                policy_version=state.policy_version + 1,
                num_prompts_drawn=state.num_prompts_drawn + experience.num_prompts_drawn,
                carried=carried_to_text(experience.carried),
            )
    return found


def facts_of(rollout: Rollout) -> list[Any]:
    return [
        rollout.prompt.prompt_id, rollout.sample_index, rollout.response_ids.tolist(), rollout.finish_reason,
        rollout.policy_version, rollout.is_cut, rollout.num_stale,
    ]  # fmt: skip


def step_facts(run: SmallRun, group: WorkerGroup, count: int) -> list[list[Any]]:
    return [
        [
            [facts_of(rollout) for rollout in experience.rollouts],
            [[*facts_of(each.rollout(state.policy_version)), each.seed] for each in experience.carried],
            experience.cut_length,
        ]
        for state, experience in collect_steps(run, group, count)
    ]
