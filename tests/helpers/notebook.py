"""docs/python.ipynb, made of docs/python.md: its text and its blocks as cells.

python -m tests.helpers.notebook
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, NOTEBOOK = ROOT / "docs" / "python.md", ROOT / "docs" / "python.ipynb"


def notebook() -> str:
    """The notebook's file, without outputs: the user runs the cells."""
    cells = []
    for number, part in enumerate(re.split(r"^```(?:python)?\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)):
        if lines := part.strip().splitlines(keepends=True):
            cell = {"cell_type": "code" if number % 2 else "markdown", "id": f"cell-{number}", "metadata": {}}
            cells.append(cell | ({"execution_count": None, "outputs": []} if number % 2 else {}) | {"source": lines})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    document = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
