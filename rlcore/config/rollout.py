"""Settings of the rollout engine, the scoring, the sandbox, the episodes and the evaluation."""

from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rlcore.config.algo import GROUP_ADVANTAGES
from rlcore.config.base import Bound, EffectiveWhen, MayChange, Rule, Run, Section, is_function_name, rule
from rlcore.config.data import ALL_SOURCES, BY_ROW, JUDGE, PROGRAMS, MixtureData, TaskData, reserved
from rlcore.config.problems import Problem

_OF_VLLM = EffectiveWhen(".engine", "vllm")
ON_GPUS = EffectiveWhen("runtime.device", unless="cpu")
_SAMPLED = EffectiveWhen(".temperature")


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


class SamplingConfig(Section):
    """The temperature and top-p with which responses are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """The sampling temperature. The log-probabilities are also computed at this temperature. With 0, the likeliest
    token is selected."""
    top_p: Annotated[float, _SAMPLED] = Field(default=1.0, gt=0, le=1)
    """The limit of top-p sampling: tokens are sampled only from the likeliest tokens whose probabilities add up to this
    number."""


class RolloutConfig(Section):
    """The engine that generates responses."""

    engine: Literal["hf", "vllm", "none"] = "hf"
    """The kind of engine: transformers (`hf`, slow and simple), or vLLM (`vllm`) in the worker's process. Millrace sets
    `none` for a warm start that samples no responses."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """The number of responses to each prompt, which is the group size of GRPO."""
    max_response_tokens: int = Field(default=1_024, ge=1)
    """The largest number of tokens in a response."""
    finish_share: float = Field(default=1.0, gt=0.5, le=1)
    """The share of the started groups that a step waits for. A group is all responses to one prompt. A step starts
    trainer.batch_size / finish_share groups and trains on the first batch_size groups that finish. The other groups
    continue in the next step."""
    sampling: SamplingConfig = SamplingConfig()
    """The sampling of training responses. A temperature of 1 and a top_p of 1 keep the policy gradient unbiased."""
    skip_special_tokens: bool = True
    """Remove special tokens from a response's text before it is scored, recorded, or passed to environments and tools.
    Tags such as `<think>`, `</answer>` and `</tool_call>` are kept. If false, all special tokens are kept, including a
    response's end token."""
    max_num_seqs: Annotated[int, MayChange] = Field(default=512, ge=1)
    """The largest number of sequences that one engine decodes at a time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The data type of the engine's weights and matrix products. `auto` is the type of the trainer (`model.dtype`)."""
    tensor_parallel_size: Annotated[int, MayChange, _OF_VLLM, Bound("divide", "runtime.num_workers")] = Field(
        default=1, ge=1
    )
    """The number of workers, each with a GPU, that share one vLLM engine. Increase this number only if one GPU has too
    little memory for the model, vLLM's cache and the training together."""
    memory_share: Annotated[float, MayChange, _OF_VLLM] = Field(default=0.5, gt=0, lt=1)
    """The share of the GPU's memory that vLLM may use for weights and cache."""
    sleep_level: Annotated[Literal[0, 1, 2], MayChange, _OF_VLLM, ON_GPUS] = 2
    """The GPU memory that vLLM frees during training. With 0, vLLM frees no memory. With 1, vLLM frees the cache and
    moves the weights to host memory. With 2, vLLM frees the cache and discards the weights, and the next weight sync
    sends the weights again."""
    enforce_eager: Annotated[bool, MayChange, _OF_VLLM, ON_GPUS] = False
    """Run vLLM without CUDA graphs."""
    max_batched_tokens: Annotated[
        int | None,
        MayChange,
        _OF_VLLM,
        Bound("be at least", "rollout.max_num_seqs", "Raise it, lower max_num_seqs, or leave it null"),
    ] = Field(default=None, ge=1)
    """The largest number of tokens that vLLM computes in one forward pass. A larger number leaves less memory for
    vLLM's cache. If null, vLLM chooses the number."""
    prefix_caching: Annotated[bool, MayChange, _OF_VLLM] = True
    """Let vLLM compute the keys and values of a prompt only once for all responses to the prompt."""
    canary_bound: Annotated[float | None, MayChange, _OF_VLLM] = Field(default=None, gt=0)
    """The limit of the mean absolute difference between the log-probabilities of vLLM and the trainer after a weight
    sync. A larger difference is reported. If some tensor in vLLM cannot be compared with the trainer's tensor, a larger
    difference also stops the run. If null, the limit is 4 times the first difference, but at least 0.0001 (float32) or
    0.02 (bfloat16)."""
    checks = (
        rule(".samples_per_prompt", "algo.advantage",
             "must be at least 2 with an advantage that compares the responses to a prompt",
             lambda own, run: run.algo.advantage not in GROUP_ADVANTAGES or own.samples_per_prompt >= 2,
             "Set it to 2 or more (8 is usual), or algo.advantage to gae, reinforce_pp or remax"),
        rule(".sampling.temperature", "", "must be over 0 for training",
             lambda own, _: own.sampling.temperature > 0, "Use 1, which is unbiased"),
        rule(".engine", "", "must be hf or vllm: training needs responses",
             lambda own, _: own.engine != "none", "Set rollout.engine=vllm, or hf where there is no vLLM"),
        rule(".finish_share", "trainer.batch_size", "must be 1, or leave a group to carry",
             lambda own, run: own.finish_share == 1 or run.prompts_in_progress > run.trainer.batch_size,
             "Set it to trainer.batch_size / (trainer.batch_size + 1) or less, or to 1"),
        rule(".finish_share", "data.environment algo.advantage algo.dynamic_sampling.enabled",
             "must be 1 with an environment, remax or dynamic sampling, which need all responses of a step",
             lambda own, run: own.finish_share == 1
             or not (run.data.environment or run.algo.advantage == "remax" or run.algo.dynamic_sampling.enabled),
             "Leave it out"),
        rule(".finish_share", "algo.importance.mode trainer.old_logprobs",
             "must be 1 without an importance correction, since the policy before sampled the carried tokens",
             lambda own, run: own.finish_share == 1
             or (run.algo.importance.mode != "off" and run.trainer.old_logprobs != "behavior"),
             "Set algo.importance.mode=truncate and trainer.old_logprobs=auto"),
        rule(".tensor_parallel_size", ".engine", "must be 1 without vLLM",
             lambda own, _: own.engine == "vllm" or own.tensor_parallel_size == 1, "Set rollout.engine=vllm, or 1"),
        # vLLM gives log-probabilities before temperature, or after temperature and top_p; the trainer needs those
        # between.
        rule(".sampling.top_p", ".sampling.temperature .engine",
             "must be 1 with a temperature and rollout.engine=vllm",
             lambda own, _: own.engine != "vllm" or 1 in (own.sampling.top_p, own.sampling.temperature),
             "Set one of the two to 1 (1 and 1 keep the gradient unbiased), or use rollout.engine=hf"),
    )  # fmt: skip


class JudgeConfig(Section):
    """A model that scores responses, behind an OpenAI-compatible endpoint (`data.scorer=data.judge:score`)."""

    url: Annotated[str, MayChange] = ""
    """The endpoint's address without `/chat/completions`, such as `http://127.0.0.1:8000/v1`. Requests use no proxy and
    follow no redirect."""
    model: str = ""
    """The name of the model at the endpoint."""
    key_variable: Annotated[str, MayChange] = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """The environment variable with the endpoint's API key. If '', no key is sent."""
    prompt: str = (
        "Judge the answer to a problem.\n\nReference, as JSON:\n{ground_truth}\n\nAnswer:\n{response}\n\n"
        'End with a JSON object alone on its line: {"score": X}, where X is a number from 0 (wrong) to 1 (right).'
    )
    """The prompt for the judge. The placeholders `{response}` (required) and `{ground_truth}` (as JSON) are filled in.
    The judge's output must end with `{"score": X}` or `<score>X</score>` and contain only one score."""
    highest: float = Field(default=1.0, gt=0)
    """The best score that the judge can give. The worst score is 0. The judge's score divided by the best score becomes
    the part `judge` of a response's score."""
    levels: int | None = Field(default=None, ge=2)
    """The number of evenly spaced scores from 0 to `highest` that the judge can give. A JSON schema (`response_format`)
    then restricts the judge's output to `{"score": X}`. If null, the output is free text."""
    rules: str = ""
    """A second scorer, as `module:function`. The total of a response is then the part `judge` plus the second scorer's
    total. The second scorer's parts become further parts of the response's score."""
    tries: Annotated[int, MayChange] = Field(default=3, ge=1)
    """The largest number of requests for one response. A request is repeated after a lost connection or an HTTP status
    of 408, 425, 429, or 500 and above. The waits between requests are 0.5, 1, 2, ... seconds."""
    deadline_s: Annotated[float, MayChange] = Field(default=30.0, gt=0)
    """The time limit for the judge's score of one response, in seconds, including all repeated requests."""
    max_tokens: int = Field(default=512, ge=1)
    """The largest number of tokens that the judge may generate for one request."""
    effective = EffectiveWhen("data.scorer", f"{JUDGE} {BY_ROW}", remedy=f"Set data.scorer={JUDGE}")
    checks = (
        rule(".url", "data.scorer",
             "must be an http or https address without user, password or query with a scorer data.judge:score, else '' "
             "too",
             lambda own, run: _is_endpoint(own.url) or not (run.data.scorer == JUDGE or own.url),
             "Such as http://127.0.0.1:8000/v1"),
        rule(".model", "data.scorer", "must be given with a scorer data.judge:score",
             lambda own, run: run.data.scorer != JUDGE or bool(own.model),
             "Use a name that the endpoint lists at /models"),
        rule(".prompt", "", "must have a place {response}",
             lambda own, _: "{response}" in own.prompt, "Write {response} where the response comes"),
        rule(".rules", "", "must be `module:function` of a scorer other than the judge, or ''",
             lambda own, _: not own.rules or (is_function_name(own.rules) and own.rules != JUDGE),
             "Such as data.countdown:score"),
    )  # fmt: skip


class RewardConfig(Section):
    """The processes that compute the scores of responses, and the weights of the parts of a score."""

    weights: dict[str, float] = Field(default_factory=dict)
    """The weight of each part of a score (`total` is the scorer's total). The reward is the sum of weight x part. If
    {}, the reward is the scorer's total. A response counts as unscored if its score lacks a part that has a weight."""

    num_processes: Annotated[int, MayChange] = Field(default=0, ge=0)
    """The number of scoring processes. With 0, the scorer runs in the trainer's process, so it must be trusted code
    that never hangs."""
    deadline_s: Annotated[float, MayChange, EffectiveWhen(".num_processes")] = Field(default=5.0, gt=0)
    """The time limit for scoring one response, in seconds. If scoring takes longer, the scoring process is replaced,
    and the response has no score."""
    judge: JudgeConfig = JudgeConfig()
    audit: Annotated[bool, MayChange, EffectiveWhen("data.environment", "''")] = True
    """Score some worthless responses before the first step. If some of them get a reward, an event reports them."""
    max_unmet_references: Annotated[float, MayChange] = Field(default=0.01, ge=0, le=1)
    """The largest accepted share of a split's rows whose reference answer or solution does not get the full score. A
    check before the run refuses a dataset with a larger share. With a smaller share, the check only reports the
    rows."""
    checks = (
        rule(".num_processes", "data.scorer",
             "must be 1 or more if data.math:score may score a response (with this data.scorer, or with data=parquet "
             "without data.scorer), because that scorer may need too long",
             lambda own, run: isinstance(run.data, MixtureData) or own.num_processes > 0
             or run.data.scorer not in ("data.math:score", BY_ROW), "Set reward.num_processes=2"),
        rule(".num_processes", "data.scorer",
             "must be 1 or more with data.scorer=data.reasoning_gym:score or data.verifiers:score, which call another "
             "package on any response",
             lambda own, run: run.data.scorer not in ("data.reasoning_gym:score", "data.verifiers:score")
             or own.num_processes > 0,
             "Set reward.num_processes=2"),
        rule(".num_processes", "data.scorer",
             "must be 1 or more with a scorer data.judge:score: so many responses are scored concurrently",
             lambda own, run: run.data.scorer != JUDGE or own.num_processes > 0, "Set reward.num_processes=16"),
        rule(".deadline_s", "sandbox.time_s",
             "must be above sandbox.time_s with data.scorer=data.code:score, or a hanging program has no score, and "
             "not 0",
             lambda own, run: run.data.scorer != PROGRAMS or own.deadline_s > run.sandbox.time_s,
             "Set sandbox.time_s=3 reward.deadline_s=5"),
        rule(".deadline_s", ".judge.deadline_s data.scorer",
             "must be above reward.judge.deadline_s with a scorer data.judge:score",
             lambda own, run: run.data.scorer != JUDGE or own.deadline_s > own.judge.deadline_s,
             "Set reward.deadline_s=35"),
        rule(".weights", "data.environment",
             "must be empty with an environment, whose rewards are added up over an episode",
             lambda own, run: not run.data.environment or not own.weights,
             "Leave it out, and weigh in the environment"),
    )  # fmt: skip


class SandboxConfig(Section):
    """The limits of programs in a model's responses (`data.code:score`) and tool calls (`data.code:run_python`)."""

    time_s: float = Field(default=3.0, gt=0, le=600)
    """The time limit for running a program on all its tests, in seconds of wall time. Tests that are not finished after
    this time fail."""
    memory_mb: int = Field(default=512, ge=64)
    """The largest address space of the program, in MB of 2**20 bytes. The program may have only one process."""
    file_mb: int = Field(default=16, ge=1)
    """The largest size of the program's /tmp, of each file that it writes, and of its output, in MB of 2**20 bytes."""
    output_kb: int = Field(default=64, ge=1)
    """The largest amount of a program's output that is kept, in kB of 1,024 bytes. Further output is discarded."""
    allow_weak: bool = False
    """Run programs even if the machine has no sandbox. Such programs have limits of time, memory and files, but can
    reach the network and all files of the user who runs Millrace."""
    effective = EffectiveWhen(
        "data.scorer data.environment validation.suites",
        unless="'' [] data.number_guessing:Game data.countdown:score data.gsm8k:score "
        "data.math:score data.number_guessing:score data.reasoning_gym:score data.sort_digits:score",
        why="no scorer that runs programs",
        remedy="Choose data=code",
    )


class EpisodeConfig(Section):
    """Responses with several turns. An environment replies after each turn (`data.environment`).

    An episode consists of all turns of one response and the replies to them. `rollout.max_response_tokens` limits its
    total length. The episode ends with a turn that reaches this limit. A reply that leaves no room for another token is
    omitted, and the episode ends."""

    tools: tuple[str, ...] = ()
    """The functions that the model may call, each as `module:function`, for
    data.environment=rlcore.rollout.tools:Tools. Each function needs type hints and a docstring with `Args:`, which the
    chat template shows to the model."""
    server: Annotated[str, MayChange] = ""
    """The address of the server for data.environment=data.openenv:OpenEnv, such as `http://127.0.0.1:8000`, without a
    key."""
    server_key_variable: Annotated[str, MayChange] = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """The environment variable with the server's key, which is sent as a bearer token. If '', no key is sent."""
    max_turns: int = Field(default=8, ge=1)
    """The largest number of turns that the model writes in an episode. A reply of the environment to the last of these
    turns is dropped."""
    max_turn_tokens: int = Field(default=0, ge=0)
    """The largest number of tokens in a turn of the model. The turn ends at this number. 0: no limit."""
    max_tool_tokens: int = Field(default=256, ge=1)
    """The largest number of tokens in a reply of the environment. A longer reply is cut at this number of tokens, or at
    16 times as many characters."""
    deadline_s: Annotated[float, MayChange] = Field(default=10.0, gt=0)
    """The time limit for one reply of the environment, in seconds. If the reply takes longer, the environment's process
    is replaced. The episode has no score and is not used for training. The new process repeats the other episodes of
    the old process."""
    num_processes: Annotated[int, MayChange] = Field(default=2, ge=1)
    """The number of environment processes. Each process replies to one turn at a time."""
    reward_per_turn: Annotated[bool, EffectiveWhen("algo.advantage", "gae reinforce_pp")] = False
    """Assign the reward of each turn to the last token of the turn. If false, the last token of the episode gets the
    sum of all rewards."""
    effective = EffectiveWhen("data.environment")
    checks = (
        rule(".tools", "", "must be a list of `module:function`, each name once",
             lambda own, _: all(map(is_function_name, own.tools))
             and len({tool.partition(":")[2] for tool in own.tools}) == len(own.tools),
             "Such as [data.arithmetic:calculate]"),
        rule(".tools", "data.environment",
             "must name a tool or more with data.environment=rlcore.rollout.tools:Tools, which calls them",
             lambda own, run: run.data.environment != "rlcore.rollout.tools:Tools" or bool(own.tools),
             "Such as [data.arithmetic:calculate]"),
        rule(".server", "", "must be http:// or https:// with host and port, without user, password and query, or ''",
             lambda own, _: not own.server or _is_endpoint(own.server),
             "Such as http://127.0.0.1:8000, with a key in the variable that episode.server_key_variable names"),
        rule(".server", "data.environment", "must name the server of data.environment=data.openenv:OpenEnv",
             lambda own, run: not run.data.environment.startswith("data.openenv:") or bool(own.server),
             "Such as http://127.0.0.1:8000"),
    )  # fmt: skip


class EvaluationConfig(Section):
    """The evaluation of a model on held-out problems."""

    every_steps: int = Field(default=20, ge=0)
    """The number of steps between two validations. With 0, validations run only before and after training."""
    max_problems: int = Field(default=0, ge=0)
    """The largest number of held-out problems in a validation. Each suite has its own limit. 0: all problems."""
    samples_per_problem: int = Field(default=4, ge=1)
    """The number of sampled responses to each problem, for mean_at_k and pass_at_k."""
    sampling: SamplingConfig = SamplingConfig()
    greedy: bool = True
    """Also evaluate one greedy response to each problem."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """The confidence level of the metrics' confidence intervals."""
    num_resamples: int = Field(default=1_000, ge=100)
    """The number of bootstrap resamples of the problems, at least 1,000. The bootstrap gives the confidence intervals
    of differences, and of metrics that can have values other than 0 and 1 for a single problem."""
    checks: ClassVar[tuple[Rule, ...]] = (
        rule(".num_resamples", "",
             "must be at least 1,000, for the ends of an interval depend on the draws of fewer",
             lambda own, _: own.num_resamples >= 1_000, "Leave it out"),
        rule(".samples_per_problem", ".sampling.temperature", "must be 1 with validation.sampling.temperature=0",
             lambda own, _: own.sampling.temperature > 0 or own.samples_per_problem == 1,
             "Set it to 1, or sample at temperature 1; validation.greedy evaluates a greedy response as well"),
    )  # fmt: skip

    @property
    def evaluation(self) -> "EvaluationConfig":
        """The evaluation settings as a plain `EvaluationConfig`, without the fields that a subclass adds."""
        return EvaluationConfig(**{name: getattr(self, name) for name in EvaluationConfig.model_fields})

    def evaluates_as(self, other: "EvaluationConfig") -> bool:
        """Return whether `other` has the same values, with the possible exception of `every_steps`. If so, an
        evaluation of the same weights gives the same metrics with both settings."""
        return self.evaluation == other.evaluation.model_copy(update={"every_steps": self.every_steps})

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return whether a run of `total_steps` steps validates after this step. Step 0 means before training."""
        return step in (0, total_steps) or (self.every_steps > 0 and step % self.every_steps == 0)


class SuiteConfig(EvaluationConfig):
    """A held-out dataset in addition to the run's data, with its own task, scorer and sampling."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")
    """The suite's name in metrics: `val-core/<name>/...`."""
    data: TaskData
    """The settings of the suite's task, including the key `task` but without `seed`. Only the held-out rows are
    used."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """The seed for drawing the suite's problems and for sampling all tokens. It is independent of the run's seed."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """The largest number of tokens in a prompt. Longer prompts are dropped. Null: filter.max_prompt_tokens."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """The largest number of tokens in a response. If null, the limit is rollout.max_response_tokens."""


def _suites_have_names_and_room(validation: "ValidationConfig", run: Run) -> Problem | None:
    if names := reserved(suite.name for suite in validation.suites):
        says = f"must have different names, and none {ALL_SOURCES}, the name of all held-out problems together"
        return Problem(".suites", says, names, "Write another `name` into the file")
    prompt, response = run.filter.max_prompt_tokens, run.rollout.max_response_tokens
    for suite in validation.suites:
        longest = (suite.max_prompt_tokens or prompt) + (suite.max_response_tokens or response)
        if longest > prompt + response:
            says = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and response"
            remedy = f"Lower the suite's limits, or raise the run's by {longest - prompt - response}"
            return Problem(".suites", says, f"{suite.name}: {longest}, the run {prompt + response}", remedy)
    return None


class ValidationConfig(EvaluationConfig):
    """The evaluation of a model on the held-out problems of the run's data and on suites."""

    suites: tuple[SuiteConfig, ...] = ()
    """Further held-out sets: names in `conf/suite`, paths of suites' files, or contents of such files (docs/data.md).
    Suites affect neither the best checkpoint nor the objective of a sweep."""
    checks = (
        rule(".suites", "", "must not name a seed in their data",
             lambda own, _: all(suite.data.seed == MixtureData().seed for suite in own.suites),
             "Set the suite's own seed, which fixes its rows and its responses"),
        Rule((".suites", "filter.max_prompt_tokens", "rollout.max_response_tokens"), _suites_have_names_and_room),
    )  # fmt: skip

    def is_of_suite(self, metric: str) -> bool:
        """Return whether `metric` is the name of a suite's metric. The metrics of a data source do not count, even if
        the data source has a name such as `<suite>/x`."""
        kinds = ("reward", "acc")
        return metric.startswith(tuple(f"val-core/{suite.name}/{kind}/" for suite in self.suites for kind in kinds))
