"""Reports of settings that have no effect."""

import re
from pathlib import Path

import pytest

from rlcore.config.base import covers, effects_in, unused_settings
from rlcore.config.compose import compose
from rlcore.config.data import TASKS
from rlcore.config.run import all_keys, section_names
from rlcore.config.sweep import load_sweep
from tests.helpers.settings import settings

# The key with a value: what leaves it unread | what lets it be read ; another case.
CASES = re.findall(r"(\S+): (.*?)\|(.*?)(?: ;|\n)", """
algo.lam=1: | algo.advantage=gae critic={} ; algo.advantage_options.k=2: | algo.advantage=pass_at_k
algo.gamma=1: | algo.advantage=reinforce_pp ; algo.value_clip=0.2: | algo.advantage=gae critic={}
algo.dual_clip=2: algo.policy_loss=cispo | algo.policy_loss=gspo ; algo.clip_low=0.1: algo.policy_loss=sapo |
algo.dual_clip=2: algo.policy_loss=sapo | ; algo.clip_low=0.1: algo.policy_loss=kl_cov |
algo.dual_clip=2: algo.policy_loss=kl_cov | ; algo.kl.estimator=k2: | algo.kl.where=loss
algo.kl.coef=0.001: | algo.kl.where=loss ; algo.kl.offload=true: | algo.kl.where=loss
algo.kl.estimator=k1: algo.kl.where=loss | algo.kl.where=reward
algo.kl.estimator=k2: algo.kl.where=reward | algo.kl.where=loss ; algo.clip_cov.low=0.5: | algo.clip_cov.share=0.1
algo.kl.estimator=k3: algo.kl.where=reward | algo.kl.where=loss ; algo.clip_cov.high=4: | algo.clip_cov.share=0.1
algo.kl.estimator=low_var_kl: algo.kl.where=reward | algo.kl.where=loss
algo.kl.target=1: algo.kl.where=loss | algo.kl.where=loss algo.kl.adaptive=true
algo.importance.mode=mask: trainer.old_logprobs=behavior | ; algo.rejection.estimator=k3: | algo.rejection.level=token
algo.rejection.level=token: trainer.old_logprobs=behavior | ; algo.overlong.penalty=2: | algo.overlong.enabled=true
algo.importance.level=sequence: | algo.importance.mode=mask ; optim.min_lr_ratio=0.1: | optim.schedule=cosine
algo.entropy_control.step=0.1: | algo.entropy_control.target=0.3 ; model.scratch.num_layers=2: | model.path=null
algo.dynamic_sampling.max_refills=2: | algo.dynamic_sampling.enabled=true ; warm_start.optim.lr=0.1: | $WARM
critic.optim.min_lr_ratio=0.1: critic={} | critic.optim.schedule=linear ; data.search_tries=3: | $WARM
warm_start.optim.min_lr_ratio=0.1: $WARM | $WARM warm_start.optim.schedule=cosine ; data.seed=2: data.task=gsm8k |
model.offload_activations=true: | model.gradient_checkpointing=true ; sandbox.time_s=9: | data.scorer=data.code:score
model.zero_stage=1: | runtime.num_workers=2 runtime.backend=ray ; sandbox.allow_weak=true: | data.scorer=my.own:score
data.search_tries=3: $WARM data.template=bare | $WARM ; warm_start.dpo_beta=0.3: $WARM | $WARM warm_start.loss=dpo
warm_start.check_problems=9: $WARM | $WARM warm_start.stop_at_reward=0.5
warm_start.patience=2: $WARM warm_start.held_out_rows=0 | $WARM ; pass_rates.keep=[0.1,0.9]: | pass_rates.samples=4
data.seed=2: data.task=gsm8k | data.task=gsm8k warm_start.demonstrations=a.jsonl
warm_start.misdirected_share=0.5: $WARM warm_start.demonstrations=a.jsonl | $WARM
warm_start.misdirected_share=0.5: $WARM data.task=gsm8k | $WARM data.task=custom
sandbox.time_s=9: data.environment=data.number_guessing:Game | data.environment=rlcore.rollout.tools:Tools
sandbox.memory_mb=99: | validation.suites=[{name:x,data:{task:countdown}}]
pass_rates.rest_weight=0.2: | pass_rates.draw=band ; rollout.memory_share=0.3: | rollout.engine=vllm
rollout.canary_bound=1: | rollout.engine=vllm ; rollout.sleep_level=1: | rollout.engine=vllm
rollout.tensor_parallel_size=1: | rollout.engine=vllm ; reward.deadline_s=1: | reward.num_processes=1
rollout.enforce_eager=true: rollout.engine=vllm runtime.device=cpu | rollout.engine=vllm
reward.judge.tries=2: | data.scorer=data.judge:score ; episode.max_turns=3: | data.environment=a:B
episode.reward_per_turn=true: data.environment=a:B | data.environment=a:B algo.advantage=reinforce_pp
validation.sampling.top_p=0.9: validation.sampling.temperature=0 | ; answers.max_gb=2: answers.every_steps=0 |
rollout.sampling.top_p=0.9: rollout.sampling.temperature=0 | ; reward.audit=false: data.environment=a:B |
alarms.grad_norm_above=9: alarms.grad_norm='off' | ; alarms.entropy_below=1: alarms.entropy='off' |
alarms.equal_scores=stop: rollout.samples_per_prompt=1 | ; alarms.kl_above=1: | alarms.kl=stop
alarms.length_share=0.5: | alarms.length=stop ; runtime.ray_address=auto: | runtime.backend=ray
runtime.fit_memory=auto: runtime.device=cpu | ; runtime.profile.num_steps=3: | runtime.profile.first_step=2
trainer.batch_size=9: trainer.total_steps=0 | ; optim.lr=0.1: trainer.total_steps=0 |
algo.clip_low=0.1: trainer.total_steps=0 | ; tracking.log_best=true: tracking.enabled=false |
""")  # fmt: skip


@pytest.mark.parametrize(("given", "idle", "read"), CASES)
def test_unused_setting_is_reported(given, idle, read):
    key = given.partition("=")[0]
    (line,) = unused_settings(settings(f"{idle} {given}"), [key])
    assert line.startswith(f"{key}=")
    assert "no effect with" in line
    assert unused_settings(settings(f"{read} {given}"), [key]) == []
    assert unused_settings(settings(f"{idle} {given}"), []) == [], "it was not given"


def test_every_effect_has_a_case():
    names, tried = {*all_keys(), *section_names()}, [given.partition("=")[0] for given, *_ in CASES] + ["data.revision"]
    full = [settings(f"critic={{}} model.lora={{}} data.task={task}") for task in TASKS]
    for (_, by), scope in (item for config in full for item in effects_in(config).items()):
        assert {*scope} <= names
        assert any(name in names for name in by)
        assert any(covers(key, name) for name in tried for key in scope), scope


def test_revision_is_unused_for_local_folder(tmp_path: Path):
    given = ["data=gsm8k", f"data.source={tmp_path}", "data.revision=main", "model.path=a/b"]
    (line,) = compose(given).unused_settings()
    assert line.startswith("data.revision=main: has no effect with data.source=")
    given[1] = "data.source=openai/gsm8k"
    assert compose(given).unused_settings() == []


@pytest.mark.parametrize(("given", "line"), [
    ("algo.lam=0.5", "algo.lam=0.5: has no effect with algo.advantage=grpo. Set algo.advantage=gae, or leave it out"),
    ("algo.kl.target=1 algo.kl.coef=0.5",
     "algo.kl.coef=0.5, algo.kl.target=1.0: have no effect with algo.kl.where=off. Set algo.kl.where=loss or "
     "reward, or leave them out"),
    ("sandbox.time_s=9",
     "sandbox.time_s=9.0: has no effect with no scorer that runs programs. Choose data=code, or leave it out"),
    ("pass_rates.keep=[0.1,0.9]",
     "pass_rates.keep=[0.1,0.9]: has no effect with pass_rates.samples=0. Set pass_rates.samples, or leave it out"),
])  # fmt: skip
def test_unused_settings_text(given: str, line: str):
    assert unused_settings(settings(given), [word.partition("=")[0] for word in given.split()]) == [line]


def test_sweep_reports_unused_settings(tmp_path: Path):
    grid = "grid: {optim.schedule: [constant, cosine], algo.importance.cap: [2.0, 3.0]}"
    (file := tmp_path / "sweep.yaml").write_text(f"name: mine\nexperiment: debug\nseeds: [1]\n{grid}\n")
    lines = load_sweep(str(file), ["reward.deadline_s=3", "optim.min_lr_ratio=0.1"]).unused_settings()
    assert [line.partition(":")[0] for line in lines] == ["algo.importance.cap", "reward.deadline_s=3.0"]


def test_file_reports_unused_unless_switched_off(tmp_path: Path):
    text = "defaults: [debug]\nalgo: {importance: {cap: 3.0}}\nrollout: {memory_share: 0.4}\n"
    (file := tmp_path / "mine.yaml").write_text(text)
    words = [f"experiment={file}", "warm_start.enabled=false", "optim.lr=1e-4"]
    lines = compose(words).unused_settings()
    assert [line.partition("=")[0] for line in lines] == ["algo.importance.cap", "rollout.memory_share"]
    words.append("rollout=hf")
    assert [line.partition("=")[0] for line in compose(words).unused_settings()] == ["algo.importance.cap"]
    words.append("+warm_start={max_steps: 9, batch_size: 8}")
    assert compose(words).unused_settings()[0].startswith("warm_start.batch_size=8, warm_start.max_steps=9: have no")
    assert compose(["experiment=debug", "~tags"]).unused_settings() == []
