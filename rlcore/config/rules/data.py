"""Rules of the dataset stage."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlcore.config.data import ALL_SOURCES, RENDERING_NAMES, CountdownData, MixtureData, ParquetData
from rlcore.config.problems import Problem
from rlcore.config.rules.registry import Rule, row, rule
from rlcore.config.run import RunConfig

_MIXTURE_SCORER = MixtureData().scorer


def _is_there(config: RunConfig, name: str) -> bool:
    file = getattr(config.data, name, "")
    return not isinstance(config.data, ParquetData) or (bool(file) and Path(file).expanduser().is_file())


def _names_a_function(name: str) -> bool:
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


def _lists_each_once(config: RunConfig) -> bool:
    data = config.data
    return not isinstance(data, CountdownData) or 0 < len(data.operations) == len(set(data.operations))


def _goes_up(ends: tuple[float, float]) -> bool:
    return 0 <= ends[0] <= ends[1] <= 1


@rule("data")
def a_mixture_has_parts(config: RunConfig) -> Problem | None:
    """A mixture has two datasets or more, and each name stands for one of them."""
    data = config.data
    if not isinstance(data, MixtureData):
        return None
    if len(data.parts) < 2:
        remedy = "Name two or more, as docs/data.md shows, or choose the one as a group: data=countdown"
        return Problem("data.parts", "must hold two datasets or more", str(len(data.parts)), remedy)
    names = Counter(part.name for part in data.parts if part.name)
    if twice := [name for name, count in names.items() if count > 1 or name == ALL_SOURCES]:
        says = f"must name each dataset once, and none {ALL_SOURCES}, which is the name of all together"
        return Problem("data.parts", says, ", ".join(twice), "Give another name, or leave it out")
    return None


_FILE, _ITS_PATH = "must be a parquet file that exists", "Give its path; data/schema.py says what it holds"

_SHARES, _LIKE_SHARES = "must be two shares from 0 to 1, the lower one first", "Such as [0.1, 0.9]"

RULES: tuple[Rule, ...] = (
    row("operations_once_each", "data.operations", "", "must name one operation or more, each once",
        _lists_each_once, "Use some of [+,-,*,/]"),
    row("training_file_is_there", "data.train_file", "", _FILE, lambda c: _is_there(c, "train_file"), _ITS_PATH),
    row("validation_file_is_there", "data.validation_file", "", _FILE, lambda c: _is_there(c, "validation_file"),
        _ITS_PATH),
    row("scorer_is_a_function", "data.scorer", "", "must be `module:function`",
        lambda c: _names_a_function(c.data.scorer), "Such as data.countdown:score"),
    row("mathematics_is_scored_apart", "reward.num_processes", "data.scorer",
        "must be 1 or more with data.scorer=data.math:score, which some answers keep busy for ever",
        lambda c: c.data.scorer != "data.math:score" or c.reward.num_processes > 0, "Set reward.num_processes=2"),
    row("a_program_ends_before_its_scorer", "reward.deadline_s", "sandbox.time_s",
        "must be above sandbox.time_s with data.scorer=data.code:score, or a hanging program has no score, and not 0",
        lambda c: c.data.scorer != "data.code:score" or c.reward.deadline_s > c.sandbox.time_s,
        "Set sandbox.time_s=3 reward.deadline_s=5"),
    row("a_mixture_scores_by_part", "data.scorer", "data.task", f"must be {_MIXTURE_SCORER} with data=mixture",
        lambda c: not isinstance(c.data, MixtureData) or c.data.scorer == _MIXTURE_SCORER,
        "Leave it out, and set `scorer` in the data of a part"),
    row("environment_is_a_class", "data.environment", "", "must be `module:Class`, or ''",
        lambda c: not c.data.environment or _names_a_function(c.data.environment), "Such as data.number_guessing:Game"),
    row("tools_are_functions", "episode.tools", "", "must be a list of `module:function`, each name once",
        lambda c: all(map(_names_a_function, c.episode.tools))
        and len({tool.partition(":")[2] for tool in c.episode.tools}) == len(c.episode.tools),
        "Such as [data.calculator:calculate]"),
    row("an_environment_of_all_parts", "data.parts", "data.environment", "must not name an environment each",
        lambda c: not isinstance(c.data, MixtureData) or not any(part.data.environment for part in c.data.parts),
        "Set data.environment, which is that of all parts"),
    row("chat_template_kwargs_are_free_names", "data.chat_template_kwargs", "",
        "must not name what the rendering itself sets (messages, tools, add_generation_prompt, ...)",
        lambda c: RENDERING_NAMES.isdisjoint(c.data.chat_template_kwargs),
        "Leave it out; episode.tools sets tools"),
    row("chat_template_kwargs_of_all_parts", "data.parts", "data.chat_template_kwargs",
        "must not name chat_template_kwargs each",
        lambda c: not isinstance(c.data, MixtureData) or not any(p.data.chat_template_kwargs for p in c.data.parts),
        "Set data.chat_template_kwargs, which are those of all parts"),
    row("a_warm_start_is_scored", "warm_start.stop_at_reward", "data.environment",
        "must be null with an environment: a warm start's answers have one turn and are scored by data.scorer",
        lambda c: not c.data.environment or not c.warm_start.enabled or c.warm_start.stop_at_reward is None,
        "Leave it out, and set warm_start.max_steps"),
    row("a_game_is_played_once", "algo.advantage", "data.environment",
        "must not be remax with an environment: its greedy answer would meet another one's random numbers",
        lambda c: not c.data.environment or c.algo.advantage != "remax", "Choose algo=rloo or algo=grpo"),
    a_mixture_has_parts,
    row("demonstrations_are_there", "warm_start.demonstrations", "warm_start.enabled",
        "must be a .jsonl or .parquet file that exists",
        lambda c: not c.warm_start.enabled or c.warm_start.demonstrations is None
        or (Path(c.warm_start.demonstrations).suffix in (".jsonl", ".parquet")
            and Path(c.warm_start.demonstrations).expanduser().is_file()),
        "Give its path, or leave it out: a task's own solutions are shown then"),
    row("kept_rates_are_shares", "pass_rates.keep", "", _SHARES, lambda c: _goes_up(c.pass_rates.keep), _LIKE_SHARES),
    row("band_of_rates_is_of_shares", "pass_rates.band", "", _SHARES, lambda c: _goes_up(c.pass_rates.band),
        _LIKE_SHARES),
    row("pass_rates_come_from_one_place", "pass_rates.samples", "pass_rates.table", "must be 0 with a given table",
        lambda c: not c.pass_rates.samples or c.pass_rates.table is None, "Leave one of the two out"),
    row("pass_rate_table_is_there", "pass_rates.table", "pass_rates.samples",
        "must be the folder of a finished table, pass-rates/<fingerprint> of a root",
        lambda c: c.pass_rates.samples > 0 or c.pass_rates.table is None
        or (Path(c.pass_rates.table).expanduser() / "manifest.json").is_file(),
        "Give the folder that `millrace data pass-rates` names"),
)  # fmt: skip


def parts_keep(rules: Sequence[Rule]) -> Rule:
    """The rule that each dataset of a mixture keeps these rules as if it were the run's only one."""
    reading = [each for each in rules if each.reads_any(("data",))]

    def check(config: RunConfig) -> Problem | None:
        told = []
        for index, part in enumerate(config.data.parts if isinstance(config.data, MixtureData) else ()):
            alone = config.model_copy(update={"data": part.data})
            broken = (problem for each in reading if (problem := each.check(alone)) is not None)
            told += [f"entry {index} ({part.data.task}): {problem}" for problem in broken]
        if not told:
            return None
        return Problem("data.parts", "every dataset must keep the rules", "; ".join(told), "Mend them one by one")

    return Rule("parts_keep_the_rules", ("data", "model", "reward", "warm_start"), check)
