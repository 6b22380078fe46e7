"""Where a run comes from: code, machine, packages and the tags by which it is found in MLflow."""

import getpass
import importlib.metadata
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.tracking.system import gpu_facts

RUN_ID_TAG = "millrace.run_id"
"""Tag of a run's own MLflow run; its value is the run's folder name."""

FOLDER_TAG = "millrace.folder"
"""Tag of a run's own MLflow run: the id of the folder that it is of. Several people may run the same in one store."""

SOURCE_FOLDER = Path(__file__).parents[2]
"""The folder that holds `rlcore`: a git checkout, or an installed package's parent."""

PACKAGES = ("torch", "transformers", "datasets", "ray", "prefect", "mlflow", "vllm", "flash-attn", "numpy", "pyarrow")
"""Packages whose versions can change the numbers or the speed."""

GIT_TIMEOUT_S = 10.0
"""A repository on a slow network disk must not hold up a run."""


@dataclass(frozen=True, slots=True)
class CodeRevision:
    """The state of the source. `dirty`: some file differs from the commit or is not in it."""

    commit: str
    dirty: bool


def code_revision(folder: Path = SOURCE_FOLDER) -> CodeRevision | None:
    """The git commit of the source; None outside a git checkout or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain") or ""
    return CodeRevision(commit.strip(), bool(changes.strip()))


def code_diff(folder: Path = SOURCE_FOLDER) -> str:
    """What the source has changed since its commit, as a patch; empty if nothing, or outside a git checkout."""
    return _git(folder, "diff", "HEAD") or ""


def environment_facts() -> dict[str, str]:
    """Python, operating system, host, GPUs with their driver, and the versions of the packages that matter, by name."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "host": socket.gethostname()}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts | gpu_facts()


def lineage_tags(
    config: RunConfig, *, stage: str, run_id: str, prefect: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The tags of a run's MLflow run: by these it is searched, compared and traced back.

    `prefect` may hold `flow_run_id`, `deployment` and the like; each becomes a tag `prefect.<key>`. The tags of the
    settings come last and win.
    """
    model = config.model.path or f"scratch-{config.model.scratch.num_layers}x{config.model.scratch.hidden_size}"
    tags = {
        RUN_ID_TAG: run_id,
        "stage": stage,
        "task": config.data.task,
        "algorithm": config.algo.advantage,
        "policy_loss": config.algo.policy_loss,
        "model": model,
        "seed": str(config.seed),
        "settings_fingerprint": settings_fingerprint(config),
        "host": socket.gethostname(),
        "mlflow.source.name": "millrace",
        "mlflow.user": _user(),
    }
    if (revision := code_revision()) is not None:
        tags |= {"git_commit": revision.commit, "git_dirty": str(revision.dirty).lower()}
        tags["mlflow.source.git.commit"] = revision.commit
    tags |= {f"prefect.{key}": value for key, value in (prefect or {}).items() if value}
    return tags | config.tags


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container with a numeric user id and no entry for it.
        return "unknown"
