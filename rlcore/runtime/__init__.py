"""Workers of a run: the groups that run them, Ray clusters, and queries of devices."""
