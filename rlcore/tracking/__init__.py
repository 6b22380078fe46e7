"""Where a run's metrics go: the local journal first, MLflow after it, and the training never waits for it.

A trainer writes to `RunJournal`, `read_journal` reads its values back, the stages around the training write by
`MlflowStore`, and `sync_run` delivers later. Importing any of it does not import mlflow.
"""
