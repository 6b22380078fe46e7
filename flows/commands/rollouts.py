"""The commands `millrace rollouts` and `audit`, which read the recorded responses of a run."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.commands.options import AsJson, OptionalRoot, Run, choices
from rlcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.responses.query import Query, SearchResult
    from rlcore.rollout.scoring import ScoringPool
    from rlcore.run.layout import RunLayout

EXIT_FINDINGS = 1
_GROUP = ["step", "data_source", "prompt_id"]
NUM_CASES = 32  # maximum number of problems that `millrace audit` tries
SORTS = ("step", "score", "advantage", "num_tokens", "logprob", "gap", "prompt_id", "change")
Step = Annotated[str, typer.Option(metavar="N|LOW..HIGH", help="Only responses of these steps.")]
Prompt = Annotated[int | None, typer.Option(help="Only responses to this prompt (prompt_id).")]
ScoreRange = Annotated[str, typer.Option("--score", metavar="X|LOW..HIGH", help="Only responses with such a score.")]
Search = Annotated[str, typer.Option(help="Only responses that contain this text.")]
Kind = Annotated[Literal["all", "training", "validation"], typer.Option(help="Only responses of this kind.")]


def rollouts(
    run: Run,
    step: Step = "",
    prompt: Prompt = None,
    score: ScoreRange = "",
    search: Search = "",
    kind: Kind = "all",
    sort: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(SORTS[:-1])} or {SORTS[-1]}; with a leading - the highest first.",
            autocompletion=choices(*SORTS),
        ),
    ] = "step",
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, show_default=False, help="Maximum number of responses; 0: all. Default: 20, and all pairs."
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --json: the columns of each token too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Preference pairs as JSON: best and worst training response of each group.")
    ] = False,
    root: OptionalRoot = None,
) -> None:
    """Show the recorded responses of a run, from its training and its validations.

    Examples:
      millrace rollouts countdown_demo-s1 --sort -score
      millrace rollouts countdown_demo-s1 --step 20..40 --score ..0 --search '<answer>' --json
      millrace rollouts countdown_demo-s1 --pairs > pairs.jsonl
    """
    from flows.progress import print_table
    from rlcore.responses.query import ALL_COLUMNS, READABLE, Query, to_finite_json

    if tokens and not as_json:
        raise ConfigError("--tokens: must come with --json, since the text output has no token columns. Add --json")
    if pairs and len(run) > 1 and "=" not in run[-1]:
        raise ConfigError(
            f"--pairs: takes no file, because the pairs go to the standard output; got {run[-1]}. "
            f"Write millrace rollouts {run[0]} --pairs > {run[-1]}"
        )
    query = Query.parse(step=step, prompt=prompt, score=score, search=search, kind=kind, sort=sort)
    config, layout, total = _recorded_responses(run, root)
    if pairs:
        _print_pairs(config, layout, query, step, limit)
        return
    found = _find(layout, query, step)
    shown = range(len(found))[: (20 if limit is None else limit) or None]
    columns = ALL_COLUMNS if tokens else READABLE
    for begin in range(0, len(shown), 1_000):
        rows = found.rows(shown[begin : begin + 1_000], columns)
        if as_json:
            for row in rows:
                parsed = {"parts": dict(row["parts"]), "ground_truth": json.loads(row["ground_truth"])}
                print(json.dumps(to_finite_json(row | parsed), ensure_ascii=False, allow_nan=False))
        elif sys.stdout.isatty():
            print(*map(_text_row, rows), sep="\n")
        else:
            print_table((), [_cells(row) for row in rows])
    if not as_json:
        found_text = f"{len(shown):,} shown of {len(found):,} responses that match, of {total:,} on record"
        print(found_text, file=sys.stderr)


def _find(layout: "RunLayout", query: "Query", step: str) -> "SearchResult":
    """Return the responses that match. Raises ConfigError if the given steps have no response of the query's kind.

    The message lists the steps that have such responses, or the first three and the last if there are more than 8.
    """
    from rlcore.config.problems import Problem, settings_error
    from rlcore.responses.query import Query, find_responses

    found, of_kind = find_responses(layout.answers, query), Query(kind=query.kind)
    if not found and step and not find_responses(layout.answers, replace(of_kind, step=query.step)):
        steps = find_responses(layout.answers, of_kind).light["step"].unique().to_pylist()
        listed = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:3], "...", steps[-1]]))
        kind = "" if query.kind == "all" else f"{query.kind} "
        if steps:
            rule = f"must have recorded {kind}responses"
            raise settings_error([Problem("--step", rule, step, f"Choose from {listed}")])
    return found


def audit(
    run: Run,
    scorer: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A scorer other than the run's own.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    root: OptionalRoot = None,
) -> None:
    """Check that a scorer does not reward empty, copied or other worthless responses. If it does, the exit code is 1.

    Examples:
      millrace audit countdown_demo-s1
      millrace audit my-run --scorer my_scorer:score
    """
    from flows.stages.stage import judge_failure_message
    from rlcore.responses.audit import audit_reward, cases_of

    config, layout, _ = _recorded_responses(run, root)
    if config.data.environment:
        raise ConfigError(
            f"audit: a run with an environment has no scorer to audit; got data.environment={config.data.environment}. "
            "Its rewards come from its turns: test the environment itself"
        )
    truth_of = ground_truth_converter(config, scorer)
    cases = cases_of(layout.answers, NUM_CASES)
    cases = [replace(case, ground_truth_json=truth_of(case.ground_truth_json)) for case in cases]
    with _scoring_pool(config, layout, scorer) as pool:
        findings = audit_reward(cases, pool)
        num_failed, failure = pool.unscored
    name = scorer or config.data.scorer
    if num_failed and not findings:
        raise DataError(
            judge_failure_message(failure)
            or f"{name}: must score any text, but failed on {num_failed:,} responses of the audit; none of the others "
            f"scored. The last failure: {failure}. Fix the scorer"
        )
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
    elif findings:
        print(f"{name} rewards responses that must not score:")
        print("\n".join(f"  {finding}" for finding in findings))
    else:
        print(f"{name}: none of the responses that must not score did, on {len(cases)} problems")
    if findings:
        sys.exit(EXIT_FINDINGS)


def ground_truth_converter(config: "RunConfig", scorer: str | None) -> Callable[[str], str]:
    """Return a function that converts a recorded ground truth (JSON) to the form that `scorer` expects.

    If each row of the run names a scorer, the ground truth contains this name. The returned function
    removes the name, unless the run's own scorers are used.
    """
    from rlcore.config.data import BY_ROW
    from rlcore.rollout.by_part import without_scorer

    by_row = config.data.scorer == BY_ROW
    return without_scorer if by_row and scorer not in (None, config.data.scorer) else str


def _recorded_responses(run: Sequence[str], root: Path | None) -> "tuple[RunConfig, RunLayout, int]":
    from flows.work.runs import find_run
    from rlcore.responses.query import count_responses

    config, layout = find_run(run, root)
    return config, layout, count_responses(layout.answers)


@contextmanager
def _scoring_pool(config: "RunConfig", layout: "RunLayout", scorer: str | None) -> "Iterator[ScoringPool]":
    """Yield a pool of processes that run `scorer`. If `scorer` is None, they run the run's scorer.

    `reward.weights` is applied only to the run's scorer.
    """
    from rlcore import sandbox
    from rlcore.rollout.scoring import ScoringPool, require_scorer
    from rlcore.user_code import run_code

    sandbox.set_limits(config.sandbox)
    if scorer is not None:
        require_scorer(scorer, "--scorer")
    reward = config.reward.model_copy(update={"num_processes": max(1, config.reward.num_processes)})
    if scorer not in (None, config.data.scorer):
        reward = reward.model_copy(update={"weights": {}})
    code = run_code(layout.code) if scorer is None else nullcontext()
    with code, ScoringPool(scorer or config.data.scorer, reward) as pool:
        yield pool


def _cells(row: dict[str, Any]) -> list[str]:
    figures = ("" if row[name] is None else f"{row[name]:.6g}" for name in ("score", "advantage"))
    names = ("num_tokens", "finish_reason", "prompt", "answer")
    place = [row["step"], row["validation"] or "", row["prompt_id"], row["sample_index"]]
    return [*map(str, place), *figures, *(str(row[name]) for name in names)]


def _print_pairs(config: "RunConfig", layout: "RunLayout", query: "Query", step: str, limit: int | None) -> None:
    from rlcore.run.layout import RunInputs

    if query.kind == "validation":
        raise ConfigError(
            "--pairs: takes training responses only, got --kind validation (held-out problems). Leave --kind out"
        )
    if config.data.environment:
        raise ConfigError(
            f"--pairs: needs responses of one turn, got a run with data.environment={config.data.environment}. Choose "
            "another run"
        )
    found = _find(layout, replace(query, kind="training"), step)
    rows = recorded_pairs(found, RunInputs.read(layout).train_parquets, layout.run_dir.name)
    if not rows:
        raise DataError(
            f"{layout.answers}: no group has two finished responses with different scores among {len(found):,} "
            "responses that match; choose other steps, or another run"
        )
    for row in rows[: limit or None]:
        print(json.dumps(row, ensure_ascii=False, allow_nan=False))


def recorded_pairs(found: "SearchResult", files: Sequence[Path], run: str) -> list[dict[str, Any]]:
    """Return the best and worst recorded response of each group as a pair. The prompts are read from `files`.

    Responses that end at the length limit or have no score are left out. Groups with equal scores are left out too."""
    from rlcore.prompt import ROWS_PER_SOURCE

    light = found.light.select([*_GROUP, "score", "finish_reason"]).to_pandas()
    groups = light[light.score.notna() & (light.finish_reason == "stop")].groupby(_GROUP, sort=False).score
    differ = groups.max() > groups.min()
    best, worst = (found.rows(places[differ].to_list()) for places in (groups.idxmax(), groups.idxmin()))
    prompts, rows = [_prompts_of(file) for file in files], []
    for chosen, rejected in zip(best, worst, strict=True):
        source, index = divmod(chosen["prompt_id"], ROWS_PER_SOURCE)
        prompt, texts = prompts[source][index], [chosen["answer"], rejected["answer"]]
        if isinstance(prompt, list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        scores = {"chosen_score": chosen["score"], "rejected_score": rejected["score"]}
        origin = {name: chosen[name] for name in _GROUP}
        rows.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1], **scores, "run": run, **origin})
    return rows


def _prompts_of(file: Path) -> dict[int, Any]:
    import pyarrow.parquet as pq

    from rlcore.batching.prompts import is_chat

    rows, chat = pq.read_table(file, columns=["prompt", "extra_info"]).to_pylist(), is_chat(file)
    return {
        row["extra_info"]["index"]: row["prompt"] if chat else "".join(message["content"] for message in row["prompt"])
        for row in rows
    }


def _text_row(row: dict[str, Any]) -> str:
    from flows.progress import printable

    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"])
    facts = [
        f"step {row['step']}",
        *([f"validation {row['validation']}"] if row["validation"] else []),
        *(["greedy"] if row["greedy"] else []),
        f"prompt {row['prompt_id']}", f"response {row['sample_index']}",
        score + (f" ({parts})" if parts else ""),
        *([f"advantage {row['advantage']:.3g}"] if row["advantage"] is not None else []),
        f"{row['num_tokens']} tokens, {row['finish_reason']}",
        f"log-probability {row['logprob']:.3g}",
        *([f"trainer differs by {row['gap']:.2g}"] if row["gap"] is not None else []),
        f"policy {row['policy_version']}",
    ]  # fmt: skip
    lines = ["-- " + " · ".join(facts), printable(row["prompt"]), f"=> {printable(row['answer'])}"]
    if row["failure"]:
        lines.append(f"no score: {printable(row['failure'])}")
    return "\n".join(lines) + "\n"
