"""A sweep's file is checked before any run starts, and all its mistakes are reported."""

import re
from itertools import product
from pathlib import Path

import pytest

from rlcore.config import sweep as sweeps
from rlcore.config.base import group_members, member_file
from rlcore.config.compose import load_config
from rlcore.config.documents import experiment_text
from rlcore.config.sweep import Budget, Range, Sweep, edge_points, load_sweep, multirun_content
from rlcore.errors import ConfigError

HEAD = "name: a\nexperiment: debug\n"
EARLY = "overrides: [trainer.total_steps=8]\ngrid: {optim.lr: [1e-3]}\n"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *overrides: str, budget: Budget | None = None) -> Sweep:
        (file := tmp_path / "sweep.yaml").write_text(text)
        return load_sweep(str(file), overrides, budget=budget)

    return load


@pytest.fixture
def mistakes(load):
    def mistakes(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        head, *lines = str(caught.value).splitlines()
        assert not lines or head == f"{len(lines)} problems in the settings:"
        return [line.partition(". ")[2] for line in lines] or [head]

    return mistakes


@pytest.mark.parametrize("name", group_members("sweep"))
def test_sweeps_in_conf_load_and_begin_with_command(name):
    found = load_sweep(name)
    assert (found.spec.name, found.unused_settings()) == (name, [])
    first = member_file("sweep", name).read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# millrace sweep {name}"


@pytest.mark.parametrize(("text", "message"), [
    ("", "sweep: is empty"), ("grid: {}", "grid: is empty"), ("grid: {optim.lr: []}", "grid.optim.lr: is empty"),
    ("list: []", "list: is empty"), ("list: [{}]", "list.1: is empty"),
    ("grid: {optim.lr: [1]}\nlist: [{optim.lr: 1}]", "sweep: has more than one way"),
    ("list: [{optim.lr: 1e-3}, {optim.lr: 0.001}]", "sweep: has two points that are the same run"),
    ("grid: {trainer.total_steps: [2, 4]}", "sweep: has two points that are the same run"),
    ("grid: {optim.lr: [1e-3]}\nseeds: []", "seeds: is empty"),
    ("grid: {optim.lr: [1e-3]}\nseeds: [-1]", "seeds.0: must be greater than or equal to 0; got -1"),
    ("grid: {optim.lr: [1e-3]}\nobjective: {metric: reward/mean_at_3}",
     "objective.metric: must be a metric of the validation; got reward/mean_at_3. Did you mean reward/mean_at_2?"),
    ("grid: {optim.lr: [1e-3]}\nobjective: {direction: up}", "objective.direction: must be 'maximize'"),
    ("grid: {paths.root: [a, b]}", "paths.root: cannot be swept"), ("grid: {seed: [1, 2]}", "seed: cannot be swept"),
    ("grid: {experiment: [debug]}", "experiment: cannot be swept; got experiment in grid. A sweep varies one"),
    ("grid: {optim.lrr: [1]}", "optim.lrr: there is no such setting; got optim.lrr in grid. Did you mean optim.lr?"),
    ("seed: 3\ngrid: {optim.lr: [1]}", "seed: a sweep has no such key; got 3. Did you mean seeds?"),
    ("grids: {optim.lr: [1]}", "grids: a sweep has no such key; got {optim.lr:[1]}. Did you mean"),
    ("optuna: {num_points: 2, space: {optim.lr: {low: 0, high: 1, log: true}}}", "optuna.space.optim.lr: log needs"),
    ("optuna: {num_points: 2, space: {optim.lr: 5}}", "optuna.space.optim.lr: must be a list of values, or a range"),
    ("optuna: {num_points: 2, space: {optim.lr: {low: -1.0, high: 1}}}", "optim.lr: must be greater than 0"),
    ("grid: {optim.lr: [1e-3]}\ngrid: {}", "sweep: cannot be read"),
    ("grid: {optim.lr: [1e-3]}\nseeds: [3, 2, 3, 2]", "seeds: must differ; got [3,2,3,2]. Name 2, 3 once"),
    ("optuna: {num_points: 2, space: {optim.lr: {low: 1, high: 1}}}",
     "optuna.space.optim.lr: low must be below high, got 1 and 1"),
    ("optuna: {num_points: 2, space: {optim.lr: {low: 1, high: 2, log: true, step: 1}}}",
     "optuna.space.optim.lr: log and step exclude one another"),
    (EARLY + "pruning: {every_steps: 3}",
     "pruning.every_steps: must be a multiple of validation.every_steps (2); got 3. Add validation."),
    (EARLY.replace("=8", "=8, validation.every_steps=0") + "pruning: {every_steps: 4}",
     "pruning.every_steps: must be a multiple of validation.every_steps (0); got 4. Add validation."),
    (EARLY + "pruning: {every_steps: 8}", "pruning.every_steps: must be below trainer.total_steps; got 8. Lower it"),
    ("overrides: [seed=3]\ngrid: {optim.lr: [1e-3]}", "overrides: seed and run_id differ from run to run"),
    ("overrides: [optim.lr=1]\ngrid: {optim.lr: [1e-3]}", "optim.lr: is swept, and given for all points"),
])  # fmt: skip
def test_mistake_is_one_problem(mistakes, text, message):
    (line,) = mistakes(HEAD + text)
    assert line.startswith(message), line


def test_mistakes_of_points_are_reported_once(mistakes):
    found = mistakes(HEAD + "grid: {optim.lr: [-1, 1e-3], trainer.mini_batch_size: [8, 3], algo: [grpo, dapoo]}")
    assert [line.partition(":")[0] for line in found] == ["optim.lr", "algo", "trainer.mini_batch_size"]
    assert "point optim.lr=-1 trainer.mini_batch_size=8 algo=grpo and 3 more" in found[0]
    assert "(point optim.lr=-1 trainer.mini_batch_size=3 algo=grpo and 3 more); got 3 with batch_size" in found[2]
    assert "Did you mean dapo?" in found[1]
    (of_two,) = mistakes(HEAD + "grid: {optim.lr: [-1, 1e-3], algo: [grpo, dapo]}")
    assert "(point optim.lr=-1 algo=grpo and 1 more)" in of_two
    (of_one,) = mistakes(HEAD + "grid: {optim.lr: [-1, 1e-3]}")
    assert "(point optim.lr=-1)" in of_one


@pytest.mark.parametrize(("text", "keys"), [
    # its form
    ("optuna: {space: {optim.lr: {low: 2, high: 1}, algo: [dapoo]}}\npruning: {every_steps: 0}",
     ["optuna.num_points", "optuna.space.optim.lr", "pruning.every_steps"]),
    ("seed: 3\nobjective: {name: a, on: 5}\nbudget: []\npruning: {name: median}\nlist: [{optim.lr: -1}, 5]",
     ["seed", "objective.name", "objective.true", "budget", "pruning.name", "pruning.every_steps", "list.1"]),
    # then what is swept
    ("seeds: [1, 1]\noverrides: [optim.lr=1]\ngrid: {seed: [1], optim.lr: [], optim.lrr: [1]}",
     ["grid.optim.lr", "seed", "optim.lrr", "optim.lr", "seeds"]),
    # then the settings of its points
    ("overrides: [trainer.totl_steps=5]\ngrid: {optim.weight_decay: [-1], algo: [dapoo]}\n"
     "objective: {metric: loss}\npruning: {every_steps: 9}",
     ["trainer.totl_steps", "optim.weight_decay", "algo", "objective.metric", *["pruning.every_steps"] * 2]),
])  # fmt: skip
def test_mistakes_of_one_kind_are_reported_together(mistakes, text, keys):
    assert sorted(line.partition(": ")[0] for line in mistakes(HEAD + text)) == sorted(keys)
    for source in ("debug_gird", "there_is_none.yaml"):
        with pytest.raises(ConfigError, match=r"sweep: must be the path of a file, or a name in conf/sweep"):
            load_sweep(source)


def test_grid_is_every_combination_up_to_a_number(load, mistakes, monkeypatch):
    sweep = load(HEAD + "grid: {optim.lr: [1e-3, 2e-3], algo: [grpo, rloo]}\nseeds: [4, 5]")
    assert [tuple(point.values()) for point in sweep.points] == list(product((1e-3, 2e-3), ("grpo", "rloo")))
    assert sweep.overrides_of(sweep.points[1], 5) == ["optim.lr=0.001", "algo=rloo", "seed=5"]
    assert sweep.rungs(sweep.base) == (2,)
    long = "overrides: [trainer.total_steps=30, trainer.steps_per_chunk=2]\n"
    sweep = load(HEAD + long + "grid: {optim.lr: [1]}\npruning: {every_steps: 8}")
    assert sweep.rungs(sweep.base) == (8, 16, 24, 30)
    assert load(HEAD + "seeds: [1, 2]\n").points == ({},)
    monkeypatch.setattr(sweeps, "MAX_POINTS", 4)
    assert len(load(HEAD + "grid: {optim.lr: [1, 2], algo: [grpo, rloo]}").points) == 4
    (line,) = mistakes(HEAD + "grid: {optim.lr: [1, 2, 3, 4, 5]}")
    assert line == "grid: must have at most 4 points; got 5. Draw some of them by optuna"


@pytest.mark.parametrize("text", [
    "grid: {optim.lr: [1e-3]}\nseeds: [0, 2147483647]", EARLY + "pruning: {every_steps: 2, confidence: 0.9}",
    "grid: {trainer.total_steps: [4, 8]}\noverrides: [optim.schedule=cosine]\npruning: {every_steps: 2}",
])  # fmt: skip
def test_valid_sweep_loads(load, text):
    assert load(HEAD + text).spec.name == "a"


def test_points_of_space_are_edges_first_and_no_part_of_the_id(load):
    space = {"optim.lr": Range(low=1e-4, high=1e-2), "algo": ("grpo", "rloo", "opo")}
    ends = [(1e-4, "grpo"), (1e-2, "grpo"), (1e-4, "rloo"), (1e-4, "opo")]
    assert [tuple(point.values()) for point in edge_points(space)] == ends
    assert edge_points({"optim.lr": (), "algo": ("grpo",)}) == [{"algo": "grpo"}]
    few, many = (load(HEAD + f"optuna: {{num_points: {number}, space: {{optim.lr: [1, 2]}}}}") for number in (3, 12))
    assert (few.points, few.num_points, many.num_points) == ((), 3, 12)
    assert many.sweep_id == few.sweep_id, "a larger search continues the smaller one"


def test_budget_and_overrides_of_command_are_added(load):
    shared = "overrides: [trainer.total_steps=8, optim.grad_clip=2]\n"
    text = HEAD + shared + "grid: {optim.lr: [1]}\nbudget: {runs: 3, hours: 1}"
    sweep = load(text, "trainer.total_steps=6", budget=Budget(runs=1))
    assert (sweep.spec.budget.runs, sweep.spec.budget.hours, sweep.base.trainer.total_steps) == (1, 1, 6)
    assert sweep.overrides == ("optim.grad_clip=2", "trainer.total_steps=6")
    assert load(text, "trainer.total_steps=6").sweep_id == sweep.sweep_id != load(text).sweep_id
    assert re.fullmatch("a-[0-9a-f]{8}", sweep.sweep_id)


@pytest.mark.parametrize("experiment", ["debug", "countdown_ppo_demo", "verl_gsm8k_grpo"])
def test_experiment_text_round_trip(experiment, tmp_path):
    words = ["optim.lr=7e-5", "algo.clip_high=0.3", "seed=5", "reward.weights={style.length: 0.5}"]
    config = load_config(words, experiment=experiment)
    assert config.reward.weights == {"style.length": 0.5}
    (file := tmp_path / "best.yaml").write_text(experiment_text(config, "millrace run experiment=best.yaml"))
    assert load_config([f"experiment={file}"]) == config
    text = experiment_text(load_config(["data.train_size=9", "tags.owner=me", "model.path=a/b"]), "first\nsecond")
    assert text.splitlines() == [
        "# first", "# second", "defaults:", "- override /data: countdown", "- override /critic: none",
        "data:", "  train_size: 9", "model:", "  path: a/b",
    ]  # fmt: skip


def test_multirun_content_separates_seeds_values_and_shared_settings() -> None:
    values = ["seed=range(1,4)", "algo=grpo,rloo", "data.operations=['+','-'],['+']"]
    assert multirun_content(["experiment=debug", *values, "optim.lr=1e-4"]) == {
        "name": "debug", "experiment": "debug", "overrides": ["optim.lr=1e-4"], "seeds": [1, 2, 3],
        "grid": {"algo": ["grpo", "rloo"], "data.operations": [["+", "-"], ["+"]]},
    }  # fmt: skip
    assert multirun_content(["seed=1,2"]) == {"name": "defaults", "overrides": [], "seeds": [1, 2]}
    for text in ("algo=glob(*)", "optim.lr=interval(0.1,0.2)"):
        key = text.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key}: must list its values with --multirun; got {re.escape(text)}"):
            multirun_content(["seed=1,2", text])
