"""Settings of the dataset stage and the tokenization filter."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlcore.config.base import MayChange, Section, expand_path, is_function_name
from rlcore.config.rules import Bound, EffectiveWhen, Rule, rule

Operation = Literal["+", "-", "*", "/"]

Scorer = Annotated[str, Field(description="`module:function` that scores a response text against a ground truth.")]
Revision = Annotated[
    str,
    Field(description="Commit, tag or branch of a hub dataset; '' for the newest. Its commit is part of the dataset's "
          "fingerprint."),
]  # fmt: skip

_ORDER = "Lower one or raise the other"
_IS_HUB_SOURCE = EffectiveWhen(
    ".source", lambda source: not expand_path(source).is_dir(), remedy="Set data.source to a hub id"
)

DATA_FILE = re.compile(r"(.+)\.(?:(jsonl|json|csv)(?:\.(?:gz|zst))?|(parquet|arrow))")
"""Names of files that are read as records: stem, and kind in one of two groups."""
KINDS_OF_FILES = ".jsonl, .json, .csv (each also .gz or .zst), .parquet or .arrow"

ALL_SOURCES = "all"
"""Name of all held-out problems of several sources: `val-core/all/...`."""

JUDGE = "data.judge:score"
"""The scorer that reads `reward.judge`."""
PROGRAMS = "data.code:score"
"""The scorer that runs programs in the sandbox."""
BY_ROW = "rlcore.rollout.by_part:score"
"""The scorer that calls the scorer of each row: its part's in a mixture, or the one known for its data source."""

_SCORERS = {
    "data.gsm8k:score": re.compile(r"(?:openai/)?gsm8k"),
    "data.countdown:score": re.compile(r"countdown"),
    "data.math:score": re.compile(
        r"math|lighteval/MATH|DigitalLearningGmbH/MATH-lighteval|HuggingFaceH4/MATH-500|math_dapo(?:_reasoning)?|aime.*"
        r"|numina_(?:aops_forum|synthetic_math|amc_aime|synthetic_amc|cn_k12|olympiads)"
    ),
}
"""Scorers by the data sources whose rows they read, as in verl and TinyZero."""


RENDERING_NAMES = frozenset((
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception",
))  # fmt: skip
"""Arguments of transformers' `apply_chat_template`, and names that every chat template gets."""


def reserved(names: Iterable[str]) -> str:
    """Return the names that are repeated, or equal to the name of all held-out problems."""
    return ", ".join(name for name, count in Counter(names).items() if count > 1 or name == ALL_SOURCES)


class Conversation(Section):
    """Settings that the datasets of all tasks share: the course of a conversation with the model."""

    environment: str = ""
    """`module:Class` that replies to the model's turns and rewards them instead of the scorer (docs/environments.md);
    '' for responses of one turn."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables of the tokenizer's chat template, such as `enable_thinking=false` for Qwen3, in prompts, demonstrations
    and later turns."""
    seed: Annotated[
        int,
        EffectiveWhen("data.task warm_start.demonstrations", unless="null gsm8k mapped parquet",
                      remedy="Choose a task that draws its rows, such as data=countdown"),
    ] = Field(default=1, ge=0, lt=2**31)  # fmt: skip
    """Fixes the rows and their split, independent of the run's seed (docs/seeds.md): runs that differ by `seed` use the
    same rows and held-out problems."""
    checks: ClassVar[tuple[Rule, ...]] = (
        rule(".scorer", "", "must be `module:function`",
             lambda own, _: is_function_name(own.scorer), "Such as data.countdown:score"),
        rule(".environment", "", "must be `module:Class`, or ''",
             lambda own, _: not own.environment or is_function_name(own.environment),
             "Such as data.number_guessing:Game"),
        rule(".chat_template_kwargs", "",
             "must not name what the rendering itself sets (messages, tools, add_generation_prompt, ...)",
             lambda own, _: RENDERING_NAMES.isdisjoint(own.chat_template_kwargs),
             "Leave it out; episode.tools sets tools"),
    )  # fmt: skip


class CountdownData(Conversation):
    """Problems of the countdown task: reach a target from given numbers, each used exactly once."""

    task: Literal["countdown"] = "countdown"
    """Task in `data/` that makes the rows."""
    train_size: int = Field(default=327_680, ge=1)
    """Rows of the training split."""
    validation_size: int = Field(default=1_024, ge=1)
    """Rows of the validation split; no multiset of numbers occurs in both splits."""
    min_numbers: Annotated[int, Bound("be at most", "data.max_numbers", _ORDER)] = Field(default=3, ge=2, le=6)
    """Fewest numbers in a problem."""
    max_numbers: int = Field(default=4, ge=2, le=6)
    """Most numbers in a problem."""
    number_low: Annotated[int, Bound("be at most", "data.number_high", _ORDER)] = Field(default=1, ge=0)
    """Smallest number."""
    number_high: int = Field(default=100, ge=1)
    """Largest number."""
    target_low: Annotated[int, Bound("be at most", "data.target_high", _ORDER)] = Field(default=1)
    """Smallest target."""
    target_high: int = Field(default=1_000)
    """Largest target."""
    targets: Literal["equation", "uniform"] = "equation"
    """Choice of the target. equation: the value of a random equation over the numbers, most often with + and - alone.
    uniform: every target of the range is equally likely, and the numbers are kept if an equation reaches it. In spaces
    small enough to list, every problem is equally likely in both cases."""
    operations: tuple[Operation, ...] = ("+", "-", "*", "/")
    """Operations that the solution of a generated problem may use."""
    balance_difficulty: bool = False
    """Equally many rows of each difficulty (fewest operations: the count of numbers less one) in both splits."""
    template: Literal["bare", "base", "qwen-instruct", "chat", "few-shot"] = "base"
    """Wording of the prompt. `bare` is numbers and target only, for randomly initialized models."""
    search_tries: Annotated[
        int | None,
        EffectiveWhen("warm_start.enabled"),
        EffectiveWhen(".template .environment", "base qwen-instruct chat data.calculator:Countdown",
                      remedy="Choose data.template=chat"),
    ] = Field(default=None, ge=0, le=64)  # fmt: skip
    """Most wrong equations that a warm-start solution tries before the right one, each computed operation by operation;
    the number is random for each row. None: the right equation and its value alone. Only templates with `<think>` show
    either. `bare` with the environment `data.calculator:Countdown` shows a turn for each, with the reply."""
    scorer: Scorer = "data.countdown:score"
    checks = (
        rule(".operations", "", "must name one operation or more, each once",
             lambda own, _: 0 < len(own.operations) == len(set(own.operations)), "Use some of [+,-,*,/]"),
        rule(".max_numbers", ".targets", "must be at most 4 with data.targets=uniform",
             lambda own, _: own.targets != "uniform" or own.max_numbers <= 4,
             "Lower it, or set data.targets=equation"),
    )  # fmt: skip


class Gsm8kData(Conversation):
    """Grade-school maths word problems (GSM8K) from the hub or local files."""

    task: Literal["gsm8k"] = "gsm8k"
    """Task in `data/` that makes the rows."""
    source: str = "openai/gsm8k"
    """Id of a hub dataset, or a folder with `train` and `test`."""
    revision: Annotated[Revision, _IS_HUB_SOURCE] = ""
    template: Literal["chat", "text"] = "chat"
    """chat: the tokenizer's chat template is applied. text: the question alone, for base models."""
    scorer: Scorer = "data.gsm8k:score"


def _is_a_file(name: str) -> Rule:
    """Check that a split has an existing parquet file."""

    def holds(data: Any, _: Any) -> bool:
        file = getattr(data, name)
        return bool(file) and expand_path(file).is_file()

    remedy = "Give its path; data/schema.py says what it holds"
    return rule(f".{name}", "", "must be a parquet file that exists", holds, remedy)


class ParquetData(Conversation):
    """An existing dataset: two parquet files in the row schema of `data/schema.py`."""

    task: Literal["parquet"] = "parquet"
    """Take rows unchanged."""
    train_file: str = ""
    """Path of the training rows."""
    validation_file: str = ""
    """Path of the validation rows."""
    template: Literal["auto", "chat", "text"] = "auto"
    """chat: the tokenizer's chat template is applied. text: the one message is the whole prompt. auto: as the file's
    metadata say, else chat."""
    scorer: str = BY_ROW
    """`module:function` that scores a response text against a ground truth. Default: the one known for the
    `data_source` of each row (docs/data.md)."""
    checks = (_is_a_file("train_file"), _is_a_file("validation_file"))


class MappedData(Conversation):
    """Questions and answers from any columns of files (docs/data.md), or of a hub dataset."""

    task: Literal["mapped"] = "mapped"
    """Take columns by their names."""
    source: str = ""
    """A folder with the two splits, or a hub id."""
    subset: Annotated[str, _IS_HUB_SOURCE] = ""
    """Subset of a hub dataset; '' for its default."""
    revision: Annotated[Revision, _IS_HUB_SOURCE] = ""
    train_split: str = "train"
    """Name of the training split: the file's stem, the folder of `save_to_disk`, or the split on the hub."""
    validation_split: str = "test"
    """Name of the held-out split."""
    question: str = "question"
    """Column of the question; `a.b` is field b of column a, `a.0` the first entry of a list, `a.-1` the last."""
    answer: str = "answer"
    """Column of the reference answer, which the scorer receives as ground truth `answer`."""
    solution: str = ""
    """Column of a worked solution that gets the full score, for a warm start; '' for none."""
    instruction: str = ""
    """Text added to each question after a space."""
    data_source: str = ""
    """Name in metrics (`val-core/<data_source>/...`); '' takes the source's."""
    template: Literal["chat", "text"] = "chat"
    """chat: the tokenizer's chat template is applied. text: question and instruction alone."""
    scorer: Scorer = "data.math:score"


class CustomData(Conversation):
    """A custom task: one file with rows, prompt and scorer (docs/data.md)."""

    task: Literal["custom"] = "custom"
    """Rows from a function."""
    build: str = "data.multiplication:build"
    """`module:function` that takes these settings and a seed and returns `data.rows.TaskRows`."""
    train_size: int = Field(default=1_000, ge=1)
    """Rows of the training split."""
    validation_size: int = Field(default=100, ge=1)
    """Rows of the validation split."""
    options: tuple[str, ...] = ()
    """Further arguments of the function. List here each file that it reads, itself or by its folder: a changed file
    makes another dataset."""
    scorer: Scorer = "data.multiplication:score"


class ReasoningGymData(Conversation):
    """Problems of the tasks of the package reasoning_gym, without a hub."""

    task: Literal["reasoning_gym"] = "reasoning_gym"
    """Task in `data/` that makes the rows."""
    tasks: tuple[str, ...] = ("chain_sum",)
    """Names of the package's tasks, in equal shares. A suffix such as `chain_sum@0` (the easiest) selects a level of
    the task's curriculum."""
    train_size: int = Field(default=10_000, ge=1)
    """Rows of the training split."""
    validation_size: int = Field(default=500, ge=1)
    """Rows of the validation split; no question occurs in both splits, and none twice."""
    template: Literal["chat", "text"] = "chat"
    """chat: the tokenizer's chat template is applied. text: question and instruction alone."""
    scorer: Scorer = "data.reasoning_gym:score"


TaskData = Annotated[
    CountdownData | Gsm8kData | ParquetData | MappedData | CustomData | ReasoningGymData, Field(discriminator="task")
]


class MixturePart(Section):
    """One dataset of a mixture."""

    data: TaskData
    """Settings of a task, `task` among them."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the training prompts, relative to the sum of all weights."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.\-/]*$")
    """Name in metrics (`val-core/<name>/...`) instead of the rows' own data source; '' keeps that."""


def _is_of_all_parts(name: str) -> Rule:
    """Check that no part of a mixture has a setting that belongs to the whole mixture."""

    def holds(mixture: Any, _: Any) -> bool:
        unset = Conversation.model_fields[name].get_default(call_default_factory=True, validated_data={})
        return all(getattr(part.data, name) == unset for part in mixture.parts)

    return rule(".parts", f".{name}", f"must not name {name} each", holds, f"Set data.{name}, which is that of all")


class MixtureData(Conversation):
    """Several datasets, drawn by weight, each scored by its own scorer and evaluated separately."""

    task: Literal["mixture"] = "mixture"
    """Rows from several tasks."""
    parts: tuple[MixturePart, ...] = ()
    """Two or more: `[{weight: 3, data: {task: countdown, ...}}, {weight: 1, name: x, data: {task: gsm8k, ...}}]`."""
    scorer: str = BY_ROW
    """Calls the scorer of each response's part."""
    checks = (
        rule(".parts", "", "must hold two datasets or more", lambda own, _: len(own.parts) >= 2,
             "Name two or more, as docs/data.md shows, or choose the one as a group: data=countdown"),
        rule(".parts", "", f"must name each dataset once, and none {ALL_SOURCES}, which is the name of all together",
             lambda own, _: not reserved(part.name for part in own.parts if part.name),
             "Give another name, or leave it out"),
        rule(".scorer", ".task", f"must be {BY_ROW} with data=mixture", lambda own, _: own.scorer == BY_ROW,
             "Leave it out, and set `scorer` in the data of a part"),
        *map(_is_of_all_parts, ("environment", "chat_template_kwargs", "seed")),
    )  # fmt: skip


DataConfig = Annotated[
    CountdownData | Gsm8kData | ParquetData | MappedData | CustomData | ReasoningGymData | MixtureData,
    Field(discriminator="task"),
]

TASKS: Mapping[str, type[Section]] = {
    section.model_fields["task"].default: section
    for section in (CountdownData, Gsm8kData, ParquetData, MappedData, CustomData, ReasoningGymData, MixtureData)
}
"""The section of each task by name."""


def parts_of(data: DataConfig) -> tuple[MixturePart, ...]:
    """Return the datasets of a run: those of a mixture, or the one."""
    return data.parts if isinstance(data, MixtureData) else (MixturePart(data=data),)


def has_default_scorer(data: TaskData) -> bool:
    """Return True if a task has its default scorer."""
    return bool(data.scorer == type(data).model_fields["scorer"].default)


def scorer_of_row(data: TaskData, data_source: str) -> str | None:
    """Return the scorer of a row: that of the settings, or the one known for its data source, else None.

    >>> scorer_of_row(ParquetData(), "openai/gsm8k"), scorer_of_row(ParquetData(), "codecontests")
    ('data.gsm8k:score', None)
    >>> scorer_of_row(ParquetData(scorer="my_reward:score"), "openai/gsm8k")
    'my_reward:score'
    """
    if data.scorer != BY_ROW:
        return data.scorer
    return next((scorer for scorer, sources in _SCORERS.items() if sources.fullmatch(data_source)), None)


def scorers_of(data: DataConfig) -> tuple[str, ...]:
    """Return all scorers that the rows of a run may have."""
    named = [part.data.scorer for part in parts_of(data)]
    return tuple(one for scorer in named for one in (_SCORERS if scorer == BY_ROW else (scorer,)))


class FilterConfig(Section):
    """The tokenization filter, which tokenizes each prompt once."""

    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt kept, in tokens, chat template included."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """Treatment of a prompt over the limit."""
    duplicates: Literal["error", "drop", "keep"] = "error"
    """Treatment of a prompt that already occurred in its split."""
    decontaminate: Annotated[Literal["off", "tell", "drop"], EffectiveWhen("validation.suites")] = "off"
    """Treatment of a training row that occurs in one of `validation.suites`: the same prompt, or 13 consecutive words
    in common, ignoring case and punctuation. tell: such rows are counted. drop: they are removed."""


_WITH_BAND = EffectiveWhen(".draw", "band")


def _shares(name: str) -> Rule:
    """Check two shares, the lower one first."""

    def holds(own: Any, _: Any) -> bool:
        low, high = getattr(own, name)
        return bool(0 <= low <= high <= 1)

    return rule(f".{name}", "", "must be two shares from 0 to 1, the lower one first", holds, "Such as [0.1, 0.9]")


class PassRatesConfig(Section):
    """Pass rates of the initial policy on each training row, and the choice of rows by them (docs/data.md)."""

    samples: int = Field(default=0, ge=0, le=1_024)
    """Responses of the initial policy to each training row, scored before training. 0: the stage is skipped."""
    table: str | None = None
    """Folder of a table of another run (`pass-rates/<fingerprint>`), instead of `samples`. It must contain every
    training row; rows are matched by their tokens and ground truth."""
    keep: Annotated[tuple[float, float], EffectiveWhen(".samples .table")] = (0.0, 1.0)
    """Lowest and highest pass rate of the training rows, both included: a share from 0 to 1 of the scored responses.
    [0, 1] keeps all rows."""
    rows_per_part: Annotated[int, MayChange, EffectiveWhen(".samples")] = Field(default=2_048, ge=1)
    """Rows that are processed together and then saved. A killed stage loses at most one part."""
    draw: Literal["uniform", "band", "informative"] = "uniform"
    """Draw of training rows. uniform: each once an epoch. band: those with a pass rate in `band`, the others by
    `rest_weight`. informative: with a weight of p (1 - p). The last two also count the responses of training and have
    no epochs: a row may be drawn again by the next step."""
    band: Annotated[tuple[float, float], _WITH_BAND] = (0.1, 0.9)
    """Lowest and highest pass rate of a row that is drawn with weight 1, both included."""
    rest_weight: Annotated[float, _WITH_BAND] = Field(default=0.05, gt=0, le=1)
    """Weight of a retired row, whose pass rate is outside `band`. It is still drawn sometimes, and is revived when its
    pass rate returns to the band."""
    fade: Annotated[float, EffectiveWhen(".draw", unless="uniform")] = Field(default=0.5, ge=0, le=1)
    """Share that remains of a row's earlier counts after a new response in training. 1: all responses count alike; 0:
    only the newest group."""
    checks = (
        _shares("keep"),
        _shares("band"),
        rule(".samples", ".table", "must be 0 with a given table", lambda own, _: not own.samples or own.table is None,
             "Leave one of the two out"),
        rule(".table", ".samples", "must be the folder of a finished table, pass-rates/<fingerprint> of a root",
             lambda own, _: own.samples > 0 or own.table is None
             or (expand_path(own.table) / "manifest.json").is_file(),
             "Give the folder that `millrace data pass-rates` names"),
    )  # fmt: skip

    @property
    def is_enabled(self) -> bool:
        """True if the run has a table of pass rates, its own or another run's."""
        return self.samples > 0 or self.table is not None
