"""Which tasks are tried again, and when."""

from typing import Any, ParamSpec, TypeVar

from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from flows.shown.tell import tell
from rlcore.config import RunConfig
from rlcore.errors import WorkerLostError

P = ParamSpec("P")
R = TypeVar("R")

RETRY_BACKOFF_S = 2
"""Before the first retry; doubled for each further one. Long enough for a dead process's memory to be free."""


def retried(task: Task[P, R], config: RunConfig) -> Task[P, R]:
    """The same task, tried again where it has lost a worker: what the trainer does goes on from what is on disk."""
    return task.with_options(
        retries=config.runtime.max_chunk_retries,
        retry_delay_seconds=exponential_backoff(RETRY_BACKOFF_S),
        retry_condition_fn=is_worth_a_retry,
    )


def is_worth_a_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """A lost process is; wrong settings, a full disk, a loss that is not finite are not."""
    if not isinstance(state.data, WorkerLostError):
        return False
    if task_run.run_count <= task.retries:
        tell(f"{state.data}\ntrying again from the last checkpoint ({task_run.run_count} of {task.retries})")
    return True
