"""A real model, SmolLM2-135M-Instruct, against transformers' own forward and backward in float32 on a CPU."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlcore.batching.pack import pack
from rlcore.checkpoint.load import export_transformers
from rlcore.config.model import SMOLLM2, LoraConfig, ModelConfig
from rlcore.models.load import load_policy
from rlcore.models.lora import add_adapters
from rlcore.models.parallel import full_state
from rlcore.models.policy import CausalPolicy
from rlcore.models.shape import shape_of
from rlcore.models.tokenizer import load_tokenizer
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch
from rlcore.workers.group import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.share_of_digits import LEARNING
from tests.helpers.small_run import prepare, train
from tests.models.tiny import inputs_of, twin

CPU = torch.device("cpu")
ROUNDING = 5e-5
"""Rounding of a log-probability in float32, summed in another order by the packed attention and the chunked head."""
TEXTS = [
    ("What is 16 - 3 - 4?", "16 - 3 - 4 = 9\n#### 9"),
    ("Name a color.", "Blue."),
    ("Using the numbers [3, 7, 21], make 42.", "<answer>(7 - 3 / 3) * 7</answer> and some more words"),
]


def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def logprobs_of(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Return the log-probability of each token in the loss, 0 elsewhere."""
    return twin(model, batch, 1.0)[0]


def outputs(policy: CausalPolicy, batch: PackedBatch) -> Tensor:
    return policy(*inputs_of(batch), temperature=1.0, entropy="none").logprobs


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    return plain(smollm2)


@pytest.fixture(scope="module")
def batch(smollm2: Path) -> PackedBatch:
    tokenizer = load_tokenizer(smollm2)
    rollouts = []
    for number, (question, answer) in enumerate(TEXTS):
        turn = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompt = Prompt(number, tuple(tokenizer(asked)["input_ids"]), "x", "{}")
        ids = np.array([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
        rollouts.append(Rollout(prompt, 0, ids, torch.zeros(len(ids)).numpy(), "stop", 0))
    return pack(rollouts, [Score(1.0, {})] * len(TEXTS), list(range(len(TEXTS))))


def test_the_weights_are_those_of_the_package(smollm2: Path, reference: PreTrainedModel) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(smollm2 / "model.safetensors").items()):
        assert tensor.dtype == torch.float32
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    assert shape_of(ModelConfig(path=SMOLLM2)) == shape_of(ModelConfig(path=str(smollm2)))


def test_a_supervised_step_is_that_of_transformers(
    smollm2: Path, reference: PreTrainedModel, batch: PackedBatch
) -> None:
    policy = load_policy(smollm2, model=ModelConfig(gradient_checkpointing=True), device=CPU)
    expected, found = logprobs_of(reference, batch), outputs(policy, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    assert expected.sum() < -10
    for logprobs in (expected, found):
        (-logprobs.sum() / batch.num_loss_tokens).backward()
    ours = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        gradient, scale = ours[name], parameter.grad.norm()
        assert gradient is not None
        assert scale > 0
        assert (gradient - parameter.grad).norm() < 1e-3 * scale, name


@pytest.mark.lengthy  # on small models: trainer/test_step.py, models/test_policy.py, workers/test_worker_gradients.py
def test_a_step_of_grpo_is_that_of_transformers(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(
        tmp_path, f"model.path={smollm2}", "model.dtype=float32", "data.template=chat", "data.train_size=8",
        "data.validation_size=4", "filter.max_prompt_tokens=256", "rollout.max_response_tokens=12", "rollout.engine=hf",
        "rollout.samples_per_prompt=3", "trainer.batch_size=2", "trainer.mini_batch_size=2",
        "trainer.old_logprobs=recompute", "optim.lr=1e-5", "optim.grad_clip=1000", *LEARNING,
    )  # fmt: skip
    seen: list[TrainBatch] = []
    update = Worker.update_policy
    monkeypatch.setattr(
        Worker, "update_policy", lambda self, batch, *rest: seen.append(batch) or update(self, batch, *rest)
    )
    group = LocalGroup(run.config, str(run.model_directory))
    with torch.random.fork_rng():
        (metrics,) = train(run, group, 1)
    (batch,) = seen
    model = plain(smollm2)
    expected = logprobs_of(model, batch.packed)
    assert batch.packed.num_sequences == 6
    mask = batch.packed.loss_mask
    for found in (batch.packed.behavior_logprobs, batch.old_logprobs):
        assert found is not None
        torch.testing.assert_close(found[mask], expected.detach()[mask], rtol=0, atol=ROUNDING)
    # The ratio is 1 before the first update, so the loss is - sum(A log p) / tokens, but for a constant.
    assert batch.advantages[mask].abs().max() > 0
    (-(batch.advantages * expected).sum() / batch.packed.num_loss_tokens).backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    # The updated weights go to the engine, whose log-probabilities are the policy's.
    before = {name: tensor.clone() for name, tensor in plain(smollm2).state_dict().items()}
    now = group.each(Worker.full_weights)[0]
    assert all(not torch.equal(now[name], before[name]) for name in now if name.endswith("proj.weight"))
    assert group.each(Worker.sync_weights, 1)[0].difference < ROUNDING
    group.close()


@pytest.mark.lengthy  # on small models: models/test_lora.py, checkpoint/test_export.py
def test_merged_adapters_are_exported_and_loaded_again(smollm2: Path, batch: PackedBatch, tmp_path: Path) -> None:
    policy = add_adapters(load_policy(smollm2, model=ModelConfig(), device=CPU), LoraConfig(rank=4), seed=1)
    with torch.no_grad():
        unchanged = outputs(policy, batch)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.01, generator=generator)
        expected = outputs(policy, batch)
        assert (expected - unchanged).abs().max() > 0.01
        target = export_transformers(dict(full_state(policy)), smollm2, tmp_path / "model", facts={"step": 1})
        del policy
        # Merged weights are rounded once more than a base and its adapters.
        torch.testing.assert_close(logprobs_of(plain(target), batch), expected, rtol=0, atol=2 * ROUNDING)
        again = outputs(load_policy(target, model=ModelConfig(), device=CPU), batch)
    torch.testing.assert_close(again, expected, rtol=0, atol=2 * ROUNDING)
    text = "<|im_start|>user\n  12 eggs<|im_end|>"
    assert AutoTokenizer.from_pretrained(target)(text)["input_ids"] == load_tokenizer(smollm2)(text)["input_ids"]
