"""Tracking of a run: metrics go to the local journal first and then to MLflow, and training never waits for MLflow.

A trainer writes to `RunJournal`, `read_journal` reads its values, other stages use `MlflowStore`, and `sync_run`
delivers later. These imports do not load mlflow.
"""
