"""Report foreign words and sentences: `python -m tests.language [FILE...]`. Exit code 1 if there are any."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    re.compile(rf"(?<![\w`-])(?:{words})(?![\w`-])", re.IGNORECASE): instead
    for words, instead in yaml.safe_load((Path(__file__).parent / "words.yaml").read_text(encoding="utf-8")).items()
}
BEGINNINGS = frozenset(
    [
        "of",
        "what",
        "where",
        "why",
        "how",
        "whether",
        "by",
        "with",
        "in",
        "at",
        "for",
        "from",
        "on",
        "under",
        "to",
        "as",
        "before",
        "after",
        "beside",
        "between",
        "until",
    ]
)
"""A docstring begins with a verb or a noun."""
MOST_WORDS = 30
"""Words of a sentence on a page."""
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and offence of a Python file: words in comments and strings, beginnings of docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (
            tokenize.COMMENT,
            tokenize.STRING,
            tokenize.FSTRING_MIDDLE if sys.version_info >= (3, 12) else -1,
        ):
            yield from word_findings(token.string, token.start[0])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DEFINITIONS) and (doc := ast.get_docstring(node)):
            first = re.match(r"[A-Za-z']+", doc)
            if first and first[0].lower() in BEGINNINGS:
                yield node.body[0].lineno, f"a docstring begins with {first[0]!r}"


def page_findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and offence of a Markdown page: words, and sentences that are too long. Tables count by cell."""
    text = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    yield from word_findings(text, 1)
    line = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=[-*|#>]|\d+\.))", text):
        for sentence in re.split(r"(?<=[.:;?!])\s|\|", paragraph):
            if len(sentence.split()) > MOST_WORDS:
                yield line, f"{len(sentence.split())} words: {' '.join(sentence.split())[:60]} ..."
        line += paragraph.count("\n")


def word_findings(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield line and offence for each word of the list in a text that begins at `line`."""
    for pattern, instead in WORDS.items():
        for found in pattern.finditer(text):
            yield line + text[: found.start()].count("\n"), f"{found[0]!r}: write {instead}"


def main(names: list[str]) -> int:
    """Print each offence as `file:line: offence`; returns their number, 100 at most."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = names or [name for name in listed.stdout.split() if name != "CHANGELOG.md"]
    count = 0
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        for line, offence in sorted(page_findings(text) if name.endswith(".md") else source_findings(text)):
            print(f"{name}:{line}: {offence}")
            count += 1
    print(f"{count} in {len(files)} files", file=sys.stderr)
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
