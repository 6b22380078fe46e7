"""`millrace doctor`: what a run needs of this machine."""

import json
import sys
from dataclasses import asdict

from flows.commands.options import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Look at what a run needs of this machine. Each line is ok, a warning or an error; exit code 1 for an error.

    Examples:
      millrace doctor
    """
    from flows.plan.machine import check_machine, show

    print("looking at this machine, which takes half a minute ...", file=sys.stderr, flush=True)
    lines = check_machine()
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        show(lines)
    if any(line.level == "error" for line in lines):
        sys.exit(1)
