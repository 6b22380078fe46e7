"""A validation as it is kept in `validation/<name>.json` of a run: every problem, every answer, every score."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rlcore.config import ValidationConfig
from rlcore.errors import DataError
from rlcore.evaluation.answers import Answer as Answer
from rlcore.evaluation.answers import ProblemResult as ProblemResult
from rlcore.evaluation.answers import num_samples_of, per_problem
from rlcore.evaluation.stats import Interval, bootstrap_intervals
from rlcore.storage.publish import write_json_atomically

FORMAT_VERSION = 1


def core_name(data_source: str, statistic: str) -> str:
    """A statistic's full metric name.

    >>> core_name("countdown", "reward/mean@4")
    'val-core/countdown/reward/mean@4'
    """
    return f"val-core/{data_source}/{statistic}"


@dataclass(frozen=True)
class ValidationResult:
    """One model judged on held-out problems, each answered the same number of times.

    `name` is `before`, `after` or `step-000020`; `step` and `policy_version` say which weights were judged.
    `data_source` is that of all problems, `all` where they come from several.
    """

    name: str
    step: int
    policy_version: int
    data_source: str
    problems: tuple[ProblemResult, ...]
    settings: ValidationConfig

    @property
    def num_samples(self) -> int:
        """k: sampled answers to each problem."""
        return num_samples_of(self.problems)

    @property
    def with_figures(self) -> "ValidationResult":
        """The same for the problems that every figure is over: those that the scorer did not wholly fail on."""
        return replace(self, problems=tuple(problem for problem in self.problems if problem.has_figures))

    @property
    def num_unscored(self) -> int:
        """Answers that the scorer failed on; they are in no figure."""
        return sum(problem.num_unscored for problem in self.problems)

    @cached_property
    def intervals(self) -> Mapping[str, Interval]:
        """Each statistic with its bootstrap interval over problems, by its name below `val-core/<data_source>/`."""
        values = per_problem(self.with_figures.problems)
        if not values:
            return {}
        found = bootstrap_intervals(
            np.stack(list(values.values()), axis=1),
            confidence=self.settings.confidence,
            num_resamples=self.settings.num_resamples,
        )
        return dict(zip(values, found, strict=True))

    def by_source(self) -> tuple["ValidationResult", ...]:
        """The same for the problems of each data source, in the order of their names; nothing where there is one."""
        sources = sorted({problem.data_source for problem in self.problems})
        if len(sources) < 2:
            return ()
        return tuple(
            replace(
                self,
                data_source=source,
                problems=tuple(problem for problem in self.problems if problem.data_source == source),
            )
            for source in sources
        )

    def summary(self) -> Mapping[str, float]:
        """The figures of this validation under their metric names, each with `/ci_low` and `/ci_high`.

        `val-core/<data_source>/reward/` with `mean@k` (mean score of the k samples), `pass@k`, `pass_all@k`, `maj@k`
        (shares of problems solved, see `rlcore.evaluation.stats`) and `greedy` (score of the greedy answer);
        `val-core/<data_source>/acc/` with `mean@k` and `greedy`: the same over solved (1) or not (0).
        Where problems come from several sources, for each of them, and over all problems as `val-core/all/...`.
        `val-aux/<data_source>/num_unscored`: answers that the scorer failed on, which are left out; absent without.
        """
        summary: dict[str, float] = {}
        for part in self.by_source():
            summary |= part.summary()
        for statistic, interval in self.intervals.items():
            name = core_name(self.data_source, statistic)
            summary |= {name: interval.value, f"{name}/ci_low": interval.low, f"{name}/ci_high": interval.high}
        if self.num_unscored:
            summary[f"val-aux/{self.data_source}/num_unscored"] = float(self.num_unscored)
        return summary

    def renamed(self, name: str) -> "ValidationResult":
        """The same result under another name."""
        return replace(self, name=name)

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all.

        Raises:
            DiskSpaceError: there is no room.
        """
        document: dict[str, Any] = _RESULT.dump_python(self, mode="json")
        write_json_atomically(path, {"format_version": FORMAT_VERSION, **document})

    @classmethod
    def read(cls, path: Path) -> "ValidationResult":
        """What `write` wrote.

        Raises:
            DataError: the file is missing, damaged or of another format.
        """
        try:
            document = _DOCUMENT.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(f"{path}: is no validation result ({_first_line(error)}); validate again") from error
        version = document.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}; read it with the version of "
                "Millrace that wrote it, or validate again"
            )
        try:
            return _RESULT.validate_python(document)
        except ValidationError as error:
            raise DataError(f"{path}: is no validation result ({_first_line(error)}); validate again") from error


_DOCUMENT = TypeAdapter(dict[str, Any])
_RESULT = TypeAdapter(ValidationResult)


def _first_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg']}"
