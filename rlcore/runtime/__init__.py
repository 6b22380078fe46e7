"""The groups that run a run's workers, the handling of Ray clusters, and queries of devices."""
