"""The start and control of a run's workers, the handling of Ray clusters, and queries of devices."""
