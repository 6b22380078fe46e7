"""torch's profiler around what a rank does, written as a Chrome trace."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

BYTES_PER_MB = 1_000_000


class RankProfiler:
    """Records all operators of this process, and the kernels of its GPU, from `start` to `stop`."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record; what was being recorded is dropped."""
        self.drop()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, file: Path, max_mb: float) -> float:
        """End it and write `file` (`*.json.gz`) whole or not at all. Its size in MB of 1e6 bytes; one that is larger
        than `max_mb` is not kept."""
        assert self._profile is not None, "start comes first"
        running, self._profile = self._profile, None
        running.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.part.gz")  # by its ending torch packs it
        try:
            running.export_chrome_trace(str(beside))
            size_mb = beside.stat().st_size / BYTES_PER_MB
            if size_mb <= max_mb:
                beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
        return size_mb

    def drop(self) -> None:
        """End it and keep nothing."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
