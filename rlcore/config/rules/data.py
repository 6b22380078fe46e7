"""Rules of the dataset stage."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlcore.config.base import expanded
from rlcore.config.data import (
    ALL_SOURCES,
    BY_ROW,
    DATA_FILE,
    KINDS_OF_FILES,
    RENDERING_NAMES,
    CountdownData,
    MixtureData,
    ParquetData,
    parts_of,
)
from rlcore.config.model import WarmStartConfig
from rlcore.config.problems import Problem
from rlcore.config.rules.registry import Rule, row, rule
from rlcore.config.run import RunConfig
from rlcore.config.suite import suite_settings

_SEED = MixtureData().seed
JUDGE = "data.judge:score"
"""The scorer that reads `reward.judge`."""
PROGRAMS = "data.code:score"
"""The scorer that runs programs, in the sandbox."""


def _is_there(config: RunConfig, name: str) -> bool:
    file = getattr(config.data, name, "")
    return not isinstance(config.data, ParquetData) or (bool(file) and expanded(file).is_file())


def _names_a_function(name: str) -> bool:
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


def _is_judged(config: RunConfig) -> bool:
    return any(part.data.scorer == JUDGE for part in parts_of(config.data))


def _is_endpoint(url: str) -> bool:
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        return False
    return (
        found.scheme in ("http", "https")
        and bool(found.hostname)
        and port != 0
        and not (found.username or found.password or found.query or found.fragment)
    )


def _taken(names: Iterable[str]) -> str:
    """Names that are given more than once, or are that of all held-out problems together."""
    return ", ".join(name for name, count in Counter(names).items() if count > 1 or name == ALL_SOURCES)


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
    if taken := _taken(part.name for part in data.parts if part.name):
        says = f"must name each dataset once, and none {ALL_SOURCES}, which is the name of all together"
        return Problem("data.parts", says, taken, "Give another name, or leave it out")
    return None


@rule("validation.suites", "filter.max_prompt_tokens", "rollout.max_response_tokens")
def suites_have_names_and_room(config: RunConfig) -> Problem | None:
    """Each suite's figures have a name of their own, and its answers fit where the run's do."""
    if taken := _taken(suite.name for suite in config.validation.suites):
        says = f"must have a name each, and none {ALL_SOURCES}, which is the name of all held-out problems together"
        return Problem("validation.suites", says, taken, "Write another `name` into the file")
    room = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    for suite in config.validation.suites:
        seen = suite_settings(config, suite)
        longest = seen.filter.max_prompt_tokens + seen.rollout.max_response_tokens
        if longest > room:
            says = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and answer"
            remedy = f"Lower the suite's limits, or raise the run's by {longest - room}"
            return Problem("validation.suites", says, f"{suite.name}: {longest}, the run {room}", remedy)
    return None


_FILE, _ITS_PATH = "must be a parquet file that exists", "Give its path; data/schema.py says what it holds"

_SHARES, _LIKE_SHARES = "must be two shares from 0 to 1, the lower one first", "Such as [0.1, 0.9]"

RULES: tuple[Rule, ...] = (
    suites_have_names_and_room,
    row("operations_once_each", "data.operations", "", "must name one operation or more, each once",
        lambda c: not isinstance(c.data, CountdownData) or 0 < len(c.data.operations) == len(set(c.data.operations)),
        "Use some of [+,-,*,/]"),
    row("training_file_is_there", "data.train_file", "", _FILE, lambda c: _is_there(c, "train_file"), _ITS_PATH),
    row("validation_file_is_there", "data.validation_file", "", _FILE, lambda c: _is_there(c, "validation_file"),
        _ITS_PATH),
    row("scorer_is_a_function", "data.scorer", "", "must be `module:function`",
        lambda c: _names_a_function(c.data.scorer), "Such as data.countdown:score"),
    row("mathematics_is_scored_apart", "reward.num_processes", "data.scorer",
        "must be 1 or more with data.scorer=data.math:score, which some answers keep busy for ever, and with "
        "data=parquet without data.scorer, whose rows may be mathematics",
        lambda c: isinstance(c.data, MixtureData) or c.data.scorer not in ("data.math:score", BY_ROW)
        or c.reward.num_processes > 0, "Set reward.num_processes=2"),
    row("reasoning_gym_is_scored_apart", "reward.num_processes", "data.scorer",
        "must be 1 or more with data.scorer=data.reasoning_gym:score, which calls another package on any answer",
        lambda c: c.data.scorer != "data.reasoning_gym:score" or c.reward.num_processes > 0,
        "Set reward.num_processes=2"),
    row("a_program_ends_before_its_scorer", "reward.deadline_s", "sandbox.time_s",
        "must be above sandbox.time_s with data.scorer=data.code:score, or a hanging program has no score, and not 0",
        lambda c: c.data.scorer != PROGRAMS or c.reward.deadline_s > c.sandbox.time_s,
        "Set sandbox.time_s=3 reward.deadline_s=5"),
    row("a_judge_has_an_endpoint", "reward.judge.url", "data.scorer",
        "must be an http or https address without user, password or query with a scorer data.judge:score, else '' too",
        lambda c: _is_endpoint(c.reward.judge.url) or not (_is_judged(c) or c.reward.judge.url),
        "Such as http://127.0.0.1:8000/v1"),
    row("a_judge_has_a_model", "reward.judge.model", "data.scorer", "must be given with a scorer data.judge:score",
        lambda c: not _is_judged(c) or bool(c.reward.judge.model), "Use a name that the endpoint lists at /models"),
    row("a_judge_is_asked_from_processes", "reward.num_processes", "data.scorer",
        "must be 1 or more with a scorer data.judge:score: as many answers are judged at a time",
        lambda c: not _is_judged(c) or c.reward.num_processes > 0, "Set reward.num_processes=16"),
    row("a_judge_ends_before_its_process", "reward.deadline_s", "reward.judge.deadline_s",
        "must be above reward.judge.deadline_s with a scorer data.judge:score",
        lambda c: not _is_judged(c) or c.reward.deadline_s > c.reward.judge.deadline_s, "Set reward.deadline_s=35"),
    row("a_judge_sees_the_answer", "reward.judge.prompt", "", "must have a place {response}",
        lambda c: "{response}" in c.reward.judge.prompt, "Write {response} where the answer comes"),
    row("a_judge_is_beside_rules", "reward.judge.rules", "",
        "must be `module:function` of a scorer other than the judge, or ''",
        lambda c: not c.reward.judge.rules
        or (_names_a_function(c.reward.judge.rules) and c.reward.judge.rules != JUDGE),
        "Such as data.countdown:score"),
    row("an_environment_has_its_rewards", "reward.weights", "data.environment",
        "must be empty with an environment, whose rewards are added up over an episode",
        lambda c: not c.data.environment or not c.reward.weights, "Leave it out, and weigh in the environment"),
    row("a_mixture_scores_by_part", "data.scorer", "data.task", f"must be {BY_ROW} with data=mixture",
        lambda c: not isinstance(c.data, MixtureData) or c.data.scorer == BY_ROW,
        "Leave it out, and set `scorer` in the data of a part"),
    row("environment_is_a_class", "data.environment", "", "must be `module:Class`, or ''",
        lambda c: not c.data.environment or _names_a_function(c.data.environment), "Such as data.number_guessing:Game"),
    row("tools_are_functions", "episode.tools", "", "must be a list of `module:function`, each name once",
        lambda c: all(map(_names_a_function, c.episode.tools))
        and len({tool.partition(":")[2] for tool in c.episode.tools}) == len(c.episode.tools),
        "Such as [data.calculator:calculate]"),
    row("tools_are_there", "episode.tools", "data.environment",
        "must name a tool or more with data.environment=rlcore.rollout.tools:Tools, which calls them",
        lambda c: c.data.environment != "rlcore.rollout.tools:Tools" or bool(c.episode.tools),
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
    row("uniform_targets_are_searched", "data.max_numbers", "data.targets",
        "must be at most 4 with data.targets=uniform",
        lambda c: not isinstance(c.data, CountdownData) or c.data.targets != "uniform" or c.data.max_numbers <= 4,
        "Lower it, or set data.targets=equation"),
    row("a_seed_of_all_parts", "data.parts", "data.seed", "must not name a seed each",
        lambda c: not isinstance(c.data, MixtureData) or all(part.data.seed == _SEED for part in c.data.parts),
        "Set data.seed, which is that of all parts"),
    row("resamples_are_enough", "validation.num_resamples", "",
        "must be at least 1,000, for the ends of an interval depend on the draws of fewer",
        lambda c: c.validation.num_resamples >= 1_000, "Leave it out"),
    row("a_suite_has_one_seed", "validation.suites", "", "must not name a seed in their data",
        lambda c: all(suite.data.seed == _SEED for suite in c.validation.suites),
        "Set the suite's own seed, which fixes its rows and its answers"),
    row("a_warm_start_is_scored", "warm_start.stop_at_reward", "data.environment",
        "must be null with an environment: a warm start's answers have one turn and are scored by data.scorer",
        lambda c: not c.data.environment or not c.warm_start.enabled or c.warm_start.stop_at_reward is None,
        "Leave it out, and set warm_start.max_steps"),
    row("a_game_is_played_once", "algo.advantage", "data.environment",
        "must not be remax with an environment: its greedy answer would meet another one's random numbers",
        lambda c: not c.data.environment or c.algo.advantage != "remax", "Choose algo=rloo or algo=grpo"),
    a_mixture_has_parts,
    row("demonstrations_are_there", "warm_start.demonstrations", "warm_start.enabled",
        f"must be a file that exists, {KINDS_OF_FILES}",
        lambda c: not c.warm_start.enabled or c.warm_start.demonstrations is None
        or (DATA_FILE.fullmatch(Path(c.warm_start.demonstrations).name) is not None
            and expanded(c.warm_start.demonstrations).is_file()),
        "Give its path, or leave it out: a task's own solutions are shown then"),
    row("kept_rates_are_shares", "pass_rates.keep", "", _SHARES, lambda c: _goes_up(c.pass_rates.keep), _LIKE_SHARES),
    row("band_of_rates_is_of_shares", "pass_rates.band", "", _SHARES, lambda c: _goes_up(c.pass_rates.band),
        _LIKE_SHARES),
    row("pass_rates_come_from_one_place", "pass_rates.samples", "pass_rates.table", "must be 0 with a given table",
        lambda c: not c.pass_rates.samples or c.pass_rates.table is None, "Leave one of the two out"),
    row("pass_rate_table_is_there", "pass_rates.table", "pass_rates.samples",
        "must be the folder of a finished table, pass-rates/<fingerprint> of a root",
        lambda c: c.pass_rates.samples > 0 or c.pass_rates.table is None
        or (expanded(c.pass_rates.table) / "manifest.json").is_file(),
        "Give the folder that `millrace data pass-rates` names"),
)  # fmt: skip


def parts_keep(rules: Sequence[Rule]) -> Rule:
    """The rule that each dataset of a mixture keeps these rules as if it were the run's only one."""

    def alone(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
        for index, part in enumerate(config.data.parts if isinstance(config.data, MixtureData) else ()):
            yield f"entry {index} ({part.data.task})", config.model_copy(update={"data": part.data})

    reading = [each for each in rules if each.reads_any(("data",))]
    reads = ("data", "model", "reward", "warm_start")
    return _each_keeps(reading, alone, "data.parts", "every dataset must keep the rules", "Mend them one by one", reads)


def suites_keep(rules: Sequence[Rule]) -> Rule:
    """The rule that each suite keeps these rules as if its data and sampling were the run's."""

    def alone(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
        for suite in config.validation.suites:  # the warm start learns from the run's own data
            yield suite.name, suite_settings(config, suite).model_copy(update={"warm_start": WarmStartConfig()})

    reading = [
        each for each in rules if each.reads_any(("data", "validation")) and each.name != "training_file_is_there"
    ]
    reads = ("validation", "data", "model", "reward", "rollout")
    return _each_keeps(reading, alone, "validation.suites", "every suite must keep the rules", "Mend its file", reads)


def _each_keeps(
    rules: Sequence[Rule],
    alone: Callable[[RunConfig], Iterator[tuple[str, RunConfig]]],
    key: str,
    says: str,
    remedy: str,
    reads: tuple[str, ...],
) -> Rule:
    """The rule that each of the settings that `alone` names keeps these rules."""

    def check(config: RunConfig) -> Problem | None:
        broken = [f"{name}: {problem}" for name, one in alone(config) for each in rules if (problem := each.check(one))]
        return Problem(key, says, "; ".join(broken), remedy) if broken else None

    return Rule(says.replace(" ", "_"), reads, check)
