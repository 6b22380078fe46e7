"""The tracking of a run. Metrics go to the local journal and later to MLflow. Training never waits for MLflow."""
