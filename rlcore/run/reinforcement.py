"""The reinforcement learning of a run: its workers, its training and its validations."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from rlcore.checkpoint.catalog import LoopState, name_of
from rlcore.config import AlgoConfig, SuiteConfig
from rlcore.errors import DataError
from rlcore.evaluation.result import Response, ValidationResult
from rlcore.responses.audit import AuditFinding, Case, audit_reward
from rlcore.responses.table import response_table
from rlcore.rollout.engine import PASS_RATE_STREAM, make_requests
from rlcore.run.initial_policy import planned_initial_policy
from rlcore.run.layout import RunInputs, suite_fingerprint
from rlcore.run.problems import HeldOutProblems, Problems
from rlcore.run.record import RunRecord
from rlcore.run.training import Training, TrainingWorkers
from rlcore.score import HELD_OUT_REWARD
from rlcore.trainer.experience import ExperienceCollector, ResponseSampler, ScoredResponse, all_unscored_error
from rlcore.trainer.step import StepResult, Trainer
from rlcore.trainer.validate import response_results, validate
from rlcore.types import Prompt
from rlcore.workers.canary import NUM_PROMPTS

NUM_AUDITED = 8  # problems in the reward audit before the first step, which needs about a hundred scores


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
        """The number of responses so far that could not be scored, and the last error of the scorer or the
        environment."""
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

    def training_prompts(self) -> list[Prompt]:
        """Load the initial policy, and return the training prompts of all data sources."""
        self.load("start")
        return [prompt for part in self.problems.train for prompt in part]

    def training_responses(self, prompts: Sequence[Prompt], num_samples: int, first_row: int) -> list[Response]:
        """Sample responses to training prompts, grouped by prompt. `first_row`: the index of `prompts[0]` among all
        training prompts. The run's seed and a prompt's index determine the random numbers."""
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


class RunTraining(Training):
    """The reinforcement learning of a run, with evaluations on held-out problems."""

    workers: RunWorkers

    def _evaluate(self, state: LoopState) -> tuple[Mapping[str, float], LoopState]:
        step, total = state.step, self._config.trainer.total_steps
        rates = self.workers.problems.pass_rates if step == 0 else None
        found: dict[str, float] = {} if rates is None else dict(rates.metrics())
        if self._config.validation.is_due(step, total):
            found |= self.evaluate(name_of(step), step).metrics()
            score = found.get(HELD_OUT_REWARD, -math.inf)
            state = replace(state, best_metric=score, best_step=step) if score > state.best_metric else state
        for suite in self._config.validation.suites:
            if suite.is_due(step, total):
                found |= self.evaluate(name_of(step), step, suite).metrics()
        if step == 0 and self._config.reward.audit and not self._config.data.environment:
            self._audit_reward()
        return found, state

    def _write_responses(self, result: StepResult) -> None:
        if self.record.answers.stores_step(result.state.step):
            self.record.answers.add(self.workers.responses_of(result))

    def _audit_reward(self) -> None:
        if findings := self.workers.audit(ValidationResult.read(self.file_of(name_of(0)))):
            text = f"{self._config.data.scorer} pays for responses that are no answers: {'; '.join(map(str, findings))}"
            self.record.record_event("reward_audit", 0, {"text": text, "kinds": [finding.kind for finding in findings]})

    def evaluate(self, name: str, step: int, suite: SuiteConfig | None = None) -> ValidationResult:
        """Evaluate the weights on held-out problems or a suite. Store the result. Raises UnscoredError if no response
        has a score."""
        if suite is None:
            result, responses = self.workers.validate(name, step)
            self._require_metrics(result, None)
            self.record.answers.write_validation(name, responses)
            self.record.report({"event": "validated", "name": name, "step": step, "summary": dict(result.metrics())})
            self.record.record_unscored(step, *self.workers.unscored)
        else:
            result, reason = self.workers.validate_suite(suite, name, step)
            self._require_metrics(result, suite)
            if count := len(result.failures):
                which = f"suite {suite.name}: {count:,} response(s) have no score"
                text = f"{which} and are in no metric; the last error: {reason}"
                data = {"suite": suite.name, "num_answers": count, "reason": reason, "text": text}
                self.record.record_event("scorer_failed", step, data)
        result.write(self.file_of(result.name, suite))
        return result

    def _require_metrics(self, result: ValidationResult, suite: SuiteConfig | None) -> None:
        if result.problems and not result.scored_only.problems:
            data = self._config.data if suite is None else suite.data
            where = f"validation {result.name}" if suite is None else f"suite {suite.name}"
            raise self._add_remedy(all_unscored_error(where, data.environment or data.scorer, result.failures))

    def evaluate_checkpoint(
        self, checkpoint: str, name: str, suite: SuiteConfig | None = None, *, step: int | None = None
    ) -> ValidationResult:
        """Evaluate a checkpoint on all held-out problems or on a suite, or reuse a stored result with the same
        settings. `step`: the step to record in the result, by default the checkpoint's step."""
        step = self.record.store.step_of(checkpoint) if step is None else step
        result = None if suite is None else self._known_result(step, suite, name)
        result = result or self._known_result(step, suite)
        if result is None:
            self.workers.load(checkpoint)
            return self.evaluate(name, step, suite)
        result = replace(result, name=name)
        result.write(self.file_of(result.name, suite))
        return result

    def file_of(self, name: str, suite: SuiteConfig | None = None) -> Path:
        """Return the file for the result of a validation."""
        folder = self._layout.validation if suite is None else self._layout.suites / suite.name
        return folder / f"{name}.json"

    def _known_result(self, step: int, suite: SuiteConfig | None, name: str | None = None) -> ValidationResult | None:
        """Return the stored result of the validation `name`, or None if there is no result with the present settings.
        If `name` is None, look for the result that training stored for the step. Ignore this result if training
        evaluates only `max_problems` problems."""
        settings = self._config.validation if suite is None else suite
        file = self.file_of(name or name_of(step), suite)
        if (name is None and settings.max_problems) or not file.is_file():
            return None
        result = ValidationResult.read(file)
        wanted = ""
        if suite is not None:
            folder = self.workers.inputs.for_suite(suite.name).filtered_directory
            wanted = suite_fingerprint(self._config, suite, folder)
        is_same = (result.step, result.suite) == (step, wanted) and result.settings.evaluates_as(settings)
        return result if is_same else None
