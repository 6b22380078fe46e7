"""How soon a deployed run with a wrong override has failed, by the time stamps of its flow run.

    python benchmarks/wrong_override.py            # --root ROOT: with a stack that is up there already

Starts the local stack in a folder of its own, then runs of `pipeline/debug` with a key that does not exist, one after
the other. Told for each: seconds from its creation to its start (the worker looks every 2 s, and a process begins), and
from its start to its failure. Writes docs/results/wrong_override.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.server.secret import login_of
from flows.stack.control import down, up
from flows.stack.state import read_stack

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "docs" / "results"
WRONG = "trainer.totl_steps=5"
NUM_RUNS = 3
WAIT_S = 300.0


def ask(url: str, login: str, body: Mapping[str, Any] | None = None) -> Any:
    """A request to Prefect's API."""
    data = None if body is None else json.dumps(body).encode()
    basic = f"Basic {b64encode(login.encode()).decode()}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", "Authorization": basic})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def failed_run(api: str, login: str, deployment: str) -> dict[str, Any]:
    """A run with the wrong override, once it has ended."""
    made = ask(f"{api}/deployments/{deployment}/create_flow_run", login, {"parameters": {"overrides": [WRONG]}})
    deadline = time.monotonic() + WAIT_S
    while True:
        run: dict[str, Any] = ask(f"{api}/flow_runs/{made['id']}", login)
        if run["state_type"] in ("FAILED", "COMPLETED", "CRASHED"):
            return run
        if time.monotonic() > deadline:
            sys.exit(f"{run['name']} is {run['state_name']} after {WAIT_S:.0f} s")
        time.sleep(0.5)


def seconds(run: Mapping[str, Any], begin: str, end: str) -> float:
    """Between two time stamps of a flow run."""
    first, last = (datetime.fromisoformat(str(run[name]).replace("Z", "+00:00")) for name in (begin, end))
    return round((last - first).total_seconds(), 2)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    given = parser.parse_args().root
    with tempfile.TemporaryDirectory() as folder:
        root = given or Path(folder)
        if given is None:
            up(root)
        try:
            api = read_stack(root).prefect_api_url
            login = login_of(root)
            deployment = ask(f"{api}/deployments/name/pipeline/debug", login)["id"]
            runs = [failed_run(api, login, deployment) for _ in range(NUM_RUNS)]
        finally:
            if given is None:
                down(root)
    command = [sys.executable, "-m", "flows.cli", "run", "experiment=debug", WRONG]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stderr.strip()
    result = {
        "override": WRONG,
        "states": [run["state_type"] for run in runs],
        "same_message_as_the_command_line": [told in run["state"]["message"] for run in runs],
        "start_to_failure_s": [seconds(run, "start_time", "end_time") for run in runs],
        "creation_to_start_s": [seconds(run, "created", "start_time") for run in runs],
        "load_average": round(os.getloadavg()[0], 1),
        "num_cores": os.cpu_count(),
    }
    text = json.dumps(result, indent=2)
    (RESULTS / "wrong_override.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
