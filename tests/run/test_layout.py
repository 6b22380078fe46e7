"""Folders and files of a run, its inputs in its record, and its need of disk space."""

import os
from pathlib import Path

import pytest

from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.config.model import SMOLLM2
from rlcore.errors import DataError
from rlcore.run.layout import RunInputs, RunLayout, configured_model, disk_needs
from rlcore.tracking.lineage import Origin, Stage
from tests.helpers.published import publish

FOLDERS = (
    "checkpoints", "answers", "validation", "suites", "failures", "profile", "logs", "model", "model-best", "report",
)  # fmt: skip


def test_require_kinds_accepts_a_run_and_names_all_obstacles(tmp_path: Path) -> None:
    good, bad = (RunLayout(tmp_path, tmp_path / name) for name in ("good", "run"))
    good.require_kinds()
    for name in FOLDERS:
        (good.run_dir / name).mkdir(parents=True)
    for name in ("settings.json", "metrics.jsonl", "run.lock", "code.diff"):
        (good.run_dir / name).touch()
    os.mkfifo(good.run_dir / "pipe.of-mine")
    good.require_kinds()
    (bad.run_dir / "metrics.jsonl").mkdir(parents=True)
    for name in FOLDERS[:-1]:
        (bad.run_dir / name).touch()
    (bad.run_dir / "report").symlink_to("nowhere")
    os.mkfifo(bad.run_dir / "run.lock")
    with pytest.raises(DataError) as caught:
        bad.require_kinds()
    wrong = [f"{bad.run_dir}/{name}: must be a folder" for name in FOLDERS]
    wrong += [f"{bad.run_dir}/{name}: must be an ordinary file" for name in ("metrics.jsonl", "run.lock")]
    assert str(caught.value) == f"{'; '.join(wrong)}. Move these away, then start again."
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: must be a folder\. Move these away"):
        RunLayout(tmp_path, tmp_path / "file").require_kinds()


def test_inputs_round_trip(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path / "run")
    for more in ((), (Path("d"), Path("o"), {"a": Path("a"), "suite b": Path("b")})):
        inputs = RunInputs(Path("f"), Path("t"), *more)
        inputs.write(RunConfig(), layout)
        assert RunInputs.read(layout) == inputs


def test_record_without_inputs_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, tmp_path)
    for stages in (None, (), (Stage("filtered", "f", "f"),)):
        if stages is not None:
            Origin(RunConfig(), stages=stages).write(tmp_path)
        with pytest.raises(DataError, match=r"run\.json: has no inputs of the run; start it by `millrace run` or"):
            RunInputs.read(layout)


def test_files_of_a_mixture_and_a_suite(tmp_path: Path) -> None:
    mixture = publish(tmp_path / "mixture", parts=["a", "b"])
    inputs = RunInputs(mixture, Path("t"), Path("d"), Path("o"), {"s": tmp_path / "s"})
    parts = (tmp_path / "a", tmp_path / "b")
    files = (tuple(part / f"{split}.parquet" for part in parts) for split in ("train", "validation"))
    assert (inputs.parts, inputs.train_parquets, inputs.validation_parquets) == (parts, *files)
    for part in parts:
        assert not inputs.has_training_rows
        part.mkdir()
        (part / "train.parquet").touch()
    assert inputs.has_training_rows
    of_suite = inputs.for_suite("s")
    assert (of_suite.filtered_directory, of_suite.demonstrations_directory) == (tmp_path / "s", None)
    assert (of_suite.tokenizer_directory, of_suite.dataset_directory) == (Path("t"), Path("d"))
    with pytest.raises(DataError, match=r"^validation\.suites: the rows of x are not made; start the run again"):
        inputs.for_suite("x")


BASE = (
    "answers.every_steps=2", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=8",
    "filter.max_prompt_tokens=32", "trainer.batch_size=8", "warm_start.enabled=false", "tracking.enabled=false",
)  # fmt: skip


def needs_of(root: Path, *words: str, has_initial_policy: bool = True) -> dict[str, tuple[Path, int]]:
    given = {word.partition("=")[0] for word in words}
    base = [word for word in BASE if word.partition("=")[0] not in given]
    config = load_config(["experiment=debug", f"paths.root={root}", *base, *words])
    sizes = {"checkpoints_bytes": 7, "num_weights": 1000, "steps_left": 11}
    needs = disk_needs(config, RunLayout.of(config), has_initial_policy=has_initial_policy, **sizes)
    assert len({need.what for need in needs}) == len(needs)
    bases = {RunLayout.of(config).run_dir: Path("run"), root: Path(), Path("/"): Path("/")}
    found = {}
    for need in needs:
        base = next(base for base in bases if need.path.is_relative_to(base))
        found[need.what] = (bases[base] / need.path.relative_to(base), need.size_bytes)
    return found


def test_needs_of_weights_and_responses(tmp_path: Path) -> None:
    answers = (Path("run/answers"), 5 * 8 * 4 * (500 + 20 * (8 + 32)))
    weights = {"checkpoints": (Path("run/checkpoints"), 7), "weights for others": (Path("run/model"), 4 * 1000)}
    assert needs_of(tmp_path) == {**weights, "answers": answers}
    sizes = {"answers.max_gb=0.0001": 100_000, "answers.every_steps=0": 0, "answers.every_steps=12": 0}
    assert {word: needs_of(tmp_path, word)["answers"][1] for word in sizes} == sizes


def test_needs_of_stages_and_tracking(tmp_path: Path) -> None:
    words = ("warm_start.enabled=true", "tracking.enabled=true", "runtime=ray")
    found = needs_of(tmp_path, *words, has_initial_policy=False)
    besides = {what: need for what, need in found.items() if what not in needs_of(tmp_path)}
    assert besides.pop("Ray's object store")[1] >= 2**20
    assert besides == {
        "initial policy": (Path("models"), 4 * 1000),
        "checkpoints of the warm start": (Path("warm-starts"), int(1000 * 12 * 1.01) + 4 * 2**20),
        "MLflow's artifacts": (Path(), 4 * 1000),
    }
    assert "Ray's object store" not in needs_of(tmp_path, "runtime=ray", "runtime.ray_address=ray-head:6379")


def test_needs_of_smollm2_until_it_exists(tmp_path: Path) -> None:
    def planned(model: str) -> dict[str, tuple[Path, int]]:
        return needs_of(tmp_path, f"model.path={model}", has_initial_policy=False)

    assert planned(SMOLLM2)["SmolLM2's weights"] == (Path("models"), 4 * 1000)
    assert "initial policy" not in planned(SMOLLM2)
    assert "SmolLM2's weights" not in planned("owner/name")
    configured_model(RunConfig(model={"path": SMOLLM2}, paths={"root": str(tmp_path)})).mkdir(parents=True)
    assert "SmolLM2's weights" not in planned(SMOLLM2)
