"""The tracking of a run, in which metrics go to the local journal first and then to MLflow.

Training never waits for MLflow. A trainer writes to `RunJournal`, and `read_journal` reads the values. Code outside the
trainer uses `MlflowStore`. `sync_run` delivers values later. Imports of these names do not load mlflow.
"""
