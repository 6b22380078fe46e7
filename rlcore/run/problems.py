"""The problems of a run as the trainer takes them: prompts, held-out prompts, decoder, scorer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.batching.loader import PromptStream
from rlcore.batching.mixing import MixedStream
from rlcore.config import MixtureData, RunConfig
from rlcore.config.data import parts_of
from rlcore.models.load import load_tokenizer
from rlcore.rollout.scoring import ScoringPool, require_scorer
from rlcore.run.inputs import RunInputs
from rlcore.run.parts import read_parts, spread
from rlcore.trainer.answers import Decode
from rlcore.types import Prompt


@dataclass(frozen=True, slots=True)
class Problems:
    """Training prompts in their order, held-out prompts, and how answers become text."""

    config: RunConfig
    stream: PromptStream | MixedStream
    validation: tuple[Prompt, ...]
    decode: Decode

    @classmethod
    def read(cls, config: RunConfig, inputs: RunInputs) -> "Problems":
        """Read the filtered rows; nothing is tokenized again.

        Raises:
            DataError: no row is left in a file, a file breaks the schema, or parts of a mixture cannot be mixed.
        """
        tokenizer = load_tokenizer(inputs.tokenizer_directory)

        def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
            # Of no answers at all (validation.greedy=false) transformers makes one empty text.
            texts = tokenizer.batch_decode([list(ids) for ids in token_ids], skip_special_tokens=True)
            return texts if token_ids else []

        validation = spread(read_parts(config, inputs.validation_parquets))
        train = read_parts(config, inputs.train_parquets)
        if isinstance(config.data, MixtureData):
            weights = [part.weight for part in config.data.parts]
            return cls(config, MixedStream(train, weights, seed=config.seed), validation, decode)
        return cls(config, PromptStream(train[0], seed=config.seed), validation, decode)

    def held_out(self, *, in_training: bool) -> tuple[Prompt, ...]:
        """All held-out prompts, or the first `validation.max_problems` of them while training."""
        limit = self.config.validation.max_problems
        return self.validation[:limit] if in_training and limit else self.validation

    def epoch_at(self, position: int) -> int:
        """Epoch of the next prompt, from 0."""
        return self.stream.epoch_at(position)

    def scoring_pool(self) -> ScoringPool:
        """Processes that score answers by the task's scorer."""
        for part in parts_of(self.config.data):
            require_scorer(part.data.scorer)
        return ScoringPool(self.config.data.scorer, self.config.reward)
