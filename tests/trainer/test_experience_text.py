"""The text of an answer whose tags are special tokens is the same for scorers and the record."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from rlcore.config.model import ScratchModel
from rlcore.models.scratch import build_scratch_model
from rlcore.models.tokenizer import load_tokenizer
from rlcore.responses.table import response_table
from rlcore.rollout.engine import make_requests
from rlcore.run.problems import Problems
from rlcore.runtime.local import LocalGroup
from rlcore.workers.worker import Worker
from tests.helpers.small_run import prepare
from tests.helpers.tagged_tokenizer import tagged

LENGTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, so that each token comes up: the tags and the end too."""
    folder = tagged(tmp_path_factory.mktemp("model"), byte_level=True)
    tokenizer = load_tokenizer(folder)
    shape = ScratchModel(max_position_embeddings=256)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return build_scratch_model(shape, vocab_size=len(tokenizer), **ends, seed=1, directory=folder)


@pytest.mark.parametrize("skips", [True, False])
def test_a_scorer_that_pays_for_a_tag_pays(model: Path, tmp_path: Path, skips: bool) -> None:
    run = prepare(
        tmp_path, f"model.path={model}", "warm_start.enabled=false", "data.scorer=tests.rollout.odd_scorers:thinks",
        f"rollout.max_response_tokens={LENGTH}", f"rollout.skip_special_tokens={skips}",
        "filter.max_prompt_tokens=64",
    )  # fmt: skip
    tokenizer = load_tokenizer(model)
    problems = Problems.read(run.config, run.inputs)
    requests = make_requests(problems.stream.take(0, 8), 8, run_seed=1, stream=1, step=1)
    with ExitStack() as opened:
        group = LocalGroup(run.config, str(model))
        opened.callback(group.close)
        group.each(Worker.sync_weights, 1)
        answers = problems.build_answerer(run.inputs, opened)(group).sample(
            requests, run.config.rollout.sampling, policy_version=1
        )
    rollouts, scores, texts = zip(*answers, strict=True)
    closing = tokenizer.convert_tokens_to_ids("</think>")
    has_tag = [closing in rollout.response_ids for rollout in rollouts]
    assert any(has_tag)
    assert not all(has_tag)
    assert [score.total for score in scores] == [float(has) for has in has_tag]
    ended = [rollout.response_ids[-1] == tokenizer.eos_token_id for rollout in rollouts]
    assert any(ended)
    assert [text.endswith("<|im_end|>") for text in texts] == [has and not skips for has in ended]
    table = response_table(1, rollouts, scores, texts, problems.decode)
    assert table.column("answer").to_pylist() == [*texts]
    assert table.column("prompt").to_pylist() == [
        tokenizer.decode(rollout.prompt.token_ids, skip_special_tokens=True) for rollout in rollouts
    ]
