"""`millrace regression`: an experiment run anew and held against its last good run, night after night.

What is known of the nights lies in `<root>/regressions/<name>/nights.json`, where `name` is that of the settings; each
night's run lies under `runs/` like any other. Its dataset and start model are those that are there already.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flows import chain
from flows.commands.settings import warn
from flows.parameters import EXPERIMENT, RunSettings, compose_settings
from flows.plan.checks import check_run
from flows.progress import Display, display, display_for_console, shown_on
from flows.work.open_run import open_run
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.errors import CheckpointError, ConfigError, DataError, RunInUseError, TrialError, is_stop
from rlcore.report.build import ReportFiles
from rlcore.report.nights import Night, judge, last_good, read_nights, slowest_good, write_nights, write_page
from rlcore.report.record import RunRecord, read_run
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import HeldLock
from rlcore.tracking.mlflow_store import NOTE_TAG, MlflowStore

log = logging.getLogger(__name__)

EXIT_CODES = {"broken": 1, "worse": 3, "slower": 3}
"""Exit codes by verdict; 0 for the others."""
SERIES_TAG = "millrace.regression"
"""Tag of the one run in MLflow that holds the nights of an experiment; its value is their name."""
NIGHT_TAG = "regression"
"""Tag of each night's own run in MLflow, with the same value."""


def night(settings: RunSettings, do: chain.RunStage, *, slower_by: float) -> tuple[Night, ReportFiles]:
    """Run the experiment anew, judge it, and keep the verdict on disk and in MLflow.

    A night that was interrupted goes on. A run that fails is a night too, a broken one, as is one whose code fails in
    its trial, and one that was interrupted and had begun with other code, data or models.

    Raises:
        ConfigError: the settings are wrong.
        RunInUseError: this night is being worked on.
        StopRequestedError: told to end; the same call goes on.
    """
    config = settings.config
    folder = folder_of(settings)
    with HeldLock(folder / "regression.lock", what=f"the regression of {config.name}"):
        nights = read_nights(folder)
        number, good, slowest = len(nights) + 1, last_good(nights), slowest_good(nights)
        run_id = f"regression-{config.name}-{number:04d}-{settings_fingerprint(config)[:8]}"
        config = config.model_copy(update={"run_id": run_id, "tags": {**config.tags, NIGHT_TAG: config.name}})
        words = (*settings.overrides, f"run_id={run_id}")
        why = _trained(replace(settings, config=config, overrides=words), do)
        if why:
            reference = "" if good is None else good.run_id
            tonight = Night(number, time.time(), run_id, reference, "broken", "not known", why)
        else:
            runs = folder.parents[1] / "runs"
            tonight = _judged(number, runs / run_id, good, slowest, slower_by=slower_by)
        nights = (*nights, tonight)
        write_nights(folder, nights)
        files = write_page(config.name, nights, folder)
        _forget_weights(folder, nights)
        _keep_in_mlflow(settings, nights, files)
    return tonight, files


def folder_of(settings: RunSettings) -> Path:
    """Folder of the nights' records."""
    return RunLayout.of(settings.config).root / "regressions" / settings.config.name


def accept(settings: RunSettings) -> Night:
    """Take the newest night's run as the one that later nights are held against, whatever was said of it.

    Raises:
        DataError: there is no night, or the newest one is broken: it has no score.
    """
    folder = folder_of(settings)
    with HeldLock(folder / "regression.lock", what=f"the regression of {settings.config.name}"):
        nights = read_nights(folder)
        if not nights or nights[-1].held_out is None:
            found = f"night {nights[-1].number} has no score ({nights[-1].text})" if nights else "there is none"
            raise DataError(f"--accept: takes the newest night of {folder}; {found}. Run the regression first.")
        nights = (*nights[:-1], replace(nights[-1], accepted=True))
        write_nights(folder, nights)
        write_page(settings.config.name, nights, folder)
    return nights[-1]


def _trained(settings: RunSettings, do: chain.RunStage) -> str:
    """Data, training and the validation after it; why it has failed, '' where it has not."""
    config = settings.config
    try:
        check_run(settings)
    except (CheckpointError, TrialError) as error:
        return f"the run cannot begin: {error}"
    try:
        with open_run(config, settings.command("train")) as run, run.heard_by(display().event, lambda line: None):
            inputs = chain.make_rows(config, do).inputs
            chain.train(run, inputs, do)
            chain.judge(run, inputs, "last", do)
            run.trainer.let_go()
    except (ConfigError, RunInUseError):
        raise
    except Exception as error:
        if is_stop(error):
            raise
        return f"the run has failed: {error or type(error).__name__}"
    return ""


def _judged(number: int, run_dir: Path, good: Night | None, slowest: Night | None, *, slower_by: float) -> Night:
    """The verdict on a run that is over. It is broken where the last good night's run cannot be read any more."""
    known: dict[str, RunRecord] = {}
    lost: dict[str, str] = {}
    for one in filter(None, (good, slowest)):
        try:
            known[one.run_id] = read_run(run_dir.with_name(one.run_id))
        except DataError as error:
            lost[one.run_id] = f"it cannot be held against {one.run_id}: {error}"
    records = [None if one is None else known.get(one.run_id) for one in (good, slowest)]
    tonight, why = judge(number, read_run(run_dir), *records, slower_by=slower_by), "; ".join(lost.values())
    if good is not None and good.run_id in lost and tonight.held_out is not None:
        return replace(tonight, reference=good.run_id, score="broken", text=f"{why}. Bring it back, or give --accept")
    return replace(tonight, text=f"{tonight.text}; {why}") if lost else tonight


def _forget_weights(folder: Path, nights: Sequence[Night]) -> None:
    """Delete the checkpoints of all nights but the newest and the last good one."""
    good = last_good(nights)
    for one in nights[:-1]:
        if good is None or one.run_id != good.run_id:
            shutil.rmtree(folder.parents[1] / "runs" / one.run_id / "checkpoints", ignore_errors=True)


def _keep_in_mlflow(settings: RunSettings, nights: Sequence[Night], files: ReportFiles) -> None:
    """One run for all nights: a point a night, the page, its summary as the description. A failure is a log line."""
    config = settings.config
    if not config.tracking.enabled:
        return
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    store = MlflowStore(config.tracking, RunLayout.of(config).root)
    tags = {SERIES_TAG: config.name, "stage": "regression", "mlflow.source.name": "millrace"}
    try:
        known = store.find_runs({SERIES_TAG: config.name})
        run = store.start_or_resume_run(f"regression {config.name}", known[0].info.run_id if known else None, tags)
        there = {point.step for point in store.client.get_metric_history(run, "regression/verdict")}
        for one in nights:
            if one.number not in there:  # also those that MLflow was away for
                store.log_metrics(run, one.number, one.metrics(), one.time)
        for file in (files.html, files.json):
            store.client.log_artifact(run, str(file), "regression")
        store.set_tags(run, {NOTE_TAG: files.summary})
        store.set_status(run, "FINISHED")
    except Exception as error:
        log.warning("MLflow did not take the night (%s); the next one brings it", error)


# ---------------------------------------------------------------------- the command


def run(
    experiment: str, overrides: list[str] | None, *, slower_by: float, root: Path | None, take: bool, as_json: bool
) -> None:
    """Do the night and say what it has come to, or accept the newest one. The exit code is the verdict's."""
    experiment = experiment.removeprefix(EXPERIMENT)
    settings = compose_settings(overrides, experiment, root=root)
    warn(settings.idle())
    if take:
        found = accept(settings)
    else:
        with shown_on(Display() if as_json else display_for_console()):
            found, _ = night(settings, chain.run_here, slower_by=slower_by)
    folder = folder_of(settings)
    if as_json:
        page = str(folder / "regression.html")
        print(json.dumps({"verdict": found.word, **asdict(found), "page": page}, indent=2))
    else:
        print(f"\n{said(settings.config.name, found)}\n  page     {folder / 'regression.html'}")
    if not take and (code := EXIT_CODES.get(found.word, 0)):
        sys.exit(code)


def said(name: str, found: Night) -> str:
    """The verdict as a sentence."""
    accepted = ", accepted" if found.accepted else ""
    return f"{name}, night {found.number}: {found.word}{accepted}; {found.text} (run {found.run_id})"
