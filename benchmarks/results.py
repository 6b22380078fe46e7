"""A function that writes the results of a benchmark to a file."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "build" / "results"


def write_result(name: str, figures: Mapping[str, Any]) -> Path:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n", encoding="utf-8")
    return path
