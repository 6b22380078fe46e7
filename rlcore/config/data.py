"""Settings of the dataset, of the tokenization filter, and of the pass rates of training rows."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from rlcore.config.base import Bound, EffectiveWhen, MayChange, Rule, Section, expand_path, is_function_name, rule

Operation = Literal["+", "-", "*", "/"]

Scorer = Annotated[str, Field(description="A `module:function` that scores a response text against a ground truth.")]
Revision = Annotated[
    str,
    Field(description="The commit, tag or branch of a hub dataset. '' selects the newest commit. The commit is part of "
          "the dataset's fingerprint."),
]  # fmt: skip

_ORDER = "Lower one or raise the other"
_IS_HUB_SOURCE = EffectiveWhen(
    ".source", lambda source: not expand_path(source).is_dir(), remedy="Set data.source to a hub id"
)

DATA_FILE = re.compile(r"(.+)\.(jsonl|json|parquet)")
"""The pattern that matches names of data files. Its two groups match the stem and the file type."""
KINDS_OF_FILES = ".jsonl, .json or .parquet"

ALL_SOURCES = "all"
"""The name in metrics for the held-out problems of all data sources together: `val-core/all/...`."""

JUDGE = "data.judge:score"
PROGRAMS = "data.code:score"
BY_ROW = "rlcore.rollout.by_part:score"
"""The scorer that calls another scorer for each row: the scorer of the row's dataset in a mixture, otherwise the scorer
of the row's data source."""

_SCORERS = {
    "data.gsm8k:score": re.compile(r"(?:openai/)?gsm8k"),
    "data.countdown:score": re.compile(r"countdown"),
    "data.math:score": re.compile(
        r"math|lighteval/MATH|DigitalLearningGmbH/MATH-lighteval|HuggingFaceH4/MATH-500|math_dapo(?:_reasoning)?|aime.*"
        r"|numina_(?:aops_forum|synthetic_math|amc_aime|synthetic_amc|cn_k12|olympiads)"
    ),
}
"""The scorers from which `BY_ROW` chooses. A scorer's pattern matches the names of its data sources, as verl and
TinyZero name them."""


RENDERING_NAMES = frozenset((
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception",
))  # fmt: skip
"""The names that `chat_template_kwargs` must not contain: variables that every chat template gets, and arguments of
transformers' `apply_chat_template`."""


def reserved(names: Iterable[str]) -> str:
    """Return the dataset or suite names that are not allowed (repeated names and `ALL_SOURCES`), joined by commas."""
    return ", ".join(name for name, count in Counter(names).items() if count > 1 or name == ALL_SOURCES)


class Conversation(Section):
    """The settings that all tasks share: the environment, the variables of the chat template, and the seed of the
    data."""

    environment: str = ""
    """The environment, a `module:Class` that replies to each turn of the model and gives the turn a reward
    (docs/environments.md). If '', each response has one turn."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables that the chat template gets, such as `enable_thinking=false`, for prompts, demonstrations and later
    turns."""
    seed: Annotated[
        int,
        EffectiveWhen("data.task warm_start.demonstrations", unless="null gsm8k mapped parquet",
                      remedy="Choose a task that draws its rows, such as data=countdown"),
    ] = Field(default=1, ge=0, lt=2**31)  # fmt: skip
    """The seed with which a task draws its rows and chooses the held-out rows (docs/seeds.md). It does not depend on
    the run's `seed`."""
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
    """Problems of the countdown task: combine some numbers to reach a target, using each number exactly once."""

    task: Literal["countdown"] = "countdown"
    """The task in `data/` that creates the rows."""
    train_size: int = Field(default=327_680, ge=1)
    """The number of rows in the training split."""
    validation_size: int = Field(default=1_024, ge=1)
    """The number of rows in the validation split. No multiset of numbers occurs in both splits."""
    min_numbers: Annotated[int, Bound("be at most", "data.max_numbers", _ORDER)] = Field(default=3, ge=2, le=6)
    """The smallest count of numbers in a problem."""
    max_numbers: int = Field(default=4, ge=2, le=6)
    """The largest count of numbers in a problem."""
    number_low: Annotated[int, Bound("be at most", "data.number_high", _ORDER)] = Field(default=1, ge=0)
    """The smallest number that a problem may contain."""
    number_high: int = Field(default=100, ge=1)
    """The largest number that a problem may contain."""
    target_low: Annotated[int, Bound("be at most", "data.target_high", _ORDER)] = Field(default=1)
    """The smallest target."""
    target_high: int = Field(default=1_000)
    """The largest target."""
    targets: Literal["equation", "uniform"] = "equation"
    """The way to choose the target. `equation`: the target is the value of a random equation, most often of an equation
    with only + and -. `uniform`: every integer from target_low to target_high is equally probable, and problems without
    a solution are dropped. If only few problems exist, every problem has the same probability in both cases."""
    operations: tuple[Operation, ...] = ("+", "-", "*", "/")
    """The operations that the solution of a generated problem may use."""
    balance_difficulty: bool = False
    """Fill each split with equally many rows of each difficulty, which is the number of operations in the solution."""
    template: Literal["bare", "base", "qwen-instruct", "chat", "few-shot"] = "base"
    """The wording of the prompt. `bare` is for randomly initialized models: it has only the numbers and the target."""
    search_tries: Annotated[
        int | None,
        EffectiveWhen("warm_start.enabled"),
        EffectiveWhen(".template", "base qwen-instruct chat"),
    ] = Field(default=None, ge=0, le=64)
    """The largest number of wrong equations that a warm-start solution tries before the right equation. Each row draws
    its number of tries at random. If null, the solution has only the right equation and its value. Only templates with
    `<think>` show the tries."""
    scorer: Scorer = "data.countdown:score"
    checks = (
        rule(".operations", "", "must name one operation or more, each once",
             lambda own, _: 0 < len(own.operations) == len(set(own.operations)), "Use some of [+,-,*,/]"),
        rule(".max_numbers", ".targets", "must be at most 4 with data.targets=uniform",
             lambda own, _: own.targets != "uniform" or own.max_numbers <= 4,
             "Lower it, or set data.targets=equation"),
    )  # fmt: skip


class Gsm8kData(Conversation):
    """Grade-school math word problems (GSM8K) from the Hugging Face hub or local files."""

    task: Literal["gsm8k"] = "gsm8k"
    """The task in `data/` that creates the rows."""
    source: str = "openai/gsm8k"
    """The id of a hub dataset, or a folder with the splits `train` and `test`."""
    revision: Annotated[Revision, _IS_HUB_SOURCE] = ""
    template: Literal["chat", "text"] = "chat"
    """The form of the prompt. `chat` applies the tokenizer's chat template. `text` uses only the question, for base
    models."""
    scorer: Scorer = "data.gsm8k:score"


def _is_a_file(name: str) -> Rule:

    def holds(data: Any, _: Any) -> bool:
        file = getattr(data, name)
        return bool(file) and expand_path(file).is_file()

    remedy = "Give its path; data/schema.py says what it holds"
    return rule(f".{name}", "", "must be a parquet file that exists", holds, remedy)


class ParquetData(Conversation):
    """An existing dataset: two parquet files with the row schema of `data/schema.py`."""

    task: Literal["parquet"] = "parquet"
    """The task that uses the rows of two parquet files unchanged."""
    train_file: str = ""
    """The path of the parquet file with the training rows."""
    validation_file: str = ""
    """The path of the parquet file with the validation rows."""
    template: Literal["auto", "chat", "text"] = "auto"
    """The form of the prompt. `chat` applies the chat template. `text` uses the prompt's single message as plain text.
    `auto` uses the form that the file's metadata names, or `chat` if the metadata names no form."""
    scorer: str = BY_ROW
    """A `module:function` that scores a response. By default, each row's `data_source` selects the scorer
    (docs/data.md)."""
    checks = (_is_a_file("train_file"), _is_a_file("validation_file"))


class MappedData(Conversation):
    """Questions and answers from any columns of local files or of a hub dataset (docs/data.md)."""

    task: Literal["mapped"] = "mapped"
    """The task that reads questions and answers from named columns."""
    source: str = ""
    """A folder with the training and the held-out split, or the id of a hub dataset."""
    subset: Annotated[str, _IS_HUB_SOURCE] = ""
    """The subset of a hub dataset. '' selects the default subset."""
    revision: Annotated[Revision, _IS_HUB_SOURCE] = ""
    train_split: str = "train"
    """The name of the training split. If `source` is a folder, the name of the split is the name of its file without
    the ending."""
    validation_split: str = "test"
    """The name of the held-out split."""
    question: str = "question"
    """The column of the question. `a.b` means field b of column a. `a.0` and `a.-1` mean the first and the last entry
    of a list in column a."""
    answer: str = "answer"
    """The column of the reference answer. The scorer receives this answer in the ground truth, under the name
    `answer`."""
    columns: tuple[str, ...] = ()
    """Further columns that the scorer receives in the ground truth. Lists and objects are passed as JSON text."""
    solution: str = ""
    """The column with worked solutions for a warm start. The scorer must give each solution the full score. If '',
    there are no solutions."""
    instruction: str = ""
    """A text that is added to each question after a space."""
    data_source: str = ""
    """The name of the data source in metrics (`val-core/<data_source>/...`). If '', the name follows from `source`."""
    template: Literal["chat", "text"] = "chat"
    """The form of the prompt. `chat` applies the chat template. `text` uses only the question and the instruction."""
    scorer: Scorer = "data.math:score"


class CustomData(Conversation):
    """A custom task: one Python file that defines the rows, the prompt and the scorer (docs/data.md)."""

    task: Literal["custom"] = "custom"
    """The task whose rows come from the function `build`."""
    build: str = "data.sort_digits:build"
    """A `module:function` that takes the settings of the section `data` and a seed, and returns
    `data.rows.TaskRows`."""
    train_size: int = Field(default=1_000, ge=1)
    """The number of rows in the training split."""
    validation_size: int = Field(default=100, ge=1)
    """The number of rows in the validation split."""
    options: tuple[str, ...] = ()
    """Further arguments of the function `build`, including each file or folder that `build` reads. If an argument or
    the content of such a file or folder changes, the dataset is built again."""
    scorer: Scorer = "data.sort_digits:score"


class ReasoningGymData(Conversation):
    """Problems from the tasks of the package reasoning_gym, which generates them without a download."""

    task: Literal["reasoning_gym"] = "reasoning_gym"
    """The task in `data/` that creates the rows."""
    tasks: tuple[str, ...] = ("chain_sum",)
    """The names of tasks in the package. Each task gets an equal share of the rows. `@` and a number after a name
    select a level of the task's curriculum: `chain_sum@0` is the easiest level of chain_sum."""
    train_size: int = Field(default=10_000, ge=1)
    """The number of rows in the training split."""
    validation_size: int = Field(default=500, ge=1)
    """The number of rows in the validation split. No question is repeated within a split or between the splits."""
    template: Literal["chat", "text"] = "chat"
    """The form of the prompt. `chat` applies the chat template. `text` uses only the question and the instruction."""
    scorer: Scorer = "data.reasoning_gym:score"


class VerifiersData(Conversation):
    """Tasks with their rewards from a taskset of the package verifiers. A taskset that needs a harness, tools or a
    container is refused."""

    task: Literal["verifiers"] = "verifiers"
    """The task in `data/` that creates the rows."""
    taskset: str = ""
    """The taskset as `module:Class`."""
    taskset_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of the taskset's config, such as `split: train`."""
    validation_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further fields of the taskset's config for the held-out tasks, such as `split: test`. If {}, `validation_size`
    tasks of the training taskset are held out."""
    train_size: int = Field(default=10_000, ge=1)
    """The largest number of rows in the training split."""
    validation_size: int = Field(default=500, ge=1)
    """The largest number of rows in the validation split."""
    template: Literal["chat", "text"] = "chat"
    """The form of the prompt. `chat` applies the tokenizer's chat template. `text` uses the prompt as plain text."""
    scorer: Scorer = "data.verifiers:score"
    checks = (
        rule(".taskset", ".task", "must be `module:Class` with data=verifiers",
             lambda own, _: is_function_name(own.taskset), "Such as my_tasks:MyTaskset"),
    )  # fmt: skip


_Task = CountdownData | Gsm8kData | ParquetData | MappedData | CustomData | ReasoningGymData | VerifiersData
TaskData = Annotated[_Task, Field(discriminator="task")]


class MixturePart(Section):
    """One dataset of a mixture."""

    data: TaskData
    """The settings of the dataset: the settings of one task, including the key `task`."""
    weight: float = Field(default=1.0, gt=0)
    """The weight of the dataset. Its share of the training prompts is its weight divided by the sum of all weights."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.\-/]*$")
    """The name of the dataset in metrics (`val-core/<name>/...`). If '', metrics use the data source of each row."""


def _is_of_all_parts(name: str) -> Rule:

    def holds(mixture: Any, _: Any) -> bool:
        unset = Conversation.model_fields[name].get_default(call_default_factory=True, validated_data={})
        return all(getattr(part.data, name) == unset for part in mixture.parts)

    return rule(".parts", f".{name}", f"must not name {name} each", holds, f"Set data.{name}, which is that of all")


class MixtureData(Conversation):
    """Several datasets in one run. A dataset's share of the training prompts is proportional to its weight. Each
    dataset has its own scorer and its own validation metrics."""

    task: Literal["mixture"] = "mixture"
    """The task that combines the rows of several tasks."""
    parts: tuple[MixturePart, ...] = ()
    """The datasets, at least two:
    `[{weight: 3, data: {task: countdown, ...}}, {name: x, data: {task: gsm8k, ...}}]`."""
    scorer: str = BY_ROW
    """The scorer that calls the scorer of each response's dataset. No other value is allowed."""
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


DataConfig = Annotated[_Task | MixtureData, Field(discriminator="task")]

TASKS: Mapping[str, type[Section]] = {
    section.model_fields["task"].default: section for section in get_args(get_args(DataConfig)[0])
}


def parts_of(data: DataConfig) -> tuple[MixturePart, ...]:
    """Return the datasets of a mixture. For any other task, return its one dataset."""
    return data.parts if isinstance(data, MixtureData) else (MixturePart(data=data),)


def has_default_scorer(data: TaskData) -> bool:
    """Return whether the settings use the default scorer of their task."""
    return bool(data.scorer == type(data).model_fields["scorer"].default)


def scorer_of_row(data: TaskData, data_source: str) -> str | None:
    """Return the scorer that the settings name. For `BY_ROW`, return the scorer of the data source, or None for an
    unknown data source.

    >>> scorer_of_row(ParquetData(), "openai/gsm8k"), scorer_of_row(ParquetData(), "codecontests")
    ('data.gsm8k:score', None)
    """
    if data.scorer != BY_ROW:
        return data.scorer
    return next((scorer for scorer, sources in _SCORERS.items() if sources.fullmatch(data_source)), None)


def scorers_of(data: DataConfig) -> tuple[str, ...]:
    """Return the scorers of all datasets. For a dataset with `BY_ROW`, these are the scorers of all known data
    sources."""
    named = [part.data.scorer for part in parts_of(data)]
    return tuple(one for scorer in named for one in (_SCORERS if scorer == BY_ROW else (scorer,)))


class FilterConfig(Section):
    """The filter that tokenizes each prompt once, and its treatment of prompts that are too long or repeated."""

    max_prompt_tokens: int = Field(default=256, ge=1)
    """The largest number of tokens in a prompt, including the chat template."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """The treatment of a prompt that is longer than `max_prompt_tokens`."""
    duplicates: Literal["error", "drop", "keep"] = "error"
    """The treatment of a prompt that repeats an earlier prompt of the same split."""


_WITH_BAND = EffectiveWhen(".draw", "band")


def _shares(name: str) -> Rule:

    def holds(own: Any, _: Any) -> bool:
        low, high = getattr(own, name)
        return bool(0 <= low <= high <= 1)

    return rule(f".{name}", "", "must be two shares from 0 to 1, the lower one first", holds, "Such as [0.1, 0.9]")


class PassRatesConfig(Section):
    """The pass rate of the initial policy on each training row (the share of correct responses), and the selection of
    rows by pass rate (docs/data.md)."""

    samples: int = Field(default=0, ge=0, le=1_024)
    """The number of responses of the initial policy to each training row, from which the row's pass rate is computed.
    With 0, no pass rates are computed."""
    keep: Annotated[tuple[float, float], EffectiveWhen(".samples")] = (0.0, 1.0)
    """The lowest and the highest pass rate, both included, of the training rows that are kept."""
    rows_per_part: Annotated[int, MayChange, EffectiveWhen(".samples")] = Field(default=2_048, ge=1)
    """The number of rows whose results are saved together. If the process is killed, at most the results of this many
    rows are lost."""
    draw: Literal["uniform", "band"] = "uniform"
    """The way to draw training rows. `uniform` draws each row once per epoch. `band` prefers rows with a pass rate in
    the range `pass_rates.band`. In this case, training responses update the pass rates, and two successive steps can
    draw the same row."""
    band: Annotated[tuple[float, float], _WITH_BAND] = (0.1, 0.9)
    """The lowest and the highest pass rate, both included, of the rows that have the full weight 1 in the draw."""
    rest_weight: Annotated[float, _WITH_BAND] = Field(default=0.05, gt=0, le=1)
    """The weight, in the draw, of a row whose pass rate is outside `band`. Such a row is still drawn sometimes."""
    fade: Annotated[float, _WITH_BAND] = Field(default=0.5, ge=0, le=1)
    """The factor by which a row's counts of scored and correct responses are multiplied before new responses are added.
    With 0, earlier responses no longer count. With 1, they count as much as new responses."""
    checks = (
        _shares("keep"),
        _shares("band"),
    )  # fmt: skip

    @property
    def is_enabled(self) -> bool:
        """True if the run computes pass rates of the training rows."""
        return self.samples > 0
