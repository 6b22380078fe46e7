"""What stands on the screen when a run is over: what came of it, and where to look."""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from flows.server.api import PrefectApi
from flows.server.database import address_in
from flows.shown.stage_words import judgement_figures
from rlcore.config import RunConfig

if TYPE_CHECKING:
    from flows.work.finished import PipelineResult


def summary_lines(config: RunConfig, result: "PipelineResult", api: PrefectApi | None) -> list[str]:
    """The last lines of `millrace run`; `api` None where there was nothing to do."""
    lines = ["", f"{result.run_id}: {config.trainer.total_steps} steps"]
    lines += [f"  {judgement_figures(one)}" for one in result.judgements]
    lines += [f"  report   {result.report}", f"  weights  {result.weights}"]
    if result.mlflow.ui_command:
        root = result.run_dir.parents[1]
        lines.append(f"  MLflow   {beside_python(f'millrace ui --root {quote(str(root))}')}")
    elif result.mlflow.url:
        lines.append(f"  MLflow   {result.mlflow.url}")
    if api is not None:
        lines.append(f"  Prefect  {prefect_hint(api, result.run_dir.parents[1])}")
    return lines


def prefect_hint(api: PrefectApi, root: Path) -> str:
    """How to see the flow runs."""
    if api.home is None:
        return api.url.removesuffix("/api")
    if api.home == root / "prefect":
        return beside_python(f"millrace up --root {quote(str(root))} --workers 0")
    where = {"PREFECT_HOME": str(api.home), **address_in(api.home)}
    told = " ".join(f"{name}={quote(value)}" for name, value in where.items())
    return f"{told} {beside_python('prefect server start')}"


def beside_python(command: str) -> str:
    """The command with the path of its program, where that lies beside the interpreter.

    >>> beside_python("no-such-program --flag")
    'no-such-program --flag'
    """
    program, _, rest = command.partition(" ")
    path = Path(sys.executable).parent / program
    return f"{quote(str(path))} {rest}" if path.is_file() else command
