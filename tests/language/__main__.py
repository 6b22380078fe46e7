"""Report words, names, docstrings and sentences that break the language rules of CONTRIBUTING.md.

    python -m tests.language [FILE...]

Exit code 1 if there are findings. words.yaml has the lists.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAX_SENTENCE_WORDS = 30
_EXAMPLES = ("tests/language/test_language.py",)

_LISTS = yaml.safe_load((Path(__file__).parent / "words.yaml").read_text(encoding="utf-8"))
_REPLACEMENTS = list(_LISTS["words"].values())
_WORDS = re.compile(
    rf"(?<![\w-])(?:{'|'.join(f'({words})' for words in _LISTS['words'])})(?![\w-])",
    re.IGNORECASE,
)
_FUNCTION_NAMES = frozenset(_LISTS["function_names"])
_BEGINNINGS = frozenset(_LISTS["beginnings"])
_EXEMPT = re.compile("|".join(map(re.escape, _LISTS["exempt"])))
_LITERAL = re.compile(r"\w[/_=.@:]\w")
"""Settings, metrics, paths and URLs have one of these signs between letters."""
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_WORD_BOUNDARY = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Finding = tuple[int, str]
"""Line and message."""


def source_findings(text: str) -> Iterator[Finding]:
    """Check words in the text and in defined names, and the first words of docstrings."""
    yield from word_findings(text, 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS):
            for line, docstring in _docstrings(node):
                first = re.match(r"[A-Za-z']+", docstring)
                if first and first[0].lower() in _BEGINNINGS:
                    yield line, f"a docstring begins with {first[0]!r}"
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _name_findings(node.name, node.lineno)
            if node.name.strip("_") in _FUNCTION_NAMES:
                yield node.lineno, f"{node.name}: name a function by a verb"
        elif isinstance(node, ast.arg):
            yield from _name_findings(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from _name_findings(node.id, node.lineno)


def _name_findings(name: str, line: int) -> Iterator[Finding]:
    words = _WORD_BOUNDARY.sub(" ", name)
    if words != name:  # a name of one word is found in the text
        yield from ((line, f"{name}: {message}") for _, message in word_findings(words, line))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Yield line and text of a definition's docstring and of its attributes' docstrings."""
    for before, statement in zip([None, *node.body], node.body, strict=False):
        if not isinstance(before, (type(None), ast.Assign, ast.AnnAssign)):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement.lineno, str(statement.value.value).strip()


def page_findings(text: str) -> Iterator[Finding]:
    """Check words and the lengths of sentences in a Markdown page. A table cell is a sentence."""
    text = _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    yield from word_findings(text, 1)
    line = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=\s*[-*|#>]|\s*\d+\.))", text):
        for sentence in re.split(r"(?<=[.:;?!])\s|\|", paragraph):
            words = sentence.split()
            if len(words) > MAX_SENTENCE_WORDS:
                yield line, f"{len(words)} words: {' '.join(words)[:60]} ..."
        line += paragraph.count("\n")


def word_findings(text: str, line: int) -> Iterator[Finding]:
    """Find listed words in a text that starts at `line`, literals excluded."""
    for match in _WORDS.finditer(text):
        start, end = match.span()
        chunk = text[text.rfind("\n", 0, start) + 1 : start].rpartition(" ")[2] + text[start:end]
        chunk += re.match(r"\S*", text[end : end + 80])[0]
        paragraph = text[max(text.rfind("\n\n", 0, start), 0) : start]
        line_end = text.find("\n", end)
        around = text[text.rfind("\n", 0, start) + 1 : line_end if line_end >= 0 else None]
        if _EXEMPT.search(around):
            continue
        if not _LITERAL.search(chunk) and paragraph.count("`") % 2 == 0:
            replacement = next(new for group, new in zip(match.groups(), _REPLACEMENTS, strict=True) if group)
            yield line + text.count("\n", 0, start), f"{match[0]!r}: write {replacement}"


def main(names: list[str]) -> int:
    """Print each finding as `file:line: message`. Return the exit code."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = names or [name for name in listed.stdout.split() if (ROOT / name).is_file() and name not in _EXAMPLES]
    count = 0
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        for line, message in sorted(page_findings(text) if name.endswith(".md") else source_findings(text)):
            print(f"{name}:{line}: {message}")
            count += 1
    print(f"{count} findings in {len(files)} files", file=sys.stderr)
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
