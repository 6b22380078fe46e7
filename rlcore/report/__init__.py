"""Reports that a run writes of itself: HTML, JSON and pictures, from the files in its folder."""

from rlcore.report.build import ReportFiles, build_report, hero_png, summary_markdown
from rlcore.report.compare import compare_runs
from rlcore.report.held_out import answer_rows, build_sample_browser
from rlcore.report.page import answers_page, live_page

__all__ = [
    "ReportFiles",
    "answer_rows",
    "answers_page",
    "build_report",
    "build_sample_browser",
    "compare_runs",
    "hero_png",
    "live_page",
    "summary_markdown",
]
