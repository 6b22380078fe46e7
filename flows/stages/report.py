"""The stage that writes the report of a run."""

from dataclasses import dataclass
from pathlib import Path

from flows.stages.stage import Stage, StageStatus
from flows.work.open_run import OpenRun
from flows.work.status import failure_of
from rlcore.config.fingerprint import fingerprint
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of
from rlcore.storage.publish import write_json_atomically

SOURCE_FILE = "source.json"  # file next to the report: the fingerprint of its inputs
SOURCE_SUFFIXES = frozenset({".py", ".jinja", ".j2", ".css", ".html"})
REPORT_SOURCE = Path(__file__).resolve().parents[2] / "rlcore" / "report"


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The HTML page of a report. `cached` is true if the page existed before."""

    html: Path
    cached: bool

    def __str__(self) -> str:
        return f"{self.html}{', skipped: it is current' if self.cached else ''}"


@dataclass(frozen=True)
class Report(Stage[ReportPage]):
    """The stage that writes the report, unless the existing report is current."""

    name = "report"

    def title(self, run: OpenRun) -> str:
        return f"report/{run.title}"

    def status(self, run: OpenRun) -> StageStatus:
        is_current = run.is_trained and find_report(run.layout) is not None
        digest = report_fingerprint(run.layout) if is_current else None
        return StageStatus(self.name, digest, run.layout.run_dir / "report", is_current, "HTML, JSON and pictures")

    def asset(self, run: OpenRun) -> Path | None:
        return run.layout.run_dir / "report"

    def find(self, run: OpenRun) -> ReportPage | None:
        return find_report(run.layout, failure_of(run.layout.run_dir))

    def make(self, run: OpenRun) -> ReportPage:
        return write_report(run.layout)

    def describe(self, result: ReportPage) -> str:
        return f"report: {result}"


def write_report(layout: RunLayout) -> ReportPage:
    """Write the report, unless the existing report is current. Return the page."""
    from rlcore.report.build import build_report

    failure = failure_of(layout.run_dir)
    if (known := find_report(layout, failure)) is not None:
        return known
    digest = report_fingerprint(layout, failure)
    files = build_report(layout.run_dir, failure=failure)
    write_json_atomically(layout.run_dir / "report" / SOURCE_FILE, {"fingerprint": digest, "html": str(files.html)})
    return ReportPage(files.html, cached=False)


def report_fingerprint(layout: RunLayout, failure: str = "") -> str:
    """Return a fingerprint of all inputs of a report: the run's files, its failure, and the report's source code."""
    files = [layout.journal, layout.run_json]
    files += [*sorted(layout.validation.glob("*.json")), *sorted(layout.suites.glob("*/*.json"))]
    ours = {path.name: sha256_of(path) for path in sorted(REPORT_SOURCE.rglob("*")) if path.suffix in SOURCE_SUFFIXES}
    read = {str(path.relative_to(layout.run_dir)): sha256_of(path) for path in files if path.is_file()}
    return fingerprint("report", {"read": read, "source": ours} | ({"failure": failure} if failure else {}))


def find_report(layout: RunLayout, failure: str = "") -> ReportPage | None:
    """Return the existing report if it is current, otherwise None."""
    try:
        known = parse_json(read_ordinary(layout.run_dir / "report" / SOURCE_FILE))
        found = ReportPage(
            layout.run_dir / "report" / Path(known["html"]).name, cached=True
        )  # the folder may be a copy
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_current = found.html.is_file() and known.get("fingerprint") == report_fingerprint(layout, failure)
    return found if is_current else None
