"""Modules that a statement loads."""

import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
