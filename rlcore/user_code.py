"""The code that settings name as `module:function`: which source files it is made of, and its copy in a run's folder.

A function's code is the file of its module and, at any remove, the files that this one imports from the same folder:
that of the module, or of the package that it lies in. Installed packages and Millrace itself do not count, unless the
function is theirs. Files are named from that folder on, so the same code has the same fingerprint anywhere. Imports are
read from the text, nothing is executed; what is imported by a computed name is not seen.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path

from pydantic import JsonValue

from rlcore import code_in_use
from rlcore.code_in_use import OWN_PACKAGES, module_of
from rlcore.config import CustomData, RunConfig
from rlcore.config.data import parts_of
from rlcore.config.fingerprint import fingerprint
from rlcore.storage.publish import published_directory, read_manifest, verify_directory

INSTALLED = ("site-packages", "dist-packages")
SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class Source:
    """A source file: its name below the folder that Python finds it in (`rewards/exact.py`), its path, its bytes."""

    name: str
    path: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class Code:
    """Source files by the function (`module:function`) that they belong to."""

    by_function: Mapping[str, tuple[Source, ...]]

    @property
    def sources(self) -> dict[str, Source]:
        """All files by name."""
        return {source.name: source for sources in self.by_function.values() for source in sources}

    @property
    def digests(self) -> dict[str, str]:
        """sha256 of each file by name."""
        return {name: source.sha256 for name, source in sorted(self.sources.items())}

    @property
    def fingerprint(self) -> str:
        """Equal for equal files, whatever machine and folder they lie in."""
        return fingerprint("code", self.digests)

    def keep(self, folder: Path) -> None:
        """Copy the files to a folder, in place of what it holds. Raises DiskSpaceError and DataError."""
        values: dict[str, JsonValue] = {
            "kind": "code",
            "functions": {name: [source.name for source in sources] for name, sources in self.by_function.items()},
            "paths": {name: source.path for name, source in self.sources.items()},
        }
        with published_directory(folder, values, replace=True) as written:
            for name, source in self.sources.items():
                (written / name).parent.mkdir(parents=True, exist_ok=True)
                (written / name).write_bytes(source.content)


def kept_code(folder: Path) -> Code | None:
    """What `Code.keep` has written; None where nothing is. Raises DataError where it is damaged."""
    if read_manifest(folder) is None:
        return None
    values = verify_directory(folder).values
    sources = {name: Source(name, path, (folder / name).read_bytes()) for name, path in values["paths"].items()}
    return Code({function: tuple(sources[name] for name in names) for function, names in values["functions"].items()})


_in_use = Code({})


@contextmanager
def working_by(folder: Path) -> Iterator[None]:
    """Inside the block, imports and fingerprints take the code that a run keeps in this folder, if it keeps any."""
    global _in_use
    before, code = _in_use, kept_code(folder)
    _in_use = code or Code({})
    code_in_use.use(None if code is None else folder)
    try:
        yield
    finally:
        _in_use = before
        code_in_use.use(None)


def named_functions(config: RunConfig) -> tuple[str, ...]:
    """Every `module:function` of the settings: scorers, builders of datasets, the loss."""
    named = [part.data.scorer for part in parts_of(config.data)]
    named += [part.data.build for part in parts_of(config.data) if isinstance(part.data, CustomData)]
    return tuple(dict.fromkeys([*named, *([config.algo.policy_loss] if ":" in config.algo.policy_loss else [])]))


def code_of(config: RunConfig) -> Code:
    """The code that a run's settings name: as the run in hand keeps it, or as it lies now."""
    return Code({function: code_for(function) for function in named_functions(config)})


def code_for(function: str) -> tuple[Source, ...]:
    """Source files of one function, by name; none where its module is not found or has no source."""
    if function in _in_use.by_function:
        return _in_use.by_function[function]
    module = function.partition(":")[0]
    roots, top = _roots(module), module.partition(".")[0]
    is_own_folder = top in OWN_PACKAGES or any(root.name in INSTALLED for root in roots)
    found: dict[str, Source] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        for name in accumulate(waiting.pop().split("."), "{}.{}".format):
            first = name.partition(".")[0]
            if name in seen or (first != top and (is_own_folder or first in OWN_PACKAGES)):
                continue
            seen.add(name)
            source = next((source for root in roots if (source := _source(root, name)) is not None), None)
            if source is not None:
                found[source.name] = source
                waiting += _imported(source.content, name, source.name.endswith("__init__.py"))
    return tuple(found[name] for name in sorted(found))


def difference(before: Code, now: Code) -> str:
    """What has changed, as a patch of some lines."""
    lines: list[str] = []
    for name in sorted(before.sources.keys() | now.sources.keys()):
        old, new = (
            code.sources[name].content.decode(errors="replace").splitlines() if name in code.sources else []
            for code in (before, now)
        )
        lines += unified_diff(old, new, f"{name} (the run's)", f"{name} (now)", lineterm="")
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES:] = [f"... and {len(lines) - SHOWN_LINES} more lines"]
    return "\n".join(lines)


def _roots(module: str) -> list[Path]:
    """The folders in which Python finds the outermost package of a module."""
    top = module.partition(".")[0]
    try:
        spec = None if top in sys.stdlib_module_names else find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).absolute().parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).absolute().parent] if spec.origin and spec.origin.endswith(".py") else []


def _source(root: Path, module: str) -> Source | None:
    """The source file of a module below a folder."""
    stem = root.joinpath(*module.split("."))
    for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if file.is_file():
            source = Source(file.relative_to(root).as_posix(), str(file), file.read_bytes())
            assert module_of(source.name) == module
            return source
    return None


@cache
def _imported(content: bytes, module: str, is_package: bool) -> tuple[str, ...]:
    """Names that a source file imports: modules, and what may be a module of one; wherever in the file that stands."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return ()  # whoever imports it will say so
    package = module if is_package else module.rpartition(".")[0]
    return tuple(dict.fromkeys(name for node in _executed(tree) for name in _named_by(node, package)))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers alone."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _named_by(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        try:
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
        except ImportError:
            return
        yield from (f"{base}.{alias.name}" for alias in node.names)
