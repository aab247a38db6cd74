"""A typed, versioned sampler on vLLM: what is configured is what the engine runs."""

from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.config import Dtype, VllmConfig
from rollout_vllm.environment import EnvironmentSetting, engine_environment
from rollout_vllm.errors import (
    GenerationError,
    RolloutError,
    SamplerClosedError,
    SamplerDiedError,
    StartError,
    WeightUpdateError,
)
from rollout_vllm.sampler import VllmSampler
from rollout_vllm.weights_sender import PublishedFile, PublishedWeights, publish_weights

__all__ = [
    "Dtype",
    "EffectiveArgument",
    "EnvironmentSetting",
    "GenerationError",
    "PublishedFile",
    "PublishedWeights",
    "RolloutError",
    "SamplerClosedError",
    "SamplerDiedError",
    "StartError",
    "VllmConfig",
    "VllmSampler",
    "WeightUpdateError",
    "engine_environment",
    "publish_weights",
]
