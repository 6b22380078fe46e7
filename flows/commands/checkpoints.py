"""`millrace checkpoints`: list, verify, export and prune the checkpoints of a run; and `--fork`, to begin with one."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.commands.roots import root_among
from flows.parameters import RunSettings, compose_settings
from flows.progress import console_for_tables
from flows.work.runs import BYTES_PER_MB, named_run
from rlcore.checkpoint.catalog import CheckpointRow, by_score, find_checkpoint, list_checkpoints
from rlcore.checkpoint.store import CheckpointStore
from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE, fingerprint
from rlcore.config.problems import override_value
from rlcore.errors import CheckpointError, ConfigError, DataError
from rlcore.models.hub import require_reachable
from rlcore.run.inputs import RunInputs, planned_start_model
from rlcore.run.layout import RunLayout
from rlcore.storage.finished import finished_or_set_aside, finished_or_why
from rlcore.storage.locks import RunLock
from rlcore.user_code import working_by

START = "start"
"""In place of a checkpoint: the model that a run has started from."""


def checkpoints(
    run: list[str],
    *,
    root: Path | None,
    verify: bool,
    export: Path | None,
    checkpoint: str | None,
    prune: bool,
    as_json: bool,
) -> None:
    """Prune and export, where asked for, then show what there is. `checkpoint` None: the last one.

    Raises:
        ConfigError: a checkpoint is named, and none is to be exported.
        CheckpointError: one cannot be exported; with `verify`, after the list: one is broken.
        RunInUseError: to be pruned, and somebody works on the run.
    """
    if checkpoint is not None and export is None:
        raise ConfigError(f"--checkpoint {checkpoint}: says which one to export, so give --export DIR, or leave it out")
    config, layout = named_run(run, root)
    chosen = "last" if checkpoint is None else checkpoint
    deleted = _prune(config, layout) if prune else ()
    exported = None if export is None else export_to(config, layout, chosen, export.absolute())
    rows = list_checkpoints(layout.checkpoints, verify_hashes=verify)
    if as_json:
        document: dict[str, Any] = {"run_id": layout.run_dir.name, "checkpoints": _documents(rows)}
        document |= {"deleted": [path.name for path in deleted]} if prune else {}
        document |= {"exported": str(exported)} if exported is not None else {}
        print(json.dumps(document, indent=2))
    else:
        for path in deleted:
            print(f"deleted {path.name}: the retention rule does not keep it")
        if exported is not None:
            print(f"exported {chosen} to {exported}")
        _show(layout, rows)
    broken = [row for row in rows if row.verdict == "broken"]
    if verify and broken:
        reasons = "\n".join(f"  {row.reason}" for row in broken)
        raise CheckpointError(f"{layout.checkpoints}: {len(broken)} of {len(rows)} checkpoints are broken:\n{reasons}")


def export_to(config: RunConfig, layout: RunLayout, checkpoint: str, target: Path) -> Path:
    """Write a checkpoint (`last`, `best`, a step or its folder's name) as a transformers directory.

    Raises:
        CheckpointError: there is none of that name, or it is broken.
        DataError: the run's start model is not there any more.
    """
    from rlcore.checkpoint.export import export_checkpoint

    info = find_checkpoint(layout.checkpoints, checkpoint)
    return export_checkpoint(info, config, start_model_of(config, layout), target)


def start_model_of(config: RunConfig, layout: RunLayout) -> Path:
    """The model that the run has started from: a folder, or a hub id as a path.

    Raises:
        DataError: the folder is not there any more.
        ModelError: the hub's model is neither in its cache nor to be had.
    """
    with working_by(layout.code):
        start = planned_start_model(config, RunInputs.read(layout).filtered_directory)
    if not start.is_absolute():
        require_reachable("model.path", str(start))
    elif not start.is_dir():
        raise DataError(
            f"{start}: missing: the model that run {layout.run_dir.name} has started from gives config and tokenizer. "
            "Restore it, or make it again by the run's own command."
        )
    return start


def _prune(config: RunConfig, layout: RunLayout) -> tuple[Path, ...]:
    """Prune unless a trainer works on the run: it may be about to read a checkpoint, and prunes by itself."""
    with RunLock(layout.run_dir, is_named=False):
        return CheckpointStore(layout.checkpoints, config.checkpoint, config).prune()


def _marks(rows: tuple[CheckpointRow, ...]) -> dict[int, list[str]]:
    """`last` and `best` by step; of equal scores the later is best."""
    whole = [row for row in rows if row.verdict != "broken"]
    marks: dict[int, list[str]] = {}
    for mark, rising in (("last", whole), ("best", by_score(whole))):
        for row in rising[-1:]:
            marks.setdefault(row.step, []).append(mark)
    return marks


def _documents(rows: tuple[CheckpointRow, ...]) -> list[dict[str, Any]]:
    marks = _marks(rows)
    plain = (asdict(replace(row, metrics=dict(row.metrics))) for row in rows)
    return [one | {"path": str(one["path"]), "marks": marks.get(one["step"], [])} for one in plain]


def _show(layout: RunLayout, rows: tuple[CheckpointRow, ...]) -> None:
    from rich.table import Table

    console = console_for_tables()
    if not rows:
        console.print(f"{layout.checkpoints}: no checkpoint yet")
        return
    marks = _marks(rows)
    table = Table("step", "MB", "held-out", "reward", "written", "", "state", box=None, pad_edge=False)
    for row in rows:
        reward = row.metrics.get("critic/score/mean")
        table.add_row(
            str(row.step),
            f"{row.size_bytes / BYTES_PER_MB:,.1f}",
            "" if row.score is None else f"{row.score:.3f}",
            "" if reward is None else f"{reward:.3f}",
            row.created[:19].replace("T", " "),
            ", ".join(marks.get(row.step, ())),
            row.verdict if row.verdict != "not verified" else "sizes fit",
        )
    console.print(f"run {layout.run_dir.name} in {layout.run_dir}")
    console.print(table, soft_wrap=False)
    if any(row.verdict == "not verified" for row in rows):
        console.print("--verify reads every byte")
    for row in rows:
        if row.verdict == "broken":
            console.print(row.reason)


# ---------------------------------------------------------------------- as the model of another run


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint of a run as a model: `folder` is where its transformers directory is, or will be."""

    config: RunConfig
    layout: RunLayout
    checkpoint: str
    folder: Path

    @property
    def label(self) -> str:
        """`<run id>@<checkpoint>`."""
        return f"{self.layout.run_dir.name}@{self.checkpoint}"

    def ensure(self) -> Path:
        """The folder, written unless it is there and whole.

        Raises:
            CheckpointError: the checkpoint is broken.
        """
        if self.checkpoint != START and finished_or_set_aside(self.folder, error=CheckpointError) is None:
            export_to(self.config, self.layout, self.checkpoint, self.folder)
        return self.folder


def weights_of(source: str, root: Path | None) -> Weights:
    """The weights that `RUN[@CHECKPOINT]` names: of `last` (taken if not given), `best`, a step, or `start`.

    Raises:
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint.
    """
    name, at, checkpoint = source.rpartition("@")
    if not at or (Path(source) / RUN_FILE).is_file():  # a folder's own name may have one
        name, checkpoint = source, ""
    config, layout = named_run([name], root)
    if checkpoint == START:
        return Weights(config, layout, START, start_model_of(config, layout))
    info = find_checkpoint(layout.checkpoints, checkpoint or "last")
    digest = fingerprint("fork", {"run": layout.run_dir.name, "step": info.step, "created": info.created})
    return Weights(config, layout, info.name, layout.root / "models" / f"fork-{digest}")


def forked(settings: list[str], source: str, *, dry_run: bool = False) -> RunSettings:
    """Compose settings whose model of step 0 has the weights that `source` names (`RUN[@CHECKPOINT]`).

    The weights go to `<root of the source>/models/fork-<digest>` as a transformers directory, once for a checkpoint.
    Optimizer, critic and place in the data begin anew: what goes on as the same run needs no fork. A dry run writes
    nothing: until the weights are there it plans by the model that the other run has started from.

    Raises:
        ConfigError: the settings are wrong.
        DataError: there is no such run.
        CheckpointError: it has no such checkpoint, or that is broken.
    """
    # The settings cannot be composed yet: their model is still to come. A run's id is looked for in their root.
    weights = weights_of(source, root_among(settings))
    is_missing = dry_run and finished_or_why(weights.folder, error=CheckpointError)[0] is None
    target = weights.folder if dry_run else weights.ensure()
    model = start_model_of(weights.config, weights.layout) if is_missing else target
    more = [
        f"model.path={override_value(str(model))}",
        "warm_start.enabled=false",
        f"tags.forked_from={override_value(weights.label)}",
    ]
    composed = compose_settings([*settings, *more])
    if not is_missing:
        return composed
    seen = composed.config
    planned = seen.model_copy(update={"model": seen.model.model_copy(update={"path": str(target)})})
    return replace(composed, config=planned, seen=seen)
