"""A small run with the real parts: data, filter, tokenizer, model and workers."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from data.demonstrations import tokenize_demonstrations
from data.filter import filter_dataset
from data.tasks import build_dataset
from flows.stages.dataset import Suite
from flows.work.open_run import OpenRun
from rlcore.checkpoint.catalog import LoopState
from rlcore.config import MixtureData, RunConfig, ScratchModel
from rlcore.config.compose import load_config
from rlcore.errors import MillraceError
from rlcore.models.load import build_scratch_model
from rlcore.run.initial_policy import InitialPolicy, ensure_tokenizer, stage_layout
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.problems import Problems
from rlcore.run.stop import StopFlag
from rlcore.run.supervised import WarmStart
from rlcore.run.watchdog import Watchdog
from rlcore.trainer.experience import ExperienceCollector
from rlcore.trainer.metrics import Metrics
from rlcore.trainer.step import StepResult, Trainer
from rlcore.workers.canary import NUM_PROMPTS
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker
from tests import SHARED_STAGES
from tests.helpers.repeatable import repeatable


class NoSignals(StopFlag):
    def __init__(self) -> None:
        super().__init__(end_now=lambda: None)

    def install(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class SmallRun:
    config: RunConfig
    inputs: RunInputs
    model_directory: Path

    @property
    def layout(self) -> RunLayout:
        return RunLayout.of(self.config)


def prepare(root: Path, *overrides: str, experiment: str = "debug") -> SmallRun:
    """Return a run with dataset, filter and initial policy under `root`. Each stage is made once for all tests and
    copied.

    The size of a micro-batch is left out, because it changes the policy's rounding, but not its fingerprint.
    """
    config = load_config([f"experiment={experiment}", f"paths.root={root}", *overrides])
    shared = os.environ.get(SHARED_STAGES)
    if shared is None or isinstance(config.data, MixtureData) or config.validation.suites:
        return make(root, *overrides, experiment=experiment)
    with (Path(shared) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [word for word in overrides if not word.startswith("trainer.max_tokens_per_micro_batch=")]
        made = make(Path(shared), *words, experiment=experiment)

    def copied(directory: Path) -> Path:
        if not directory.is_relative_to(shared):
            return directory
        copy = root / directory.relative_to(shared)
        if not copy.exists():
            shutil.copytree(directory, copy)
        return copy

    inputs = {name: copied(folder) for name, folder in asdict(made.inputs).items() if folder}
    if (stage := stage_layout(made.config, made.inputs.filtered_directory).run_dir).exists():
        copied(stage)
    return SmallRun(config, RunInputs(**inputs), copied(made.model_directory))


def other_model(root: Path, scratch: ScratchModel) -> Path:
    folder = root / f"other-{scratch.hidden_size}"
    if not folder.exists():
        build_scratch_model(scratch, seed=1, directory=folder)
    return folder


def make(root: Path, *overrides: str, experiment: str = "debug") -> SmallRun:
    """Make each stage as a run in this workspace does, for tests of the stages."""
    config = load_config([f"experiment={experiment}", f"paths.root={root}", *overrides])
    dataset = build_dataset(config.data, seed=config.data.seed, root=root)
    tokenizer = ensure_tokenizer(config)
    filtered = filter_dataset(dataset.directory, tokenizer, config)
    suites = {suite.name: Suite(suite).make(OpenRun(config)).directory for suite in config.validation.suites}
    shown = None
    if config.warm_start.demonstrations is not None:
        shown = tokenize_demonstrations(config, tokenizer).directory
    inputs = RunInputs(filtered.directory, tokenizer, dataset.directory, shown, suites)
    return SmallRun(config, inputs, warm_start(config, inputs).directory)


def give_up(error: MillraceError) -> None:
    raise error


def warm_start(config: RunConfig, inputs: RunInputs) -> InitialPolicy:
    def report(event: Mapping[str, object]) -> None:
        pass

    tracking = config.tracking.model_copy(update={"enabled": False})
    config = config.model_copy(update={"tracking": tracking})
    stop = NoSignals()
    with TemporaryDirectory() as folder, ExitStack() as watched:  # the run's own folder is made by the run
        layout = RunLayout(Path(config.paths.root), Path(folder))
        guard = Watchdog(config, layout, stop=stop, report=report, abandon=give_up)
        watched.enter_context(guard)
        stage = WarmStart(config, inputs, guard, layout.run_dir.name)
        try:
            return stage.make()
        finally:
            stage.close(failed=False)


def train_results(run: SmallRun, group: WorkerGroup, num_steps: int) -> list[StepResult]:
    """Train steps from the initial policy."""
    config, problems = run.config, Problems.read(run.config, run.inputs)
    with ExitStack() as opened:
        sampler = problems.build_sampler(run.inputs, opened)(group)
        trainer = Trainer(config, group, ExperienceCollector(sampler, problems.stream), failures=run.layout.failures)
        group.each(Worker.set_probe, problems.held_out(limited=True)[:NUM_PROMPTS])
        group.each(Worker.sync_weights, 0)
        state, found = LoopState(0, 0, 0, 0, config.algo.kl.coef), list[StepResult]()
        for _ in range(num_steps):
            found.append(trainer.step(state, epoch=problems.stream.epoch_at(state.num_prompts_drawn)))
            state = found[-1].state
    return found


def train(run: SmallRun, group: WorkerGroup, num_steps: int) -> list[Metrics]:
    """Train steps from the initial policy. Return each step's metrics without those of the machine."""
    return [repeatable(result.metrics) for result in train_results(run, group, num_steps)]
