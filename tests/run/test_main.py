"""Tests of the start of the trainer process."""

import subprocess
import sys

import pytest

CODE = """
import sys
{before}
import rlcore.run.process
print(*sorted({{"scipy", "sklearn"}} & sys.modules.keys()))
import scipy.optimize, sklearn.metrics
"""
SKIPPED = "from rlcore.run.__main__ import skip_unused_imports; skip_unused_imports()"


@pytest.mark.parametrize(("before", "loaded"), [(SKIPPED, ""), (f"import scipy; {SKIPPED}", "scipy")])
def test_unused_packages_are_skipped_but_can_be_imported(before: str, loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{loaded}\n", "")
