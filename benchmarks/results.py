"""Functions that measure the cost of a benchmark and write its results to a file."""

import json
import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "build" / "results"


@dataclass(slots=True)
class Cost:
    """The seconds that a `with` block takes. `cpu_s` covers this process and children that ended in the block."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    _start: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def __enter__(self) -> "Cost":
        self._start = (time.perf_counter(), _cpu_s())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, cpu = self._start
        self.wall_s, self.cpu_s = round(time.perf_counter() - wall, 3), round(_cpu_s() - cpu, 3)


def _cpu_s() -> float:
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e6, 1)


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}


def write_result(name: str, figures: Mapping[str, Any]) -> Path:
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path
