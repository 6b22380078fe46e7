"""Run folders as a real run leaves them, runs in memory with artificial curves, and parsed pages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.evaluation.result import ProblemResult, Response, ValidationResult
from rlcore.report.build import ReportFiles
from rlcore.report.record import RunRecord
from rlcore.tracking.journal import JOURNAL_FILE, Journal, StepRecord, load_journal
from rlcore.tracking.lineage import Origin, Stage, read_origin

HOSTILE = (
    "</td></table></script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>",
    '"><svg onload=alert(1)> ![x](http://evil.example/y) | a | `b` \n# head\n<!-- {{ 7*7 }} {% raw %} $x$ \x00',
)


def write_run(
    run_dir: Path,
    *,
    experiment: str = "countdown_demo",
    overrides: tuple[str, ...] = (),
    num_steps: int = 100,
    seed: int = 1,
    gain: float = 0.35,
    num_problems: int = 120,
    validate: bool = True,
    only: tuple[str, ...] = (),
) -> RunConfig:
    """Write a run whose held-out reward rises from about 0.3 by about `gain`. `only` names the kept metrics."""
    config = load_config([*overrides, f"seed={seed}"], experiment=experiment)
    run_dir.mkdir(parents=True, exist_ok=True)
    Origin(config).write(run_dir)
    rng = np.random.default_rng(seed)
    with Journal(run_dir / JOURNAL_FILE) as journal:
        for step in range(num_steps + 1):
            metrics = dict(step_metrics(config, step, rng, gain)) if step else {}
            metrics = {name: value for name, value in metrics.items() if not only or name in only}
            if validate and (step % config.validation.every_steps == 0 or step == num_steps):
                result = validation(config, f"step-{step:06d}", step, gain, num_problems)
                result.write(run_dir / "validation" / f"step-{step:06d}.json")
                metrics |= result.metrics()
                if step in (0, num_steps):
                    name = "before" if step == 0 else "after"
                    replace(result, name=name).write(run_dir / "validation" / f"{name}.json")
            if metrics:
                journal.append_step(step, metrics)
        if num_steps >= 50:
            journal.append_event("out_of_memory", 37, {"max_tokens_per_micro_batch": 8_192})
    return config


def progress(step: int) -> float:
    return 1 - float(np.exp(-step / 35))


def step_metrics(config: RunConfig, step: int, rng: np.random.Generator, gain: float) -> Mapping[str, float]:
    done, noise = progress(step), rng.normal
    reward = 0.3 + gain * done + noise(0, 0.025)
    seconds = {"gen": 0.62, "reward": 0.02, "adv": 0.004, "update_actor": 0.41, "update_weights": 0.01}
    ppo = config.critic is not None
    if ppo:
        seconds |= {"values": 0.11, "update_critic": 0.33, "old_log_prob": 0.1}
    if config.algo.kl.where != "off":
        seconds["ref"] = 0.12
    if step == 1:
        seconds["gen"] *= 2
    seconds = {name: value * float(np.exp(noise(0, 0.06))) for name, value in seconds.items()}
    step_s = sum(seconds.values()) + 0.03
    tokens = 7_700 + noise(0, 60)
    length = 6.4 - 0.5 * done + noise(0, 0.05)
    metrics = {
        "actor/pg_loss": noise(0, 0.01),
        "actor/entropy": 1.1 - 0.75 * done + noise(0, 0.015),
        "actor/ppo_kl": abs(noise(0, 2e-4)),
        "actor/pg_clipfrac": abs(noise(0.004, 0.001)),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/grad_norm": float(np.exp(noise(-0.5, 0.15))),
        "actor/lr": config.optim.lr,
        "critic/score/mean": reward,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/advantages/mean": noise(0, 0.01),
        "response_length/mean": length,
        "response_length/max": 10.0,
        "response_length/min": 4.0,
        "response_length/clip_ratio": max(0.0, 0.012 * (1 - done) + noise(0, 0.002)),
        "reward/equal_group_share": 0.22 + 0.25 * done + noise(0, 0.03),
        "training/rollout_probs_diff_mean": 1e-7,
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": step_s,
        "perf/throughput": tokens / step_s,
        "perf/cpu_memory_used_gb": 4.2,
        "timing_s/step": step_s,
        "timing_per_token_ms/gen": 1e3 * seconds["gen"] / (tokens / 2),
        "timing_per_token_ms/update_actor": 1e3 * seconds["update_actor"] / tokens,
        **{f"timing_s/{name}": value for name, value in seconds.items()},
    }
    if ppo:
        metrics |= {
            "critic/vf_loss": 0.1 - 0.06 * done + noise(0, 0.004),
            "critic/vf_clipfrac": 0.01,
            "critic/vf_explained_var": 0.6 * done + noise(0, 0.03),
            "critic/grad_norm": float(np.exp(noise(0, 0.2))),
            "critic/lr": config.critic.optim.lr if config.critic else 0.0,
        }
    if config.algo.kl.where == "loss":
        metrics["actor/kl_loss"] = 0.003 * done
    if config.algo.kl.where == "reward":
        metrics["actor/reward_kl_penalty"] = 0.003 * done
    return metrics


def validation(
    config: RunConfig, name: str, step: int, gain: float, num_problems: int, texts: tuple[str, str] = ("", "")
) -> ValidationResult:
    """Return held-out responses at a step. `texts` precede the prompts and responses."""
    rng = np.random.default_rng((7, 0))  # the same draws at every step, as a real validation has
    hardness = rng.uniform(0, 1, num_problems)
    draws = rng.uniform(0, 1, (num_problems, config.validation.samples_per_problem))
    level = 0.3 + gain * progress(step)
    problems = []
    for index in range(num_problems):
        numbers = rng.integers(1, 21, 3).tolist()
        target = numbers[0] + numbers[1] - numbers[2]
        chance = 1 / (1 + np.exp((hardness[index] - level) * 7))
        good = f"{texts[1]}{numbers[0]} + {numbers[1]} - {numbers[2]}"
        bad = f"{texts[1]}{numbers[0]} - {numbers[1]} + {numbers[2]}"
        samples = tuple(_answer(draw < chance, good, bad) for draw in draws[index])
        problems.append(
            ProblemResult(
                prompt_id=index,
                difficulty=2 + int(hardness[index] > 0.6),
                prompt_text=f"{texts[0]}{' '.join(map(str, numbers))} > {target}",
                ground_truth_json=json.dumps({"target": target, "numbers": numbers, "form": "bare"}),
                greedy=_answer(chance > 0.45, good, bad),
                samples=samples,
            )
        )
    return ValidationResult(name, step, step, "countdown", tuple(problems), config.validation)


def _answer(right: bool, good: str, bad: str) -> Response:
    parts = {"correct": float(right), "format": 1.0}
    return Response(good if right else bad, float(right), parts, 6, "stop", logprob=-1.5)


def with_stages(run_dir: Path, *stages: Stage) -> None:
    origin = read_origin(run_dir)
    assert origin is not None
    replace(origin, stages=stages).write(run_dir)


def record_of(
    curves: Mapping[str, Sequence[float]],
    *,
    validations: Mapping[str, ValidationResult] | None = None,
    config: RunConfig | None = None,
) -> RunRecord:
    length = max((len(values) for values in curves.values()), default=0)
    steps = tuple(
        StepRecord(
            step,
            1_000.0 + step,
            {name: float(values[step - 1]) for name, values in curves.items() if step <= len(values)},
        )
        for step in range(1, length + 1)
    )
    return RunRecord(
        Path("planted"), config or RunConfig(), steps, (), validations or {}, Origin(config or RunConfig()), ()
    )


FEW = ("critic/score/mean",)  # metrics of a run whose report is drawn quickly

VOID = {"meta", "br", "img", "link", "input", "hr", "base"}


@dataclass
class Page(HTMLParser):
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    _table: str = ""
    _cell: list[str] | None = None

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        if str(found.get("id", "")).startswith("t-"):
            self._table = str(found["id"])[2:]
        if tag == "tr":
            self.tables.setdefault(self._table, []).append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._table][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data):
        self.text.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def words(self) -> str:
        return "".join(self.text)


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == [], f"never closed: {page.open}"
    return page


def page_of(files: ReportFiles) -> Page:
    return parse(files.html.read_text())


def table(files: ReportFiles, name: str) -> list[dict[str, object]]:
    found = json.loads(files.json.read_text())["tables"][name]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def series(run_dir: Path, name: str) -> list[float]:
    steps = load_journal(run_dir / JOURNAL_FILE).steps
    return [record.metrics[name] for record in steps if name in record.metrics]
