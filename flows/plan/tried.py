"""What only a try can tell, before anything expensive: the scorer on a row, the loss on a few tokens, the tokenizer.

Code of one's own runs in processes with a deadline. What a run has done already is not tried again.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.plan.plan import RunPlan
from rlcore.config import CountdownData, Gsm8kData, RunConfig
from rlcore.config.data import TaskData, parts_of
from rlcore.errors import ConfigError, EngineError
from rlcore.rollout.scoring import ScoringPool

if TYPE_CHECKING:
    from data.custom import FirstRow

LOSS_DEADLINE_S = 120.0
"""Importing torch on a busy machine takes most of it."""
FIRST_CALL_S = 60.0
"""Beyond `reward.deadline_s`: a scoring process starts, and the scorer imports what it needs."""
ANY_ANSWER = "0"
"""Where a task has no solution to score."""
_tried: set[str] = set()
"""What this process has tried: a command and its flow both ask."""


def try_parts(config: RunConfig, plan: RunPlan) -> None:
    """Try what the run will need.

    Raises:
        ConfigError, DataError: key, rule, what was got, what to do.
    """
    tried = f"{plan.settings_fingerprint} {plan.code_fingerprint} {config.paths.root} {config.reward}"
    if plan.is_done or tried in _tried:
        return
    model = Path(config.model.path or "")
    is_tokenizer_tried = config.model.path is not None and model.is_dir() and not plan.stage("filter").cached
    rows: list[FirstRow] = []
    for data in (part.data for part in parts_of(config.data)):
        if isinstance(data, CountdownData) and not plan.stage("dataset").cached:
            _require_problems(data, config.seed)
        is_scorer_tried = _may_not_fit(data)
        if not (is_scorer_tried or is_tokenizer_tried):
            continue
        from data.custom import first_row

        if (row := first_row(data, config.seed, Path(config.paths.root).resolve())) is not None:
            rows.append(row)
            if is_scorer_tried:
                _try_scorer(data.scorer, row, config)
    if is_tokenizer_tried:
        _try_tokenizer(model, rows)
    if ":" in config.algo.policy_loss:
        _try_loss(config)
    _tried.add(tried)


def _require_problems(data: CountdownData, seed: int) -> None:
    from data.countdown_problems import require_enough

    require_enough(data, seed)


def _may_not_fit(data: TaskData) -> bool:
    """Whether scorer and rows come from different hands, or from somebody else's."""
    is_default = data.scorer == type(data).model_fields["scorer"].default
    return not (is_default and isinstance(data, CountdownData | Gsm8kData))


def _try_scorer(scorer: str, row: "FirstRow", config: RunConfig) -> None:
    answer = row.solution or ANY_ANSWER
    with ScoringPool(scorer, config.reward.model_copy(update={"num_processes": 1})) as pool:
        job = pool.submit([answer], [row.ground_truth_json])
        if job.done.wait(config.reward.deadline_s + FIRST_CALL_S):
            try:
                pool.collect(job)
            except EngineError as error:
                raise ConfigError(str(error)) from error
            failures, why = pool.unscored
        else:
            failures, why = 1, "it did not come back"
    if failures:
        raise ConfigError(
            f"data.scorer: must score any text; got {scorer}, which failed on the answer {answer[:80]!r} to the task's "
            f"first row, with ground truth {row.ground_truth_json[:200]}: {why}. docs/data.md says what it returns"
        )


def _try_tokenizer(directory: Path, rows: "list[FirstRow]") -> None:
    """Load it, and render and tokenize a prompt, as the filter will."""
    from data.tokenizer import PromptTokenizer

    for form in dict.fromkeys(row.prompt_form for row in rows):
        tokenizer = PromptTokenizer(directory, chat=form == "chat")
        tokenizer.encode_prompts(tokenizer.texts([row.prompt for row in rows if row.prompt_form == form]))


def _try_loss(config: RunConfig) -> None:
    """In a process of its own: it needs torch, and this one does not."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rlcore.algos.loss_call"], input=config.algo.model_dump_json(),
            capture_output=True, text=True, timeout=LOSS_DEADLINE_S, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"algo.policy_loss: {config.algo.policy_loss} did not come back in {LOSS_DEADLINE_S:g} s on two answers of "
            "three tokens; does it wait for something?"
        ) from None
    if done.returncode:
        raise ConfigError(done.stdout or f"algo.policy_loss: {config.algo.policy_loss} fails: {done.stderr[-1_000:]}")
