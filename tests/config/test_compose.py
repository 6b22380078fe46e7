"""Overrides, experiment files, and messages about wrong ones."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from rlcore.config import Gsm8kData
from rlcore.config.base import CONFIG_DIR_VARIABLE, group_members, value_at
from rlcore.config.compose import compose, load_config
from rlcore.errors import ConfigError

DEMO = "countdown_demo"
EXPERIMENTS = ", ".join(group_members("experiment"))
ALGOS = list(group_members("algo"))


def problems(*overrides: str, experiment: str | None = DEMO) -> list[str]:
    """Return the lines of the message, without their numbers."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, experiment=experiment)
    title, *lines = str(caught.value).splitlines()
    if not lines:
        return [title]
    assert title == f"{len(lines)} problems in the settings:"
    assert all(line.startswith(f"  {number}. ") for number, line in enumerate(lines, 1))
    return [line.partition(". ")[2] for line in lines]


def keys(*overrides: str, experiment: str | None = DEMO) -> list[str]:
    return [line.partition(":")[0] for line in problems(*overrides, experiment=experiment)]


def the_problem(*overrides: str, experiment: str | None = DEMO) -> str:
    (line,) = problems(*overrides, experiment=experiment)
    return line


def test_override_changes_only_its_key():
    assert load_config([f"experiment={DEMO}", "seed=2", "seed=2"]) == load_config(["seed=2"], experiment=DEMO)
    before, after = (load_config(words, experiment=DEMO) for words in ([], ["trainer.total_steps=5"]))
    assert (after.trainer.total_steps, after.model_copy(update={"trainer": before.trainer})) == (5, before)


@pytest.mark.parametrize(("override", "key", "value"), [
    ("++trainer.total_steps=5", "trainer.total_steps", 5), ("optim.lr=1", "optim.lr", 1.0),
    ("~optim.lr", "optim.lr", 1e-6), ("data.operations=[+,-,*]", "data.operations", ("+", "-", "*")),
    ("paths.root='a folder, with a comma'", "paths.root", "a folder, with a comma"),
    ("paths.root=2026", "paths.root", "2026"),
    ("model.gradient_checkpointing=true", "model.gradient_checkpointing", True),
    ("algo.dual_clip=null", "algo.dual_clip", None), ("algo.kl.where=off", "algo.kl.where", "off"),
    ("algo.kl={where:loss,coef:0.01}", "algo.kl.coef", 0.01), ("trainer={total_steps:5}", "trainer.batch_size", 64),
    ("trainer.mini_batch_size=${trainer.batch_size}", "trainer.mini_batch_size", 64),
    ("model.lora.rank=4", "model.lora.rank", 4), ("model.lora=null", "model.lora", None),
    ("tags.owner=me", "tags", {"owner": "me"}), ("tags.seed=${seed}", "tags", {"seed": "1"}),
    ("tags.run=007", "tags", {"run": "007"}),
])  # fmt: skip
def test_values_have_the_type_of_their_key(override, key, value):
    found = value_at(load_config([override], experiment=DEMO), key)
    assert (found, type(found)) == (value, type(value))


def test_number_in_list_of_texts_is_text(tmp_path):
    options = load_config(["data=custom", "data.options=[3,hard]", "model.path=some/model"]).data.options
    assert options == ("3", "hard")
    file = tmp_path / "suite.yaml"
    data = "data: {task: mapped, source: a/b, subset: 7, revision: 2024-06-01, scorer: 'data.countdown:score'}"
    for name in ("name: 2024\n", ""):
        file.write_text(f"{name}sampling: {{temperature: 1e-1}}\n{data}\n")
        words = [f"validation.suites=[{file}]", "model.path=some/model"]
        (suite,) = load_config(words, experiment=DEMO).validation.suites
        assert (suite.name, suite.sampling.temperature) == (name[6:-1] or "suite", 0.1)
        assert (suite.data.subset, suite.data.revision) == ("7", "2024-06-01")


def test_ppo_adds_critic():
    critic = load_config(["algo=ppo", "critic.warmup_steps=3"], experiment=DEMO).critic
    assert (critic.warmup_steps, critic.optim.lr) == (3, 1e-5)
    assert load_config(["algo=ppo", "critic=default"], experiment=DEMO) == load_config(["algo=ppo"], experiment=DEMO)
    for none in ("none", "null"):
        words = ["algo=grpo", f"critic={none}", "algo.lam=1"]
        assert load_config(words, experiment="countdown_ppo_demo").critic is None


def test_the_default_in_a_message_is_that_of_the_task() -> None:
    with pytest.raises(ConfigError, match=r"^data\.train_size: must be .*; got many\. .*\(default 1000\)"):
        load_config(["experiment=debug", "data=custom", "data.build=a:b", "data.scorer=a:c", "data.train_size=many"])


@pytest.mark.parametrize(("override", "expected"), [
    ("trainer.totl_steps=5", ": there is no such setting; got 5. Did you mean trainer.total_steps?"),
    ("optim.learning_rate=1e-6", ": there is no such setting; got 1e-06. docs/settings.md lists every key"),
    ("algo.lr=1e-6", "got 1e-06. Did you mean optim.lr?"), ("algo.kl.coeff=1", "got 1. Did you mean algo.kl.coef?"),
    ("trainer.samples_per_prompt=4", "got 4. Did you mean rollout.samples_per_prompt?"),
    ("validation.suites=[{name:x,data:{task:countdown,tmplate:bare}}]",
     "data.tmplate: there is no such setting; got bare. Did you mean data.template?"),
    ("validation.suites=[{name:x,data:{task:countdown},sampling:{temprature:3}}]",
     "sampling.temprature: there is no such setting; got 3. Did you mean sampling.temperature?"),
    ("validation.suites=[3]", "entry 0: must be an object; got 3. Further held-out sets: names in `conf/suite`"),
    ("validation.suites=[{name:x,data:{task:countdown},seed:2147483648}]",
     "x: seed: must be less than 2147483648; got 2147483648"),
    ("validation.suites=[{name:7,data:{task:countdown},x:1}]", "entry 0: x: there is no such setting; got 1"),
    ("validation.suites=[{name:g,data:{task:gsm8k,validation_size:8}}]",
     "g: data.validation_size: the suite's task has no such setting; got 8. Leave it out"),
    ("validation.suites=[gsm9k]", ": must name files in conf/suite, or paths; got gsm9k. Did you mean gsm8k? "
     "There are aime24, aime25, countdown, gsm8k, humaneval, humaneval_base, ifeval, math500; a path ends in .yaml"),
    ("trainer.total_steps=five", "must be a valid integer; got five"),
    ("trainer.total_steps=1.5", "must be a valid integer; got 1.5"),
    ("trainer.total_steps='5'", "must be a valid integer; got 5"),
    ("trainer.total_steps=-1", ": must be greater than or equal to 0; got -1. The number of steps of the run. "
     "Each step trains on one batch of prompts."),
    ("seed=true", "must be a valid integer; got true"), ("seed=null", "must be a valid integer; got null"),
    ("optim.lr=nan", "must be a finite number; got nan"), ("algo.lam=1.5", "must be less than or equal to 1; got 1.5"),
    ("rollout.engine=vlm", "must be 'hf', 'vllm' or 'none'; got vlm. Did you mean vllm?"),
    ("algo.kl.where=false", ": must be 'off', 'loss' or 'reward'; got false. In YAML write it in quotes: 'off' without "
     "them is the boolean false. "),
    ("algo.advantage=gea", "got gea. Did you mean gae?"), ("name='no spaces'", "must match pattern"),
    ("data.operations=[+,x]", "must be '+', '-', '*' or '/'; got x"),
    ("data.operations=+", "must be a valid array; got +"),
    ("trainer=5", "is a section, not a value; got 5. Set one of its keys, such as trainer.batch_size"),
    ("trainer=null", "is a section, not a value; got null"),
    ("model.lora=5", ": is a section, not a value; got 5. Set one of its keys, such as model.lora.alpha"),
    ("tags=5", "is a section, not a value; got 5. Set one of its keys, such as tags.name=value"),
    ("tags.owner=true", ": must be a valid string; got true. docs/settings.md describes every key"),
    ("seed.x=1", "there is no such setting: seed is a value, not a section; got 1"),
    ("data.source=x",
     "is a setting of task gsm8k or mapped, and the task is countdown; got x. Leave it out, or add data=gsm8k"),
    ("paths.root=${nosuch:1}", "cannot be filled in (Unsupported interpolation type nosuch)"),
    ("paths.root=???", "cannot be filled in (Missing mandatory value: root)"),
    ("paths.root='${'", "cannot be filled in (no viable alternative at input '${')"),
    ("data.operations=['+','${nope}']", "cannot be filled in (Interpolation key 'nope' not found); got [+,${nope}]"),
    ("data.operations=['+','${']", "cannot be filled in (no viable alternative at input '${'); got [+,${]"),
    ("warm_start.demonstrations='~nobody77/m.jsonl'", "must be a file that exists, .jsonl, .json or .parquet"),
    ("validation.suites=['~nobody77/m.yaml']", "there is no such file; got ~nobody77/m.yaml in "),
    *((f"algo.policy_loss_options.tau_pos={value}", f"must be true or false, a finite number or a text; got {value}. ")
      for value in ("null", "[1,2]", "{a:1}", "nan")),
    ("seed=1,2", "is a sweep over several values, and this is one run; got 'seed=1,2'. Add -m to millrace run for a "
     "grid over the values, or give one; a list is written key=[a,b]"),
    ("seed@x=1", "packages and group paths have no meaning here"),
    ("conf/seed=1", "packages and group paths have no meaning here"),
    ("hydra.run.dir=x", "Hydra's own settings (output folders, launchers, logging) are not supported"),
    ("hydra/launcher=joblib", "Hydra's own settings (output folders, launchers, logging) are not supported"),
    ("rollout.n=4", "got 4. From verl or TRL: rollout.samples_per_prompt (docs/from-verl-and-trl.md)"),
    ("beta=0.1", "From verl or TRL: algo.kl.where=loss algo.kl.coef, beta=0 corresponds to algo.kl.where=off (docs"),
    ("actor_rollout_ref.actor.clip_ratio_high=1", "From verl or TRL: algo.clip_low, algo.clip_high (docs"),
    ("+seed=2", "seed: exists already, and + adds only new keys; got +seed=2. Write seed=2"),
    ("~sed", "there is no such key to delete; got ~sed. Did you mean seed?"),
    ("~tags.owner", "there is no such key to delete; got ~tags.owner."),
    ("~algo.kl", "is a section, and only single settings return to their defaults; got ~algo.kl. Set its keys, or "
     "reset one, such as ~algo.kl.adaptive"),
    ("~data.task", ": follows from the group; got '~data.task'. Choose a task as a group: data=countdown"),
    ("algo=grppo", "must name a file in conf/algo; got grppo. Did you mean grpo?"),
    ("algo=[grpo,ppo]", "must name a file in conf/algo; got [grpo,ppo]"),
    ("data=null", "must name a file in conf/data; got null. There are code, countdown, custom, gsm8k, mapped, math"),
])  # fmt: skip
def test_one_mistake_is_one_problem(override, expected):
    line = the_problem(override)
    assert expected in line
    assert line.startswith(f"{override.lstrip('~+').partition('=')[0].partition('@')[0]}: ")


@pytest.mark.parametrize(("name", "expected"), [
    ("folder", "must be a regular file"), ("list", "its file must hold keys and values"),
    ("none", "there is no such file"),
    ("bytes", "cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
    ("torn", "cannot be read (while parsing a flow mapping"), ("twice", "cannot be read (while constructing a mapping"),
    ("broken", "cannot be read (Input/output error)"),
])  # fmt: skip
def test_unreadable_settings_file_is_one_problem(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "broken.yaml").symlink_to("/proc/self/mem")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00name")
    for file, text in {"list": "[1, 2]\n", "torn": "trainer: {batch_size: 4\n", "twice": "seed: 1\nseed: 2\n"}.items():
        (tmp_path / f"{file}.yaml").write_text(text)
    for shown, got in ((f"{name}.yaml", f"{name}.yaml in {tmp_path}"), (f"{tmp_path}/{name}.yaml",) * 2):
        suite, experiment = the_problem(f"validation.suites=[{shown}]"), the_problem(experiment=shown)
        assert suite.startswith(f"validation.suites: {expected}")
        assert suite.endswith(f"; got {got}. conf/suite/gsm8k.yaml shows the form")
        assert experiment.startswith(f"experiment: {expected}")
        assert f"; got {got}. Fix it, or name one of {EXPERIMENTS}; " in experiment


@pytest.mark.parametrize("override", ["a b=3", "seed==3", "", "trainer.total_steps 5", "=3", "data.operations=[+"])
def test_unreadable_override_is_shown(override):
    line = the_problem(override)
    assert line.startswith("override: cannot be read (")
    assert f"; got {override!r}. Write key=value" in line
    assert "there is no = in it" in (bare := the_problem("countdown_demo"))
    assert "Did you mean experiment=countdown_demo?" in bare
    cannot_be_read, other = problems("paths.root=~/x", "seed=-1")
    assert "quote spaces, commas and ~" in cannot_be_read
    assert "experiment=" not in cannot_be_read
    assert other.startswith("seed: ")


@pytest.mark.parametrize("key", ["tags", "data.chat_template_kwargs"])
def test_unresolved_interpolation_under_dotted_name_is_reported(key):
    assert the_problem("tags={a:'${',b:'${seed}'}").startswith("tags.a: cannot be filled in (no viable alternative")
    values = "a.b:'${nope}',c.d:'${oc.env:MILLRACE_NO_SUCH}',e.f:'???',g.h:'${paths.root}'"
    not_found, no_variable, missing = problems(f"{key}={{{values}}}")
    assert not_found.startswith(f"{key}.a.b: cannot be filled in (Interpolation key 'nope' not found); got ${{nope}}. ")
    assert no_variable.startswith(f"{key}.c.d: cannot be filled in (")
    assert "Environment variable 'MILLRACE_NO_SUCH' not found" in no_variable
    assert missing.startswith(f"{key}.e.f: cannot be filled in (Missing mandatory value: e.f); got ???. ")


@pytest.mark.parametrize(("overrides", "key"), [
    (["experiment=debug"], "experiment"), (["algo=grpo", "algo=rloo"], "algo"),
    (["algo.kl={where:loss,coef:0.1}", "algo.kl.coef=0.2"], "algo.kl.coef"), (["tags.a=1", "~tags.a"], "tags.a"),
])  # fmt: skip
def test_key_with_two_values_is_rejected(overrides, key):
    assert the_problem(*overrides).startswith(f"{key}: is given more than once, with different values; got ")


def test_every_kind_of_mistake_is_reported_together_without_its_followers():
    assert keys("trainer.batch_size=many", "trainer.mini_batch_size=48") == ["trainer.batch_size"]
    assert keys("trainer.batchsize=96", "trainer.mini_batch_size=48") == ["trainer.batchsize"]
    found = keys(
        "algo=grppo", "a b=3", "seed=1,2", "sed=1", "trainer.total_steps=-1", "rollout.engine=vlm",
        "model.path=./no/where", "trainer.mini_batch_size=48", "paths.root=${foo}", "tracking=off",
    )  # fmt: skip
    first = ["algo", "override", "seed", "paths.root", "rollout.engine", "trainer.total_steps", "tracking", "sed"]
    assert found == [*first, "model.path", "trainer.mini_batch_size"]
    found = keys("sed=1", "trainer.total_steps=-1", "trainer.mini_batch_size=48", experiment="nothing")
    assert found == ["experiment", "trainer.total_steps", "sed"]


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the experiments in a user's folder of settings, which is registered as by `--config-dir`."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(folder.parent))
    return folder


def test_mistakes_in_file_are_reported(own_conf):
    (own_conf / "mine.yaml").write_text("defaults: [debug, _self_]\ntrainer: {totl_steps: 5, batch_size: 0}\n")
    lines = problems("seed=x", experiment="mine")
    assert [line.partition(":")[0] for line in lines] == ["seed", "trainer.batch_size", "trainer.totl_steps"]
    assert "got 5 from experiment/mine.yaml. Did you mean trainer.total_steps?" in lines[2]
    (own_conf / "mine.yaml").write_text("defaults: {debug: 1, _self_: 2}\n")
    assert "its defaults must be a list; got {debug:1,_self_:2} in mine. " in the_problem(experiment="mine")
    odd = "warm_start: {on: true, off: '${nope}'}\ntrainer: {1: 5}\n"
    (own_conf / "mine.yaml").write_text(f"defaults: [debug, _self_]\n{odd}")
    lines = problems(experiment="mine")
    assert [line.partition(":")[0] for line in lines] == ["warm_start.false", "warm_start.true", "trainer.1"]
    assert "there is no such setting; got true from a settings file" in lines[1]


@pytest.mark.parametrize(("defaults", "missing", "remedy"), [
    ("[mine, _self_]", "experiment/mine", f"There are {EXPERIMENTS}"),
    ("[debgu, _self_]", "experiment/debgu", "Did you mean debug? There are "),
    ("[debug, {override /algo: grppo}, _self_]", "algo/grppo", "Did you mean grpo? There are "),
    ("[debug, {/none: x}]", "none/x", "There are experiment, data, "),
])  # fmt: skip
def test_unknown_defaults_are_reported_with_known_ones(tmp_path, defaults, missing, remedy):
    (file := tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\n")
    line = the_problem(experiment=str(file))
    assert line.startswith(f"experiment: its defaults must name files in conf/; got {missing} in {file}. {remedy}")
    assert "hydra" not in line


def test_a_forgotten_config_dir_is_proposed(tmp_path, monkeypatch):
    (folder := tmp_path / "conf" / "data").mkdir(parents=True)
    (folder / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert "got mine. Add --config-dir conf, which has data/mine.yaml. There are code, " in the_problem("data=mine")


def test_composition_lists_files_and_members(own_conf):
    usual = {"data": "countdown", "model": "scratch", "critic": "none", "algo": "grpo", "rollout": "hf"}
    usual["runtime"] = "local"
    assert ((alone := compose([])).files, alone.members) == ([], usual)
    (own_conf / "mine.yaml").write_text("defaults: [debug, _self_]\nseed: 3\n")
    files = ["experiment/debug.yaml", "experiment/mine.yaml"]
    found = compose(["algo=ppo", "seed=2"], experiment="mine")
    assert (found.files, found.members["algo"], found.members["critic"]) == (files, "ppo", "default")
    (elsewhere := own_conf.parent.parent / "elsewhere.yaml").write_text(
        "defaults: [mine, override /algo: rloo, _self_]\n"
    )
    found = compose([f"experiment={elsewhere}"])
    assert (found.files, found.members["algo"], list(found.members)) == ([*files, str(elsewhere)], "rloo", list(usual))


def test_another_task_drops_inherited_keys(own_conf):
    config = load_config(["data=gsm8k", "model.path=some/model", "warm_start.enabled=false"], experiment=DEMO)
    assert config.data == Gsm8kData()
    assert load_config(["data=countdown"], experiment=DEMO) == load_config([], experiment=DEMO)
    data = "data: {build: data.sort_digits:build, scorer: data.sort_digits:score}"
    (own_conf / "mine.yaml").write_text(f"defaults: [debug, override /data: custom, _self_]\n{data}\n")
    (own_conf / "more.yaml").write_text("defaults: [mine, _self_]\ndata: {train_size: 64}\n")
    given = ["data.build=data.sort_digits:build", "data.scorer=data.sort_digits:score", "data=custom"]
    assert load_config(["data=custom"], experiment="mine") == load_config(given, experiment="debug")
    assert load_config([], experiment="more") == load_config([*given, "data.train_size=64"], experiment="debug")
    back = load_config(["data=countdown"], experiment="more").data
    assert back == load_config([], experiment="debug").data, "what debug says of countdown, and nothing of the others"
    text = "defaults: [countdown_ppo_demo, override /algo: grpo, _self_]\nalgo: {lam: 1}\n"
    (own_conf / "mine.yaml").write_text(text)
    assert load_config([], experiment="mine").critic is None


def test_external_file_builds_on_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    base, middle, own = (tmp_path / name for name in ("base.yaml", "below/middle.yaml", "own.yaml"))
    base.write_text("defaults: [debug, _self_]\nname: base\nseed: 4\noptim: {lr: 1e-5}\n")
    middle.write_text("defaults: [../base.yaml, {override /algo: rloo}, _self_]\nseed: 5\n")
    own.write_text("defaults: [below/middle.yaml, _self_]\nname: own\n")
    monkeypatch.chdir(tmp_path / "below")
    config = load_config([], experiment="../own.yaml")
    assert (config.name, config.seed, config.optim.lr, config.algo.advantage) == ("own", 5, 1e-5, "rloo")
    assert compose([], experiment=str(own)).files == ["experiment/debug.yaml", *map(str, (base, middle, own))]
    base.write_text("defaults: [debug, _self_]\nseed: 4\noptim: {lr: 2e-5, lrr: 1}\n")
    assert f"optim.lrr: there is no such setting; got 1 from {base}" in the_problem(experiment=str(own))
    for wrong, problem in (("own.yaml", "builds on itself"), ("gone.yaml", "there is no such file")):
        own.write_text(f"defaults: [{wrong}, _self_]\nname: own\n")
        assert problem in the_problem(experiment=str(own))
    assert "Did you mean own.yaml? Fix it, or name one of" in the_problem(experiment=str(own.with_suffix(".yml")))
    own.write_text("defaults: [below/middle.yaml, _self_]\nname: own\n")
    base.write_text("defaults: [_self_, debug]\noptim: {lr: 2e-5}\n")
    assert f"got _self_ before debug in {base}. Put _self_ behind debug" in the_problem(experiment=str(own))


def test_threads_compose_concurrently_inside_another_hydra(tmp_path):
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda algo: compose([f"algo={algo}"], experiment=DEMO).members["algo"], ALGOS))
        assert hydra_compose("theirs").a == 1
    assert found == ALGOS


def test_own_groups_and_experiments_are_found_first(own_conf: Path) -> None:
    algo = own_conf.parent / "algo"
    algo.mkdir()
    (algo / "calm.yaml").write_text("defaults: [dapo, _self_]\nclip_high: 0.3\n")
    (algo / "grpo.yaml").write_text("defaults: [defaults, _self_]\nclip_low: 0.1\n")
    mine = "defaults: [debug, {override /algo: calm}, _self_]\nname: mine\nalgo: {overlong: {enabled: false}}\n"
    (own_conf / "mine.yaml").write_text(mine)
    mine = load_config([], experiment="mine")
    assert (mine.name, mine.algo.clip_high, mine.algo.dynamic_sampling.enabled) == ("mine", 0.3, True)
    assert load_config(["algo=grpo"], experiment=DEMO).algo.clip_low == 0.1
    assert "calm" in group_members("algo")
    with pytest.raises(ConfigError, match=r"algo: must name .* Did you mean calm\?"):
        load_config(["algo=cal"], experiment=DEMO)
    (algo / "calm.yaml").write_text("defaults: [dapo, _self_]\nclip_high: 0.4\n")
    assert load_config([], experiment="mine").algo.clip_high == 0.4, "changed files are read again"
