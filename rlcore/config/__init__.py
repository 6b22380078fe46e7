"""All settings of a run as typed classes with defaults, ranges and docstrings. No module here imports torch or Ray."""

from rlcore.config.algo import AlgoConfig, CriticConfig, KlConfig, OptimConfig
from rlcore.config.data import (
    CountdownData,
    CustomData,
    DataConfig,
    FilterConfig,
    Gsm8kData,
    MappedData,
    MixtureData,
    ParquetData,
    PassRatesConfig,
    ReasoningGymData,
)
from rlcore.config.model import LoraConfig, ModelConfig, ScratchModel, WarmStartConfig
from rlcore.config.rollout import (
    EvaluationConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
    SuiteConfig,
)
from rlcore.config.run import (
    AnswersConfig,
    CheckpointConfig,
    PathsConfig,
    RunConfig,
    RuntimeConfig,
    TrackingConfig,
)
