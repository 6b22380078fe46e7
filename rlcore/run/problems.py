"""The training and held-out prompts of a run, and the decoder and scorer of the responses."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

from rlcore import sandbox
from rlcore.batching.prompts import MixedStream, PassCounts, PromptStream, RowSampler, is_chat, read_prompts
from rlcore.config import MixtureData, RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import BY_ROW, TaskData, parts_of, scorer_of_row, scorers_of
from rlcore.errors import DataError
from rlcore.models.tokenizer import Decode, load_tokenizer, text_decoder
from rlcore.prompt import ROWS_PER_SOURCE, Prompt
from rlcore.rollout.by_part import with_scorer
from rlcore.rollout.environment import TurnTokens
from rlcore.rollout.scoring import ScoringPool, require_scorer
from rlcore.run.layout import RunInputs, suite_fingerprint
from rlcore.run.pass_rates import PassRates, find_pass_rates
from rlcore.trainer.episodes import Episodes
from rlcore.trainer.experience import ResponseSampler
from rlcore.workers.group import WorkerGroup


@dataclass(frozen=True, kw_only=True)
class HeldOutProblems:
    """The held-out prompts of a run or a suite, and a decoder of responses. `suite`: the suite's fingerprint, or '' for
    the run's own prompts."""

    config: RunConfig
    validation: tuple[Prompt, ...]
    decode: Decode
    suite: str = ""

    @classmethod
    def of_run(cls, config: RunConfig, inputs: RunInputs) -> "HeldOutProblems":
        """Read the run's filtered held-out rows. Raises DataError if a file is invalid or empty."""
        tokenizer = load_tokenizer(inputs.tokenizer_directory)
        decode = text_decoder(tokenizer, skip_special_tokens=config.rollout.skip_special_tokens)
        validation = spread(read_parts(config, inputs.validation_parquets))
        return HeldOutProblems(config=config, validation=validation, decode=decode)

    @classmethod
    def for_suite(cls, config: RunConfig, inputs: RunInputs, suite: SuiteConfig) -> "HeldOutProblems":
        """Read a suite's problems, with the suite's name as data source. Raises DataError if rows are missing."""
        rows = inputs.for_suite(suite.name)
        found = cls.of_run(suite_settings(config, suite), rows)
        named = tuple(replace(prompt, data_source=suite.name) for prompt in found.validation)
        return replace(found, validation=named, suite=suite_fingerprint(config, suite, rows.filtered_directory))

    def held_out(self, *, limited: bool) -> tuple[Prompt, ...]:
        """Return the held-out prompts, or only the first `validation.max_problems` if `limited` is true."""
        limit = self.config.validation.max_problems
        return self.validation[:limit] if limited and limit else self.validation

    def episodes(self, inputs: RunInputs) -> Episodes | None:
        """Return an object that runs episodes in the environment `data.environment`, or None if this setting is empty.
        Raises ConfigError if the environment cannot be used. Raises DataError if the prompts of some data sources are
        chats and others are plain text."""
        if not self.config.data.environment:
            return None
        forms = {is_chat(file) for file in inputs.validation_parquets}
        if len(forms) > 1:
            raise DataError("data.parts: with data.environment all parts must be chats, or all plain text")
        sandbox.set_limits(self.config.sandbox)
        turns = TurnTokens(
            load_tokenizer(inputs.tokenizer_directory),
            chat=forms.pop(),
            max_reply_tokens=self.config.episode.max_tool_tokens,
            role="tool" if self.config.episode.tools else "user",
            chat_template_kwargs=self.config.data.chat_template_kwargs,
        )
        return Episodes(self.config, turns, self.decode)

    def build_sampler(self, inputs: RunInputs, opened: ExitStack) -> Callable[[WorkerGroup], ResponseSampler]:
        """Start the scoring processes, which end when `opened` is closed. Return a function that creates the
        `ResponseSampler` of a worker group. Raises ConfigError if the scorer or the environment cannot be used."""
        scoring, episodes = opened.enter_context(self.scoring_pool()), self.episodes(inputs)
        if episodes is not None:
            opened.enter_context(episodes)
        return lambda group: ResponseSampler(self.config, group, scoring, self.decode, episodes)

    def scoring_pool(self) -> ScoringPool:
        """Return the pool of processes that score responses."""
        for scorer in scorers_of(self.config.data):
            require_scorer(scorer)
        sandbox.set_limits(self.config.sandbox)
        return ScoringPool(self.config.data.scorer, self.config.reward)


@dataclass(frozen=True, kw_only=True)
class Problems(HeldOutProblems):
    """The held-out problems of a run, and its training prompts grouped by data source."""

    inputs: RunInputs
    train: tuple[tuple[Prompt, ...], ...]

    @classmethod
    def read(cls, config: RunConfig, inputs: RunInputs) -> "Problems":
        """Read the filtered rows of a run. Raises DataError if a suite and a data source have the same name, if a
        teacher's data source has no training rows, or if a weight of the mixture is too small."""
        held_out = HeldOutProblems.of_run(config, inputs)
        own = {prompt.data_source for prompt in held_out.validation}
        if clash := [suite.name for suite in config.validation.suites if suite.name in own]:
            raise DataError(
                f"validation.suites: {clash[0]} is the data source of the run's held-out problems too, so their "
                "metrics would be merged; write another `name` into the suite's file"
            )
        train = tuple(map(tuple, read_parts(config, inputs.train_parquets)))
        if config.algo.teacher is not None and config.algo.teacher.by_source:
            _require_sources(config.algo.teacher.by_source, train)
        if isinstance(config.data, MixtureData):  # checks the weights
            MixedStream(train, [part.weight for part in config.data.parts], seed=config.seed)
        return cls(config=config, validation=held_out.validation, decode=held_out.decode, inputs=inputs, train=train)

    @cached_property
    def pass_rates(self) -> PassRates | None:
        """The pass rates of the training rows, or None if the run does not use pass rates. Raises DataError if the
        pass rates are not measured yet, or if `pass_rates.keep` leaves too few rows."""
        if not self.config.pass_rates.is_enabled:
            return None
        found = find_pass_rates(self.config, self.inputs)
        if found is None:
            raise DataError(
                "pass_rates.samples: the table is not made yet. Run `millrace data pass-rates` with these settings"
            )
        found.require_enough(self.config.trainer.batch_size)
        return found

    @cached_property
    def selected(self) -> tuple[tuple[Prompt, ...], ...]:
        """The training prompts that `pass_rates.keep` selects, grouped by data source."""
        if self.pass_rates is None:
            return self.train
        pairs = zip(self.train, self.pass_rates.selected, strict=True)
        return tuple(tuple(compress(prompts, kept)) for prompts, kept in pairs)

    @cached_property
    def stream(self) -> PromptStream[Prompt] | MixedStream:
        """A stream that gives the selected prompts in training order."""
        if isinstance(self.config.data, MixtureData):
            weights = [part.weight for part in self.config.data.parts]
            return MixedStream(self.selected, weights, seed=self.config.seed)
        return PromptStream(self.selected[0], seed=self.config.seed)

    def row_sampler(self) -> RowSampler | None:
        """Return a sampler that draws training rows by their pass counts, or None if `pass_rates.draw` is `uniform`."""
        settings = self.config.pass_rates
        if settings.draw == "uniform":
            return None
        ids = [prompt.prompt_id for part in self.selected for prompt in part]
        none = PassCounts.of([0] * len(ids), [0] * len(ids))
        return RowSampler(ids, none if self.pass_rates is None else self.pass_rates.selected_counts(), settings)


def read_parts(config: RunConfig, files: Sequence[Path]) -> list[list[Prompt]]:
    """Read the prompts of each data source. The `prompt_id` in data source k is the row's index plus k x
    `ROWS_PER_SOURCE`. Raises DataError if a file is invalid or empty, or if data sources share a name."""
    parts = parts_of(config.data)
    found = [read_prompts(file) for file in files]
    if empty := [file for file, prompts in zip(files, found, strict=True) if not prompts]:
        raise DataError(f"{empty[0]}: no row is left; loosen filter.max_prompt_tokens, or make a larger dataset")
    if config.data.scorer != BY_ROW:
        return found
    named = [
        [
            replace(
                prompt,
                prompt_id=prompt.prompt_id + index * ROWS_PER_SOURCE,
                data_source=part.name or prompt.data_source,
                ground_truth_json=_with_scorer(prompt, part.data),
            )
            for prompt in prompts
        ]
        for index, (part, prompts) in enumerate(zip(parts, found, strict=True))
    ]
    _require_unique_names(named)
    return named


def _with_scorer(prompt: Prompt, data: TaskData) -> str:
    scorer = scorer_of_row(data, prompt.data_source)
    return prompt.ground_truth_json if scorer is None else with_scorer(prompt.ground_truth_json, scorer)


def spread(parts: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    """Interleave the prompts of all data sources. For every N, the first N prompts contain about the same fraction of
    each source's prompts."""
    placed = [
        ((place + 0.5) / len(prompts), part, prompt)
        for part, prompts in enumerate(parts)
        for place, prompt in enumerate(prompts)
    ]
    return tuple(prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2]))


def _require_sources(teachers: Iterable[str], parts: Sequence[Sequence[Prompt]]) -> None:
    sources = {prompt.data_source for part in parts for prompt in part}
    if unknown := sorted(set(teachers) - sources):
        raise DataError(
            f"algo.teacher.by_source: must name data sources of the training rows; got {unknown[0]!r}, but the "
            f"rows are of {', '.join(sorted(sources))}"
        )


def _require_unique_names(parts: Sequence[Sequence[Prompt]]) -> None:
    owners: dict[str, int] = {}
    for index, prompts in enumerate(parts):
        for source in {prompt.data_source for prompt in prompts}:
            first = owners.setdefault(source, index)
            if first != index:
                raise DataError(
                    f"data.parts: entries {first} and {index} both have rows of {source}, so their metrics would be "
                    "merged; give at least one of them a name"
                )
