"""A model in a hub cache on disk."""

import shutil
from pathlib import Path

HUB_ID = "somebody/tiny-countdown"


def cache_of(model: Path, home: Path) -> None:
    repository = home / "hub" / ("models--" + HUB_ID.replace("/", "--"))
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    (snapshot / "manifest.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
