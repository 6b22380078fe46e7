"""Reinforcement learning of language models: settings, algorithms, models, rollout, training and storage."""

import gc
import os
import sys
from pathlib import Path

# Collect garbage less often. With Python's default, it takes a tenth of the time for importing the trainer or vLLM.
gc.set_threshold(50_000, 20, 50)

SOURCE_FOLDER = Path(__file__).resolve().parents[1]
"""The folder that contains `rlcore`. It is a git checkout, or the folder into which Millrace is installed."""


def python_path() -> str:
    """Return `sys.path` of this process as a `PYTHONPATH`. Entries of `sys.path` that are not strings are omitted."""
    return os.pathsep.join(place or str(Path.cwd()) for place in sys.path if isinstance(place, str))
