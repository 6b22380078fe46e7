"""Hooks of mkdocs (`make docs`) that add pages from outside of docs/, and the files that pages link to, to the site."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "metrics.md": "rlcore/tracking/metrics.md",
}
"""The pages of the site that come from outside of docs/, each with its file in the repository."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages in docs/decisions to the navigation, in the order of their numbers."""
    decisions = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/decisions").glob("*.md"))
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] = decisions
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and the files that pages link to."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for file in list(files.documentation_pages()):
        for link in LINK.findall(file.content_string):
            target = _target(_source(file.src_uri), link)
            if target is not None and files.get_file_from_path(_on_site(target)) is None:
                files.append(File.generated(config, _on_site(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links to files of the repository, so that they lead to the same files on the site."""
    here = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        target = _target(_source(here), link[1])
        if target is None:
            return link[1]
        climb = "../" * (len(PurePosixPath(here).parts) - 1)
        return climb + _on_site(target)

    return LINK.sub(on_site, markdown)


def _source(page: str) -> PurePosixPath:
    """Return the source file of a page of the site."""
    return PurePosixPath(PAGES.get(page, f"docs/{page}"))


def _target(source: PurePosixPath, link: str) -> str | None:
    """Return the file of the repository that a link leads to, or None. The build reports dead links."""
    path = (ROOT / source.parent / link).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_file() and path.is_relative_to(ROOT) else None


def _on_site(target: str) -> str:
    """Return the path that a file of the repository has on the site."""
    pages = {source: name for name, source in PAGES.items()}
    if target in pages:
        return pages[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"
