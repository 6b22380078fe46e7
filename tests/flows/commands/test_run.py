"""The last lines of `millrace run`."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil

from flows.chain import PipelineResult
from flows.commands.run import summary_lines
from flows.stack.state import Service, StackState, write_stack
from flows.work.mlflow_record import MlflowContents
from rlcore.config.compose import load_config
from rlcore.storage.locks import start_time_of


def test_last_line_names_the_stack_that_a_user_started_during_the_run(tmp_path: Path) -> None:
    config = load_config(["experiment=debug", f"paths.root={tmp_path}"])
    result = PipelineResult("run", tmp_path / "runs" / "run", 2, [], None, tmp_path, MlflowContents())
    own = ("http://own/api", SimpleNamespace(home=tmp_path / "prefect"))  # no server has to run for a line
    *_, before = summary_lines(config, result, *own)
    me = Service("prefect", os.getpid(), start_time_of(psutil.Process()), 1, "http://stack", "", "")
    write_stack(tmp_path, StackState(services=(me,)))
    *_, after = summary_lines(config, result, *own)
    assert before.endswith(f"millrace up --root {tmp_path}")
    assert after == "  Prefect  http://stack"
