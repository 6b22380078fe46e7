"""The interface of a stage, and the trial calls of custom functions and tokenizers before any expensive work."""

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from flows.work.open_run import OpenRun
from flows.work.trainer import trainer_variables
from rlcore import sandbox
from rlcore.config import CountdownData, Gsm8kData, RewardConfig, RunConfig
from rlcore.config.data import TaskData, has_default_scorer, parts_of
from rlcore.errors import ConfigError, EngineError, TrialError
from rlcore.rollout.environment import PLAY, Episode, is_repeatable, resolve_environment, turn_from_score
from rlcore.rollout.scoring import START_DEADLINE_S, ScoringPool
from rlcore.rollout.scoring_worker import weights_problem
from rlcore.rollout.tools import tool_schemas
from rlcore.runtime.interpreter import trainer_process
from rlcore.score import Score

if TYPE_CHECKING:
    from data.trial import FirstRow


LOSS_DEADLINE_S = 120.0  # seconds for a trial of loss and advantage, most of them for the import of torch
JUDGE_FAILURE = "JudgeError: "  # prefix of a scorer's failure where its judge gave no verdict (`data.judge`)
WRONG_RESPONSE = "0"
"""A response that is wrong for most tasks. A scorer is tried on the solution, this response and an empty response."""


class Trial:
    """The trial calls of a run's scorers, environment, loss and advantage. They are made before the run starts.

    `warnings` collects the warnings of the stages' checks.
    """

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self.config = run.planning_config
        self.warnings: list[str] = []
        self._rows: dict[int, FirstRow | None] = {}

    @cached_property
    def tasks(self) -> list[TaskData]:
        """The tasks of a mixture, or the single task of the run."""
        return [part.data for part in parts_of(self.config.data)]

    def first_row(self, task: TaskData) -> "FirstRow | None":
        """Return the first row of a task, or None if it is unknown until the dataset is built."""
        from data.trial import first_row

        if id(task) not in self._rows:
            root = Path(self.config.paths.root).resolve()
            self._rows[id(task)] = first_row(task, self.config.data.seed, root)
        return self._rows[id(task)]

    def first_rows(self) -> "list[FirstRow]":
        """Return the known first rows of the tasks."""
        return [row for task in self.tasks if (row := self.first_row(task)) is not None]

    def try_scorers(self) -> None:
        """Try the environment on the first known row or, without an environment, each scorer on its task's first row.

        The default scorers of Countdown and GSM8K are tried only if `reward.weights` is set. Raises TrialError if the
        environment or a scorer fails.
        """
        config = self.config
        if config.data.environment:
            if rows := self.first_rows():
                _try_environment(rows[0], config)
            return
        for task in self.tasks:
            is_ours = has_default_scorer(task) and isinstance(task, CountdownData | Gsm8kData)
            if (not is_ours or config.reward.weights) and (row := self.first_row(task)) is not None:
                _try_scorer(task.scorer, row, config)

    def try_functions(self) -> None:
        """Try the loss and the advantage on a few tokens, if they are custom functions or have options."""
        algo, python = self.config.algo, self.config.runtime.python
        named = f"algo.policy_loss={algo.policy_loss}, algo.advantage={algo.advantage}"
        if ":" not in named and not algo.policy_loss_options and not algo.advantage_options:
            return
        try:
            command = [trainer_process(python)[0], "-P", "-m", "rlcore.algos.loss_call"]
            done = subprocess.run(
                command,
                input=algo.model_dump_json(),
                capture_output=True,
                text=True,
                timeout=LOSS_DEADLINE_S,
                env=trainer_variables(python),
            )
        except subprocess.TimeoutExpired:
            raise TrialError(
                f"{named}: not finished after {LOSS_DEADLINE_S:g} s on a few tokens. Check what a function waits for"
            ) from None
        if done.returncode:
            kind = ConfigError if done.returncode == 2 else TrialError
            raise kind(done.stdout or f"{named}: a function fails: {done.stderr[-1_000:]}")


def _try_scorer(scorer: str, row: "FirstRow", config: RunConfig) -> None:
    # Wrong and empty responses are tried too, because many scorers return None for them by mistake.
    sandbox.set_limits(config.sandbox)
    responses = list(dict.fromkeys((row.solution or WRONG_RESPONSE, WRONG_RESPONSE, "")))
    settings = config.reward.model_copy(update={"num_processes": 1})
    with ScoringPool(scorer, settings, num_logged=0) as pool:
        scores = _score_once(pool, responses, row.ground_truth_json, settings)
    for response, score in zip(responses, scores, strict=True):
        if score.failure:
            if problem := weights_problem(score.failure):
                raise ConfigError(problem)
            raise TrialError(
                judge_failure_message(score.failure)
                or f"data.scorer: must score any text; got {scorer}, which failed on response {response[:80]!r} to the "
                f"task's first row, with ground truth {row.ground_truth_json[:200]}: {score.failure}. docs/data.md "
                "describes its return value"
            )


def judge_failure_message(failure: str) -> str:
    """Return a message if a scorer failed because its judge model failed, otherwise ''."""
    if not failure.startswith(JUDGE_FAILURE):
        return ""
    return (
        f"reward.judge: must give a verdict on any response; got {failure.removeprefix(JUDGE_FAILURE)}. Check that the "
        "endpoint is reachable and serves reward.judge.model"
    )


def _try_environment(row: "FirstRow", config: RunConfig) -> None:
    """Play the environment's first turn with a wrong response. Raises TrialError if the environment fails.

    If the environment is repeatable, the turn is played again in another process. The two processes must give equal
    replies.
    """
    name = config.data.environment
    played = [_first_replies(row, config) for _ in range(1 + is_repeatable(resolve_environment(name)))]
    if played[0] != played[-1]:
        raise TrialError(
            f"data.environment: must repeat its replies, or declare repeatable = False; got {name}, which replied "
            f"{played[0]} and {played[-1]} to the same texts. Let it use the row's seed (docs/environments.md)"
        )


def _first_replies(row: "FirstRow", config: RunConfig) -> list[str]:
    settings = RewardConfig(num_processes=1, deadline_s=config.episode.deadline_s)
    episode = Episode.start("tried", config, row.ground_truth_json, config.seed)
    with ScoringPool(PLAY, settings, section="episode", num_logged=0) as pool:
        while len(episode.replies) < 2:
            (score,) = _score_once(pool, [episode.to_json()], episode.truth, settings)
            if score.failure:
                raise TrialError(
                    f"data.environment: must begin with any row and reply to any text; got {config.data.environment}, "
                    f"which failed in {'step' if episode.texts else 'reset'} on the task's first row, "
                    f"{row.ground_truth_json[:200]}: {score.failure}. docs/environments.md describes the return values"
                )
            episode.replies.append(turn_from_score(score).reply)
            episode.texts.append(WRONG_RESPONSE)
    return [reply[:80] for reply in episode.replies]


def _score_once(pool: ScoringPool, responses: Sequence[str], truth_json: str, settings: RewardConfig) -> list[Score]:
    scores = pool.submit(responses, [truth_json] * len(responses))
    limit_s = START_DEADLINE_S + len(responses) * settings.deadline_s
    if wait(scores, limit_s).not_done:
        return [Score(0.0, {}, failure=f"not finished after {limit_s:g} s")] * len(responses)
    try:
        return [score.result() for score in scores]
    except EngineError as error:
        raise TrialError(str(error)) from error


def try_tokenizer(directory: Path, rows: "list[FirstRow]", config: RunConfig) -> None:
    """Load the tokenizer in a folder and tokenize the prompts of `rows` with it. If `rows` is empty, only load it."""
    from data.tokenizer import PromptTokenizer, load_tokenizer

    tools = tool_schemas(config.episode.tools) if config.episode.tools else []
    forms = dict.fromkeys(row.prompt_form for row in rows)
    if not forms:  # no row is known yet
        load_tokenizer(directory)
    template_kwargs = config.data.chat_template_kwargs
    if template_kwargs and forms and "chat" not in forms:
        raise ConfigError(
            f"data.chat_template_kwargs={template_kwargs}: no prompt is a chat, so no chat template is applied. Remove "
            "it, or choose data.template=chat"
        )
    for form in forms:
        tokenizer = PromptTokenizer(
            directory, chat=form == "chat", fast_path=False, tools=tools, chat_template_kwargs=template_kwargs
        )
        tokenizer.encode_prompts(tokenizer.texts([row.prompt for row in rows if row.prompt_form == form]))
        if config.data.environment:
            from rlcore.rollout.environment import TurnTokens

            role = "tool" if tools else "user"
            loaded, chat = load_tokenizer(directory), form == "chat"
            TurnTokens(loaded, chat=chat, max_reply_tokens=1, role=role, chat_template_kwargs=template_kwargs)


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The status of a stage. `fingerprint` identifies the stage's result. It is None until earlier stages have run."""

    name: str
    fingerprint: str | None
    place: Path | None
    cached: bool
    detail: str


class Stage(ABC, Generic[R]):
    """A stage of a run, which returns its result from disk or creates it.

    Each kind of stage is a frozen dataclass. Its fields distinguish stages of the same kind, such as two chunks of the
    training.
    """

    name: ClassVar[str]  # kind of stage, which is shown in plans and task names
    label: ClassVar[str] = ""  # first words of a result's description, by default `name`
    in_trainer: ClassVar[bool] = False  # repeated after the loss of the trainer process

    def title(self, run: OpenRun) -> str:
        """Return the name of the Prefect task that runs this stage."""
        return f"{self.name} {run.title}"

    @abstractmethod
    def status(self, run: OpenRun) -> StageStatus:
        """Return the status of the stage without writing anything."""

    def check(self, trial: Trial) -> None:
        """Check the requirements of an unfinished stage, and add warnings to `trial.warnings`."""

    def asset(self, run: OpenRun) -> Path | None:
        """Return the folder of the result if Prefect records it as an asset, otherwise None."""
        return None

    def find(self, run: OpenRun) -> R | None:
        """Return the stage's result if it is on disk, otherwise None."""
        return None

    @abstractmethod
    def make(self, run: OpenRun) -> R:
        """Create the result. All stages before this one must be done."""

    def find_or_make(self, run: OpenRun) -> R:
        """Return the result on disk, or create it if there is none."""
        known = self.find(run)
        return self.make(run) if known is None else known

    def describe(self, result: R) -> str:
        """Return a line that describes the result, or '' if nothing is printed."""
        return f"{self.label or self.name}: {result}"


def remake_note(damage: str) -> str:
    """Return a note that a damaged result will be built again, or '' if `damage` is ''."""
    return damage and f"made again: {damage}"
