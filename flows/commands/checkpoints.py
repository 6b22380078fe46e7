"""The command `millrace checkpoints`, which lists, verifies, exports and prunes the checkpoints of a run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import OptionalRoot, Run
from rlcore.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rlcore.checkpoint.catalog import CheckpointInfo
    from rlcore.run.layout import RunLayout


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
    from flows.work.weights import export_to, find_weights
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
        from flows.work.weights import require_pushable

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
        from flows.work.weights import push as upload
        from flows.work.weights import write_card

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
