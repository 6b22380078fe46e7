"""Names of flow runs and artifacts."""

import re
from pathlib import PurePath

from prefect.runtime import flow_run

from rlcore.config.compose import FILE_ENDINGS


def flow_run_name() -> str:
    """`train/countdown_demo seed=2`: the flow, the experiment, and the seed where one was given."""
    given = flow_run.parameters
    seed = [f"seed={given['seed']}"] if given.get("seed") is not None else []
    seed += [override for override in given.get("overrides") or [] if override.startswith("seed=")]
    return " ".join([f"{flow_run.flow_name}/{experiment_name(given.get('experiment'))}", *seed[:1]])


def experiment_name(experiment: str | None) -> str:
    """An experiment as a flow run's name shows it.

    >>> experiment_name("debug"), experiment_name("/my/files/mine.yaml"), experiment_name(None)
    ('debug', 'mine', 'defaults')
    """
    named = experiment or "defaults"
    return PurePath(named).stem if named.endswith(FILE_ENDINGS) else named


def artifact_key(of: str, what: str) -> str:
    """The key of an artifact of a run, a sweep or a comparison, by its id: Prefect shows the history of each key.

    Its letters are lower-case letters, digits and dashes.

    >>> artifact_key("countdown_demo-s1-1bb2114f", "report")
    'countdown-demo-s1-1bb2114f-report'
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{of}-{what}".lower()).strip("-")
