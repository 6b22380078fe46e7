"""`millrace data inspect`."""

from pathlib import Path


def inspect(path: Path, *, num_rows: int, seed: int, as_json: bool, html: Path | None) -> None:
    """Show what a dataset's file or folder holds: on the screen, as JSON, or as a page."""
    from data.inspect import as_html, as_rich, inspect_dataset

    report = inspect_dataset(path, num_rows=num_rows, seed=seed)
    if html is not None:
        from rlcore.storage.publish import write_text_atomically

        write_text_atomically(html, as_html(report))
        print(html)
    elif as_json:
        print(report.as_json())
    else:
        from rich.console import Console

        Console().print(as_rich(report))
