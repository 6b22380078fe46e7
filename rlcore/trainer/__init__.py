"""The training step: collection of responses, advantage estimates, updates, metrics and alarms."""
