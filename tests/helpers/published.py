"""Published directories for tests, and ways to damage them."""

import json
import os
from pathlib import Path

from rlcore.storage.manifest import manifest_digest
from rlcore.storage.publish import published_directory


def publish(target: Path, content: str = "abc", *, replace: bool = False, **values: object) -> Path:
    with published_directory(target, dict(values), replace=replace) as folder:
        (folder / "a.txt").write_text(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(bytes(range(256)))
    return target


def edit_manifest(folder: Path, *, without: str = "", **changes: object) -> None:
    document = json.loads((folder / "manifest.json").read_text()) | changes
    document.pop(without, None)
    document["manifest_sha256"] = manifest_digest(document)
    (folder / "manifest.json").write_text(json.dumps(document))


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file, but not its size and modification time."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
