"""The nouns, Protocols, strict configuration loader and fakes that RL packages share.

The training half (`rl_contracts.train`, `rl_contracts.packing`, `rl_contracts.packed_images`,
`rl_contracts.batch_checks`, `rl_contracts.loss_tally`, `rl_contracts.expert_layout`,
`rl_contracts.pretrained`, `rl_contracts.shared_folder`, `rl_contracts.all_ranks`) and the fakes
(`rl_contracts.testing`) need torch and are imported by their own names, and so is
`rl_contracts.images`, which needs numpy.
"""

from rl_contracts.config import ConfigError, LoadedConfig, Origin, Problem, load_config
from rl_contracts.dtype import DType, known_dtype
from rl_contracts.effective import effective_toml, settings_help
from rl_contracts.finite import finite
from rl_contracts.optim import OptimConfig
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
    "DType",
    "FinishReason",
    "LoadedConfig",
    "OptimConfig",
    "Origin",
    "PolicyVersion",
    "Problem",
    "Sampler",
    "SamplingParams",
    "Trajectory",
    "effective_toml",
    "finite",
    "known_dtype",
    "load_config",
    "settings_help",
]
