"""The tracking of a run: metrics go to the local journal first, and later to MLflow. Training does not wait for it."""
