"""The code that settings name as `module:function`: its source files, a copy for each run, and imports from this copy.

The code of a function consists of its module's file, the files that this module imports from the same import folder,
and the data files whose relative paths are strings in these files. A file of an installed package belongs to the code
of a function only if the function is in the same package. The same holds for files of Millrace. No code is executed, so
computed imports are not followed. Scoring processes import this module. To keep the import light, pydantic, settings
and storage are imported inside functions.
"""

import ast
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config import RunConfig

FOLDER_VARIABLE = "MILLRACE_CODE"
"""The environment variable with the code folder of a run, for all processes of the run."""
MILLRACE_PACKAGES = ("conf", "data", "flows", "rlcore")
"""Millrace's packages. They are never imported from a copy, because running processes have already loaded them."""
MILLRACE_FOLDER = "millrace-source"
SITE_PACKAGES = ("site-packages", "dist-packages")
MAX_PATCH_LINES = 40
MAX_DATA_BYTES = 10_000_000


def module_of(name: str) -> str:
    """Return the module name of a source file below an import folder.

    >>> module_of("rewards/exact.py"), module_of("rewards/__init__.py")
    ('rewards.exact', 'rewards')
    """
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True, slots=True)
class Source:
    """A source file: its name below the import folder (`rewards/exact.py`), its path and its bytes."""

    name: str
    path: str
    content: bytes

    @property
    def sha256(self) -> str:
        """The digest of the file's bytes."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def read(cls, file: Path, root: Path) -> "Source":
        """Read a file below the import folder `root`."""
        return cls(file.relative_to(root).as_posix(), str(file), file.read_bytes())


@dataclass(frozen=True, slots=True)
class Code:
    """The source files of each function that is named in the settings (as `module:function`)."""

    by_function: Mapping[str, tuple[Source, ...]]

    @property
    def sources(self) -> dict[str, Source]:
        """All source files by name."""
        return {source.name: source for sources in self.by_function.values() for source in sources}

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each file by name."""
        return {name: source.sha256 for name, source in sorted(self.sources.items())}

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the files' names and contents, without their paths. It is the same on every machine."""
        from rlcore.config.fingerprint import fingerprint

        return fingerprint("code", self.digests)

    def shared_with(self, other: "Code") -> "Code":
        """Return only the code of those functions that are also in `other`."""
        return Code({name: sources for name, sources in self.by_function.items() if name in other.by_function})

    def save(self, folder: Path) -> None:
        """Replace the folder by a copy of the files. Raises DiskSpaceError or DataError if writing the copy fails."""
        from rlcore.storage.publish import published_directory

        values: dict[str, Any] = {
            "kind": "code",
            "functions": {name: [source.name for source in sources] for name, sources in self.by_function.items()},
            "paths": {name: source.path for name, source in self.sources.items()},
        }
        with published_directory(folder, values, replace=True) as written:
            for name, source in self.sources.items():
                file = _path_in_copy(written, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(source.content)
            for name, path in self._other_sources():
                (written / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, written / name)

    def _other_sources(self) -> Iterator[tuple[str, Path]]:
        """Yield the name and path of each other Python file in the packages of these sources. These files are included
        because code can import a file by a computed name."""
        for name, source in self.sources.items():
            top, _, file = name.partition("/")
            if file == "__init__.py" and top not in MILLRACE_PACKAGES:
                package = Path(source.path).parent
                for at, folders, files in os.walk(package):
                    folders[:] = [each for each in folders if (Path(at, each) / "__init__.py").is_file()]
                    paths = (Path(at, each) for each in files if each.endswith(".py"))
                    named = ((path.relative_to(package.parent).as_posix(), path) for path in paths)
                    yield from (each for each in named if each[0] not in self.sources)


def read_code(folder: Path) -> Code | None:
    """Read the copy that `Code.save` wrote, or return None if there is none. Raises DataError if it is damaged."""
    from rlcore.storage.manifest import read_manifest, verify_directory

    if read_manifest(folder) is None:
        return None
    values = verify_directory(folder).values
    sources = {
        name: Source(name, path, _path_in_copy(folder, name).read_bytes()) for name, path in values["paths"].items()
    }
    return Code({function: tuple(sources[name] for name in names) for function, names in values["functions"].items()})


def _path_in_copy(folder: Path, name: str) -> Path:
    return folder / MILLRACE_FOLDER / name if name.partition("/")[0] in MILLRACE_PACKAGES else folder / name


def code_for_run(config: "RunConfig") -> Code:
    """Return the code of every `module:function` of the settings, such as scorers and losses, and of every taskset.

    Inside a `run_code` block, the code is read from the run's copy. Otherwise, it is read from the original files."""
    from rlcore.config.data import CustomData, VerifiersData, parts_of, scorers_of

    tasks = [part.data for part in parts_of(config.data)] + [suite.data for suite in config.validation.suites]
    named = [scorer for data in tasks for scorer in scorers_of(data)]
    named += [data.build for data in tasks if isinstance(data, CustomData)]
    named += [data.taskset for data in tasks if isinstance(data, VerifiersData)]
    named += [config.data.environment, *(suite.data.environment for suite in config.validation.suites)]
    named += [*config.episode.tools, config.algo.policy_loss, config.algo.advantage, config.reward.judge.rules]
    return Code({name: code_for(name) for name in dict.fromkeys(named) if ":" in name})


def code_for(function: str) -> tuple[Source, ...]:
    """Return the source files of one function, sorted by name. Return () if its module has no source file."""
    if function in _active.by_function:
        return _active.by_function[function]
    module = function.partition(":")[0]
    roots, top = _roots(module), module.partition(".")[0]
    is_own_folder = top in MILLRACE_PACKAGES or any(root.name in SITE_PACKAGES for root in roots)
    found: dict[str, Source] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        for name in accumulate(waiting.pop().split("."), "{}.{}".format):
            first = name.partition(".")[0]
            if name in seen or (first != top and (is_own_folder or first in MILLRACE_PACKAGES)):
                continue
            seen.add(name)
            place = next(((root, file) for root in roots if (file := _module_file(root, name)) is not None), None)
            if place is None:
                continue
            root, file = place
            source = Source.read(file, root)
            found[source.name] = source
            if top == "rlcore":  # a module of rlcore counts alone
                continue
            imported, texts = _parse_source(source.content, name, file.name == "__init__.py")
            waiting += imported
            found |= {data.name: data for data in _data_files(file, root, texts)}
    return tuple(found[name] for name in sorted(found))


def code_patch(before: Code, now: Code) -> str:
    """Return the difference between two versions of the code as a patch of at most `MAX_PATCH_LINES` lines."""
    lines: list[str] = []
    for name in sorted(before.sources.keys() | now.sources.keys()):
        old, new = (
            code.sources[name].content.decode(errors="replace").splitlines() if name in code.sources else []
            for code in (before, now)
        )
        lines += unified_diff(old, new, f"{name} (the run's)", f"{name} (now)", lineterm="")
    if len(lines) > MAX_PATCH_LINES:
        lines[MAX_PATCH_LINES:] = [f"... and {len(lines) - MAX_PATCH_LINES} more lines"]
    return "\n".join(lines)


def _roots(module: str) -> list[Path]:
    top = module.partition(".")[0]
    try:
        spec = None if top in sys.stdlib_module_names else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).absolute().parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).absolute().parent] if spec.origin and spec.origin.endswith(".py") else []


def _module_file(root: Path, module: str) -> Path | None:
    stem = root.joinpath(*module.split("."))
    return next((file for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if file.is_file()), None)


def _data_files(file: Path, root: Path, texts: tuple[str, ...]) -> Iterator[Source]:
    for text in texts:
        path = file.parent / text
        if PurePosixPath(text).is_absolute() or ".." in PurePosixPath(text).parts or path.suffix == ".py":
            continue
        if path.is_file() and path.stat().st_size <= MAX_DATA_BYTES:
            yield Source.read(path, root)


@cache
def _parse_source(content: bytes, module: str, is_package: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return (), ()  # the import will raise the error
    package = module if is_package else module.rpartition(".")[0]
    nodes = list(ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paths = [text for text in strings if 0 < len(text) <= 100 and text.isprintable()]
    imported = dict.fromkeys(name for node in nodes for name in _imported_names(node, package))
    return tuple(imported), tuple(dict.fromkeys(paths))


def _imported_names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        try:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:
            return
        yield from (f"{base}.{alias.name}" for alias in node.names)


_active = Code({})


@contextmanager
def run_code(folder: Path) -> Iterator[None]:
    """Use a run's copy of the code for imports and fingerprints inside the `with` block. If there is no copy, use the
    original files."""
    global _active
    before, code = _active, read_code(folder)
    _active = code or Code({})
    import_from(None if code is None else folder)
    try:
        yield
    finally:
        _active = before
        import_from(None)


def import_from(folder: Path | None) -> None:
    """Import user modules from the copy in `folder`, or from the original files if `folder` is None.

    The choice also holds for child processes. Imported modules that a copy contains are removed from `sys.modules`, so
    that their next import reads the right file."""
    before = os.environ.pop(FOLDER_VARIABLE, None)
    for name in {*_modules_in(before), *_modules_in(folder)} & sys.modules.keys():
        del sys.modules[name]
        package, _, member = name.rpartition(".")
        if package in sys.modules:  # a namespace package stays and has the module as a member
            vars(sys.modules[package]).pop(member, None)
    sys.path[:] = [place for place in sys.path if place != before]
    if folder is not None:
        sys.path.insert(0, str(folder))
        os.environ[FOLDER_VARIABLE] = str(folder)
    importlib.invalidate_caches()


def _modules_in(folder: str | Path | None) -> set[str]:
    if folder is None or not (manifest := Path(folder) / "manifest.json").is_file():
        return set()
    names = json.loads(manifest.read_text(encoding="utf-8"))["paths"]
    return {
        module_of(name) for name in names if name.endswith(".py") and name.partition("/")[0] not in MILLRACE_PACKAGES
    }


def import_from_environment() -> None:
    """Call `import_from` with the folder in the variable `MILLRACE_CODE`, if the folder exists on this node."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and (Path(folder) / "manifest.json").is_file():
        import_from(Path(folder))
