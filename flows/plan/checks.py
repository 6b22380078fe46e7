"""What is checked before anything expensive: each mistake ends the run in a second, not after the model has loaded.

First the settings and folders, then what only a try can show: the scorer or environment on a row, the loss on a few
tokens, the tokenizer. Code of one's own runs in processes with a deadline. What a run has done already is not tried
again.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from data.custom import build_function
from data.stage import SPLITS
from flows.parameters import RunSettings
from flows.plan.plan import RunPlan, make_plan
from flows.stages.rows import few_rows
from flows.work.slots import Slots
from rlcore import sandbox
from rlcore.config import AlgoConfig, CountdownData, CustomData, Gsm8kData, RewardConfig, RunConfig
from rlcore.config.base import expanded
from rlcore.config.data import ParquetData, TaskData, has_default_scorer, parts_of, scorers_of
from rlcore.config.model import SMOLLM2
from rlcore.config.rules.data import PROGRAMS
from rlcore.config.suite import suite_settings
from rlcore.errors import ConfigError, DataError, DiskSpaceError, EngineError, TrialError
from rlcore.models.hub import require_reachable
from rlcore.models.shape import require_base, require_embeddings, require_same_tokens, require_trainable, tokens_of
from rlcore.rollout.environment import PLAY, Episode, turn_of
from rlcore.rollout.scoring import ScoringPool, require_environment, require_scorer
from rlcore.rollout.scoring_worker import wrong_weights
from rlcore.rollout.tools import tool_schemas
from rlcore.rollout.vllm import require_vllm
from rlcore.run.inputs import given_model, require_smollm2, require_whole_model, stage_settings
from rlcore.run.layout import RunLayout
from rlcore.run.model_digests import model_paths
from rlcore.runtime.cluster import folder_problem, unreachable
from rlcore.score import Score
from rlcore.start import import_path
from rlcore.storage.disk import is_out_of_room, nearest_existing
from rlcore.tracking.lineage import first_gpu
from rlcore.workers.memory_plan import require_fit

if TYPE_CHECKING:
    from data.trial import FirstRow

LOSS_DEADLINE_S = 120.0
"""Seconds for a try of loss and advantage; the import of torch takes most of them on a busy machine."""
FIRST_CALL_S = 60.0
"""Seconds beyond `reward.deadline_s` for a scoring process to start, and the scorer to import what it needs."""
NO_VERDICT = "JudgeError: "
"""Beginning of a scorer's failure where its judge has given no verdict (`data.judge`)."""
ANY_ANSWER = "0"
"""An answer that is wrong for most tasks. A scorer is tried on the solution, this one and an empty one."""

NUM_TRIED = 256
"""Demonstrations of a file that are tokenized before a start."""

GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""Files in /dev of a GPU: NVIDIA's, one under WSL, AMD's. Its management library may be missing."""


def plan_run(settings: RunSettings) -> RunPlan:
    """Check the settings, plan, and try what the run will need.

    Raises:
        ConfigError, DataError, CheckpointError: key, rule, value got, what to do.
    """
    check_before_plan(settings.config)
    plan = make_plan(settings.config, seen=settings.seen)
    return replace(plan, warning=try_parts(settings.seen or settings.config, plan))


def check_run(settings: RunSettings) -> None:
    """The same, and what a run needs beyond a plan; see `check_before_start`."""
    check_before_start(settings.config, plan_run(settings))


def check_before_plan(config: RunConfig) -> None:
    """The user's own functions, architecture and tokens of a model whose files are here, the run's folder, the root.

    Raises:
        ConfigError, DataError, ModelError: key, rule, value got, what to do.
    """
    _require_functions(config)
    tokens = _tokens(config)
    for key, path in model_paths(config).items():
        if path is not None:
            require_trainable(key, path)
            (require_same_tokens if key == "critic.path" else require_embeddings)(key, path, tokens)
    RunLayout.of(config).require_kinds()
    require_root(Path(config.paths.root))


def _tokens(config: RunConfig) -> dict[str, int]:
    """Id of each token of the run's tokenizer; empty where its file is not on this machine."""
    if config.model.path is not None:
        return tokens_of(str(given_model(config)))
    if config.critic is None or config.critic.path is None:
        return {}  # it is made with the model
    from rlcore.models.tokenizer import scratch_tokens

    return scratch_tokens(config.model.scratch)


def require_root(root: Path) -> None:
    """Require that files can be made under a root, or where it will be made. The trial leaves nothing behind.

    Raises:
        DataError: they cannot; says why.
    """
    there = nearest_existing(root)
    try:
        with TemporaryFile(dir=there):  # permissions alone do not tell: nobody can make a file in /proc
            pass
    except OSError as reason:
        if is_out_of_room(reason):  # the plan says how much is missing
            return
        why = "" if reason.errno == errno.ENOENT else f": {reason.strerror}"  # what /proc says of a new file
        raise DataError(
            f"paths.root: must be writable, and {there} is not (for {root}){why}. Make it writable, or choose another "
            "paths.root."
        ) from reason


def _require_functions(config: RunConfig) -> None:
    if config.data.environment:
        require_environment(config.data.environment)
    if config.episode.tools:
        tool_schemas(config.episode.tools)
    tasks = (config.data, *(suite.data for suite in config.validation.suites))
    named = {*config.episode.tools, *(scorer for task in tasks for scorer in scorers_of(task))}
    if {"data.code:run_python", PROGRAMS} & named:
        sandbox.require_sandbox(config.sandbox)
    for part in parts_of(config.data):
        if isinstance(part.data, CustomData):
            build_function(part.data)
        if not has_default_scorer(part.data):
            require_scorer(part.data.scorer)


def _require_packages(config: RunConfig) -> None:
    """Packages of the engine and of the model, and the device."""
    if config.rollout.engine == "vllm":
        require_vllm()
    require_base(config.model.lora)
    _require_device(config)
    if SMOLLM2 in model_paths(config).values():
        require_smollm2(given_model(config))


def _require_machine(config: RunConfig) -> None:
    """Engine, device, cluster and models, which a run would miss only after its data is made."""
    _require_packages(config)
    if config.runtime.backend == "ray":
        address = config.runtime.ray_address
        problem = folder_problem() if address is None else unreachable(address)
        if problem is not None:
            raise ConfigError(problem)
    for key, path in model_paths(config).items():
        if path not in (None, SMOLLM2):
            require_reachable(key, path)
            require_whole_model(key, path)


def _require_device(config: RunConfig) -> None:
    runtime = config.runtime
    if runtime.device != "cuda" or runtime.ray_address is not None or first_gpu() is not None:
        return
    if not any(next(Path("/dev").glob(name), None) for name in GPU_FILES):
        raise ConfigError(
            "runtime.device: must be auto or cpu where there is no GPU; got cuda, and this machine shows none. Set "
            "runtime.device=auto, or look whether the driver is loaded (nvidia-smi)"
        )


def check_dry_run(config: RunConfig, plan: RunPlan) -> None:
    """What a start would be refused for and the plan does not show: packages, device, memory of the device.

    Raises:
        EngineError, ConfigError, ModelError: what is missing, and what to do.
    """
    if not plan.is_done:
        _require_packages(config)
        _require_memory(config, plan)


def check_before_start(config: RunConfig, plan: RunPlan) -> None:
    """What a run needs and a plan does not: slots, engine, device, cluster, models, memory, and room on the disk.

    Raises:
        EngineError, ConfigError, ModelError, DiskSpaceError: what is missing, and what to do.
    """
    if plan.is_done:
        return
    Slots(RunLayout.of(config).root).require(config.runtime.num_workers)
    _require_machine(config)
    _require_memory(config, plan)
    if short := [report.problem for report in plan.disk.file_systems if not report.enough]:
        raise DiskSpaceError(
            f"{'; '.join(short)}. The run needs room for {plan.disk.num_checkpoints} checkpoints, among others "
            "(--dry-run shows it). Free some room, lower checkpoint.keep_last, or set paths.root to a larger disk."
        )


def _require_memory(config: RunConfig, plan: RunPlan) -> None:
    for settings, memory in ((config, plan.memory), (stage_settings(config), plan.warm_start_memory)):
        if memory is not None:
            require_fit(settings, memory)


def check_evaluation(config: RunConfig) -> None:
    """What an evaluation needs: a folder, functions, the engine, a device, a cluster, the model.

    Raises:
        ConfigError, DataError, EngineError, ModelError: what is missing, and what to do.
    """
    for suite in config.validation.suites:
        check_before_plan(suite_settings(config, suite))
    _require_machine(config)


def try_parts(config: RunConfig, plan: RunPlan) -> str:
    """Try what the run will need. Returns what to tell all the same; '' if there is nothing.

    Raises:
        ConfigError, DataError: key, rule, what was got, what to do.
    """
    if plan.is_done:
        return ""
    may_differ = any(_is_own_build(part.data) for part in parts_of(config.data))
    where = "that data.train_size asks for" if may_differ else "of the dataset"
    few = few_rows(config, check_rows(config), where)
    model = None if config.model.path is None or not Path(config.model.path).is_dir() else Path(config.model.path)
    is_tokenizer_tried = model is not None and not plan.stage("filter").cached
    rows: list[FirstRow] = []
    for data in (part.data for part in parts_of(config.data)):
        if isinstance(data, CountdownData) and not plan.stage("dataset").cached:
            from data.countdown_problems import require_enough

            require_enough(data, config.data.seed)
        is_ours = has_default_scorer(data) and isinstance(data, CountdownData | Gsm8kData)
        is_scorer_tried = not config.data.environment and (not is_ours or bool(config.reward.weights))
        if not (is_scorer_tried or is_tokenizer_tried or config.data.environment):
            continue
        from data.trial import first_row

        if (row := first_row(data, config.data.seed, Path(config.paths.root).resolve())) is not None:
            rows.append(row)
            if is_scorer_tried:
                _try_scorer(data.scorer, row, config)
    if config.data.environment and rows:
        _try_environment(rows[0], config)
    if model is not None and is_tokenizer_tried:
        _try_tokenizer(model, rows, config)
    warm = config.warm_start
    if warm.enabled and warm.demonstrations is not None and not plan.stage("warm-start").cached:
        from data.demonstrations import try_demonstrations

        try_demonstrations(warm, model, NUM_TRIED, config.data.chat_template_kwargs)
    given = [] if plan.stage("filter").cached else _check_continued(config)
    from data.references import check_parts

    suites = (suite_settings(config, suite) for suite in config.validation.suites)
    unmet = [check_parts(config, keep=False), *(check_parts(suite, SPLITS[1:], keep=False) for suite in suites)]
    algo = config.algo
    if ":" in f"{algo.policy_loss}{algo.advantage}" or algo.policy_loss_options or algo.advantage_options:
        _try_functions(algo)
    return "\n".join(filter(None, (few, *given, *unmet)))


def _check_continued(config: RunConfig) -> list[str]:
    """Check prompts that end with the assistant's words, as the filter will. Only files in the row schema have them."""
    from data.filter import check_continued

    suites = (suite_settings(config, suite).data for suite in config.validation.suites)
    held_out = [part.data for data in (config.data, *suites) for part in parts_of(data)]
    files = [data.train_file for data in (part.data for part in parts_of(config.data)) if isinstance(data, ParquetData)]
    files += [data.validation_file for data in held_out if isinstance(data, ParquetData)]
    return [check_continued(expanded(name)) for name in files]


def check_rows(config: RunConfig) -> int | None:
    """Check the rows of local files, those of suites too. Returns the most training rows that there can be, of a build
    of one's own those that it is asked for; None where neither files here nor `data.train_size` say it.

    Raises:
        DataError: file and line of a row that cannot be used.
    """
    from data.trial import require_sound_rows

    root, once = Path(config.paths.root).resolve(), config.filter.duplicates == "error"
    found: list[int | None] = []
    for data in (part.data for part in parts_of(config.data)):
        made = require_sound_rows(data, config.data.seed, root, each_once=once)
        found.append(made if made is not None else getattr(data, "train_size", None))
    for suite in (suite_settings(config, suite) for suite in config.validation.suites):
        for part in parts_of(suite.data):
            once = suite.filter.duplicates == "error"
            require_sound_rows(part.data, suite.seed, root, SPLITS[1:], each_once=once)
    known = [rows for rows in found if rows is not None]
    return sum(known) if len(known) == len(found) else None


def _is_own_build(data: TaskData) -> bool:
    return isinstance(data, CustomData) and not data.build.startswith("data.")


def _try_scorer(scorer: str, row: "FirstRow", config: RunConfig) -> None:
    # A wrong answer and an empty one too: many a scorer returns nothing for what is not right.
    sandbox.use(config.sandbox)
    answers = list(dict.fromkeys((row.solution or ANY_ANSWER, ANY_ANSWER, "")))
    settings = config.reward.model_copy(update={"num_processes": 1})
    scores = _tried(scorer, answers, row.ground_truth_json, settings, "reward")
    for answer, score in zip(answers, scores, strict=True):
        if score.failure:
            if problem := wrong_weights(score.failure):
                raise ConfigError(problem)
            raise TrialError(
                of_the_judge(score.failure)
                or f"data.scorer: must score any text; got {scorer}, which failed on the answer {answer[:80]!r} to the "
                f"task's first row, with ground truth {row.ground_truth_json[:200]}: {score.failure}. docs/data.md "
                "says what it returns"
            )


def of_the_judge(failure: str) -> str:
    """What to say where a scorer failed because its judge gave no verdict; '' where it failed by itself."""
    if not failure.startswith(NO_VERDICT):
        return ""
    return (
        f"reward.judge: must give a verdict on any answer; got {failure.removeprefix(NO_VERDICT)}. Look whether the "
        "endpoint answers, and serves reward.judge.model"
    )


def _try_environment(row: "FirstRow", config: RunConfig) -> None:
    settings = RewardConfig(num_processes=1, deadline_s=config.episode.deadline_s)
    episode = Episode.begun("tried", config, row.ground_truth_json, config.seed)
    (score,) = _tried(PLAY, [episode.asked()], episode.truth, settings, "episode")
    if not score.failure:
        episode.replies.append(turn_of(score).reply)
        episode.texts.append(ANY_ANSWER)
        (score,) = _tried(PLAY, [episode.asked()], episode.truth, settings, "episode")
    if score.failure:
        raise TrialError(
            f"data.environment: must begin with any row and reply to any text; got {config.data.environment}, which "
            f"failed in {'step' if episode.texts else 'reset'} on the task's first row, {row.ground_truth_json[:200]}: "
            f"{score.failure}. docs/environments.md says what they return"
        )


def _tried(scorer: str, answers: Sequence[str], truth_json: str, settings: RewardConfig, section: str) -> list[Score]:
    with ScoringPool(scorer, settings, section=section, num_logged=0) as pool:
        job = pool.submit(answers, [truth_json] * len(answers))
        if not job.done.wait(len(answers) * settings.deadline_s + FIRST_CALL_S):
            return [Score(0.0, {}, failure="it did not come back")] * len(answers)
        try:
            return pool.collect(job)
        except EngineError as error:
            raise TrialError(str(error)) from error


def _try_tokenizer(directory: Path, rows: "list[FirstRow]", config: RunConfig) -> None:
    from data.tokenizer import PromptTokenizer, load_tokenizer

    tools = tool_schemas(config.episode.tools) if config.episode.tools else []
    forms = dict.fromkeys(row.prompt_form for row in rows)
    if not forms:  # no row is known yet; what the folder holds is
        load_tokenizer(directory)
    template_kwargs = config.data.chat_template_kwargs
    if template_kwargs and forms and "chat" not in forms:
        raise ConfigError(
            f"data.chat_template_kwargs={template_kwargs}: no prompt is a chat, so no chat template is applied. Leave "
            "it out, or choose data.template=chat"
        )
    for form in forms:
        tokenizer = PromptTokenizer(directory, chat=form == "chat", tools=tools, chat_template_kwargs=template_kwargs)
        tokenizer.encode_prompts(tokenizer.texts([row.prompt for row in rows if row.prompt_form == form]))
        if config.data.environment:
            from rlcore.rollout.turns import TurnTokens

            role = "tool" if tools else "user"
            TurnTokens(
                load_tokenizer(directory),
                chat=form == "chat",
                max_reply_tokens=1,
                role=role,
                chat_template_kwargs=template_kwargs,
            )


def _try_functions(algo: AlgoConfig) -> None:
    """Loss and advantage in a process of its own: it needs torch, and this one does not."""
    named = f"algo.policy_loss={algo.policy_loss}, algo.advantage={algo.advantage}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rlcore.algos.loss_call"], input=algo.model_dump_json(),
            capture_output=True, text=True, timeout=LOSS_DEADLINE_S, env={**os.environ, "PYTHONPATH": import_path()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TrialError(
            f"{named}: no end in {LOSS_DEADLINE_S:g} s on a few tokens; does a function wait for something?"
        ) from None
    if done.returncode:
        kind = ConfigError if done.returncode == 2 else TrialError
        raise kind(done.stdout or f"{named}: a function fails: {done.stderr[-1_000:]}")
