"""Metrics that are equal in a repeated run. Metrics that are measured on the machine are left out."""

from collections.abc import Mapping

MEASURED_ON_THE_MACHINE = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/throughput",
    "perf/time_per_step",
    "perf/mfu",
    "perf/max_memory",
    "perf/num_passes_redone",
    "perf/cpu_memory",
    "system/",
    "disk/",
    "fault/",
    "cost/",
)  # beginnings of the names of metrics that differ from run to run; all others are the same, value for value


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED_ON_THE_MACHINE)}
