"""All settings, typed: every default, range and docstring lives here, once. Imports neither torch nor Ray."""

from rlcore.config.algo import AlgoConfig, CriticConfig, KlConfig, OptimConfig
from rlcore.config.data import (
    CountdownData,
    CustomData,
    DataConfig,
    FilterConfig,
    Gsm8kData,
    MappedData,
    MixtureData,
    MixturePart,
    ParquetData,
)
from rlcore.config.model import LoraConfig, ModelConfig, ScratchModel, WarmStartConfig
from rlcore.config.rollout import (
    EpisodeConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
    ValidationConfig,
)
from rlcore.config.run import RunConfig
from rlcore.config.trainer import (
    AnswersConfig,
    CheckpointConfig,
    PathsConfig,
    RuntimeConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "AlgoConfig",
    "AnswersConfig",
    "CheckpointConfig",
    "CountdownData",
    "CriticConfig",
    "CustomData",
    "DataConfig",
    "EpisodeConfig",
    "FilterConfig",
    "Gsm8kData",
    "KlConfig",
    "LoraConfig",
    "MappedData",
    "MixtureData",
    "MixturePart",
    "ModelConfig",
    "OptimConfig",
    "ParquetData",
    "PathsConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScratchModel",
    "TrackingConfig",
    "TrainerConfig",
    "ValidationConfig",
    "WarmStartConfig",
]
