"""The commands `millrace eval`, `compare`, `report`, `checkpoints`, `sync` and `ui`. They do not use Prefect."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import (
    ARTIFACTS,
    ConfigDir,
    OptionalRoot,
    Root,
    Run,
    Runs,
    Uri,
    complete_runs_and_settings,
    members_of,
)
from flows.commands.settings import root_in_overrides, with_program_path
from rlcore.errors import CheckpointError, ConfigError, MillraceError

if TYPE_CHECKING:
    from flows.stack.state import Service
    from rlcore.checkpoint.catalog import CheckpointInfo
    from rlcore.run.layout import RunLayout


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_RUN... [KEY=VALUE]...",
            help="Model directories, or runs by folder or id with @last (the default), @best, @start or a step; "
            "settings for all of them.",
            autocompletion=complete_runs_and_settings,
        ),
    ],
    suites: Annotated[
        list[str],
        typer.Option(
            "--suite",
            help="A name in conf/suite, NAME=FOLDER for other files of its form, or a suite's file. May be repeated.",
            autocompletion=members_of("suite"),
        ),
    ],
    root: OptionalRoot = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="All metrics as JSON.")] = False,
) -> None:
    """Evaluate models or checkpoints on suites, with confidence intervals. Each model is compared with the first.

    Examples:
      millrace eval artifacts/runs/<run id> --suite gsm8k
      millrace eval <run id>@start <run id>@best --suite gsm8k --suite my_suite.yaml
      millrace eval <run id> --suite math500=/data/MATH-500 --suite humaneval
      millrace eval /models/SmolLM2-135M-Instruct --suite gsm8k rollout.engine=vllm
    """
    from flows.evaluation import evaluate_all, evaluations_json, table_lines
    from flows.progress import Display, display_for_console, use_display

    models = [word for word in words if "=" not in word or Path(word).exists()]
    overrides = [word for word in words if word not in models]
    command = ["millrace", "eval", *words, *(word for suite in suites for word in ("--suite", suite))]
    command += [] if root is None else ["--root", str(root)]
    with use_display(Display() if as_json else display_for_console()):
        found = evaluate_all(models, suites, overrides, root or root_in_overrides(overrides), command)
    print(json.dumps(evaluations_json(found), indent=2) if as_json else "\n".join(table_lines(found)))


def compare(
    runs: Runs = None,
    search: Annotated[str, typer.Option(help="Also the runs that this MLflow query finds.")] = "",
    root: Root = ARTIFACTS,
    uri: Uri = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment to search (tracking.experiment).")] = "millrace",
) -> None:
    """Compare runs with the first run: settings, curves, metrics and costs. Metrics have confidence intervals.

    Examples:
      millrace compare countdown_demo-s1 countdown_demo-s2
      millrace compare --search "tags.task = 'countdown' and params.seed = '1'"
    """
    from flows.stack.state import with_stack_store
    from flows.work.runs import compare as compare_runs
    from flows.work.runs import find_runs
    from rlcore.config import TrackingConfig

    root = root.resolve()
    tracking = with_stack_store(TrackingConfig(uri=uri, experiment=experiment), root)
    folders = find_runs(runs or (), search, root, tracking)
    files, urls = compare_runs(folders, root)
    print(f"{len(folders)} runs: {', '.join(folder.name for folder in folders)}\n")
    print("\n".join(f"{found.topic}: {found.statement}" for found in files.findings))
    print(f"\n  HTML      {files.html}\n  JSON      {files.json}")
    if urls:
        page, table = reachable_urls(root, *urls)
        print(f"  MLflow    {page}\n  Table     {table}")


def report(run: Run, root: OptionalRoot = None) -> None:
    """Write the report of a run: an HTML page, a JSON file with the numbers of this page, and charts.

    Examples:
      millrace report experiment=countdown_demo
      millrace report artifacts/runs/<run id>
    """
    from flows.stages.outputs import write_report
    from flows.work.runs import find_run

    _, layout = find_run(run, root)
    print(f"report: {write_report(layout)}")


def checkpoints(
    run: Run,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte. Exit code 1 if one is broken.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write one to this folder as a transformers directory.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The one to export: last, best, or a step.", show_default="last")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the export to a new repository of the hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Everyone may read the repository of --push.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete those that the retention rule does not keep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, with all metrics of each.")] = False,
    root: OptionalRoot = None,
) -> None:
    """Show the step, size, scores and state of each checkpoint of a run. The last and the best one are marked.

    Examples:
      millrace checkpoints experiment=countdown_demo --verify
      millrace checkpoints artifacts/runs/<run id> --export model --checkpoint best
      millrace checkpoints artifacts/runs/<run id> --export model --push me/my-model
    """
    from flows.work.runs import find_run
    from flows.work.weights import export_to, find_weights, require_pushable, write_card
    from flows.work.weights import push as upload
    from rlcore.checkpoint.catalog import list_checkpoints
    from rlcore.checkpoint.store import CheckpointStore
    from rlcore.storage.locks import RunLock

    if checkpoint is not None and export is None:
        raise ConfigError(f"--checkpoint {checkpoint}: names the one to export; add --export DIR, or leave it out")
    if push is not None and export is None:
        raise ConfigError(f"--push {push}: uploads an export; add --export DIR, or leave it out")
    if public and push is None:
        raise ConfigError("--public: concerns the repository of --push; add --push OWNER/NAME, or leave it out")
    if push is not None:
        require_pushable(push)
    config, layout = find_run(run, root)
    document: dict[str, Any] = {"run_id": layout.run_dir.name}
    lines = []
    if prune:
        with RunLock(layout.run_dir, is_named=False):  # a trainer may read a checkpoint
            pruned = CheckpointStore(layout.checkpoints, config.checkpoint, config).prune()
        document["deleted"] = [path.name for path in pruned]
        lines += [f"deleted {path.name}: the retention rule does not keep it" for path in pruned]
    if export is not None:
        exported = export_to(config, layout, checkpoint or "last", export.absolute())
        document["exported"] = str(exported)
        lines.append(f"exported {checkpoint or 'last'} to {exported}")
        evaluated = find_weights(f"{layout.run_dir}@{checkpoint or 'last'}", root).folder
        write_card(layout, exported, push or exported.name, evaluated)
        if push is not None:
            document["pushed"] = upload(exported, push, private=not public)
            lines.append(f"pushed to {document['pushed']}, {'public' if public else 'private'}")
    rows = list_checkpoints(layout.checkpoints, verify_hashes=verify)
    if as_json:
        marks = _marks(rows)
        plain = (asdict(replace(row, metrics=dict(row.metrics))) for row in rows)
        listed = [row | {"path": str(row["path"]), "marks": marks.get(row["step"], [])} for row in plain]
        print(json.dumps(document | {"checkpoints": listed}, indent=2))
    else:
        print(*lines, sep="\n", end="\n" if lines else "")
        _show(layout, rows)
    broken = [row for row in rows if row.verdict == "broken"]
    if verify and broken:
        reasons = "\n".join(f"  {row.reason}" for row in broken)
        raise CheckpointError(f"{layout.checkpoints}: {len(broken)} of {len(rows)} checkpoints are broken:\n{reasons}")


def _marks(rows: "Sequence[CheckpointInfo]") -> dict[int, list[str]]:
    from rlcore.checkpoint.catalog import by_score

    intact = [row for row in rows if row.verdict != "broken"]
    marks: dict[int, list[str]] = {}
    for mark, rising in (("last", intact), ("best", by_score(intact))):
        for row in rising[-1:]:
            marks.setdefault(row.step, []).append(mark)
    return marks


def _show(layout: "RunLayout", rows: "Sequence[CheckpointInfo]") -> None:
    from flows.progress import print_table
    from rlcore.storage.disk import size

    if not rows:
        print(f"{layout.checkpoints}: no checkpoint yet", file=sys.stderr)
        return
    marks, cells = _marks(rows), []
    for row in rows:
        reward = row.metrics.get("critic/score/mean")
        cells.append((
            str(row.step),
            size(row.size_bytes),
            "" if row.score is None else f"{row.score:.3f}",
            "" if reward is None else f"{reward:.3f}",
            row.created[:19].replace("T", " "),
            ", ".join(marks.get(row.step, ())),
            row.verdict if row.verdict != "not verified" else "sizes fit",
        ))  # fmt: skip
    if sys.stdout.isatty():
        print(f"run {layout.run_dir.name} in {layout.run_dir}")
    print_table(("step", "size", "held-out", "reward", "written", "", "state"), cells)
    for row in rows:
        if row.verdict == "broken":
            print(row.reason, file=sys.stderr)


def reachable_urls(root: Path, *pages: str) -> list[str]:
    """Return `pages` with the address of the workspace's running MLflow server in place of the default local address.

    If no server runs, the command that starts one is appended to the last address.
    """
    from flows.stack.services import free_port, is_free_port
    from rlcore.tracking.mlflow_store import LOCAL_UI

    if not pages[0].startswith(LOCAL_UI):
        return [*pages]
    address, _, port = LOCAL_UI.rpartition(":")
    number = int(port) if is_free_port(int(port)) else free_port()
    running = _running_mlflow(root)
    server = f"{address}:{number}" if running is None else running.url
    command = with_program_path(f"millrace ui --root {quote(str(root))} --port {number}")
    *others, last = (page.replace(LOCAL_UI, server, 1) for page in pages)
    return [*others, last if running is not None else f"{last}\n            after {command}"]


def _running_mlflow(root: Path) -> "Service | None":
    from flows.stack.services import is_ready
    from flows.stack.state import read_stack

    found = read_stack(root).service("mlflow")
    return found if found is not None and is_ready(found) else None


def sync(runs: Runs = None, root: Root = ARTIFACTS, uri: Uri = None) -> None:
    """Send the metrics and the final status of runs to MLflow. Without an argument, all runs are sent.

    Metrics that were sent before are not sent again.

    Examples:
      millrace sync
      millrace sync countdown_demo-s1 --uri http://127.0.0.1:5000
    """
    from flows.work import runs as several

    root = root.resolve()
    folders = [several.find_folder(run, root) for run in runs] if runs else several.all_runs(root)
    if not folders:
        print(f"no runs under {root / 'runs'}")
    has_failed = False
    for folder in folders:
        try:
            text = several.sync(folder, uri)
        except (MillraceError, OSError) as error:
            text, has_failed = str(error), True
        print(f"{folder.name}: {text}")
    if has_failed:
        sys.exit(1)


def ui(
    root: Root = ARTIFACTS,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port of the page; default: a free one.")] = None,
) -> None:
    """Serve MLflow's pages for a workspace's runs, and a page with their responses, until the command is interrupted.

    Examples:
      millrace ui --port 5000
    """
    from flows.server.launch import log_tail
    from flows.stack.services import is_free_port, start_mlflow, stop_server, wait_until_ready
    from flows.stack.state import (
        StackState,
        default_mlflow_database,
        login_hint,
        mlflow_database,
        mlflow_login_environment,
        root_login,
        with_stack_store,
    )
    from rlcore.config import TrackingConfig
    from rlcore.tracking.connection import has_store
    from rlcore.tracking.mlflow_store import MlflowStore

    root = root.resolve()
    running = _running_mlflow(root) if port is None else None
    if running is not None:
        store = MlflowStore(with_stack_store(TrackingConfig(), root), root)
        print(f"MLflow is up already, by millrace up: {store.runs_url(running.url)}")
        print(f"Responses: {running.url}/answers/\nLog in with {login_hint(root)}")
        return
    if port is not None and not is_free_port(port):
        raise ConfigError(f"--port {port}: is in use on this machine. Name another one, or leave it out.")
    database = mlflow_database(root)
    if not has_store(database):
        raise ConfigError(f"--root {root}: holds no MLflow store. Run an experiment there, or name another workspace.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = start_mlflow(root, port, StackState(), tether=True)
    process = server.process()
    try:
        wait_until_ready(server)
        tracking = TrackingConfig()
        if database != default_mlflow_database(root):
            os.environ.update(mlflow_login_environment(root_login(root)))
            tracking = TrackingConfig(uri=server.url)
        page = MlflowStore(tracking, root).runs_url(server.url)
        print(f"MLflow: {page} (until Ctrl-C; its log: {server.log})\nResponses: {server.url}/answers/")
        print(f"Log in with {login_hint(root)}", flush=True)
        if process is not None:
            process.wait()
        raise MillraceError(f"MLflow's server has ended unexpectedly.\n{log_tail(server.log)}")
    except KeyboardInterrupt:
        pass
    finally:
        if process is not None:
            stop_server(process)
