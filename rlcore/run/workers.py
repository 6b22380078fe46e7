"""The workers of a run, their data, and the checkpoint whose weights they hold."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Concatenate, Self

import pyarrow as pa
from pydantic import JsonValue

from rlcore.checkpoint.export import export_transformers
from rlcore.checkpoint.shards import RankSaver
from rlcore.checkpoint.state import LoopState
from rlcore.config import AlgoConfig, RunConfig, SuiteConfig
from rlcore.errors import DataError, RankMemoryError
from rlcore.evaluation.result import Response, ValidationResult
from rlcore.responses.audit import AuditFinding, Case, audit_reward
from rlcore.responses.table import response_table
from rlcore.rollout.engine import PASS_RATE_STREAM, make_requests
from rlcore.run.inputs import RunInputs, planned_initial_policy
from rlcore.run.problems import HeldOutProblems, Problems
from rlcore.run.record import RunRecord
from rlcore.runtime.cluster import restrict_ray
from rlcore.tracking.cost import GpuUse
from rlcore.trainer.experience import ExperienceCollector, ResponseSampler, ScoredResponse
from rlcore.trainer.step import StepResult, Trainer
from rlcore.trainer.validate import response_results, validate
from rlcore.types import Prompt
from rlcore.workers.canary import NUM_PROMPTS
from rlcore.workers.group import LocalGroup, P, R, WorkerGroup
from rlcore.workers.memory_plan import fit_run
from rlcore.workers.worker import Worker

MID_STEP = "in the middle of a step"
"""Value of `holds` during and after a failed step, when the weights belong to no checkpoint."""
SHORT_RANK = "one of several ranks ran out of memory before"
NUM_AUDITED = 8  # problems in the reward audit before the first step, which needs about a hundred scores


def start_workers(config: RunConfig, model_directory: str) -> WorkerGroup:
    """Start all ranks of a run with the model in `model_directory`."""
    if config.runtime.backend != "ray":
        return LocalGroup(config, model_directory)
    restrict_ray(config.runtime.ray_address)
    from rlcore.runtime.ray import RayGroup

    return RayGroup(config, model_directory)


class TrainingWorkers:
    """The ranks of a training, which start at their first use. `start` sets `config` and `group`."""

    config: RunConfig  # the settings, fitted to the memory of this host
    group: WorkerGroup

    def __init__(self, record: RunRecord, initial_policy: Path) -> None:
        self._config, self._layout, self._report = record.config, record.layout, record.report
        self._record, self._guard = record, record.guard
        self._open = ExitStack()
        self._is_started = False
        self._version = 0
        self.initial_policy = initial_policy
        self.found: Mapping[str, object] = {}  # facts about the ranks after their start, such as the device
        self.holds: str | None = None
        """The name of the checkpoint whose weights the workers hold, or `MID_STEP`, or None before the first load."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def unscored(self) -> tuple[int, str]:
        """The number of responses without a score, and the last error. Supervised training has no such responses."""
        return 0, ""

    def gpu_uses(self) -> list[GpuUse]:
        """Return the GPU use of each rank since its start, or an empty list on a CPU."""
        if not self._is_started or self.found.get("device_name") == "CPU":
            return []
        return [use for use in self.group.each(Worker.gpu_use) if use is not None]

    def load(self, checkpoint: str) -> None:
        """Load a checkpoint's weights into the workers and the engines, unless the workers hold these weights."""
        workers = self.start().group
        found = self._record.store.find(checkpoint)
        name = "start" if found is None else found.name
        if self.holds == name:
            return
        if found is None:
            if self.holds is not None:  # the workers hold trained weights
                workers.each(Worker.reset)
            version = 0
        else:
            saved = self._record.store.load_state(found)  # verifies every byte
            version = saved.policy_version
            with self._guard.phase("load"):
                workers.each(Worker.load, str(found.path))
        self.sync_weights(version)
        self.holds, self._version = name, version

    def sync_weights(self, version: int) -> None:
        """Send the policy's weights to the engines."""
        with self._guard.phase("update_weights"):
            weight_sync = self.start().group.each(Worker.sync_weights, version)[0]
        if weight_sync.warning:
            self._report({"event": "note", "text": weight_sync.warning})

    def export(self, target: Path, phase: str, *, facts: Mapping[str, JsonValue]) -> None:
        """Write the workers' weights in the transformers format. See `export_transformers`."""
        group, lora = self.start().group, self._config.model.lora
        with self._guard.phase(phase):
            weights, adapters = group.each(Worker.full_weights)[0], group.each(Worker.adapters)[0]
        with self._guard.phase(phase):
            export_transformers(weights, self.initial_policy, target, facts=facts, lora=lora, adapters=adapters)

    def each(self, verb: Callable[Concatenate[RankSaver, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of `RankSaver` on every rank, with the deadline of the phase `save_checkpoint`."""
        with self._guard.phase("save_checkpoint"):
            return self.start().group.each(Worker.save, verb, *args, **kwargs)

    def step(self, state: LoopState) -> StepResult:
        """Run one training step. The caller must then record the result and set `holds` to the step's checkpoint."""
        self.start()
        self.holds = MID_STEP
        is_profiled = self.config.runtime.profile.has_step(state.step + 1)
        if is_profiled:
            self.group.each(Worker.start_profile)
        result = self._take_step(state)
        if is_profiled:
            folder = self._layout.profile
            with self._guard.phase("profile"):
                self.group.each(Worker.stop_profile, str(folder), result.state.step)
            self._report({"event": "note", "text": f"profile of step {result.state.step} in {folder}"})
        self._version = result.state.policy_version
        return result

    def start(self) -> Self:
        """Start the workers unless they are already running."""
        if not self._is_started:
            self.config = fit_run(self._config, self._report)
            self._start()
            self._is_started, self.holds = True, None
        return self

    def _start(self) -> None:
        raise NotImplementedError

    def _take_step(self, state: LoopState) -> StepResult:
        raise NotImplementedError

    def _start_group(self, probe: Sequence[Prompt] = ()) -> None:
        """Start the ranks. `probe`: the prompts on which weight syncs are tested."""
        try:
            with self._guard.phase("start"):
                self.group = group = start_workers(self.config, str(self.initial_policy))
                self._open.callback(group.close)
                group.each(Worker.set_probe, probe)
                if times := self._guard.num_failures(RankMemoryError.failure_kind):
                    group.each(Worker.split_micro_batches, times)
                    self._report(
                        {"event": "note", "text": f"forward passes in {2**times} times the micro-batches: {SHORT_RANK}"}
                    )
                info = group.each(Worker.info)[0]
        finally:
            self._guard.stop.install()  # Ray replaces the handler of SIGTERM
        self._record.set_num_trained_parameters(info.num_trained)
        text = (
            f"{group.world_size} worker(s) on {info.device_name}: {info.num_parameters:,} parameters, {info.dtype}, "
            f"attention {info.attention}"
        )
        self._report({"event": "note", "text": text})
        names = ("device_name", "num_parameters", "dtype", "attention")
        self.found = {"num_workers": group.world_size, **{name: getattr(info, name) for name in names}}


class RunWorkers(TrainingWorkers):
    """The ranks of a reinforcement learning run."""

    _held_out: HeldOutProblems
    _sampler: ResponseSampler

    def __init__(self, record: RunRecord, inputs: RunInputs) -> None:
        super().__init__(record, planned_initial_policy(record.config, inputs.filtered_directory))
        self.inputs = inputs
        if record.config.is_supervised:  # these ranks only evaluate
            model = record.config.model
            if model.lora is not None:  # new adapters, which change nothing, on the weights of the export
                model = model.model_copy(update={"lora": model.lora.model_copy(update={"base": "native"})})
            self._config = record.config.model_copy(update={"model": model, "algo": AlgoConfig(), "critic": None})

    def use(self, model: Path) -> None:
        """Set the model that the ranks start with. Running ranks must not hold another model."""
        assert model == self.initial_policy or not self._is_started, "the ranks hold another model"
        self.initial_policy = model

    @property
    def unscored(self) -> tuple[int, str]:
        """The number of responses without a score, and the last error of the scorer or the environment."""
        return self.start()._sampler.unscored

    def validate(self, name: str, step: int) -> tuple[ValidationResult, pa.Table]:
        """Evaluate the workers' weights on the held-out problems. Return the result and the table of responses."""
        sampler = self.start()._sampler
        tables: list[pa.Table] = []

        def store(responses: Sequence[ScoredResponse], greedy: bool) -> None:
            rollouts, scores, texts = zip(*responses, strict=True)
            tables.append(response_table(step, rollouts, scores, texts, sampler.decode, validation=name, greedy=greedy))

        prompts = self._held_out.held_out(limited=name.startswith("step-"))
        with self._guard.phase("testing"):
            result = validate(sampler, prompts, name=name, step=step, policy_version=self._version, on_scored=store)
        return result, pa.concat_tables(tables)

    def validate_suite(self, suite: SuiteConfig, name: str, step: int) -> tuple[ValidationResult, str]:
        """Evaluate the weights on a suite, which has its own scorer. Return the result and the last scoring error."""
        problems = HeldOutProblems.for_suite(self.start().config, self.inputs, suite)
        is_evaluation = not self.inputs.has_training_rows
        prompts = problems.held_out(limited=is_evaluation or name.startswith("step-"))
        with ExitStack() as opened, self._guard.phase("testing"):
            sampler = problems.build_sampler(self.inputs.for_suite(suite.name), opened)(self.group)
            result = validate(
                sampler, prompts, name=name, step=step, policy_version=self._version, suite=problems.suite
            )
            return result, sampler.unscored[1]

    @property
    def problems(self) -> Problems:
        """The training and held-out problems of a run that trains."""
        problems = self.start()._held_out
        assert isinstance(problems, Problems), "an evaluation has no training rows"
        return problems

    def training_responses(self, prompts: Sequence[Prompt], num_samples: int, first_row: int) -> list[Response]:
        """Sample responses to training prompts, grouped by prompt. Random numbers depend on the run's seed and the
        row's index. `first_row`: the index of the first prompt."""
        config = self.start().config
        requests = make_requests(
            prompts, num_samples, run_seed=config.seed, stream=PASS_RATE_STREAM, step=0, first_group=first_row
        )
        with self._guard.phase("testing"):
            sampled = self._sampler.sample(requests, config.rollout.sampling, policy_version=self._version)
            return response_results(sampled)

    def audit(self, result: ValidationResult) -> tuple[AuditFinding, ...]:
        """Return the kinds of worthless responses that the scorer rewards. See `audit_reward`."""
        cases = [
            Case(each.prompt_text, each.ground_truth_json, tuple(response.text for response in each.samples[:2]))
            for each in result.problems[:NUM_AUDITED]
        ]
        scoring = self.start()._sampler.scoring
        with self._guard.phase("testing"), scoring.without_counting():
            return audit_reward(cases, scoring)

    def responses_of(self, result: StepResult) -> pa.Table:
        """Return the table of a step's responses."""
        experience, batch = result.experience, result.batch
        assert experience is not None, "a step of reinforcement learning has responses"
        assert batch is not None, "and their batch"
        return response_table(
            result.state.step,
            experience.rollouts,
            experience.scores,
            experience.texts,
            self._held_out.decode,
            batch=batch,
            policy_logprobs=result.logprobs_before,
        )

    def _start(self) -> None:
        is_trained = self.inputs.has_training_rows
        self._held_out = (Problems.read if is_trained else HeldOutProblems.of_run)(self.config, self.inputs)
        build_sampler = self._held_out.build_sampler(self.inputs, self._open)
        self._start_group(self._held_out.held_out(limited=True)[:NUM_PROMPTS])
        self._sampler = build_sampler(self.group)

    @cached_property
    def _trainer(self) -> Trainer:
        """The trainer, created at the first step because it needs the pass rates."""
        collector = ExperienceCollector(self._sampler, self.problems.stream, self.problems.row_sampler())
        failures = self._layout.failures
        return Trainer(self.config, self.group, collector, failures=failures, enter_phase=self._guard.phase)

    def _take_step(self, state: LoopState) -> StepResult:
        if not isinstance(self._held_out, Problems):
            step = f"step {state.step + 1}"
            raise DataError(f"{step}: this is an evaluation, which has held-out problems only; start a run")
        return self._trainer.step(state, epoch=self._held_out.stream.epoch_at(state.num_prompts_drawn))
