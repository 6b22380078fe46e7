"""A run that this process works on: its lock, its folder, its settings on disk, its trainer process.

Flows nested in one another work on the same run and share one trainer process; whoever opens the run first closes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from flows.trainer.client import TrainerProcess
from flows.trainer.protocol import Event
from flows.work.begun_with import keep_code
from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_id
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import HeldLock
from rlcore.storage.publish import write_text_atomically
from rlcore.user_code import working_by

FLOW_LOCK = "flow.lock"
END_WAIT_S = 60.0
"""Beyond `runtime.stop_deadline_s`: by then a trainer that was told to stop has ended by itself, and its last metrics
are delivered."""


@dataclass(frozen=True, slots=True)
class _Ears:
    """Who hears the trainer."""

    on_event: Callable[[Event], None] = lambda event: None
    on_line: Callable[[str], None] = lambda line: None
    on_wait: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Shown:
    """What Prefect shows of the run: a bar for each stage, validations by step, its page in MLflow once known.

    `summary_at`: when all of it was last looked at. `again_at`: when a server that was away is asked again.
    """

    progress: dict[str, UUID] = field(default_factory=dict)
    validations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    mlflow_page: str = ""
    mlflow_link: bool = False
    summary_at: float = float("-inf")
    again_at: float = float("-inf")


class OpenRun:
    """A run in hand.

    `shown`: what Prefect shows of it. `command`: the command line that works on the run. `has_lineage`: whether this
    process has noted where the run comes from.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self.has_lineage = False
        self.shown = Shown()
        self.config = config
        self.layout = layout
        self._ears = _Ears()
        self.trainer = TrainerProcess(
            layout.run_dir,
            on_event=lambda event: self._ears.on_event(event),
            on_line=lambda line: self._ears.on_line(line),
            on_wait=lambda: self._ears.on_wait(),
            stop_wait_s=config.runtime.stop_deadline_s + END_WAIT_S,
        )

    @property
    def run_id(self) -> str:
        """Name of the run's folder."""
        return self.layout.run_dir.name

    @contextmanager
    def heard_by(
        self,
        on_event: Callable[[Event], None],
        on_line: Callable[[str], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Inside the block, what the trainer says and writes is heard there; `on_wait` may end the wait for it."""
        before, self._ears = self._ears, _Ears(on_event, on_line, on_wait)
        try:
            yield
        finally:
            self._ears = before


_open: dict[Path, OpenRun] = {}


@contextmanager
def open_run(config: RunConfig, command: Sequence[str] = ()) -> Iterator[OpenRun]:
    """Take a run in hand, or join whoever in this process has it; `command` is noted with the run.

    Raises:
        RunInUseError: another process works on it.
        CheckpointError: it has begun with other code or data.
        DataError: its folder cannot be written.
    """
    layout = RunLayout.of(config)
    if layout.run_dir in _open:
        yield _open[layout.run_dir]
        return
    with HeldLock(layout.run_dir / FLOW_LOCK, what=f"run {run_id(config)}"):
        keep_code(config, layout)
        _write_settings(config, layout)
        run = OpenRun(config, layout, command)
        with working_by(layout.code), run.trainer:  # an edit meanwhile is for the next start
            _open[layout.run_dir] = run
            try:
                yield run
            finally:
                del _open[layout.run_dir]


def _write_settings(config: RunConfig, layout: RunLayout) -> None:
    """Keep the settings with the run. The root is absolute there: whoever reads them may stand elsewhere."""
    from rlcore.config.documents import to_yaml

    write_text_atomically(layout.settings_json, settings_text(config, layout))
    write_text_atomically(layout.run_dir / "settings.yaml", to_yaml(_anchored(config, layout)))


def settings_text(config: RunConfig, layout: RunLayout) -> str:
    """What is kept of the settings with the run, for programs."""
    return _anchored(config, layout).model_dump_json(indent=2) + "\n"


def _anchored(config: RunConfig, layout: RunLayout) -> RunConfig:
    return config.model_copy(update={"paths": config.paths.model_copy(update={"root": str(layout.root)})})
