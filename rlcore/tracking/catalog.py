"""Every metric: its name, unit and definition. The documentation and the report take them from here.

In a name, `{a,b}` stands for one of the words, `<k>` and `<i>` for a number and `<x>` for any text. The definitions are
veRL's where it has the metric, so that a figure can be laid beside one from there; where ours differs, the definition
says so.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """What a metric, or a family of them, means."""

    name: str
    unit: str
    definition: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric."""
        return _pattern(self.name).fullmatch(name) is not None


METRICS: tuple[MetricDoc, ...] = (
    MetricDoc("training/global_step", "steps", "The step: one batch of prompts sampled, scored and learned from."),
    MetricDoc("training/epoch", "passes", "Passes over the training prompts begun before this one."),
    MetricDoc("training/num_nonfinite", "metrics", "Metrics of the step that were NaN or infinite. MLflow only."),
    MetricDoc(
        "training/rollout_probs_diff_{mean,max,std}",
        "probability",
        "|p_sampler - p_trainer| of the sampled tokens: how far the engine is from the model that is trained. Absent "
        "where the trainer's own are not computed before the update (`trainer.old_logprobs=behavior`, more updates).",
    ),
    MetricDoc(
        "training/canary_logprob_diff",
        "nats",
        "vLLM: mean |log p_engine - log p_trainer| on a probe after the hand-over; over its bound the event `alarm`.",
    ),
    MetricDoc(
        "rollout_corr/weight/{mean,max,min}",
        "ratio",
        "Importance weight of answer tokens that corrects for that difference, after truncation or masking.",
    ),
    MetricDoc("actor/pg_loss", "loss", "Policy loss without KL and entropy terms, mean over the step's updates."),
    MetricDoc("actor/entropy", "nats/token", "Entropy of the policy at answer tokens, under the loss's aggregation."),
    MetricDoc(
        "actor/token_entropy",
        "nats/token",
        "The same per answer token, where the loss's aggregation is another than token-mean.",
    ),
    MetricDoc("actor/kl_loss", "nats/token", "KL estimate to the reference, where it is a term of the loss."),
    MetricDoc("actor/ref_kl", "nats/token", "The same per answer token, whatever the loss's aggregation."),
    MetricDoc("actor/kl_coef", "1", "Coefficient of the KL term; moves if it is adaptive."),
    MetricDoc(
        "actor/reward_kl_penalty", "nats/token", "KL estimate to the reference, where it is taken off the reward."
    ),
    MetricDoc("actor/ppo_kl", "nats/token", "Mean over answer tokens of old minus new log-probability."),
    MetricDoc("actor/pg_clipfrac", "share", "Answer tokens whose loss is that of the clipped ratio."),
    MetricDoc("actor/pg_clipfrac_lower", "share", "Answer tokens at the dual clip (negative advantage, large ratio)."),
    MetricDoc("actor/grad_norm", "1", "Global gradient norm before clipping, mean over the step's updates."),
    MetricDoc("actor/lr", "1", "Learning rate of the step."),
    MetricDoc(
        "critic/score/{mean,max,min}", "score", "Score of an answer as the scorer gave it, less the overlong penalty."
    ),
    MetricDoc("critic/rewards/{mean,max,min}", "score", "The score less the KL penalty, where that is in the reward."),
    MetricDoc("critic/advantages/{mean,max,min}", "1", "Advantage over all answer tokens."),
    MetricDoc(
        "critic/returns/{mean,max,min}", "1", "Return over all answer tokens; where an answer has one advantage, that."
    ),
    MetricDoc("critic/values/{mean,max,min}", "1", "Value over all answer tokens, before the update."),
    MetricDoc("critic/vf_loss", "loss", "Clipped value loss, half the squared error."),
    MetricDoc("critic/vf_clipfrac", "share", "Answer tokens whose value loss is that of the clipped value."),
    MetricDoc("critic/vf_explained_var", "share", "1 - Var(return - value) / (Var(return) + 1e-5), answer tokens."),
    MetricDoc("critic/vpred_mean", "1", "Value over answer tokens, during the update."),
    MetricDoc("critic/grad_norm", "1", "Global gradient norm of the critic before clipping."),
    MetricDoc("critic/lr", "1", "Learning rate of the critic."),
    MetricDoc("reward/equal_group_share", "share", "Prompts whose answers all scored the same: they teach nothing."),
    MetricDoc("reward/groups_dropped", "prompts", "Such prompts replaced by others (dynamic sampling)."),
    MetricDoc(
        "reward/unscored_share",
        "share",
        "Answers that the scorer failed on (it raised, or overran its deadline): left out of training. Absent without.",
    ),
    MetricDoc("reward/<part>/mean", "score", "Mean of a named part of the score (`correct`, `format`, `overlong`)."),
    MetricDoc("prompt_length/{mean,max,min}", "tokens", "Tokens of a prompt."),
    MetricDoc("prompt_length/clip_ratio", "share", "Prompts as long as the limit."),
    MetricDoc("response_length/{mean,max,min}", "tokens", "Tokens of an answer, its end token included."),
    MetricDoc(
        "response_length/clip_ratio",
        "share",
        "Answers cut off at the limit (veRL: as long as the batch is wide, which counts whole answers too).",
    ),
    MetricDoc("global_seqlen/{min,max,mean}", "tokens", "Tokens on a rank if the batch were cut in the order drawn."),
    MetricDoc("global_seqlen/minmax_diff", "tokens", "The largest of these less the smallest."),
    MetricDoc("global_seqlen/balanced_{min,max}", "tokens", "Tokens on a rank as they are shared out by length."),
    MetricDoc("perf/total_num_tokens", "tokens", "Prompt and answer tokens of the step, over all samples."),
    MetricDoc("perf/time_per_step", "s", "Wall seconds of the step, without validation and checkpoint."),
    MetricDoc("perf/throughput", "tokens/s/device", "total_num_tokens / (time_per_step x devices)."),
    MetricDoc(
        "perf/mfu/{actor,critic}",
        "share",
        "Floating point operations of the update / (its seconds x the devices' peak), 6 N T + 6 A sum(s^2): N weights "
        "of linear layers and head, T tokens, A heads x head size x layers, s a sequence's length. Tied embeddings "
        "count once. The peak is `runtime.peak_tflops`, or that of the GPU by its name; not logged where neither is "
        "known, or for a mixture of experts.",
    ),
    MetricDoc(
        "perf/mfu_verl/actor",
        "share",
        "The same as veRL counts it under `perf/mfu/actor`: embedding and head each, tied or not. Compare it with "
        "figures from veRL; for a small model with a large vocabulary it is too high.",
    ),
    MetricDoc(
        "perf/max_memory_allocated_gb",
        "GB (1e9)",
        "Most device memory held by tensors since the start, without what "
        "a sleeping engine has given back; the report sets it beside the memory plan.",
    ),
    MetricDoc(
        "perf/max_memory_reserved_gb", "GB (1e9)", "Most device memory reserved by the allocator, counted likewise."
    ),
    MetricDoc(
        "perf/num_passes_redone",
        "passes",
        "Passes since the start that ran out of memory and were done again in finer micro-batches; absent while 0.",
    ),
    MetricDoc("perf/cpu_memory_used_gb", "GB (1e9)", "Memory in use on the host, by all processes."),
    MetricDoc(
        "timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights}",
        "s",
        "Wall seconds of a phase on the driver, waiting included: generation, scoring, passes for old and reference "
        "log-probabilities and values, advantages, updates, hand-over of weights to the engine.",
    ),
    MetricDoc(
        "timing_s/save_checkpoint",
        "s",
        "Wall seconds for which training stood still for checkpoints since the last such value: the copy to the host, "
        "and waiting for a save before this one or for room on the disk.",
    ),
    MetricDoc("timing_s/testing", "s", "Wall seconds of a validation."),
    MetricDoc("timing_s/step", "s", "Wall seconds of the step: the phases and what lies between them."),
    MetricDoc(
        "timing_per_token_ms/{gen,old_log_prob,ref,values,adv,update_critic,update_actor}",
        "ms/token",
        "A phase's time over its tokens: answer tokens for gen, prompt and answer tokens for the others.",
    ),
    MetricDoc(
        "val-core/<data_source>/reward/mean@<k>",
        "score",
        "Held-out score: mean over k samples a problem; <data_source> is `all` over several sources.",
    ),
    MetricDoc("val-core/<data_source>/reward/pass@<k>", "share", "Chance that one of k samples is right (unbiased)."),
    MetricDoc(
        "val-core/<data_source>/reward/pass_all@<k>",
        "share",
        "Chance that all of k samples are right (pass^k elsewhere).",
    ),
    MetricDoc("val-core/<data_source>/reward/maj@<k>", "share", "Problems whose most frequent answer of k is right."),
    MetricDoc("val-core/<data_source>/reward/greedy", "score", "Held-out score of the greedy answer."),
    MetricDoc("val-core/<data_source>/acc/mean@<k>", "share", "Held-out samples that are right."),
    MetricDoc("val-core/<data_source>/acc/greedy", "share", "Held-out problems whose greedy answer is right."),
    MetricDoc(
        "val-core/<statistic>/{ci_low,ci_high}", "as it", "Ends of a statistic's bootstrap interval over problems."
    ),
    MetricDoc(
        "val-aux/<data_source>/num_unscored",
        "answers",
        "Held-out answers that the scorer failed on: left out of every figure. Absent without.",
    ),
    MetricDoc("val-aux/<name>", "as named", "Other held-out statistics."),
    MetricDoc("events/<event>", "1", "1 at the step of an event; its data are in events/events.jsonl. MLflow only."),
    MetricDoc(
        "alarm/update_skipped",
        "share",
        "The step's updates of the policy that an alarm left out, 1 where no answer has a score; absent without.",
    ),
    MetricDoc("fault/num_retries", "1", "Faults so far after which the run went on from a checkpoint; absent without."),
    MetricDoc("system/cpu_percent", "%", "Processor time in use since the last step, all cores of the host."),
    MetricDoc("system/process_cpu_percent", "%", "The trainer's own; 100 is one core."),
    MetricDoc("system/memory_used_gb", "GB (1e9)", "Memory in use on the host."),
    MetricDoc("system/memory_percent", "%", "The same as a share of what the host has."),
    MetricDoc("system/process_memory_gb", "GB (1e9)", "Memory of the trainer's process (resident set)."),
    MetricDoc("disk/free_gb", "GB (1e9)", "Free room where the checkpoints are written."),
    MetricDoc("disk/needed_gb", "GB (1e9)", "What the next checkpoint takes, and the reserve."),
    MetricDoc("system/disk_free_gb", "GB (1e9)", "Free room on the run's disk."),
    MetricDoc("system/gpu_<i>_utilization_percent", "%", "Share of the last sample period in which the GPU was busy."),
    MetricDoc("system/gpu_<i>_memory_used_gb", "GB (1e9)", "Memory in use on a GPU, by all processes."),
    MetricDoc("system/gpu_<i>_power_watts", "W", "Power drawn by a GPU."),
)
"""All metrics, in the order in which the documentation lists them. The first that matches a name describes it."""


@lru_cache(maxsize=4096)
def describe(name: str) -> MetricDoc | None:
    """What a metric means; None if it is not documented.

    >>> describe("val-core/openai/gsm8k/reward/mean@8").unit
    'score'
    """
    return next((doc for doc in METRICS if doc.matches(name)), None)


@lru_cache
def _pattern(name: str) -> re.Pattern[str]:
    """`{a,b}` one of the words, `<k>` and `<i>` a number, `<x>` any text (a data source may hold slashes)."""
    pattern = re.sub(r"<[ki]>", r"\\d+", re.escape(name))
    pattern = re.sub(r"<\w+>", ".+", pattern)
    pattern = re.sub(r"\\{(.*?)\\}", lambda words: f"(?:{words[1].replace(',', '|')})", pattern)
    return re.compile(pattern)


@dataclass(frozen=True, slots=True)
class Absent:
    """A metric of the reference that has no meaning here, and why."""

    name: str
    reason: str


REFERENCE_METRICS: tuple[str, ...] = (
    *(f"actor/{name}" for name in ("entropy", "grad_norm", "kl_coef", "kl_loss", "lr")),
    *(f"actor/{name}" for name in ("pg_clipfrac", "pg_clipfrac_lower", "pg_loss", "ppo_kl")),
    *(
        f"critic/{name}/{part}"
        for name in ("advantages", "returns", "rewards", "score")
        for part in ("max", "mean", "min")
    ),
    *(f"global_seqlen/{name}" for name in ("balanced_max", "balanced_min", "max", "mean", "min", "minmax_diff")),
    *(f"perf/{name}" for name in ("cpu_memory_used_gb", "max_memory_allocated_gb", "max_memory_reserved_gb")),
    *(f"perf/{name}" for name in ("mfu/actor", "throughput", "time_per_step", "total_num_tokens")),
    *(f"{kind}_length/{part}" for kind in ("prompt", "response") for part in ("clip_ratio", "max", "mean", "min")),
    *(f"timing_per_token_ms/{phase}" for phase in ("adv", "gen", "ref", "update_actor")),
    *(f"timing_s/{phase}" for phase in ("adv", "gen", "generate_sequences", "old_log_prob", "ref", "reshard")),
    *(f"timing_s/{phase}" for phase in ("reward", "save_checkpoint", "start_profile", "step", "stop_profile")),
    *(f"timing_s/{phase}" for phase in ("testing", "update_actor")),
    "training/epoch",
    "training/global_step",
    "val-core/openai/gsm8k/reward/mean@1",
)
"""The 62 names of its last step, in the order of its log."""

ABSENT: tuple[Absent, ...] = (
    Absent("timing_s/generate_sequences", "the engine's part of gen, measured on a worker; here gen is nothing else"),
    Absent("timing_s/reshard", "moves the policy into the engine's sharding before gen; here that is update_weights"),
    Absent(
        "timing_s/start_profile",
        "switches veRL's profiler on; that of runtime.profile begins and ends outside a step's time",
    ),
    Absent(
        "timing_s/stop_profile",
        "switches veRL's profiler off; that of runtime.profile begins and ends outside a step's time",
    ),
)
"""Those that are not logged here."""


METRICS_FILE = Path(__file__).parents[2] / "docs" / "metrics.md"

_INTRODUCTION = """\
<!-- Generated from rlcore/tracking by `python -m rlcore.tracking.catalog`. -->
# Metrics

Every metric of a run with its unit and definition. Names and definitions are veRL's where it has the metric; where
ours differs, the definition says so. `{a,b}` stands for one of the words, `<k>` and `<i>` for a number, `<x>` for any
text. In MLflow `@`, which it refuses, is written `_at_`: `mean@4` is `mean_at_4` there.

## Where they are

| place | what | when |
| --- | --- | --- |
| `runs/<id>/metrics.jsonl` | the journal: a line a step, events too. The truth that all else is made from | at once |
| MLflow, the run | all values, each metric once at a step | seconds later |
| `runs/<id>/metrics.abandoned-<k>.jsonl` | lines that a resume from a checkpoint cut off the journal | at the resume |

The x axis is the step in all of them. A NaN or an infinity is `null` in the journal (its name stands under
`nonfinite`) and is counted, not sent, in MLflow.

Training never waits for MLflow. A process beside the trainer reads the journal and sends it: a process, because
MLflow's client needs about 0.1 ms of Python for a value, twice a value, and Python runs one thread at a time. If MLflow
is away, the process tries again, at most a minute apart, and says so once; `millrace sync runs/<id>` sends what is
missing later. A value that is sent twice is there once, since its time stamp comes from the journal.

MLflow cannot delete a point. A resume repeats the steps between its checkpoint and the crash: in MLflow the first value
of a metric at a step stays, in the journal and the report the last one. The same numbers computed again are the same in
both; times differ, and so may all of these few steps' values on another machine or with changed settings. If a run goes
back behind a published checkpoint (its newest one was damaged), or an alarm rolls it back, its MLflow run is marked
`millrace.superseded_by` and a new one gets the whole journal.
`benchmarks/tracking_cost.py` measures what all this costs a step.
"""

_HEADINGS = {
    "training": "The run",
    "rollout_corr": "Sampler and trainer",
    "actor": "Policy",
    "critic": "Scores, advantages and the critic",
    "reward": "Parts of the score and groups",
    "prompt_length": "Lengths",
    "global_seqlen": "Balance over ranks",
    "perf": "Performance",
    "timing_s": "Time",
    "val-core": "Validation",
    "events": "Events",
    "system": "Machine",
}
"""Title of the part that begins with a metric of this first word; others go on in the part before."""


def metrics_page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_INTRODUCTION, *_parts(), *_reference()]) + "\n"


def write_metrics_page(file: Path = METRICS_FILE) -> Path:
    """Write the page."""
    file.write_text(metrics_page(), encoding="utf-8")
    return file


def _parts() -> Iterator[str]:
    for first_word, docs in groupby(METRICS, key=lambda doc: doc.name.partition("/")[0]):
        if first_word in _HEADINGS:
            yield f"\n## {_HEADINGS[first_word]}\n"
            yield "| metric | unit | definition |"
            yield "| --- | --- | --- |"
        yield from map(_row, docs)


def _row(doc: MetricDoc) -> str:
    return f"| `{doc.name}` | {_cell(doc.unit)} | {_cell(doc.definition)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _reference() -> Iterator[str]:
    reasons = {metric.name: metric.reason for metric in ABSENT}
    yield "\n## The reference log\n"
    total, absent = len(REFERENCE_METRICS), len(reasons)
    yield f"The {total} metrics of the last step of a published veRL run (GRPO, Llama-3.2-1B, GSM8K, 8 GPUs)."
    yield f"{total - absent} have the same name and meaning here, {absent} have none here.\n"
    yield "| veRL | here |"
    yield "| --- | --- |"
    for name in REFERENCE_METRICS:
        doc = describe(name)
        here = f"`{doc.name}`" if doc is not None else f"not logged: {reasons[name]}"
        yield f"| `{name}` | {here} |"


if __name__ == "__main__":
    print(write_metrics_page().relative_to(METRICS_FILE.parents[1]))
