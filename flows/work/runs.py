"""The runs in a workspace: status, lookup by name or id, comparison, and upload of their metrics to MLflow."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from flows.progress import REWARD_NAMES
from flows.stack.state import FLOW_RUN_COMMAND, set_mlflow_login, stack_tracking_uri
from flows.work.slots import Slots
from rlcore.checkpoint.catalog import scan
from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.config.fingerprint import RUN_FILE
from rlcore.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MillraceError,
    NotFoundError,
    RunInUseError,
    TrackingError,
)
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import read_failures
from rlcore.storage.disk import PAUSED, RESUMED
from rlcore.storage.documents import READ_BLOCK_BYTES, files_of, open_ordinary, parse_json, read_ordinary, sqlite_file
from rlcore.storage.locks import RUN_LOCK, Holder, holder_of, read_holder
from rlcore.tracking.attempts import Destination, read_attempts
from rlcore.tracking.connection import explain_error, has_store
from rlcore.tracking.delivery import read_state, sync_run
from rlcore.tracking.journal import GPU_SECONDS, EventRecord, StepRecord, iter_lines
from rlcore.tracking.lineage import read_origin
from rlcore.tracking.mlflow_store import MlflowStore, compare_url, search_run_ids

if TYPE_CHECKING:
    from rlcore.report.build import ReportFiles


State = Literal["running", "waiting", "stopping", "finished", "stopped", "failed", "lost", "not begun"]
"""The state of a run. The process of a `running`, `waiting` (for disk space or slots) or `stopping` run still exists.

A `stopped` run ended after a stop request. A `lost` run ended without recording why. A `not begun` run has never
started a trainer.
"""
STATES: tuple[State, ...] = get_args(State)

STOP_FILE = "stop.json"
"""The file in a run's folder that records the last stop request. With this record, a repeated `millrace stop` does not
signal the process again."""
SAME_COMMAND = "the same command resumes it"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run. `score` is the mean held-out reward of the newest validated checkpoint.

    `reward` is the training reward of the last step. `changed` is the time of the last entry in the run's journal, in
    seconds since the epoch. `note` explains `state`. `gpu_seconds` is None without a GPU. `tokens_per_s` is the speed
    of each device in the last step.
    """

    run_id: str
    run_dir: str
    name: str
    state: State
    step: int
    total_steps: int | None
    score: float | None
    reward: float | None
    changed: float
    size_bytes: int
    note: str
    gpu_seconds: float | None = None
    tokens_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, plus the seconds since `changed` as `age_s`."""
        return asdict(self) | {"age_s": round(time.time() - self.changed, 1)}


def status_of(run_dir: Path) -> RunStatus:
    """Return the status of one run, read from its folder. Unreadable files count as absent."""
    layout = RunLayout(run_dir.parents[1], run_dir)
    step, reward, pause, changed, gpu_seconds, tokens_per_s = 0, None, "", 0.0, None, None
    for record in _last_records(layout.journal):
        match record:
            case StepRecord():
                step, pause = record.step, ""
                reward = next((record.metrics[name] for name in REWARD_NAMES if name in record.metrics), reward)
                gpu_seconds = record.metrics.get(GPU_SECONDS, gpu_seconds)
                tokens_per_s = record.metrics.get("perf/throughput", tokens_per_s)
            case EventRecord(name=name, data=data):
                pause = str(data.get("text", "")) if name == PAUSED else "" if name == RESUMED else pause
        changed = record.time
    with suppress(OSError):  # deleted during the call
        changed = changed or (run_dir / RUN_FILE).stat().st_mtime
    found = _read_json(run_dir / RUN_FILE).get("settings")
    settings = found if isinstance(found, dict) else {}
    trainer, warm = settings.get("trainer"), settings.get("warm_start")
    total = trainer.get("total_steps") if isinstance(trainer, dict) else None
    if total == 0 and isinstance(warm, dict):  # only supervised steps
        total = warm.get("max_steps")
    state, note = _state(run_dir, pause or Slots(run_dir.parents[1]).wait_reason(run_dir.name))
    scores: list[float | None] = []
    with suppress(CheckpointError):
        scores = [info.score for info in scan(layout.checkpoints).checkpoints]
    return RunStatus(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        name=str(settings.get("name", "")),
        state=state,
        step=step,
        total_steps=total,
        score=next((score for score in reversed(scores) if score is not None), None),
        reward=reward,
        changed=changed,
        size_bytes=size_of(run_dir),
        note=note,
        gpu_seconds=gpu_seconds,
        tokens_per_s=tokens_per_s,
    )


def failure_of(run_dir: Path) -> str:
    """Return `failed: reason` or `lost: reason` if the run is failed or lost, otherwise ''."""
    state, note = _state(run_dir, "")
    return f"{state}: {note}" if state in ("failed", "lost") else ""


def worker_of(run_dir: Path) -> Holder | None:
    """Return the process that uses a run, or None. It is a command, a flow, or a trainer that is still saving."""
    return holder_of(run_dir / RUN_LOCK)


def is_stop_requested(run_dir: Path, worker: Holder | None) -> bool:
    """Return whether a stop of the process `worker` was requested, for example by `millrace stop`."""
    return worker is not None and _read_json(run_dir / STOP_FILE).get("process") == [worker.pid, worker.born]


def resume_hint(run_dir: Path) -> str:
    """Return a text that explains how to resume an ended run: by the run's command, or by a retry in Prefect."""
    last = read_holder(run_dir / RUN_LOCK)
    if last is None or not last.command.endswith(FLOW_RUN_COMMAND):
        return SAME_COMMAND
    flow_run = _read_json(run_dir / STOP_FILE).get("flow_run") if is_stop_requested(run_dir, last) else None
    retry = "Retry on its Prefect page" + (f" or `prefect flow-run retry {flow_run}`" if flow_run else "")
    # Only Prefect knows whether it is suspended, and the stack may be down.
    return f"{retry} resumes it, or Resume on the page if it is suspended (first `millrace up` if the stack is down)"


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder. Files that vanish during the call are skipped."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(at, name).lstat().st_size
    return total


def _state(run_dir: Path, pause: str) -> tuple[State, str]:
    worker = worker_of(run_dir)
    if worker is not None:
        state: State = "stopping" if is_stop_requested(run_dir, worker) else "waiting" if pause else "running"
        return state, pause or f"process {worker.pid} on {worker.host}"
    attempts, failures = read_attempts(run_dir), read_failures(run_dir)
    end = attempts[-1][1] if attempts else None
    status = None if end is None else end.status
    found = _read_json(run_dir / STOP_FILE).get("time")
    stopped_at = found if isinstance(found, int | float) else 0.0
    if not attempts:  # the run ended before the first step
        status = "KILLED" if stopped_at > (failures[-1].time if failures else 0.0) else "FAILED" if failures else None
        if status is None:
            return "not begun", ""
    if status == "FINISHED":
        if end is None or stopped_at <= end.time:
            return "finished", ""
        return "stopped", f"all steps are trained, and results are missing; {resume_hint(run_dir)}"
    if status == "KILLED":
        return "stopped", resume_hint(run_dir)
    why = f"{failures[-1]}: {failures[-1].message.partition(chr(10))[0]}" if failures else ""
    return ("failed" if status == "FAILED" else "lost"), why or f"its process has ended; {resume_hint(run_dir)}"


def _last_records(journal: Path) -> Iterator[StepRecord | EventRecord]:
    with suppress(OSError, DataError), open_ordinary(journal) as file:
        size = os.fstat(file.fileno()).st_size
        for record, _ in iter_lines(file.fileno(), max(0, size - READ_BLOCK_BYTES)):
            if record is not None:
                yield record


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_ordinary(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


log = logging.getLogger(__name__)

FOLDER = "comparisons"  # folder of comparisons among a run's artifacts in MLflow
MAX_NAMES = 8  # largest number of run ids in a message


def all_runs(root: Path) -> list[Path]:
    """Return the folders of all runs in a workspace, sorted by name."""
    return sorted(file.parent for file in files_of(root / "runs", f"*/{RUN_FILE}"))


def find_folder(name: str, root: Path) -> Path:
    """Return the folder of the run with this path, id or prefix of an id. Raises NotFoundError if `name` does not match
    exactly one run."""
    for folder in (Path(name), root / "runs" / name):
        if (folder / RUN_FILE).is_file():
            return folder.resolve()
    known = all_runs(root)
    found = [folder for folder in known if name and folder.name.startswith(name)]
    if len(found) == 1:
        return found[0].resolve()
    name = name or "''"  # perhaps an unset variable of the shell
    meant = found or known
    names = ", ".join(folder.name for folder in meant[:MAX_NAMES]) or "none"
    if len(meant) > MAX_NAMES:
        names += f" and {len(meant) - MAX_NAMES} more (millrace runs lists them)"
    problem = "is a prefix of several run ids" if found else "is neither the folder nor the id of a run"
    raise NotFoundError(
        f"{name}: {problem}; {root / 'runs'} has: {names}. Name one of them, or another workspace (--root, paths.root)."
    )


def find_run(words: Sequence[str], root: Path | None) -> tuple[RunConfig, RunLayout]:
    """Return the settings and layout of the run that `words` name: a folder, an id, a prefix of an id, or settings
    KEY=VALUE. Raises ConfigError for invalid words or settings, NotFoundError if no run matches, and DataError if the
    run's settings cannot be read.
    """
    named = is_named(words)
    if named and len(words) > 1:
        raise ConfigError(
            f"RUN: must be one run, by its folder or id, or its settings, each KEY=VALUE; got {' '.join(words)}"
        )
    if named:
        folder = find_folder(words[0], root or Path(PathsConfig().root))
        config = read_settings(folder)
        layout = RunLayout(Path(config.paths.root).resolve(), folder)  # the folder may be a copy
    else:
        from flows.parameters import all_overrides
        from rlcore.config.compose import load_config  # imports Hydra, which a named run does not need

        config = load_config(all_overrides(words, root=root))
        layout = RunLayout.of(config)
        if not layout.run_dir.is_dir():
            raise NotFoundError(
                f"{layout.run_dir}: there is no such run with these settings. "
                "Give the settings of the run, its id, or its folder."
            )
    return config, layout


def is_named(words: Sequence[str]) -> bool:
    """Return whether any of the words is the id or folder of a run instead of a setting KEY=VALUE."""
    return any("=" not in word or (Path(word) / RUN_FILE).is_file() for word in words)


def read_settings(folder: Path) -> RunConfig:
    """Return the settings in a run's folder. Raises DataError if they cannot be read."""
    if (origin := read_origin(folder)) is None:
        raise DataError(f"{folder / RUN_FILE}: is not there. Name the folder of a run.")
    return origin.settings


def find_runs(names: Sequence[str], search: str, root: Path, tracking: TrackingConfig) -> list[Path]:
    """Return the folders of the named runs and of the runs that a search in MLflow returns. Raises DataError if no run
    is found or if a run is not on this machine. Raises TrackingError if MLflow rejects the search.
    """
    folders = [find_folder(name, root) for name in names]
    if search:
        store = MlflowStore(tracking, root)
        if not has_store(store.uri):
            raise DataError(
                f"--search {search!r}: there is no MLflow store ({store.uri}) to search; name another --root"
            )
        found = search_run_ids(store, search)
        if not found:
            raise DataError(
                f"--search {search!r}: finds no run in experiment {tracking.experiment}; check the spelling"
            )
        folders += [find_folder(name, root) for name in found]
    return list(dict.fromkeys(folders))


def compare(folders: Sequence[Path], root: Path) -> "tuple[ReportFiles, list[str]]":
    """Compare two or more runs. Write the comparison as HTML and JSON files under `<root>/comparisons`, and upload the
    files to each run in MLflow. Return the files, and the URLs of MLflow's comparison page and table of runs, or no URL
    if MLflow cannot compare the runs."""
    from rlcore.report.build import compare_runs

    root = root.resolve()
    files = compare_runs(folders, root=root)
    return files, _upload(folders, files, root)


def _upload(folders: Sequence[Path], files: "ReportFiles", root: Path) -> list[str]:
    """Upload the files of a comparison to each run in MLflow, and return the URLs for `compare`.

    If the upload fails, the error is logged.
    """
    known = [(folder, run_id) for folder in folders if (run_id := _mlflow_run(folder)) is not None]
    configs = [read_settings(folder) for folder, _ in known]
    if not known or not all(config.tracking.enabled for config in configs):
        return []
    stores = [MlflowStore(config.tracking, root) for config in configs]
    for (folder, _), config, store in zip(known, configs, stores, strict=True):
        if not has_store(store.uri) or (config.tracking.uri is None and folder.resolve().parents[1] != root):
            log.warning("The comparison is not uploaded to MLflow: %s is not in the MLflow store of %s", folder, root)
            return []
    try:
        for store, (_, run_id) in zip(stores, known, strict=True):
            for file in (files.html, files.json):
                store.client.log_artifact(run_id, str(file), f"{FOLDER}/{files.html.parent.name}")
        if len(known) > 1 and len({store.uri for store in stores}) == 1:
            return [compare_url(stores[0], [run_id for _, run_id in known]), stores[0].runs_url()]
    except Exception as error:
        log.warning("The comparison is not uploaded to MLflow: %s", explain_error(error, stores[0].uri))
    return []


def _mlflow_run(folder: Path) -> str | None:
    try:
        return read_state(folder).mlflow_run_id
    except MillraceError as error:
        log.warning("%s", error)
        return None


def sync(folder: Path, uri: str | None) -> str:
    """Upload the metrics in a run's journal that MLflow does not have yet, and return a text with the result. `uri` is
    the address of the MLflow store, or None for the run's own store. Raises MillraceError or OSError if this fails."""
    if not (attempts := read_attempts(folder)):
        return "has not begun"
    begun_with = attempts[-1][0].destination
    uri = uri or _store_of_root(folder, begun_with)
    set_mlflow_login(uri or begun_with.uri, folder.parents[1])
    try:
        result = sync_run(folder, uri)
    except RunInUseError:
        return "is being delivered by another process"
    status = "is running" if result.status is None else f"is {result.status}"
    news = f"{result.num_bytes:,} bytes of the journal delivered" if result.num_bytes else "nothing was missing"
    return f"{news}; the run {status} (MLflow run {result.mlflow_run_id})"


def _store_of_root(folder: Path, begun_with: Destination) -> str | None:
    """Return the address of the MLflow store of the workspace that contains the run's folder.

    Return None if the run's metrics belong in the store that the run used when it was last started (`begun_with`).
    """
    root = folder.parents[1]
    try:
        if read_settings(folder).tracking.uri is not None:
            return None
    except DataError:  # settings of another version: use the store in `attempts.jsonl`
        return None
    if (stack := stack_tracking_uri(root)) is not None:
        return stack
    store = MlflowStore(TrackingConfig(experiment=begun_with.experiment), root)
    is_file = begun_with.uri.startswith("sqlite:")  # not the address of a server
    if not is_file or sqlite_file(store.uri).resolve() == sqlite_file(begun_with.uri).resolve():
        return None
    try:
        _ = store.experiment_id  # a missing experiment is created with its artifacts in this workspace
    except Exception as error:
        raise TrackingError(f"{folder}: not delivered: {explain_error(error, store.uri)}") from error
    return store.uri
