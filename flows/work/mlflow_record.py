"""When the stages around the training write to the run's page in MLflow; what they write is in `mlflow_parts`.

MLflow may be slow or away: the first part is written by a thread while the training goes on, the last part within a
bound, and an error is a line in the log. `recorded.json` in the run's folder says what is there already, so a run that
is finished does not even import mlflow. Metrics are not written here; the trainer's journal carries them.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from data import StageResult
from flows.parameters import MLFLOW_PAGE
from flows.work.mlflow_parts import Page, log_models, log_result, log_start
from flows.work.open_run import OpenRun
from flows.work.report import Report, report_fingerprint
from flows.work.stages import Export
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import is_stop
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking import MlflowStore, ensure_mlflow_run, explain, lineage_tags
from rlcore.tracking.attempts import FinalStatus, has_begun
from rlcore.tracking.models import load_ahead
from rlcore.user_code import code_of

log = logging.getLogger(__name__)

RECORDED_FILE = "recorded.json"
FINISH_WAIT_S = 120.0
"""For MLflow at the end of a run: the first use of a store makes its tables, and weights are copied."""

END_WAIT_S = 20.0
"""For MLflow at the end of a run that never came to its first step."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What MLflow has of a run: by which settings, which report, whose weights and under which registered name."""

    mlflow_run_id: str = ""
    url: str = ""
    ui_command: str = ""
    settings: str = ""
    report: str = ""
    models: str = ""

    @classmethod
    def read(cls, layout: RunLayout) -> "Recorded":
        """What is on disk; nothing where that is nothing."""
        try:
            return cls(**parse_json(read_ordinary(layout.run_dir / RECORDED_FILE)))
        except (OSError, ValueError, TypeError):
            return cls()

    def is_whole(self, config: RunConfig, layout: RunLayout, last: Export, best: Export) -> bool:
        """Whether MLflow has all of the run."""
        wanted = (settings_digest(config), report_fingerprint(layout), _models_digest(config, last, best))
        return (self.settings, self.report, self.models) == wanted

    def write(self, layout: RunLayout) -> "Recorded":
        """Keep it."""
        write_json_atomically(layout.run_dir / RECORDED_FILE, asdict(self))
        return self


def settings_digest(config: RunConfig) -> str:
    """What the first part depends on."""
    return f"{settings_fingerprint(config)}-{config.trainer.total_steps}-{code_of(config).fingerprint}"


def _models_digest(config: RunConfig, last: Export, best: Export) -> str:
    return f"last {last.step}, best {best.step}, registered {config.tracking.registered_model}"


class MlflowRecord:
    """The run's page in MLflow, written by one thread. Use as a context manager; nothing here raises."""

    def __init__(self, run: OpenRun, prefect: Mapping[str, str]) -> None:
        self._run = run
        self._prefect = dict(prefect)
        # Its hints about model cards and licences are for others.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._known = Recorded.read(run.layout)
        run.shown.mlflow_page = self._known.url
        self._first: Future[Recorded] | None = None

    def __enter__(self) -> "MlflowRecord":
        """Nothing is written yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave what MLflow has not taken; the interpreter's end waits for a request that is under way."""
        if error is not None and self._run.config.tracking.enabled and not has_begun(self._run.layout.run_dir):
            self._end_before_the_first_step("KILLED" if is_stop(error) else "FAILED")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, dataset: StageResult, filtered: StageResult) -> None:
        """Write settings and datasets, meanwhile."""
        config = self._run.config
        digest = settings_digest(config)
        if not config.tracking.enabled or self._known.settings == digest:
            return
        self._first = self._thread.submit(
            lambda: _record_start(self._run, self._known, self._prefect, digest, dataset, filtered)
        )
        self._first.add_done_callback(self._tell_at_once)
        self._thread.submit(load_ahead)

    def finish(self, report: Report | None, last: Export, best: Export) -> Recorded:
        """Write report, samples and weights, and wait for it, within a bound."""
        config = self._run.config
        digest = report_fingerprint(self._run.layout)
        models = _models_digest(config, last, best)
        is_there = (self._known.report, self._known.models) == (digest, models) and self._first is None
        if not config.tracking.enabled or is_there:
            return self._known
        first = self._first

        def record() -> Recorded:
            return _record_end(self._run, self._after(first), digest, models, report, last, best)

        try:
            self._known = self._thread.submit(record).result(FINISH_WAIT_S)
        except FutureTimeoutError:
            log.warning("MLflow takes longer than %.0f s; `millrace run` again to write the rest", FINISH_WAIT_S)
        except Exception as error:
            self._warn("all of the run", error)
        return self._known

    def _end_before_the_first_step(self, status: FinalStatus) -> None:
        """Later ends are told by the trainer's journal."""
        first = self._first

        def end() -> None:
            if run_id := self._after(first).mlflow_run_id:
                MlflowStore(self._run.config.tracking, self._run.layout.root).set_status(run_id, status)

        try:
            self._thread.submit(end).result(END_WAIT_S)
        except Exception as error:  # the run's own error matters more
            log.info("MLflow was not told that the run has ended: %s", error)

    def _after(self, first: "Future[Recorded] | None") -> Recorded:
        """What is known once the first part is written, or has failed."""
        if first is None:
            return self._known
        return self._known if first.exception() is not None else first.result()

    def _tell_at_once(self, first: "Future[Recorded]") -> None:
        """A store that is away is told when the run begins, while there is time to look."""
        if not first.cancelled() and (error := first.exception()) is not None:
            self._warn("the settings and datasets of the run", error)

    def _warn(self, what: str, error: BaseException) -> None:
        where = MlflowStore(self._run.config.tracking, self._run.layout.root).uri
        log.warning(
            "MLflow did not take %s: %s. The training is not touched by that; the same command again writes the rest",
            what,
            explain(error, where),
        )


def _record_start(
    run: OpenRun,
    known: Recorded,
    prefect: Mapping[str, str],
    digest: str,
    dataset: StageResult,
    filtered: StageResult,
) -> Recorded:
    tags = lineage_tags(run.config, stage="train", run_id=run.run_id, prefect=prefect)
    page = _page(run, ensure_mlflow_run(run.layout.run_dir, run.config, tags))
    located = _located(known, page)
    run.shown.mlflow_page = located.url  # from here on the flow run's page has the way there
    log_start(page, tags, dataset, filtered)
    return replace(located, settings=digest).write(run.layout)


def _record_end(
    run: OpenRun, known: Recorded, digest: str, models: str, report: Report | None, last: Export, best: Export
) -> Recorded:
    page = _page(run, ensure_mlflow_run(run.layout.run_dir, run.config, {}))
    log_result(page, report)
    log_models(page, last, best)
    return replace(_located(known, page), report=digest, models=models).write(run.layout)


def _page(run: OpenRun, mlflow_run: str) -> Page:
    return Page(MlflowStore(run.config.tracking, run.layout.root), mlflow_run, run.config, run.layout)


def _located(known: Recorded, page: Page) -> Recorded:
    """Where the run's page is: a resumed run may have been given another one."""
    stack = os.environ.get(MLFLOW_PAGE)
    url = page.store.run_url(page.mlflow_run, stack) if stack else page.store.run_url(page.mlflow_run)
    ui_command = "" if stack else page.store.ui_command() or ""
    return replace(known, mlflow_run_id=page.mlflow_run, url=url, ui_command=ui_command)
