"""Training steps: experience, estimate, update, metrics and alarms."""
