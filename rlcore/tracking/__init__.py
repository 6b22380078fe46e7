"""Where a run's metrics go: the local journal first, MLflow after it, and the training never waits for it.

A trainer writes to `Tracker`, `read_journal` reads its values back, the stages around the training write by
`MlflowStore`, and `sync_run` delivers later. Importing this package does not import mlflow.
"""

from rlcore.tracking.connection import explain, mlflow_name
from rlcore.tracking.delivery import SyncResult, ensure_mlflow_run, sync_run
from rlcore.tracking.journal import EventRecord, Journal, JournalContents, StepRecord, load_journal, read_journal
from rlcore.tracking.lineage import SystemSampler, code_diff, environment_facts, lineage_tags
from rlcore.tracking.mlflow_store import MlflowStore
from rlcore.tracking.tracker import Tracker

__all__ = [
    "EventRecord",
    "Journal",
    "JournalContents",
    "MlflowStore",
    "StepRecord",
    "SyncResult",
    "SystemSampler",
    "Tracker",
    "code_diff",
    "ensure_mlflow_run",
    "environment_facts",
    "explain",
    "lineage_tags",
    "load_journal",
    "mlflow_name",
    "read_journal",
    "sync_run",
]
