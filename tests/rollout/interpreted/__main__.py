"""All checks in one process, which pays for vLLM's import once: `python -m tests.rollout.interpreted FILE`.

The file says of each check, by its name, what it failed with; empty where it passed.
"""

import json
import sys
import traceback
from pathlib import Path

from tests.rollout.interpreted import machine


def main(file: Path) -> None:
    """Run them and write the file."""
    machine.replace_the_gpus_own()
    from tests.rollout.interpreted import kernels, steps

    found: dict[str, str] = {}
    for check in (*kernels.CHECKS, *steps.CHECKS):
        try:
            check()
            found[check.__name__] = ""
        except Exception:  # the test of that name shows it
            found[check.__name__] = traceback.format_exc()
    file.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
