"""Settings of the rollout engine, the scoring pool and validation."""

from typing import Annotated, Literal

from pydantic import Field

from rlcore.config.base import Bound, Section
from rlcore.config.data import TaskData


class SamplingConfig(Section):
    """How answers are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy; log-probabilities are those at this temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of probability kept."""


class RolloutConfig(Section):
    """The engine that writes answers."""

    engine: Literal["hf", "vllm", "none"] = "hf"
    """hf: transformers, slow and obvious. vllm: vLLM in the worker's process. none: no answers, for the workers of a
    warm start; a run needs one of the others."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Answers to each prompt: the group size of GRPO."""
    max_response_tokens: int = Field(default=1_024, ge=1)
    """Longest answer, in tokens."""
    sampling: SamplingConfig = SamplingConfig()
    """How training answers are drawn. Temperature 1 and top_p 1 keep the policy gradient unbiased."""
    max_num_seqs: int = Field(default=512, ge=1)
    """Sequences decoded together."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights and products. auto: that of the trainer (`model.dtype`)."""
    tensor_parallel_size: Annotated[int, Bound("divide", "runtime.num_workers")] = Field(default=1, ge=1)
    """Workers, and with them GPUs, that share one vLLM engine: each holds a part of every matrix. For a model whose
    weights and cache do not fit one GPU beside training; one that fits is faster with an engine for each GPU."""
    memory_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the GPU's memory that vLLM may take for its weights and cache; `max_num_seqs` answers may need less."""
    sleep_level: Literal[0, 1, 2] = 2
    """What vLLM frees of the GPU while training runs: 0 nothing, 1 the cache, and its weights wait in the host's
    memory, 2 cache and weights, which the next hand-over brings back."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs."""
    max_batched_tokens: Annotated[
        int | None, Bound("be at least", "rollout.max_num_seqs", "Raise it, lower max_num_seqs, or leave it null")
    ] = Field(default=None, ge=1)
    """Tokens that vLLM computes in one pass, prompts and answers together. Where `memory_share` has no room for all
    answers, vLLM keeps memory for such a pass, and its cache lacks it. None: vLLM's own choice."""
    prefix_caching: bool = True
    """Whether the answers to one prompt share its keys and values in vLLM."""
    canary_bound: float | None = Field(default=None, gt=0)
    """After each hand-over to vLLM some prompts of the run are answered, and the log-probabilities compared with the
    trainer's: a mean absolute difference above this is told, and stops the run where a tensor could not be compared.
    None: 4 times that of the first hand-over, at least 0.0001 in float32 and 0.02 in bfloat16."""


class JudgeConfig(Section):
    """A model that judges answers, behind an OpenAI-compatible endpoint (`data.scorer=data.judge:score`)."""

    url: str = ""
    """Where the endpoint is, without `/chat/completions`: `http://127.0.0.1:8000/v1`. No proxy is used, no redirection
    followed."""
    model: str = ""
    """Its name of the model."""
    key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Name of the environment variable that holds the endpoint's key; '' for an endpoint without one."""
    prompt: str = (
        "Judge the answer to a problem.\n\nReference, as JSON:\n{ground_truth}\n\nAnswer:\n{response}\n\n"
        'End with a JSON object alone on its line: {"score": X}, where X is a number from 0 (wrong) to 1 (right).'
    )
    """What the model is asked; `{response}` and `{ground_truth}` (as JSON) are put in. It must end its text with
    `{"score": X}` or `<score>X</score>`, and have no second one."""
    highest: float = Field(default=1.0, gt=0)
    """Best score; the part `judge` is the score over it, 0 to 1. A score outside 0 to this is no verdict."""
    levels: int | None = Field(default=None, ge=2)
    """Structured output: by a JSON schema (`response_format`) it can write `{"score": X}` alone, without reasons,
    X one of so many numbers, evenly from 0 to `highest`; so a small model gives a verdict too. None: free text."""
    rules: str = ""
    """`module:function` of a scorer beside the judge: its parts, and its total added to the judge's; '' for none."""
    tries: int = Field(default=3, ge=1)
    """Requests at most for one answer: a lost connection and status 408, 425, 429 and 500 and above are tried again,
    after 0.5, 1, 2, ... seconds."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Seconds for one answer, all tries together."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest text of the judge, in tokens."""
    cache: str = ""
    """File that keeps verdicts by what was asked, for all processes and later runs; '' keeps them in each process."""


class RewardConfig(Section):
    """Scores: the pool of processes that computes them, and how several become one."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of a score: the total becomes the sum of weight x part; `total` is the scorer's own. {}: the
    scorer's total. An answer whose score lacks a part that has a weight has no score."""

    num_processes: int = Field(default=0, ge=0)
    """Scoring processes; 0 scores in the trainer's own process (trusted, bounded scorers only)."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Seconds for one answer; over it, its process is killed and replaced and the answer has no score."""
    judge: JudgeConfig = JudgeConfig()
    """A model as judge."""
    audit: bool = True
    """Whether the scorer is given some answers that must not score before the first step (nothing, junk, the prompt, a
    form without content, answers to other problems). An event tells of those that do. It changes no number."""


class SandboxConfig(Section):
    """Limits of a program that a model wrote: an answer (`data.code:score`) or a call (`data.code:run_python`)."""

    time_s: float = Field(default=3.0, gt=0, le=600)
    """Seconds of wall time for a program, with all its tests together; it is killed then, and the tests left fail."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of the program, which is one process."""
    file_mb: int = Field(default=16, ge=1)
    """Room in its /tmp, and the longest file or output."""
    output_kb: int = Field(default=64, ge=1)
    """Output that is kept; the rest is cut off."""
    allow_weak: bool = False
    """Run programs where they cannot be shut in (no bubblewrap, no user namespaces): under limits of time, memory and
    files for each process alone, with the network and all files of this user in reach."""


class EpisodeConfig(Section):
    """Answers of several turns, with an environment's replies between them (`data.environment`).

    `rollout.max_response_tokens` is the length of a whole episode, replies included: a turn that reaches it is the
    last, and a reply that leaves no token after it is dropped, which ends the episode.
    """

    tools: tuple[str, ...] = ()
    """Functions that the model may call, each as `module:function`, for data.environment=rlcore.rollout.tools:Tools. A
    chat template shows them to the model, so each needs type hints and a docstring with `Args:`."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of the model. The last one is judged too; what the environment replies to it is dropped."""
    max_turn_tokens: int = Field(default=0, ge=0)
    """Longest turn of the model, in tokens: one that reaches it ends there, and the episode goes on. 0: no limit."""
    max_tool_tokens: int = Field(default=256, ge=1)
    """Longest reply of the environment, in tokens, and in characters 16 times that: what is beyond is cut off."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Seconds for one reply. Over it the environment's process is killed and replaced, and the episode has no score and
    no part in training; other episodes of that process are repeated in the new one."""
    num_processes: int = Field(default=2, ge=1)
    """Processes of the environments; each has one turn at a time."""
    reward_per_turn: bool = False
    """Whether each turn's reward stands at its last token, for advantages that know when a reward came. Off: the sum of
    all stands at the episode's last token."""


class JudgingConfig(Section):
    """How a model is judged on held-out problems."""

    every_steps: int = Field(default=20, ge=0)
    """Steps between two validations in training; 0: only before and after."""
    max_problems: int = Field(default=0, ge=0)
    """Held-out problems used in training, and of a suite in an evaluation; 0: all."""
    samples_per_problem: int = Field(default=4, ge=1)
    """Sampled answers to each problem, for mean@k and pass@k."""
    sampling: SamplingConfig = SamplingConfig()
    """How validation answers are drawn."""
    greedy: bool = True
    """Also judge one greedy answer to each problem."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Level of the bootstrap intervals."""
    num_resamples: int = Field(default=1_000, ge=100)
    """Bootstrap resamples over problems."""

    @property
    def judging(self) -> "JudgingConfig":
        """These settings alone, without what a subclass adds."""
        return JudgingConfig(**{name: getattr(self, name) for name in JudgingConfig.model_fields})

    def judges_as(self, other: "JudgingConfig") -> bool:
        """Whether both come to the same figures of the same weights: they do whatever `every_steps` says."""
        return self.judging == other.judging.model_copy(update={"every_steps": self.every_steps})

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether a training of so many steps is judged after this one, 0 being before the first."""
        return step in (0, total_steps) or (self.every_steps > 0 and step % self.every_steps == 0)


class SuiteConfig(JudgingConfig):
    """A held-out set of its own, with its own task, scorer and sampling, and without a training part."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")
    """Its name in metrics: `val-core/<name>/...`."""
    data: TaskData
    """Settings of a task, `task` among them. The held-out rows are taken and nothing else."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Fixes the problems that a task draws and every sampled token, whatever the seed of the run."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt kept, in tokens; a longer one is left out. None: filter.max_prompt_tokens."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, in tokens. None: rollout.max_response_tokens."""


class ValidationConfig(JudgingConfig):
    """How a model is judged on held-out problems: those of its own data, and suites."""

    suites: tuple[SuiteConfig, ...] = ()
    """Further held-out sets, each a name in `conf/suite`, the path of a file of that form, or its content
    (docs/data.md). They decide neither which checkpoint is best nor the objective of a sweep."""

    def is_of_suite(self, metric: str) -> bool:
        """Whether a metric is a figure of a suite. A data source `<suite>/hard` is none."""
        kinds = ("reward", "acc")
        return metric.startswith(tuple(f"val-core/{suite.name}/{kind}/" for suite in self.suites for kind in kinds))
