"""Each rule: settings that break it, and the same settings mended."""

import json
from typing import Any

import pytest
import yaml

from rlcore.config import RunConfig
from rlcore.config.algo import POLICY_LOSSES
from rlcore.config.model import SMOLLM2
from rlcore.config.rules import RULES, broken_rules
from rlcore.config.rules.registry import divisors
from rlcore.config.run import all_keys, is_key, section_names

HELD = "model.path=some/model"
# A model made from nothing, on problems that it can read.
SCRATCH = (
    "data.number_high=20 data.target_high=40 data.template=bare "
    "filter.max_prompt_tokens=32 rollout.max_response_tokens=8"
)
FILES = f"data.train_file={__file__} data.validation_file={__file__} reward.num_processes=1"


def settings(words: str, base: str = HELD) -> RunConfig:
    """Settings from words like `trainer.total_steps=5`; no rule is asked."""
    nested: dict[str, Any] = {"data": {"task": "countdown"}}
    for word in [*base.split(), *words.split()]:
        key, _, value = word.partition("=")
        inner = nested
        for part in key.split(".")[:-1]:
            inner = inner.setdefault(part, {})
        # A mapping in braces needs a space after its colons, and words have none; `::` is a colon of a value.
        spaced = value.replace("::", "\0").replace(":", ": ").replace("\0", ":")
        inner[key.rpartition(".")[2]] = yaml.safe_load(spaced if "{" in value else value)
    if nested["data"]["task"] != "countdown":
        own = ("task", "train_file", "validation_file", "parts", "scorer")
        nested["data"] = {name: value for name, value in nested["data"].items() if name in own}
    return RunConfig.model_validate(nested)


CHECK_EVERY = "warm_start.check_every must divide warm_start.steps_per_chunk"
MICRO_BATCH = (
    "trainer.max_tokens_per_micro_batch must be at least filter.max_prompt_tokens + rollout.max_response_tokens"
)
MIXTURE = "data.task=mixture data.parts=[{data:{task:countdown%s}},{data:{task:custom}%s}]"

WEIGHED = "algo.advantage=gdpo reward.weights.correct=1 reward.weights.format=0.5"
JUDGED = (
    "data.scorer=data.judge:score reward.num_processes=2 reward.deadline_s=31 reward.judge.model=m "
    "reward.judge.url=http://127.0.0.1:8000/v1"
)

# rule, broken, mended
SUITES = "validation.suites=[{name:%s,data:{task:countdown}},{name:%s,data:{task:countdown}%s}]"
CASES = [
    ("a_mixture_has_parts", "data.task=mixture data.parts=[{data:{task:countdown}}]", MIXTURE % ("", "")),
    ("a_mixture_has_parts", "data.task=mixture data.parts=[]", MIXTURE % ("", "")),
    ("a_mixture_has_parts", MIXTURE % ("", ",name:all"), MIXTURE % ("", ",name:mine")),
    ("a_mixture_scores_by_part", MIXTURE % ("", "") + " data.scorer=a.b:c", MIXTURE % ("", "")),
    ("every_dataset_must_keep_the_rules", MIXTURE % (",min_numbers:5", ""), MIXTURE % (",min_numbers:4", "")),
    (
        "reasoning_gym_is_scored_apart",
        "data.task=reasoning_gym data.scorer=data.reasoning_gym:score",
        "data.task=reasoning_gym data.scorer=data.reasoning_gym:score reward.num_processes=1",
    ),
    ("suites_have_names_and_room", SUITES % ("x", "x", ""), SUITES % ("x", "y", "")),
    ("suites_have_names_and_room", SUITES % ("x", "all", ""), SUITES % ("x", "y", "")),
    ("suites_have_names_and_room", SUITES % ("x", "y", ",max_prompt_tokens:257"), SUITES % ("x", "y", "")),
    ("every_suite_must_keep_the_rules", SUITES % ("x", "y", ",sampling:{temperature:0}"), SUITES % ("x", "y", "")),
    ("data.min_numbers must be at most data.max_numbers", "data.min_numbers=5", "data.min_numbers=4"),
    ("data.number_low must be at most data.number_high", "data.number_low=101", "data.number_low=100"),
    ("data.target_low must be at most data.target_high", "data.target_low=1001", "data.target_low=1000"),
    ("operations_once_each", "data.operations=['+','+']", "data.operations=['+']"),
    ("operations_once_each", "data.operations=[]", "data.operations=['-','+']"),
    ("training_file_is_there", f"data.task=parquet {FILES} data.train_file=no.parquet", f"data.task=parquet {FILES}"),
    ("training_file_is_there", f"data.task=parquet {FILES} data.train_file=tests", f"data.task=parquet {FILES}"),
    (
        "training_file_is_there",
        f"data.task=parquet {FILES} data.train_file='~nobody77/x'",
        f"data.task=parquet {FILES}",
    ),
    ("training_file_is_there", f"data.task=parquet {FILES} data.train_file=''", f"data.task=parquet {FILES}"),
    ("validation_file_is_there", f"data.task=parquet {FILES} data.validation_file=''", f"data.task=parquet {FILES}"),
    *[("scorer_is_a_function", f"data.scorer={s}", "data.scorer=a.b:c") for s in ("''", "a.b", "a/b:c")],
    *[("scorer_is_a_function", f"data.scorer={s}", "data.scorer=b:c") for s in ("':c'", "'a.b:'", "a:c:d", "a..b:c")],
    ("a_program_ends_before_its_scorer", "data.scorer=data.code:score sandbox.time_s=5", "data.scorer=data.code:score"),
    (
        "tools_are_there",
        "data.environment=rlcore.rollout.tools:Tools",
        "data.environment=rlcore.rollout.tools:Tools episode.tools=[data.calculator:calculate]",
    ),
    ("tools_are_functions", "data.environment=a:B episode.tools=[a.b]", "data.environment=a:B episode.tools=['a.b:c']"),
    ("environment_is_a_class", "data.environment=a.b", "data.environment=a.b:C"),
    ("an_environment_of_all_parts", MIXTURE % (",environment:a::B", ""), MIXTURE % ("", "") + " data.environment=a:B"),
    ("kept_rates_are_shares", "pass_rates.samples=4 pass_rates.keep=[0.9,0.1]", "pass_rates.keep=[0.1,0.9]"),
    ("kept_rates_are_shares", "pass_rates.samples=4 pass_rates.keep=[0,8]", "pass_rates.keep=[0,1]"),
    ("band_of_rates_is_of_shares", "pass_rates.band=[-0.1,0.5]", "pass_rates.band=[0,0.5]"),
    ("band_of_rates_is_of_shares", "pass_rates.band=[0.5,1.1]", "pass_rates.band=[0.5,0.5]"),
    ("pass_rates_come_from_one_place", "pass_rates.samples=4 pass_rates.table=x", "pass_rates.samples=4"),
    ("pass_rate_table_is_there", "pass_rates.table=no/such/folder", "pass_rates.table=null"),
    (
        "chat_template_kwargs_are_free_names",
        "data.chat_template_kwargs.tokenize=true",
        "data.chat_template_kwargs.enable_thinking=false",
    ),
    (
        "chat_template_kwargs_of_all_parts",
        MIXTURE % (",chat_template_kwargs:{enable_thinking:false}", ""),
        MIXTURE % ("", "") + " data.chat_template_kwargs.enable_thinking=false",
    ),
    ("a_seed_of_all_parts", MIXTURE % (",seed:2", ""), MIXTURE % ("", "") + " data.seed=2"),
    (
        "a_suite_has_one_seed",
        "validation.suites=[{name:x,data:{task:countdown,seed:2}}]",
        "validation.suites=[{name:x,data:{task:countdown},seed:2}]",
    ),
    ("resamples_are_enough", "validation.num_resamples=999", "validation.num_resamples=1000"),
    ("uniform_targets_are_searched", "data.targets=uniform data.max_numbers=5", "data.max_numbers=5"),
    (
        "a_warm_start_is_scored",
        "data.environment=a:B warm_start.enabled=true warm_start.stop_at_reward=0.5",
        "data.environment=a:B warm_start.enabled=true",
    ),
    ("a_game_is_played_once", "data.environment=a:B algo.advantage=remax", "data.environment=a:B algo.advantage=rloo"),
    (
        "mathematics_is_scored_apart",
        "data.scorer=data.math:score",
        "data.scorer=data.math:score reward.num_processes=1",
    ),
    *[
        (name, f"warm_start.enabled=true warm_start.{wrong}", f"warm_start.enabled={enabled} warm_start.{right}")
        for name, wrong, right, enabled in (
            ("demonstrations_are_there", "demonstrations=no/such.jsonl", "demonstrations=null", "true"),
            ("demonstrations_are_there", "demonstrations=pyproject.toml", "demonstrations=no/such.jsonl", "false"),
            ("warm_start_warmup_fits", "optim.warmup_steps=1200", "optim.warmup_steps=1199", "true"),
            (
                "warm_start.check_every must divide warm_start.steps_per_chunk",
                "check_every=30",
                "check_every=25",
                "true",
            ),
        )
    ],
    ("a_run_has_an_engine", "rollout.engine=none", "rollout.engine=hf"),
    (
        "runtime.num_workers must divide warm_start.batch_size",
        "runtime.backend=ray runtime.num_workers=4 warm_start.enabled=true warm_start.batch_size=6",
        "runtime.backend=ray runtime.num_workers=4 warm_start.batch_size=6",
    ),
    (
        "trainer.mini_batch_size must divide trainer.batch_size",
        "trainer.mini_batch_size=48",
        "trainer.mini_batch_size=64",
    ),
    (
        "trainer.mini_batch_size must divide trainer.batch_size",
        "trainer.mini_batch_size=512",
        "trainer.mini_batch_size=256",
    ),
    (
        "runtime.num_workers must divide trainer.mini_batch_size x rollout.samples_per_prompt",
        "runtime.backend=ray runtime.num_workers=2 rollout.samples_per_prompt=5 trainer.mini_batch_size=1",
        "runtime.backend=ray runtime.num_workers=2 rollout.samples_per_prompt=5 trainer.mini_batch_size=2",
    ),
    (
        "runtime.num_workers must be at most trainer.batch_size",
        "runtime.backend=ray runtime.num_workers=4 trainer.batch_size=2 trainer.mini_batch_size=2",
        "runtime.backend=ray runtime.num_workers=4 trainer.batch_size=4 trainer.mini_batch_size=4",
    ),
    (
        MICRO_BATCH,
        "trainer.max_tokens_per_micro_batch=1279",
        "trainer.max_tokens_per_micro_batch=1280",
    ),
    ("local_runtime_is_one_process", "runtime.num_workers=2", "runtime.num_workers=2 runtime.backend=ray"),
    ("policy_warmup_fits", "optim.warmup_steps=100", "optim.warmup_steps=99"),
    ("policy_warmup_fits", "optim.warmup_steps=2 trainer.total_steps=1", "optim.warmup_steps=1 trainer.total_steps=1"),
    ("policy_warmup_fits", "optim.warmup_steps=5 optim.warmup_ratio=0.1", "optim.warmup_ratio=0.1"),
    (
        "critic_warmup_fits",
        "algo.advantage=gae critic.optim.warmup_steps=100",
        "algo.advantage=gae critic.optim.warmup_steps=99",
    ),
    *[
        (
            "groups_have_members",
            f"algo.advantage={method} rollout.samples_per_prompt=1",
            f"algo.advantage={method} rollout.samples_per_prompt=2",
        )
        for method in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo")
    ],
    (
        "dynamic_sampling_has_groups",
        "algo.advantage=json:dumps algo.dynamic_sampling.enabled=true rollout.samples_per_prompt=1",
        "algo.advantage=json:dumps algo.dynamic_sampling.enabled=true",
    ),
    *[
        ("dynamic_sampling_drops_what_is_zero", f"{words} algo.dynamic_sampling.enabled=true", words)
        for words in ("algo.advantage=gae critic={}", "algo.advantage=reinforce_pp", "algo.advantage=remax")
    ],
    (
        "rejection_has_two_sides",
        "algo.rejection.level=token trainer.old_logprobs=behavior",
        "algo.rejection.level=token",
    ),
    ("top_entropy_has_a_pass", "algo.top_entropy=0.2 trainer.old_logprobs=behavior", "algo.top_entropy=0.2"),
    *[
        (
            "kl_cov_sees_a_difference",
            "algo.policy_loss=kl_cov trainer.batch_size=8 trainer.mini_batch_size=8",
            f"algo.policy_loss=kl_cov trainer.batch_size=8 {word}",
        )
        for word in (
            "trainer.mini_batch_size=4",
            "trainer.mini_batch_size=8 trainer.epochs_per_batch=2",
            "trainer.mini_batch_size=8 trainer.old_logprobs=behavior",
        )
    ],
    (
        "algo.clip_cov.low must be under algo.clip_cov.high",
        "algo.clip_cov.share=0.1 algo.clip_cov.low=5",
        "algo.clip_cov.low=5",
    ),
    (
        "a_factor_is_over_one",
        "algo.rejection.level=token algo.rejection.cap=1",
        "algo.rejection.level=token algo.rejection.cap=1 algo.rejection.estimator=k3",
    ),
    ("gdpo_has_parts", "algo.advantage=gdpo reward.weights.correct=1", WEIGHED),
    *[
        ("gdpo_sees_parts_alone", f"{WEIGHED} {word}", WEIGHED)
        for word in ("algo.overlong.enabled=true", "algo.kl.where=reward")
    ],
    *[
        ("a_judge_has_an_endpoint", f"{JUDGED} reward.judge.url={url}", JUDGED)
        for url in (
            "''",
            "127.0.0.1:8000/v1",
            "ftp://a",
            "http://",
            "http://me:secret@host/v1",
            "http://host/v1?key=secret",
            "http://host:99999/v1",
            "http://host:0/v1",
            "http://me@host/v1",
            "http://host/v1#part",
        )
    ],
    ("a_judge_has_an_endpoint", f"{JUDGED} reward.judge.url=''", f"{JUDGED} reward.judge.url=https://host"),
    ("a_judge_has_an_endpoint", "reward.judge.url=http://me:secret@host/v1", "reward.judge.url=''"),
    ("a_judge_has_a_model", f"{JUDGED} reward.judge.model=''", JUDGED),
    ("a_judge_is_asked_from_processes", f"{JUDGED} reward.num_processes=0", JUDGED),
    ("a_judge_ends_before_its_process", f"{JUDGED} reward.deadline_s=30", JUDGED),
    ("a_judge_sees_the_answer", "reward.judge.prompt=Well?", ""),
    ("a_judge_is_beside_rules", "reward.judge.rules=data.judge:score", "reward.judge.rules=data.countdown:score"),
    ("an_environment_has_its_rewards", "data.environment=a:B reward.weights.correct=1", "data.environment=a:B"),
    ("gae_has_a_critic", "algo.advantage=gae", "algo.advantage=gae critic={}"),
    ("critic_is_used", "critic={}", "critic={} algo.advantage=gae"),
    *[
        ("kl_settings_have_effect", f"algo.kl.{word}", f"algo.kl.{word} algo.kl.where=loss")
        for word in ("coef=0.01", "adaptive=true", "target=0.2", "horizon=5", "estimator=k1", "offload=true")
    ],
    ("kl_settings_have_effect", "algo.kl.coef=0 algo.kl.adaptive=true", "algo.kl.coef=0"),
    ("lambda_has_effect", "algo.lam=0.9", "algo.lam=0.9 algo.advantage=gae critic={}"),
    ("gamma_has_effect", "algo.gamma=0.9", "algo.gamma=0.9 algo.advantage=reinforce_pp"),
    *[
        ("policy_loss_is_known", "algo.policy_loss=gsop", f"algo.policy_loss={loss} trainer.mini_batch_size=1")
        for loss in (*POLICY_LOSSES, "tests.algos.custom_loss:my_loss")
    ],
    *[
        ("advantage_is_known", "algo.advantage=gea", f"algo.advantage={name}")
        for name in ("rloo", "pass_at_k", "tests.algos.custom_loss:scaled")
    ],
    *[
        ("advantage_is_known", f"algo.advantage={wrong}", "algo.advantage=tests.algos.custom_loss:scaled")
        for wrong in ("mine:advantage", "tests.algos.custom_loss:scale", ":scaled")
    ],
    *[
        ("policy_loss_is_known", f"algo.policy_loss={wrong}", "algo.policy_loss=tests.algos.custom_loss:my_loss")
        for wrong in ("mine:loss", "no.such.package:loss", "tests.algos.custom_loss:my_los", ":my_loss")
    ],
    (
        "algo.overlong.buffer_tokens must be at most rollout.max_response_tokens",
        "algo.overlong.enabled=true algo.overlong.buffer_tokens=1025",
        "algo.overlong.enabled=true algo.overlong.buffer_tokens=1024",
    ),
    (
        "algo.overlong.buffer_tokens must be at most rollout.max_response_tokens",
        "algo.overlong.enabled=true algo.overlong.buffer_tokens=1025",
        "algo.overlong.buffer_tokens=1025",
    ),
    (
        "an_offloaded_base_changes_places",
        "model.lora.offload=true rollout.engine=vllm",
        "model.lora.offload=true rollout.engine=vllm rollout.sleep_level=1",
    ),
    ("kl_alarm_has_a_reference", "alarms.kl=stop", "alarms.kl=stop algo.kl.where=loss algo.kl.coef=0"),
    (
        "importance_has_two_sides",
        "algo.importance.mode=mask trainer.old_logprobs=behavior",
        "algo.importance.mode=mask trainer.old_logprobs=recompute",
    ),
    (
        "critic.warmup_steps must be under trainer.total_steps",
        "algo.advantage=gae critic.warmup_steps=100",
        "algo.advantage=gae critic.warmup_steps=99",
    ),
    ("training_answers_vary", "rollout.sampling.temperature=0", "rollout.sampling.temperature=0.1"),
    (
        "validation_answers_vary",
        "validation.sampling.temperature=0",
        "validation.sampling.temperature=0 validation.samples_per_problem=1",
    ),
    (
        "tensor_parallel_is_vllms",
        "rollout.tensor_parallel_size=2 runtime.num_workers=2 runtime.backend=ray",
        "rollout.tensor_parallel_size=2 runtime.num_workers=2 runtime.backend=ray rollout.engine=vllm",
    ),
    (
        "rollout.tensor_parallel_size must divide runtime.num_workers",
        "rollout.tensor_parallel_size=2 rollout.engine=vllm",
        "rollout.tensor_parallel_size=2 rollout.engine=vllm runtime.num_workers=4 runtime.backend=ray",
    ),
    (
        "vllm_gives_the_trainers_logprobs",
        "rollout.sampling.top_p=0.9 rollout.sampling.temperature=0.7 rollout.engine=vllm",
        "rollout.sampling.top_p=0.9 rollout.sampling.temperature=0.7",
    ),
    (
        "vllm_gives_the_trainers_logprobs",
        "rollout.sampling.top_p=0.9 rollout.sampling.temperature=0.7 rollout.engine=vllm",
        "rollout.sampling.top_p=0.9 rollout.engine=vllm",
    ),
    (
        "rollout.max_batched_tokens must be at least rollout.max_num_seqs",
        "rollout.max_batched_tokens=511",
        "rollout.max_batched_tokens=512",
    ),
    *[
        (
            "attention_runs_on_the_device",
            f"model.attention={attention} runtime.device=cpu",
            "model.attention=sdpa runtime.device=cpu",
        )
        for attention in ("varlen", "flash_attn")
    ],
    ("compiling_is_for_cuda", "model.compile=true runtime.device=cpu", "model.compile=true"),
    *[
        ("local_model_is_there", f"model.path={p}", "")
        for p in ("./no", "/no", "~/no", "'~nobody77/no'", "a/b/c", "tests", "package:pandas", "pyproject.toml")
    ],
    ("local_critic_is_there", "algo.advantage=gae critic.path=./no", "algo.advantage=gae critic.path=owner/name"),
    ("local_critic_is_there", "algo.advantage=gae critic.path='~nobody77/no'", "algo.advantage=gae critic.path=a/b"),
    ("local_critic_is_there", f"algo.advantage=gae critic.path={SMOLLM2}", "algo.advantage=gae critic.path=a/b"),
]
# The same for a model made from nothing.
TWO_GPUS = "rollout.engine=vllm rollout.tensor_parallel_size=2 runtime.backend=ray runtime.num_workers=2"
SCRATCH_CASES = [
    ("heads_divide_width", "model.scratch.hidden_size=100", "model.scratch.hidden_size=102"),
    ("heads_divide_width", "model.scratch.hidden_size=99", "model.scratch.hidden_size=99 model.path=a/b"),
    ("heads_fit_vllm", "model.scratch.num_heads=6 rollout.engine=vllm", "rollout.engine=vllm"),
    ("heads_fit_vllm", "model.scratch.num_heads=6 rollout.engine=vllm", "model.scratch.num_heads=6"),
    (
        "heads_fit_vllm",
        "model.scratch.hidden_size=144 rollout.engine=vllm runtime.device=cpu",
        "model.scratch.hidden_size=144 rollout.engine=vllm runtime.device=cuda",
    ),
    (
        "heads_fit_vllm",
        "model.scratch.hidden_size=144 rollout.engine=vllm runtime.device=cpu",
        "model.scratch.hidden_size=192 rollout.engine=vllm runtime.device=cpu",
    ),
    ("scratch_reads_the_prompts", "data.template=base", "data.template=bare"),
    ("scratch_reads_the_prompts", "data.task=gsm8k", "data.task=gsm8k model.path=a/b"),
    ("integers_are_tokens", "data.target_high=100", "data.target_high=99"),
    ("integers_are_tokens", "data.number_high=100", "data.number_high=99"),
    ("integers_are_tokens", "data.target_low=-1", "data.target_low=0"),
    ("sequences_fit_the_context", "filter.max_prompt_tokens=505", "filter.max_prompt_tokens=504"),
    ("adapters_name_layers", "model.lora.target_modules=[q_proj,nope]", "model.lora.target_modules=[q_proj]"),
    ("adapters_name_layers", "model.lora.target_modules=[]", "model.lora.target_modules=[q_proj]"),
    *[
        ("heads_are_dealt_to_the_gpus", f"{TWO_GPUS} model.scratch.hidden_size=192 {broken}", f"{TWO_GPUS} {mended}")
        for broken, mended in (
            ("model.scratch.num_heads=3", "model.scratch.num_heads=4 model.scratch.hidden_size=128"),
            ("model.scratch.num_heads=2 model.scratch.intermediate_size=99", "model.scratch.num_heads=2"),
        )
    ],
]
PAIRS = [
    *[(name, settings(broken), settings(mended)) for name, broken, mended in CASES],
    *[(name, settings(broken, SCRATCH), settings(mended, SCRATCH)) for name, broken, mended in SCRATCH_CASES],
]
NAMES = [name for name, *_ in PAIRS]
BY_NAME = {rule.name: rule for rule in RULES}


def test_every_rule_has_a_case():
    assert BY_NAME.keys() == set(NAMES)
    assert len(BY_NAME) == len(RULES)


@pytest.mark.parametrize(("name", "broken", "mended"), PAIRS, ids=NAMES)
def test_broken_and_mended(name, broken, mended):
    rule = BY_NAME[name]
    problem = rule.check(broken)
    assert problem is not None
    assert broken_rules(broken) == [problem]
    assert broken_rules(mended) == []
    assert is_key(problem.key) or problem.key in section_names()
    assert rule.reads_any([problem.key])
    assert problem.rule
    assert problem.got
    assert problem.remedy
    assert not problem.remedy.endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=BY_NAME)
def test_rules_read_settings_that_exist(rule):
    assert rule.reads
    assert all(key in all_keys() or key in section_names() for key in rule.reads)


@pytest.mark.parametrize(("name", "broken", "mended"), PAIRS, ids=NAMES)
def test_a_rule_depends_on_what_it_declares(name, broken, mended):
    """Put what a rule declares to read from the broken settings into the mended: broken. Then nothing else counts."""
    rule = BY_NAME[name]
    merged, source = mended.model_dump(), broken.model_dump()
    for key in rule.reads:
        _copy(source, merged, key.split("."))
    assert rule.check(RunConfig.model_validate(merged)) is not None


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
BARE = "is unset, and a model made from nothing reads bare countdown prompts only"
COVERED = "must cover every number and target from 0 up"
DEALT = "must divide the model's heads and its feed-forward width"
KL_ALONE = "has no effect without a reference (algo.kl.where)"
NO_KL = "Set algo.kl.where=loss or algo.kl.where=reward, or leave the other KL settings out"
ROOM = "must have at most filter.max_prompt_tokens + rollout.max_response_tokens in prompt and answer"
WORDS = [
    ("heads_divide_width", "model.scratch.hidden_size=100 model.scratch.num_heads=4",
     "must be an even multiple of model.scratch.num_heads", "100 with num_heads 4",
     "Take a multiple of 8, such as 128"),
    ("heads_fit_vllm", "model.scratch.num_heads=6 rollout.engine=vllm", f"{VLLM_HEADS}32 or more", "heads of 16",
     "Use 3 heads, hidden_size=192, or rollout.engine=hf"),
    ("heads_fit_vllm", "model.scratch.num_heads=1 model.scratch.hidden_size=16 rollout.engine=vllm",
     f"{VLLM_HEADS}32 or more", "heads of 16", "Use hidden_size=32, or rollout.engine=hf"),
    ("heads_fit_vllm", "model.scratch.num_heads=7 model.scratch.hidden_size=140 rollout.engine=vllm",
     f"{VLLM_HEADS}32 or more", "heads of 20", "Use 2 heads, hidden_size=224, or rollout.engine=hf"),
    ("heads_fit_vllm",
     "model.scratch.num_heads=8 model.scratch.hidden_size=192 rollout.engine=vllm runtime.device=cpu",
     ON_A_CPU, "heads of 24", "Use 6 heads, hidden_size=256, or rollout.engine=hf"),
    ("heads_fit_vllm", "model.scratch.hidden_size=144 rollout.engine=vllm runtime.device=cpu", ON_A_CPU, "heads of 48",
     "Use hidden_size=96, or rollout.engine=hf"),
    ("scratch_reads_the_prompts", "data.template=base", BARE, "data.template=base",
     "Set model.path to a directory or hub id, or data.template=bare, or start from experiment=countdown_demo"),
    ("scratch_reads_the_prompts", "data.task=gsm8k", BARE, "data=gsm8k", "Set model.path to a directory or hub id"),
    ("integers_are_tokens", "data.target_high=100", COVERED, "99 with number_high 20 and targets 1 to 100",
     "Set model.scratch.max_integer=100, or narrow the data's ranges"),
    ("integers_are_tokens", "data.number_high=101", COVERED, "99 with number_high 101 and targets 1 to 40",
     "Set model.scratch.max_integer=101, or narrow the data's ranges"),
    ("sequences_fit_the_context", "filter.max_prompt_tokens=505", CONTEXT, "505 + 8 = 513 tokens with a context of 512",
     "Lower one of the two, or raise the context"),
    ("adapters_name_layers", "model.lora.target_modules=[q_proj,nope,odd]",
     "must name linear layers of the decoder", "nope, odd",
     "Choose of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ("heads_are_dealt_to_the_gpus", f"{TWO_GPUS} model.scratch.hidden_size=192", DEALT,
     "2 with 3 heads, 3 of keys and values, and a width of 384", "Use one of 1, 3"),
    ("policy_warmup_fits", "optim.warmup_steps=5 optim.warmup_ratio=0.1", "must be 0 where warmup_steps is given",
     "warmup_steps 5 and warmup_ratio 0.1", "Set one of the two"),
    ("policy_warmup_fits", "optim.warmup_steps=100", "must be under trainer.total_steps", "100 with total_steps 100",
     "Warm up for fewer steps"),
    ("kl_settings_have_effect", "algo.kl.target=0.2 algo.kl.coef=0.5 algo.kl.offload=true", KL_ALONE,
     "coef 0.5, target 0.2, offload True with where off", NO_KL),
    ("suites_have_names_and_room", SUITES % ("x", "y", ",max_response_tokens:20"), ROOM, "y: 52, the run 40",
     "Lower the suite's limits, or raise the run's by 12"),
    ("runtime.num_workers must divide trainer.mini_batch_size x rollout.samples_per_prompt",
     "runtime.backend=ray runtime.num_workers=4 rollout.samples_per_prompt=5 trainer.mini_batch_size=2",
     "must divide trainer.mini_batch_size x rollout.samples_per_prompt",
     "4 with mini_batch_size 2, samples_per_prompt 5", "Use one of 1, 2, 5, 10"),
    (MICRO_BATCH, "trainer.max_tokens_per_micro_batch=39", MICRO_BATCH.partition(" ")[2],
     "39 with max_prompt_tokens 32, max_response_tokens 8",
     "Set it to 40 or more; the gradient does not depend on it"),
    ("critic_is_used", "critic={}", "has no use except with algo.advantage=gae", "its settings with advantage grpo",
     "Leave out the critic's settings (critic=none), or choose algo=ppo"),
    ("policy_loss_is_known", "algo.policy_loss=no_module_of_this_name:f", "must name a function as module:function",
     "no_module_of_this_name:f (there is no module no_module_of_this_name)",
     "A module is found in the folder that the command is started in, beside the experiment's file, on PYTHONPATH, "
     "or installed"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "says", "got", "remedy"), WORDS, ids=[name for name, *_ in WORDS])
def test_a_problem_is_told_in_these_words(name: str, words: str, says: str, got: str, remedy: str) -> None:
    problem = BY_NAME[name].check(settings(words, SCRATCH))
    assert problem is not None
    assert (problem.rule, problem.got, problem.remedy) == (says, got, remedy)


@pytest.mark.parametrize("unsound", ["trainer.batch_size", "trainer.mini_batch_size", "trainer"])
def test_rules_that_read_unsound_keys_are_not_judged(unsound):
    broken = settings("trainer.mini_batch_size=48")
    assert broken_rules(broken, ["optim.lr", "trainer.total_steps", "train"]) != []
    assert broken_rules(broken, [unsound]) == []


def test_a_section_is_unsound_with_a_key_in_it():
    assert broken_rules(settings("critic={}"), ["critic.optim.lr"]) == []


@pytest.mark.parametrize("nested", [False, True])
def test_the_context_of_a_local_model_is_read(tmp_path, nested):
    shape = {"max_position_embeddings": 1_280}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    held = f"model.path={tmp_path}"
    assert broken_rules(settings(held)) == []
    (problem,) = broken_rules(settings(f"{held} filter.max_prompt_tokens=257"))
    assert problem.key == "rollout.max_response_tokens"
    assert problem.got == "257 + 1024 = 1281 tokens with a context of 1280"
    assert "config.json of model.path" in problem.rule


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"max_position_embeddings": "many"}', "\xff"])
def test_a_strange_config_json_is_left_to_the_loader(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert broken_rules(settings(f"model.path={tmp_path}")) == []


def test_ranks_of_an_engine_may_share_a_head_of_keys_and_values(tmp_path):
    shape = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 48, "hidden_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rule = BY_NAME["heads_are_dealt_to_the_gpus"]
    found = {}
    for size in (1, 2, 3, 4, 5, 6, 12, 24):
        ranks = f"rollout.tensor_parallel_size={size} runtime.num_workers={size} runtime.backend=ray"
        found[size] = rule.check(settings(f"rollout.engine=vllm model.path={tmp_path} {ranks}"))
    assert [size for size, problem in found.items() if problem is None] == [1, 2, 4, 6, 12]
    assert found[3].got == "3 with 12 heads, 2 of keys and values, and a width of 48"
    assert found[3].remedy == "Use one of 1, 2, 4, 6, 12"


@pytest.mark.parametrize(("kind", "is_known"), [("qwen3", True), ("gpt_neox", False)])
def test_layers_with_adapters_are_judged_where_the_model_type_is_known(tmp_path, kind, is_known):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    found = broken_rules(settings(f"model.path={tmp_path} model.lora.target_modules=[query_key_value,q_proj]"))
    assert [problem.got for problem in found] == ["query_key_value"] * is_known


def test_a_path_that_is_empty_is_shown_as_such():
    problem = BY_NAME["local_model_is_there"].check(settings("model.path=''"))
    assert problem.got.startswith("'', which ")


def test_the_largest_divisors_are_named_of_any_number():
    for number in range(1, 200):
        every = [str(each) for each in range(1, number + 1) if number % each == 0]
        assert divisors(number) == ", ".join(every[-12:])
    assert divisors(10**12 + 39) == "1, 1000000000039", "a prime"


def test_a_suites_figures_are_its_own_and_not_those_of_sources_whose_names_begin_with_its_name() -> None:
    suites = [{"name": "countdown", "data": {"task": "countdown"}}]
    validation = RunConfig.model_validate({"validation": {"suites": suites}}).validation
    names = ("countdown", "countdown/hard", "countdown2", "all")
    figures = [f"val-core/{name}/{figure}" for name in names for figure in ("reward/mean@4", "acc/greedy/ci_low")]
    assert [figure for figure in figures if validation.is_of_suite(figure)] == figures[:2]
    assert not RunConfig().validation.is_of_suite(figures[0])
