"""A run as a command names it: by its folder, by its id, or by the settings that it was started with."""

from pathlib import Path

from flows.commands.options import with_root
from flows.work.run_folders import named_runs
from rlcore.config import PathsConfig, RunConfig
from rlcore.config.compose import load_config
from rlcore.errors import DataError
from rlcore.run.layout import RunLayout


def named_run(words: list[str], root: Path | None) -> tuple[RunConfig, RunLayout]:
    """Settings and folders of a run. An id, or the beginning of one, is looked up below `root` (None: the usual one).

    Raises:
        ConfigError: the settings are wrong.
        DataError: there is no such run, its settings cannot be read, or a part of it is of another kind.
    """
    if len(words) == 1 and "=" not in words[0]:
        (folder,) = named_runs(words, root or Path(PathsConfig().root))
        config, layout = _in_folder(folder)
        layout.require_kinds()
        return config, layout
    config = load_config(with_root(words, root))
    layout = RunLayout.of(config)
    if not layout.run_dir.is_dir():
        raise DataError(
            f"{layout.run_dir}: there is no such run: the settings name it, but nothing was started with them. Give "
            "the settings of the run, its id, or its folder."
        )
    layout.require_kinds()
    return config, layout


def _in_folder(folder: Path) -> tuple[RunConfig, RunLayout]:
    """By what the run keeps of its settings. The folder is where it is now: it may have been moved or copied."""
    file = folder / "settings.json"
    try:
        config = RunConfig.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: cannot be read as the settings of this version of Millrace ({error}). Use the version that wrote "
            "it."
        ) from error
    return config, RunLayout(Path(config.paths.root).resolve(), folder)
