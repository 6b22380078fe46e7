"""The report of a run, and when it has to be written anew."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread

from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of
from rlcore.storage.publish import write_json_atomically

SOURCE_FILE = "source.json"
"""Beside the report: the fingerprint of what it was written from."""
SOURCE_SUFFIXES = frozenset({".py", ".jinja", ".j2", ".css", ".html"})
DRAWN_WITH = ("rlcore.report", "matplotlib.figure", "matplotlib.backends.backend_svg", "jinja2")
"""Imported where a report needs them, if not by `load_ahead`."""
REPORT_SOURCE = Path(__file__).resolve().parents[2] / "rlcore" / "report"


@dataclass(frozen=True, slots=True)
class Report:
    """The report's files, and whether they were current already."""

    html: Path
    cached: bool

    @property
    def samples(self) -> Path:
        """The sample browser; it is not there before the first validation."""
        return self.html.with_name("samples.html")


def report_fingerprint(layout: RunLayout) -> str:
    """What a report depends on: the run's journal, settings, validations and samples, and the report's own source."""
    files = [layout.journal, layout.settings_json, *sorted(layout.validation.glob("*.json"))]
    files += [layout.run_dir / name for name in ("lineage.json", "memory_plan.json")]
    files += sorted(layout.samples.glob("*.json*"))
    ours = {path.name: sha256_of(path) for path in sorted(REPORT_SOURCE.rglob("*")) if path.suffix in SOURCE_SUFFIXES}
    read = {str(path.relative_to(layout.run_dir)): sha256_of(path) for path in files if path.is_file()}
    return fingerprint("report", {"read": read, "source": ours})


def report_is_current(layout: RunLayout) -> bool:
    """Whether the report on disk says what the run's files say."""
    return known_report(layout) is not None


def known_report(layout: RunLayout) -> Report | None:
    """The report on disk, if it says what the run's files say."""
    try:
        known = parse_json(read_ordinary(layout.run_dir / "report" / SOURCE_FILE))
        found = Report(Path(known["html"]), cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.html.is_file() and known.get("fingerprint") == report_fingerprint(layout) else None


def load_ahead() -> None:
    """Import what a report is drawn with, in a thread, while the trainer works: it takes a second."""

    def load() -> None:
        for module in DRAWN_WITH:
            import_module(module)

    Thread(target=load, name="report-import").start()


def write_report(layout: RunLayout) -> Report:
    """Write the report, unless the one on disk is current."""
    source = layout.run_dir / "report" / SOURCE_FILE
    if (known := known_report(layout)) is not None:
        return known
    from rlcore.report import build_report, hero_png

    digest = report_fingerprint(layout)
    files = build_report(layout.run_dir)
    hero_png(layout.run_dir, files.html.with_name("hero.png"))
    _write_samples(layout)
    write_json_atomically(source, {"fingerprint": digest, "html": str(files.html)})
    return Report(files.html, cached=False)


def _write_samples(layout: RunLayout) -> None:
    """The sample browser, if there are answers to show."""
    from rlcore.report import build_sample_browser

    try:
        build_sample_browser(layout.run_dir)
    except DataError:  # no validation yet, which the report says too
        (layout.run_dir / "report" / "samples.html").unlink(missing_ok=True)
