"""The nouns, Protocols, strict configuration loader and fakes that RL packages share.

The training half (`rl_contracts.train`, `rl_contracts.packing`) and the fakes
(`rl_contracts.testing`) need torch and are imported by their own names.
"""

from rl_contracts.config import ConfigError, LoadedConfig, Origin, Problem, load_config
from rl_contracts.effective import effective_toml, settings_help
from rl_contracts.rollout import (
    Completion,
    FinishReason,
    PolicyVersion,
    Sampler,
    SamplingParams,
    Trajectory,
)

__all__ = [
    "Completion",
    "ConfigError",
    "FinishReason",
    "LoadedConfig",
    "Origin",
    "PolicyVersion",
    "Problem",
    "Sampler",
    "SamplingParams",
    "Trajectory",
    "effective_toml",
    "load_config",
    "settings_help",
]
