"""Rules between settings: bounds declared at the fields, rows of a table, and functions where a row is not enough."""

from collections.abc import Collection

from rlcore.config.problems import Problem
from rlcore.config.rules import data, model, training
from rlcore.config.rules.registry import Rule, bounds
from rlcore.config.run import RunConfig

__all__ = ["RULES", "Rule", "broken_rules"]

_ALONE = (*training.RULES, *bounds(), *data.RULES, *model.RULES)
RULES: tuple[Rule, ...] = (*_ALONE, data.parts_keep(_ALONE), data.suites_keep(_ALONE))
"""All rules, in the order in which broken ones are listed."""


def broken_rules(config: RunConfig, unsound: Collection[str] = ()) -> list[Problem]:
    """Every broken rule, except rules that read a key or section named in `unsound`."""
    found = (each.check(config) for each in RULES if not each.reads_any(unsound))
    return [problem for problem in found if problem is not None]
