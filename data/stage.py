"""Results of the data stages, and mixtures: datasets bound together by a folder.

Each part of a mixture is made and filtered on its own under its own fingerprint. The folder of the mixture has no rows:
its manifest names the folders of the parts beside it, in order. Weights, names and scorers stay in the settings, so
another weight makes no new rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.storage.manifest import PARTS_KEY, read_finished_or_set_aside
from rlcore.storage.publish import published_directory

CARD = "README.md"
"""Name of the dataset card in a folder."""


SPLITS = ("train", "validation")
"""What a dataset has; a suite's has the second alone."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """A published directory. `cached`: it existed already, and no work was done.

    `counts` are rows: of each split, and of those that a stage left out, by reason. `warning`: what should be known of
    the rows, '' for nothing.
    """

    directory: Path
    fingerprint: str
    cached: bool
    counts: Mapping[str, int]
    warning: str = ""


def publish_mixture(kind: str, directory: Path, parts: Sequence[StageResult]) -> StageResult:
    """Publish the folder that binds the parts, unless it exists; `kind` is `dataset` or `filtered`.

    Counts are sums over the parts. Raises DiskSpaceError where there is no room.
    """
    counts = dict(sorted(sum((Counter(part.counts) for part in parts), Counter()).items()))
    if read_finished_or_set_aside(directory) is not None:
        return StageResult(directory, directory.name, cached=all(part.cached for part in parts), counts=counts)
    facts: dict[str, Any] = {
        "kind": f"{kind}-mixture",
        "fingerprint": directory.name,
        PARTS_KEY: [part.directory.name for part in parts],
        "counts": counts,
    }
    with published_directory(directory, facts) as folder:
        lines = [f"# Mixture of {len(parts)} datasets", "", "| part | rows |", "| --- | --- |"]
        for part in parts:
            rows = ", ".join(f"{count:,} {name}" for name, count in part.counts.items())
            lines.append(f"| [{part.fingerprint}](../{part.fingerprint}) | {rows} |")
        (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return StageResult(directory, directory.name, cached=False, counts=counts)
