"""Follow a log file that another process writes."""

from collections.abc import Iterator
from pathlib import Path

MAX_READ_BYTES = 1 << 20
"""Read at one time: a process that floods its log must not flood ours."""


class LogTail:
    """New whole lines of a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """Lines that have been completed since the last call; at most a megabyte of them. None of a deleted file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            yield _text(line)

    def last_lines(self, num_lines: int) -> list[str]:
        """The end of the file, without empty lines; nothing of a deleted one."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - MAX_READ_BYTES))
                lines = [_text(line) for line in file.read().split(b"\n")]
        except FileNotFoundError:
            return []
        return [line for line in lines if line.strip()][-num_lines:]


def _text(line: bytes) -> str:
    """A progress bar rewrites its line: what stands there in the end is what counts."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
