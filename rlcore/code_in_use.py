"""Imports modules as a run keeps them in its folder, so that an edit of a file changes nothing in a run that goes on.

A scoring process may start hours after the trainer, and so may a rank: each imports the text with which the run began.
Standard library only: a scoring process is up in a tenth of a second.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType

FOLDER_VARIABLE = "MILLRACE_CODE"
"""In the environment of processes that work for a run: the folder of its code."""
OWN_PACKAGES = ("conf", "data", "flows", "rlcore")
"""Millrace's own: a process has imported them already, and they belong together."""


def module_of(name: str) -> str:
    """The module of a source file, which is named below the folder that Python finds it in.

    >>> module_of("rewards/exact.py"), module_of("rewards/__init__.py")
    ('rewards.exact', 'rewards')
    """
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class KeptSource(ExecutionLoader):
    """Loads one module from the text that was kept, under the path at which it lay: data beside it are found there."""

    def __init__(self, kept: Path, path: str, *, is_package: bool) -> None:
        self.content = kept.read_bytes()
        self.path = path
        self._is_package = is_package

    def get_filename(self, fullname: str) -> str:
        """Where the file lay when the run began."""
        return self.path

    def get_source(self, fullname: str) -> str:
        """The text that was kept."""
        return importlib.util.decode_source(self.content)

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: a bytecode file beside the original may be of another text."""
        return self.source_to_code(self.content, self.path)

    def is_package(self, fullname: str) -> bool:
        """Whether it is an `__init__.py`."""
        return self._is_package


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.loaders: Mapping[str, KeptSource] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self.loaders.get(fullname)
        if loader is None:
            return None
        inside = [str(Path(loader.path).parent)] if loader.is_package(fullname) else None
        return importlib.util.spec_from_file_location(
            fullname, loader.path, loader=loader, submodule_search_locations=inside
        )


_FINDER = _Finder()


def use(folder: Path | None) -> None:
    """From here on import modules as `folder` has them, here and in processes that this one starts; None: as they lie.

    Modules that were imported with other texts before are imported again at their next use.
    """
    loaders = {} if folder is None else _loaders(folder)
    imported = loaders.keys() & sys.modules.keys()
    if not all(_is_of(sys.modules[name], loaders[name]) for name in imported):
        for name in imported:  # those of equal text too: they hold what they have imported from the others
            del sys.modules[name]
    _FINDER.loaders = loaders
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if folder is None:
        os.environ.pop(FOLDER_VARIABLE, None)
    else:
        os.environ[FOLDER_VARIABLE] = str(folder)


def _is_of(module: ModuleType, kept: KeptSource) -> bool:
    loader = getattr(module.__spec__, "loader", None)
    return isinstance(loader, KeptSource) and loader.content == kept.content


def use_as_told() -> None:
    """In a process that works for a run: `use` what the environment names, if it is here (another node may lack it)."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and (Path(folder) / "manifest.json").is_file():
        use(Path(folder))


def _loaders(folder: Path) -> dict[str, KeptSource]:
    paths: Mapping[str, str] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["paths"]
    return {
        module_of(name): KeptSource(folder / name, path, is_package=PurePosixPath(name).name == "__init__.py")
        for name, path in paths.items()
        if PurePosixPath(name).with_suffix("").parts[0] not in OWN_PACKAGES
    }
