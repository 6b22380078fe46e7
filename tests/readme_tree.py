"""README.md's tree, written from the disk: known lines keep their meaning, new Python files get their docstring's.

python -m tests.readme_tree
"""

import ast
import re

from tests.test_readme_tree import HEADING, ROOT, in_readme, on_disk

WIDTH = 30
LONGEST = 120


def meaning_of(path: str) -> str:
    """First sentence of a module's docstring; of a folder's, that of its package."""
    file = ROOT / path / "__init__.py" if path.endswith("/") else ROOT / path
    if file.suffix != ".py" or not file.is_file():
        return f"?? say in README.md what {path} is"
    said = (ast.get_docstring(ast.parse(file.read_text())) or "").strip().split("\n\n")[0].replace("\n", " ")
    first = re.split(r"[:;.] ", said)[0].rstrip(".")
    while len(first) > LONGEST - WIDTH and ", " in first:
        first = first.rsplit(", ", 1)[0]
    return first[:1].lower() + first[1:] if re.match(r".[a-z ]", first) else first


def main() -> None:
    """Rewrite the block below the heading."""
    known = in_readme()
    lines = []
    order = list(dict.fromkeys(path.split("/")[0] for path in known))
    paths = on_disk()
    tops = sorted(
        {path.split("/")[0] for path in paths}, key=lambda top: (order.index(top) if top in order else 99, top)
    )
    for top in tops:
        for path in sorted(path for path in paths if path.rstrip("/") == top or path.startswith(f"{top}/")):
            is_top = path.rstrip("/") == top
            name = path if is_top else "  " + path.removeprefix(f"{top}/")
            lines.append(f"{name:<{WIDTH}}{known.get(path) or meaning_of(path)}")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = text.split(f"\n{HEADING}\n")
    head, _, tail = after.split("```", 2)
    block = "\n".join(lines)
    (ROOT / "README.md").write_text(f"{before}\n{HEADING}\n{head}```\n{block}\n```{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
