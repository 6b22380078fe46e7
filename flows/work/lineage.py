"""What a run notes of where it comes from before its first step: `lineage.json` and `code.diff` in its folder."""

import logging
from typing import TYPE_CHECKING

from flows.work.open_run import OpenRun
from rlcore.run.inputs import RunInputs, planned_start_model
from rlcore.storage.publish import write_text_atomically
from rlcore.tracking.lineage import code_diff, code_revision, environment_facts
from rlcore.user_code import code_of

if TYPE_CHECKING:
    from rlcore.report.record import Stage

log = logging.getLogger(__name__)

DIFF_FILE = "code.diff"
"""What the source had changed since its commit when the run was last started."""
MAX_DIFF_CHARACTERS = 1_000_000


def record_lineage(run: OpenRun, inputs: RunInputs) -> None:
    """Write both files, once for each start of the run. A lack of room here is no reason not to train."""
    if run.has_lineage:
        return
    from rlcore.report.record import Lineage

    run.has_lineage = True
    try:
        revision = code_revision()
        lineage = Lineage(
            stages=_stages(run, inputs),
            command=run.command,
            git_commit="" if revision is None else revision.commit,
            git_dirty=revision is not None and revision.dirty,
            environment=environment_facts(),
        )
        lineage.write(run.layout.run_dir)
        write_text_atomically(run.layout.run_dir / DIFF_FILE, code_diff()[:MAX_DIFF_CHARACTERS])
    except OSError as error:
        log.warning("%s: where the run comes from was not noted: %s", run.layout.run_dir, error)


def _stages(run: OpenRun, inputs: RunInputs) -> "tuple[Stage, ...]":
    from data import dataset_directory, dataset_fingerprint
    from rlcore.report.record import Stage, stage_of

    config, root = run.config, run.layout.root
    dataset = dataset_directory(dataset_fingerprint(config.data, config.seed, root), root)
    folders = {
        "dataset": dataset,
        "filtered": inputs.filtered_directory,
        "tokenizer": inputs.tokenizer_directory,
        "start model": planned_start_model(config, inputs.filtered_directory),
    }
    code = code_of(config)
    kept = Stage("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    return (kept, *(stage_of(name, folder) for name, folder in folders.items()))
