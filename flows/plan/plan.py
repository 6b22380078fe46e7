"""What a run would do: its stages, what of them is done, its chunks, its room on disk, its tokens. Writes nothing."""

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from data import dataset_directory, dataset_fingerprint, filter_fingerprint, filtered_directory, tokenizer_fingerprint
from flows.work.open_run import require_same_run
from flows.work.results import committed_step, known_judgement, known_pass_rates, known_report, report_fingerprint
from flows.work.stages import chunk_bounds, suite_datasets
from rlcore.checkpoint.catalog import scan
from rlcore.config import LoraConfig, RunConfig, WarmStartConfig
from rlcore.config.fingerprint import fingerprint, run_id, settings_fingerprint
from rlcore.config.model import PUBLISHED, SMOLLM2, smollm2_file
from rlcore.errors import CheckpointError
from rlcore.models.shape import config_file, critic_shape, shape_of
from rlcore.run.disk import disk_needs
from rlcore.run.given_models import require_same_base
from rlcore.run.inputs import RunInputs, given_model, is_given, planned_start_model, planned_tokenizer, stage_settings
from rlcore.run.layout import RunLayout
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.storage.disk import (
    RoomReport,
    check_needs,
    checkpoint_bytes,
    free_bytes,
    num_checkpoints_at_once,
    reserve_bytes,
)
from rlcore.storage.finished import finished_or_why
from rlcore.user_code import code_of
from rlcore.workers.memory_plan import MemoryPlan, device_of, fitted


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage. `fingerprint` None: it depends on a stage that has not run yet."""

    name: str
    fingerprint: str | None
    place: Path | None
    cached: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A chunk of training, and whether its checkpoint is committed."""

    start: int
    stop: int
    done: bool


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Most tokens that one step, and the steps that are left, can have."""

    prompts_per_step: int
    sequences_per_step: int
    max_tokens_per_sequence: int
    max_tokens_per_step: int
    max_tokens_left: int


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """Bytes. `checkpoint_bytes` None: not known before the first one. `needed_bytes`: of checkpoints beyond those there
    are, and the reserve. `file_systems`: all that the run writes, by file system."""

    checkpoint_bytes: int | None
    num_checkpoints: int
    reserve_bytes: int
    needed_bytes: int
    free_bytes: int
    file_systems: tuple[RoomReport, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do, stage by stage, and what it needs."""

    run_id: str
    run_dir: Path
    settings_fingerprint: str
    code_fingerprint: str
    stages: tuple[StagePlan, ...]
    chunks: tuple[ChunkPlan, ...]
    committed_step: int
    total_steps: int
    tokens: TokenBudget
    disk: DiskBudget
    memory: MemoryPlan | None
    """Of one rank's GPU; None where the model's shape is not known here."""
    warm_start_memory: MemoryPlan | None
    """The same of the supervised steps, where there will be some."""
    published_model: str | None
    """`model.path` of a model that is not on this machine, whose published shape the sizes are planned by."""
    warning: str = ""
    """What does not hinder the run and should be known."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(stage.cached for stage in self.stages)

    def stage(self, name: str) -> StagePlan:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        plain: dict[str, Any] = TypeAdapter(RunPlan).dump_python(self, mode="json")
        return plain


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """`trained`: what a checkpoint holds; each comes with two moments of the optimizer. `policy`: all of the policy."""

    trained: int
    policy: int


def count_parameters(config: RunConfig) -> ParameterCount | None:
    """Parameters of policy and critic; None where neither the model's files nor its shape are known."""
    lora = config.model.lora
    shape = shape_of(config.model)
    tensors = {} if config.model.path is None else _file_shapes(config.model.path)
    if tensors:
        whole = sum(prod(tensor) for tensor in tensors.values())
        policy = whole if lora is None else _adapters(tensors, lora)
    elif shape is None:
        return None
    else:
        whole = shape.policy_parameters
        policy = whole if lora is None else shape.adapter_parameters(lora)
    if config.critic is None:
        return ParameterCount(policy, whole)
    critic = whole if shape is None else critic_shape(config, shape).critic_parameters
    return ParameterCount(policy + critic, whole)


def _file_shapes(path: str) -> dict[str, tuple[int, ...]]:
    folder = Path(path).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with suppress(SafetensorError, OSError), safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _adapters(shapes: dict[str, tuple[int, ...]], lora: LoraConfig) -> int:
    """Two matrices beside each target layer, of rank x in and out x rank."""
    targets = tuple(f"{name}.weight" for name in lora.target_modules)
    return sum(lora.rank * sum(shape) for name, shape in shapes.items() if name.endswith(targets) and len(shape) == 2)


def make_plan(config: RunConfig, *, seen: RunConfig | None = None) -> RunPlan:
    """The plan of a run as things stand on disk.

    Args:
        config: of the run.
        seen: the same with a model of the same shape and tokenizer, to look at while that of `config` is not there yet.

    Raises:
        DataError: source files of the dataset are missing.
        CheckpointError: the run's checkpoints are broken, of other settings, code, data or models, or past its last
            step.
        ModelError: the warm start was made from another model than the one at `model.path`.
    """
    layout = RunLayout.of(config)
    committed = committed_step(config)
    require_same_run(config, layout)
    seen = config if seen is None else seen
    dataset, filtered = _data_stages(seen, layout.root)
    chunks = tuple(ChunkPlan(start, stop, stop <= committed) for start, stop in chunk_bounds(config))
    start_model = _start_model(config, filtered)
    stages = [dataset, filtered, start_model]
    if config.pass_rates.is_wanted:
        stages.append(_pass_rates(config, filtered))
    stages.append(_train(config, layout, chunks, committed))
    stages += [_validate(config, layout, committed), _report(layout, stages)]
    return RunPlan(
        run_id=run_id(config),
        run_dir=layout.run_dir,
        settings_fingerprint=settings_fingerprint(config),
        code_fingerprint=code_of(config).fingerprint,
        stages=tuple(stages),
        chunks=chunks,
        committed_step=committed,
        total_steps=config.trainer.total_steps,
        tokens=_tokens(config, committed),
        disk=_disk(config, layout, count_parameters(seen), has_start_model=start_model.cached),
        memory=plan_memory_here(seen),
        warm_start_memory=None
        if start_model.cached or not seen.warm_start.enabled
        else plan_memory_here(stage_settings(seen)),
        published_model=_published_model(seen),
    )


def plan_memory_here(config: RunConfig) -> MemoryPlan | None:
    """What a rank will hold on this host's GPU; on one of unknown size where there is none."""
    shape = shape_of(config.model)
    return None if shape is None else fitted(config, shape, device_of(config))[1]


def _published_model(config: RunConfig) -> str | None:
    path = config.model.path
    if path is None or path not in PUBLISHED:
        return None
    file = smollm2_file() if path == SMOLLM2 else config_file(path)
    return path if file is None else None


def _data_stages(config: RunConfig, root: Path) -> tuple[StagePlan, StagePlan]:
    digest = dataset_fingerprint(config.data, config.data.seed)
    place = dataset_directory(digest, root)
    manifest, damage = finished_or_why(place)
    rows = _again(damage) if manifest is None else _rows(manifest.values["counts"])
    dataset = StagePlan("dataset", digest, place, manifest is not None, f"{config.data.task} {rows}".strip())
    tokenizer = planned_tokenizer(config)
    damage = finished_or_why(tokenizer)[1]
    if damage or not tokenizer.is_dir():
        return dataset, StagePlan("filter", None, None, False, _again(damage) or "after its tokenizer is made")
    filter_digest = filter_fingerprint(
        digest,
        tokenizer_fingerprint(tokenizer),
        config.filter,
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
        suites=suite_datasets(config),
    )
    filtered = filtered_directory(filter_digest, root)
    manifest, damage = finished_or_why(filtered)
    detail = _again(damage) if manifest is None else _rows(manifest.values["counts"])
    return dataset, StagePlan("filter", filter_digest, filtered, manifest is not None, detail)


def _again(damage: str) -> str:
    return damage and f"made again: {damage}"


def _rows(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _start_model(config: RunConfig, filtered: StagePlan) -> StagePlan:
    if is_given(config):
        return StagePlan("warm-start", None, given_model(config), True, f"off: starts from {config.model.path}")
    if filtered.place is None:
        return StagePlan("warm-start", None, None, False, "after the filter")
    require_same_base(config, filtered.place)
    place = planned_start_model(config, filtered.place)
    warm = config.warm_start
    detail = _ends(warm) if warm.enabled else "model only"
    manifest, damage = finished_or_why(place)
    return StagePlan("warm-start", place.name, place, manifest is not None, _again(damage) or detail)


def _pass_rates(config: RunConfig, filtered: StagePlan) -> StagePlan:
    wanted = config.pass_rates
    detail = f"{wanted.samples} answers to each training row" if wanted.table is None else f"from {wanted.table}"
    if filtered.place is None or not filtered.cached:
        return StagePlan("pass-rates", None, None, False, f"{detail}, after the filter")
    place = planned_pass_rates(config, filtered.place)
    damage = "" if wanted.table is not None else finished_or_why(place)[1]
    known = None if damage else known_pass_rates(config, RunInputs(filtered.place, planned_tokenizer(config)))
    if known is not None:
        detail = f"kept {known.kept:,} of {known.rows:,} rows"
    return StagePlan("pass-rates", place.name, place, known is not None, _again(damage) or detail)


def _ends(warm: WarmStartConfig) -> str:
    ends = [] if warm.epochs is None else [f"{warm.epochs:g} epochs"]
    ends += [] if warm.stop_at_reward is None else [f"reward {warm.stop_at_reward:g}"]
    ends += [] if warm.patience is None else [f"{warm.patience} measurements without a lower held-out loss"]
    return f"to {' or '.join(ends)}, at most {warm.max_steps} steps" if ends else f"{warm.max_steps} steps"


def _train(config: RunConfig, layout: RunLayout, chunks: tuple[ChunkPlan, ...], committed: int) -> StagePlan:
    total = config.trainer.total_steps
    exported, damage = finished_or_why(layout.exported_model, error=CheckpointError)  # a plan sets nothing aside
    has_weights = exported is not None and exported.values.get("step") == committed
    done = sum(chunk.done for chunk in chunks)
    detail = f"step {min(committed, total)} of {total}, {done} of {len(chunks)} chunks done"
    if damage:
        detail += f"; the weights are exported again: {damage}"
    cached = done == len(chunks) and has_weights
    return StagePlan("train", settings_fingerprint(config), layout.checkpoints, cached, detail)


def _validate(config: RunConfig, layout: RunLayout, committed: int) -> StagePlan:
    judged = {"before": 0, "after": committed}
    names = [name for name, step in judged.items() if known_judgement(config, layout, name, step) is not None]
    finished = committed >= config.trainer.total_steps
    digest = fingerprint("validate", {"run": settings_fingerprint(config), "settings": config.validation})
    detail = f"{' and '.join(names)} judged" if names else "before and after"
    return StagePlan("validate", digest, layout.validation, finished and len(names) == len(judged), detail)


def _report(layout: RunLayout, stages: list[StagePlan]) -> StagePlan:
    current = all(stage.cached for stage in stages) and known_report(layout) is not None
    digest = report_fingerprint(layout) if current else None
    return StagePlan("report", digest, layout.run_dir / "report", current, "HTML, JSON and pictures")


def _tokens(config: RunConfig, committed: int) -> TokenBudget:
    prompts = config.trainer.batch_size
    sequences = prompts * config.rollout.samples_per_prompt
    longest = config.filter.max_prompt_tokens + config.rollout.max_response_tokens
    left = max(0, config.trainer.total_steps - committed)
    return TokenBudget(prompts, sequences, longest, sequences * longest, sequences * longest * left)


def _disk(config: RunConfig, layout: RunLayout, count: ParameterCount | None, *, has_start_model: bool) -> DiskBudget:
    known = scan(layout.checkpoints).checkpoints
    size: int | None = None
    if known:
        size = known[-1].size_bytes
    elif count is not None:
        size = checkpoint_bytes(count.trained)
    trainer = config.trainer
    number = num_checkpoints_at_once(
        config.checkpoint, total_steps=trainer.total_steps, steps_per_chunk=trainer.steps_per_chunk
    )
    reserve = reserve_bytes(config.checkpoint)
    committed = known[-1].step if known else 0
    is_done = committed >= trainer.total_steps
    more = 0 if is_done else max(0, number * (size or 0) - sum(info.size_bytes for info in known))
    needs = disk_needs(
        config,
        layout,
        checkpoints_bytes=more,
        num_weights=0 if count is None else count.policy,
        steps_left=max(0, trainer.total_steps - committed),
        has_start_model=has_start_model,
    )
    reports = check_needs(needs, reserve)
    return DiskBudget(size, number, reserve, more + reserve, free_bytes(layout.checkpoints), reports)
