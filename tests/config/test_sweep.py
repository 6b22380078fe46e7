"""A sweep's file is checked before anything runs, and every mistake in it is told at once."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlcore.config import RunConfig, sweep_load
from rlcore.config.compose import group_members, load_config
from rlcore.config.documents import experiment_text
from rlcore.config.sweep import Budget, OptunaSearch, Pruning, RandomSearch, Range, SweepSpec, edge_points
from rlcore.config.sweep_load import SWEEPS_DIR, Sweep, load_sweep
from rlcore.errors import ConfigError

HEAD = "name: a\nexperiment: debug\n"
EARLY = "overrides: [trainer.total_steps=8]\ngrid: {optim.lr: [1e-3]}\n"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *overrides: str, budget: Budget | None = None) -> Sweep:
        file = tmp_path / "sweep.yaml"
        file.write_text(text)
        return load_sweep(str(file), overrides, budget=budget)

    return load


@pytest.fixture
def mistakes(load):
    def mistakes(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        head, *lines = str(caught.value).splitlines()
        assert head.startswith(f"{len(lines)} problem")
        return [line.partition(". ")[2] for line in lines]

    return mistakes


@pytest.mark.parametrize("name", group_members("sweep"))
def test_each_sweep_in_conf_is_sound_and_says_its_command(name):
    assert load_sweep(name).spec.name == name
    first = (SWEEPS_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# millrace sweep {name}"


def test_settings_of_the_command_go_before_those_of_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    shared = "overrides: [trainer.total_steps=8, optim.grad_clip=2]"
    file.write_text(f"name: mine\nexperiment: debug\n{shared}\ngrid: {{optim.lr: [1e-3]}}\n")
    swept = load_sweep(str(file), ["trainer.total_steps=4"])
    assert swept.overrides == ("optim.grad_clip=2", "trainer.total_steps=4")
    assert swept.base.trainer.total_steps == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "sweep: is empty"),
        ("grid: {}", "grid: is empty"),
        ("grid: {optim.lr: []}", "grid.optim.lr: is empty"),
        ("list: []", "list: is empty"),
        ("list: [{}]", "list.1: is empty"),
        ("grid: {optim.lr: [1]}\nlist: [{optim.lr: 1}]", "sweep: says more than one way"),
        ("list: [{optim.lr: 1e-3}, {optim.lr: 0.001}]", "sweep: has two points that are the same run"),
        ("grid: {trainer.total_steps: [2, 4]}", "sweep: has two points that are the same run"),
        ("grid: {optim.lr: [1e-3]}\nseeds: [1, 2, 1]", "seeds: must differ"),
        ("grid: {optim.lr: [1e-3]}\nseeds: []", "seeds: is empty"),
        ("grid: {optim.lr: [1e-3]}\nseeds: [-1]", "seeds.0: must be greater than or equal to 0; got -1"),
        ("grid: {optim.lr: [1e-3]}\nobjective: {metric: reward/mean@4}", "objective.metric: must be a figure"),
        ("grid: {optim.lr: [1e-3]}\nobjective: {direction: up}", "objective.direction: must be 'maximize'"),
        ("grid: {paths.root: [a, b]}", "grid.paths.root: cannot be swept"),
        ("grid: {seed: [1, 2]}", "grid.seed: cannot be swept"),
        ("grid: {experiment: [debug]}", "grid.experiment: cannot be swept"),
        ("grid: {optim.lrr: [1]}", "grid.optim.lrr: there is no such setting; got optim.lrr. Did you mean optim.lr?"),
        (
            "seed: 3\ngrid: {optim.lr: [1]}",
            "seed: there is nothing of that name in a sweep; got 3. Did you mean seeds?",
        ),
        ("grids: {optim.lr: [1]}", "grids: there is nothing of that name in a sweep; got {optim.lr:[1]}. Did you mean"),
        ("random: {num_points: 2, space: {optim.lr: {low: 2, high: 1}}}", "random.space.optim.lr: low must be below"),
        (
            "random: {num_points: 2, space: {optim.lr: {low: 0, high: 1, log: true}}}",
            "random.space.optim.lr: log needs",
        ),
        (
            "random: {num_points: 2, space: {optim.lr: 5}}",
            "random.space.optim.lr: must be a list of values, or a range",
        ),
        ("optuna: {num_points: 2, space: {optim.lr: {low: -1.0, high: 1}}}", "optim.lr: must be greater than 0"),
        (
            "optuna: {num_points: 2, space: {optim.lr: [1]}}\npruning: {every_steps: 1}",
            "pruning.every_steps: must be a multiple of validation.every_steps (2)",
        ),
        ("grid: {optim.lr: [1e-3]}\npruning: {every_steps: 2}", "pruning.every_steps: must be below"),
        ("halving: {first_steps: 2}\ngrid: {optim.lr: [1e-3]}", "halving: there is nothing of that name in a sweep"),
        (EARLY + "pruning: {every_steps: 2, confidence: 1.0}", "pruning.confidence: must be less than 1"),
        (EARLY + "pruning: {every_steps: 2, pruner: best}", "pruning.pruner: must be 'paired', 'median'"),
        (EARLY + "pruning: {every_steps: 2, options: {lower: 0}}", "pruning: options are arguments of Optuna's"),
        (
            EARLY + "pruning: {every_steps: 2, pruner: threshold, confidence: 0.9}",
            "pruning: confidence is read by pruner: paired alone, and pruner is threshold",
        ),
        ("grid: {optim.lr: [1e-3]}\nbudget: {hours: 0}", "budget.hours: must be greater than 0"),
        ("grid: {optim.lr: [1e-3]}\ngrid: {}", "sweep: cannot be read"),
        (
            "grid: {optim.lr: [1e-3]}\nseeds: [2147483648]",
            "seeds.0: must be less than 2147483648; got 2147483648",
        ),
        ("grid: {optim.lr: [1e-3]}\nseeds: [3, 2, 3, 2]", "seeds: must differ; got [3,2,3,2]. Name 2, 3 once"),
        (
            "random: {num_points: 2, space: {optim.lr: {low: 1, high: 1}}}",
            "random.space.optim.lr: low must be below high, got 1 and 1",
        ),
        (
            "random: {num_points: 2, space: {optim.lr: {low: 1, high: 2, log: true, step: 1}}}",
            "random.space.optim.lr: log and step exclude one another",
        ),
        (
            EARLY + "pruning: {every_steps: 3, pruner: hyperband, options: {max_resource: 8}}",
            "pruning.every_steps: must be a multiple of validation.every_steps (2); got 3. Add validation.",
        ),
        (
            EARLY.replace("=8", "=8, validation.every_steps=0") + "pruning: {every_steps: 4}",
            "pruning.every_steps: must be a multiple of validation.every_steps (0); got 4. Add validation.",
        ),
        (
            EARLY + "pruning: {every_steps: 8}",
            "pruning.every_steps: must be below trainer.total_steps; got 8. Lower it",
        ),
        ("overrides: [seed=3]\ngrid: {optim.lr: [1e-3]}", "overrides: seed and run_id differ from run to run"),
        ("overrides: [optim.lr=1]\ngrid: {optim.lr: [1e-3]}", "optim.lr: is swept, and given for all points"),
    ],
)
def test_one_clear_error(mistakes, text, told):
    (line,) = mistakes(HEAD + text)
    assert line.startswith(told), line


def test_wrong_values_of_all_points_are_told_together_each_once(mistakes):
    found = mistakes(HEAD + "grid: {optim.lr: [-1, 1e-3], trainer.mini_batch_size: [8, 3], algo: [grpo, dapoo]}")
    assert [line.partition(":")[0] for line in found] == ["optim.lr", "algo", "trainer.mini_batch_size"]
    assert "point optim.lr=-1 trainer.mini_batch_size=8 algo=grpo and 3 more" in found[0]
    assert "(point optim.lr=-1 trainer.mini_batch_size=3 algo=grpo and 3 more); got 3 with batch_size" in found[2]
    assert "Did you mean dapo?" in found[1]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        # its form
        ("seed: 3\ngrid: {optim.lr: 5}\nbudget: []\nseeds: [1, -1]", ["seed", "grid.optim.lr", "budget", "seeds.1"]),
        (
            "random: {space: {optim.lr: {low: 2, high: 1}, algo: [dapoo]}}\npruning: {every_steps: 0}",
            ["random.num_points", "random.space.optim.lr", "pruning.every_steps"],
        ),
        (
            "objective: {name: a, on: 5}\nnum_points: 20\npruning: {name: median}\nlist: [{optim.lr: -1}, 5]",
            ["objective.name", "objective.true", "num_points", "pruning.name", "pruning.every_steps", "list.1"],
        ),
        # then what is swept
        (
            "seeds: [1, 1]\noverrides: [optim.lr=1]\ngrid: {seed: [1], optim.lr: [], optim.lrr: [1]}",
            ["grid.optim.lr", "grid.seed", "grid.optim.lrr", "optim.lr", "seeds"],
        ),
        # then the settings of its points
        (
            "overrides: [trainer.totl_steps=5]\ngrid: {optim.weight_decay: [-1], algo: [dapoo]}\n"
            "objective: {metric: loss}\npruning: {every_steps: 9}",
            ["trainer.totl_steps", "optim.weight_decay", "algo", "objective.metric", *["pruning.every_steps"] * 2],
        ),
    ],
)
def test_mistakes_of_one_kind_are_told_at_once(mistakes, text, keys):
    assert sorted(line.partition(": ")[0] for line in mistakes(HEAD + text)) == sorted(keys)


@pytest.mark.parametrize("source", ["debug_gird", "there_is_none.yaml"])
def test_a_sweep_that_is_not_there(source):
    with pytest.raises(ConfigError, match=r"sweep: must be the path of a file, or a name in conf/sweep"):
        load_sweep(source)


def test_a_grid_is_every_combination(load):
    sweep = load(HEAD + "grid: {optim.lr: [1e-3, 2e-3], algo: [grpo, rloo]}\nseeds: [4, 5]")
    assert [tuple(point.values()) for point in sweep.points] == [
        (1e-3, "grpo"), (1e-3, "rloo"), (2e-3, "grpo"), (2e-3, "rloo"),
    ]  # fmt: skip
    assert sweep.overrides_of(sweep.points[1], 5) == ["optim.lr=0.001", "algo=rloo", "seed=5"]
    assert sweep.rungs(sweep.base) == (2,)


def test_a_grid_has_at_most_so_many_points(load, mistakes, monkeypatch):
    monkeypatch.setattr(sweep_load, "MAX_POINTS", 4)
    assert len(load(HEAD + "grid: {optim.lr: [1, 2], algo: [grpo, rloo]}").points) == 4
    (line,) = mistakes(HEAD + "grid: {optim.lr: [1, 2, 3, 4, 5]}")
    assert line == "grid: must have at most 4 points; got 5. Draw some of them by random or optuna"


@pytest.mark.parametrize(
    "text",
    [
        "grid: {optim.lr: [1e-3]}\nseeds: [0, 2147483647]",
        EARLY + "pruning: {every_steps: 2, pruner: hyperband, options: {max_resource: 8}}",
        EARLY + "pruning: {every_steps: 2, pruner: successive_halving, options: {min_resource: 2}}",
        EARLY + "pruning: {every_steps: 2, pruner: paired, confidence: 0.9}",
        EARLY + "pruning: {every_steps: 2, pruner: median}",
        "grid: {trainer.total_steps: [4, 8]}\noverrides: [optim.schedule=cosine]\npruning: {every_steps: 2}",
    ],
)
def test_what_is_sound_is_taken(load, text):
    assert load(HEAD + text).spec.name == "a"


def test_the_edges_of_a_space_are_checked_before_a_search():
    space = {"optim.lr": Range(low=1e-4, high=1e-2), "algo": ("grpo", "rloo", "opo")}
    assert edge_points(space) == [
        {"optim.lr": 1e-4, "algo": "grpo"},
        {"optim.lr": 1e-2, "algo": "grpo"},
        {"optim.lr": 1e-4, "algo": "rloo"},
        {"optim.lr": 1e-4, "algo": "opo"},
    ]
    assert edge_points({"optim.lr": (), "algo": ("grpo",)}) == [{"algo": "grpo"}]


def test_what_a_sweep_does_not_say_is_usual():
    search = OptunaSearch(num_points=1, space={"optim.lr": (1, 2)})
    assert (search.seed, search.startup_points, search.points_at_once) == (1, 10, 1)
    early = Pruning(every_steps=1)
    assert (early.pruner, early.confidence, early.options) == ("paired", 0.95, {})
    spec = SweepSpec(name="a", grid={"optim.lr": (1,)})
    assert (spec.seeds, spec.objective.metric, spec.objective.direction) == ((1,), None, "maximize")
    assert spec.budget.model_dump() == {"runs": None, "steps": None, "hours": None}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (RandomSearch, {"num_points": 0, "space": {"a": (1,)}}),
        (RandomSearch, {"num_points": 1, "space": {}}),
        (RandomSearch, {"num_points": 1, "space": {"a": (1,)}, "seed": -1}),
        (OptunaSearch, {"num_points": 1, "space": {"a": (1,)}, "startup_points": 0}),
        (OptunaSearch, {"num_points": 1, "space": {"a": (1,)}, "points_at_once": 0}),
        (Range, {"low": 1, "high": 2, "step": 0}),
        (Range, {"low": 0, "high": 2, "log": True}),
        (Pruning, {"every_steps": 0}),
        (Pruning, {"every_steps": 1, "confidence": 0}),
        (Pruning, {"every_steps": 1, "confidence": 1}),
        (Budget, {"runs": 0}),
        (Budget, {"steps": 0}),
        (Budget, {"hours": 0}),
        (SweepSpec, {"name": "a" * 65}),
    ],
)
def test_a_value_out_of_range_is_refused(section, values):
    with pytest.raises(ValidationError):
        section(**values)


def test_the_least_values_are_taken():
    least = {"num_points": 1, "space": {"a": (1,)}, "seed": 0, "startup_points": 1, "points_at_once": 1}
    assert OptunaSearch(**least).model_dump() == least
    assert Pruning(every_steps=1, confidence=0.001).every_steps == 1
    assert Budget(runs=1, steps=1, hours=0.001).model_dump() == {"runs": 1, "steps": 1, "hours": 0.001}
    assert SweepSpec(name="a" * 64).seeds == (1,)


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_more_points_of_a_search_are_of_the_same_sweep(load, search):
    few, many = (load(HEAD + f"{search}: {{num_points: {number}, space: {{optim.lr: [1, 2]}}}}") for number in (3, 12))
    assert (few.points, few.num_points, many.num_points) == ((), 3, 12)
    assert many.sweep_id == few.sweep_id


def test_points_are_compared_every_so_many_steps_and_at_the_end(load):
    long = "overrides: [trainer.total_steps=30, trainer.steps_per_chunk=2]\n"
    sweep = load(HEAD + long + "grid: {optim.lr: [1]}\npruning: {every_steps: 8}")
    assert sweep.rungs(sweep.base) == (8, 16, 24, 30)


def test_the_command_lines_budget_and_overrides_are_added(load):
    text = HEAD + "grid: {optim.lr: [1]}\nbudget: {runs: 3, hours: 1}"
    sweep = load(text, "trainer.total_steps=6", budget=Budget(runs=1))
    assert (sweep.spec.budget.runs, sweep.spec.budget.hours) == (1, 1)
    assert sweep.base.trainer.total_steps == 6
    assert sweep.sweep_id == load(text, "trainer.total_steps=6").sweep_id
    assert sweep.sweep_id != load(text).sweep_id
    assert re.fullmatch("a-[0-9a-f]{8}", sweep.sweep_id)


@pytest.mark.parametrize("experiment", ["debug", "countdown_ppo_demo", "verl_gsm8k_grpo"])
def test_an_experiment_file_composes_to_the_settings_it_was_written_from(experiment, tmp_path):
    words = ["optim.lr=7e-5", "algo.clip_high=0.3", "seed=5", "reward.weights={style.length: 0.5}"]
    config = load_config(words, experiment=experiment)
    assert config.reward.weights == {"style.length": 0.5}
    file = tmp_path / "best.yaml"
    file.write_text(experiment_text(config, "millrace run experiment=best.yaml"))
    assert load_config([f"experiment={file}"]) == config
    again: RunConfig = load_config(["seed=6"], experiment=str(file))
    assert again == config.model_copy(update={"seed": 6})


def test_an_experiment_file_says_what_differs_from_the_members_of_its_groups():
    config = load_config(["data.train_size=9", "optim.lr=7e-5", "tags.owner=me", "seed=5", "model.path=a/b"])
    assert experiment_text(config, "millrace run experiment=best.yaml\nthe best").splitlines() == [
        "# millrace run experiment=best.yaml",
        "# the best",
        "defaults:",
        "- override /data: countdown",
        "- override /critic: none",
        "seed: 5",
        "data:",
        "  train_size: 9",
        "model:",
        "  path: a/b",
        "optim:",
        "  lr: 7.0e-05",
    ]


def test_an_experiment_file_from_elsewhere_may_build_on_ours(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults:\n  - debug\n  - override /algo: ppo\n  - _self_\noptim: {lr: 5e-4}\n")
    config = load_config([f"experiment={file}"])
    assert (config.optim.lr, config.algo.advantage, config.critic is not None) == (5e-4, "gae", True)
    assert config.data == load_config([], experiment="debug").data


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "experiment: there is no such file"), ("a: [b", "experiment: cannot be read (")],
)
def test_an_experiment_file_that_cannot_be_read(tmp_path, content, told):
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config([f"experiment={file}"])
    assert str(caught.value).splitlines()[1].strip().startswith(f"1. {told}")
